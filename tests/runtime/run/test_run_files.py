"""The files of a run: how a resume changes them, its messages, and commands that read damaged files."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.main import main
from tests.compiler.cli.forms import FORMS, faults
from tests.runtime.run.mutate import mutate
from tests.runtime.run.place import FOUR_RANKS, ONE_RANK, Place, bits, rows, saved, untimed

STEPS = 40
MUTATIONS = 80
HUNG_S = 600  # for commands that wait for a pipe
READ = (
    "spec.resolved",
    "schedule.txt",
    "program.sha256",
    "metrics.jsonl",
    "events.jsonl",
    "load.json",
    "memory/*",
    "trace/*",
)


@pytest.fixture(scope="module")
def trained(new_place: Callable[[], Place]) -> Place:
    """A place with `run`, 40 steps on four ranks with a checkpoint every third step."""
    place = new_place()
    place.compile(dict(FOUR_RANKS, steps=60))
    place.dsc("train", "--out", "run", "--steps", STEPS)
    return place


@pytest.fixture
def again(trained: Place, tmp_path: Path) -> tuple[Place, Path]:
    """The place, and a copy of its run that tests may change."""
    shutil.copytree(trained.folder / "run", tmp_path / "run")
    return trained, tmp_path / "run"


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]


# ---------------------------------------------------------------- resuming


def test_a_resume_after_a_damaged_row_keeps_all_others(again: tuple[Place, Path]) -> None:
    place, run = again
    straight = untimed(run)
    for file in (run / "metrics.jsonl", run / "trace" / "rank_2.jsonl"):
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join((*lines[:5], lines[5][:40] + b"\n", *lines[6:])))
    done = place.dsc("train", "--out", run, "--resume", "--steps", STEPS + 1)
    assert untimed(run)[: STEPS - 1] == [*straight[:5], *straight[6:]]
    assert [row["step"] for row in rows(run)] == [*range(1, 6), *range(7, STEPS + 2)]
    assert (run / "metrics.damaged.jsonl").read_text().startswith('{"step": 6, ')
    assert [json.loads(line)["step"] for line in (run / "trace" / "rank_2.jsonl").open()] == [
        *range(1, 6),
        *range(7, 33),
    ]
    output = done.stdout + done.stderr
    for name in ("metrics", "rank_2"):
        assert output.count(f"{name}.jsonl: 1 damaged line is now in {name}.damaged.jsonl") == 1
    assert place.dsc("inspect", run).stdout


def test_rows_replaced_by_a_resume_are_moved_aside(again: tuple[Place, Path]) -> None:
    place, run = again
    for step in (STEPS, 39):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    done = place.dsc("train", "--out", run, "--resume", "--steps", STEPS)
    assert f"metrics.jsonl: rows of steps 37 to {STEPS}, later than step 36, are now in metrics.1.jsonl" in done.stderr
    replaced = [json.loads(line) for line in (run / "metrics.1.jsonl").read_text().splitlines()]
    assert [row["step"] for row in replaced] == [37, 38, 39, 40]
    assert [row["step"] for row in rows(run)] == [*range(1, STEPS + 1)]
    assert [row["loss"] for row in replaced] == [row["loss"] for row in rows(run)[36:]], "bit for bit"
    assert replaced[0]["time"] < rows(run)[36]["time"]


def test_a_resume_by_another_transport_has_the_same_bits(again: tuple[Place, Path], tmp_path: Path) -> None:
    place, run = again
    shutil.copytree(run, tmp_path / "by-gloo")
    for folder, transport in ((run, "memory"), (tmp_path / "by-gloo", "gloo")):
        done = place.dsc("train", "--out", folder, "--resume", "--steps", STEPS + 3, "--transport", transport)
        assert "going on from" in done.stdout and "not bit for bit" not in done.stdout
        assert [event["transport"] for event in events(folder) if event["event"] == "start"] == ["memory", transport]
    assert bits(saved(run)) == bits(saved(tmp_path / "by-gloo"))


def test_inspect_after_a_resume_under_another_plan(again: tuple[Place, Path], place: Place) -> None:
    _, run = again
    place.compile(dict(ONE_RANK, pipeline=2, devices=2))
    shutil.rmtree(run / "trace")
    shutil.copytree(again[0].folder / "run" / "trace", run / "trace")
    for step in range(6, STEPS + 1):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    place.dsc("train", "--out", run, "--resume", "--steps", 6)
    output = place.dsc("inspect", run).stdout
    assert "1f1b" in output and "traced steps 3" in " ".join(output.split())
    assert (
        "3 traced steps are left out: they ran other programs, of another phase or of a plan before a resume"
        in " ".join(output.split())
    )
    traced = [json.loads(line) for line in (run / "trace" / "rank_0.jsonl").open()]
    assert [line["step"] for line in traced] == [1, 2, 3, 4, 5, 6]
    assert len({line["of"] for line in traced[:3]}) == len({line["of"] for line in traced[3:]}) == 1
    assert traced[2]["of"] != traced[3]["of"] == (run / "program.sha256").read_text().strip()


# ---------------------------------------------------------------- events


def test_events_tell_the_life_of_a_run(again: tuple[Place, Path]) -> None:
    place, run = again
    newest = run / "checkpoints" / f"step-{STEPS:08d}" / "shard.0.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    place.dsc("train", "--out", run, "--resume", "--steps", STEPS)
    recorded = events(run)
    assert [event["time"] for event in recorded] == sorted(event["time"] for event in recorded)
    assert [event["event"] for event in recorded if event["event"] != "notice"] == [
        *("start", *["save"] * 14, "end"),
        *("start", "refused", "resume", "save", "end"),
    ]
    assert [fault for event in recorded for fault in faults(event, FORMS[f"event_{event['event']}"])] == []
    start, end = recorded[0], recorded[-1]
    assert start["step"] == 0 and start["last_step"] == STEPS and start["ranks"] == 4 and start["transport"] == "memory"
    assert end["outcome"] == "finished" and end["exit_code"] == 0 and end["step"] == STEPS
    refused, resume, save = [event for event in recorded if event["event"] != "notice"][-4:-1]
    assert "shard.0.safetensors" in refused["reason"] and resume["step"] == save["step"] - 1 == 39
    notices = [event["text"] for event in recorded if event["event"] == "notice"]
    assert [text for text in notices if "waited for that of step" not in text] == [
        f"{run}/metrics.jsonl: rows of step 40, later than step 39, are now in metrics.1.jsonl"
    ]
    assert recorded[-3]["event"] == "notice", "after the start"
    assert sum("waited for that of step" in text for text in notices) <= 1
    folder = run / "checkpoints" / save["checkpoint"]
    assert save["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert save["seconds"] > 0 and save["written_s"] > 0


def test_a_stop_and_its_signal_are_recorded(trained: Place, tmp_path: Path) -> None:
    with trained.started("train", "--out", tmp_path / "run") as running:
        running.wait_for_step(tmp_path / "run", 1)
        running.process.send_signal(signal.SIGTERM)
        assert running.ends() == 128 + signal.SIGTERM
    *_, stop, end = events(tmp_path / "run")
    assert faults(stop, FORMS["event_stop"]) == faults(end, FORMS["event_end"]) == []
    assert stop["event"] == "stop" and stop["signal"] == "SIGTERM"
    assert end["event"] == "end" and end["outcome"] == "stopped" and end["exit_code"] == 128 + signal.SIGTERM
    assert stop["step"] == end["step"] == rows(tmp_path / "run")[-1]["step"]


# ---------------------------------------------------------------- damaged and irregular files


@pytest.mark.parametrize("command", ["train", "report", "inspect"])
def test_a_name_that_is_too_long(trained: Place, command: str) -> None:
    long = "x" * 300
    done = trained.dsc(command, *(("--out", long) if command == "train" else (long,)), code=2)
    assert "File name too long" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_irregular_metrics_files_are_found_before_the_first_step(
    again: tuple[Place, Path], make: Callable[[Path], None]
) -> None:
    place, run = again
    (run / "metrics.jsonl").unlink()
    make(run / "metrics.jsonl")
    before = len(events(run))
    done = place.dsc("train", "--out", run, "--resume", code=2)
    assert f"{run}/metrics.jsonl cannot be used: " in done.stderr and "move it away" in done.stderr
    assert "Traceback" not in done.stderr and len(events(run)) == before


@contextmanager
def limited() -> Iterator[None]:
    """Ends commands that hang."""

    def hung(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(HUNG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_mutated_files_end_in_a_report_or_a_message(
    trained: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rng, done = trained.folder / "run", random.Random(1), {"report": 0, "inspect": 0}
    files = [path.relative_to(run) for name in (*READ, "data/*/meta.json") for path in sorted(run.glob(name))]
    assert len(files) == 15
    for number in range(MUTATIONS):
        copy = tmp_path / str(number)
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "*.bin", "*.idx"))
        file = rng.choice(files)
        kind = mutate(copy / file, rng)
        for command in done:
            with limited():
                code = main([command, str(copy)])
            stdout, stderr = capsys.readouterr()
            case = f"{command} after {kind} in {file} (number {number}): {stderr}"
            assert code == 0 or (code == 2 and stderr.startswith("error")) or (command == "inspect" and code == 1), case
            assert "\x1b" not in stdout + stderr and "\x07" not in stdout + stderr and "Errno" not in stderr, case
            done[command] += code == 0
        shutil.rmtree(copy)
    assert all(MUTATIONS // 4 < number < MUTATIONS for number in done.values()), done
