"""events.jsonl: whole lines from several processes and threads, and no failure of a run."""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runtime.observe.events import Events
from runtime.system import lines

LINES = 200


def read(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_an_event_has_a_time_a_name_and_its_fields(tmp_path: Path) -> None:
    Events(tmp_path).write("save", step=3, checkpoint="step-00000003", bytes=10)
    Events(tmp_path).write("refused", reason="\x1b[2J\n")
    first, second = read(tmp_path)
    assert list(first) == ["time", "event", "step", "checkpoint", "bytes"] and first["event"] == "save"
    assert second["reason"] == "\x1b[2J\n" and "\x1b" not in (tmp_path / "events.jsonl").read_text()


def _write(events: Events, number: int) -> None:
    for index in range(LINES):
        events.write("notice", text=f"{number} {index} " + "x" * (index * 37 % 3000))


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_write, args=(Events(tmp_path), number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert_all_are_there_once(tmp_path)


def test_lines_of_several_threads_are_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exporters are threads, and each of them writes events."""
    append, events = lines._append, Events(tmp_path)

    def slow(*args: Any, **more: Any) -> None:
        append(*args, **more)
        os.sched_yield()  # another thread runs before the line is known to be written

    monkeypatch.setattr(lines, "_append", slow)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(_write, events, number) for number in range(4)]:
            done.result()
    assert_all_are_there_once(tmp_path)


def assert_all_are_there_once(run: Path) -> None:
    texts = [str(row["text"]).split()[:2] for row in read(run)]
    assert sorted(texts) == sorted([str(n), str(i)] for n in range(4) for i in range(LINES))


def test_a_half_line_of_a_killed_process_stays_separate(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"time": "2026')
    Events(tmp_path).write("end", exit_code=0)
    half, complete = (tmp_path / "events.jsonl").read_text().splitlines()
    assert half == '{"time": "2026' and json.loads(complete)["event"] == "end"


def test_unwritable_events_are_kept_and_fail_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    events = Events(tmp_path)
    events.write("start", step=0)
    events.write("save", step=3)
    assert capsys.readouterr().err.count("cannot be written (it is not a regular file)") == 1
    path.unlink()
    events.write("end", exit_code=0)
    assert [row["event"] for row in read(tmp_path)] == ["start", "save", "end"]
