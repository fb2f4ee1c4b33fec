"""A run's progress display: on a terminal, elsewhere, after a resume, and with a closed output."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.launch.rank_watch import Supervision
from runtime.observe.metrics import MetricsWriter
from runtime.observe.progress import LIVE_EVERY_S, PLAIN_EVERY_S, Progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A run of one rank whose rows a test appends; each takes a second."""

    def __init__(self, folder: Path, stream: TextIO | None, total: int = 500, resume_step: int = 0) -> None:
        self.clock, self.board, self.path = Clock(), Board(1), folder / "metrics.jsonl"
        self.progress = Progress(folder, total, 6.812, stream=stream, clock=self.clock)
        self.metrics = MetricsWriter(folder, resume_step)
        self.rank = self.board.bind(0)

    def step(self, step: int, **more: object) -> None:
        self.rank.start_step(step)
        row = {"step": step, "loss": 5.1234, "tokens_per_s": 12345.4, "imbalance": 1.32, **more}
        self.metrics.write(row)
        self.clock.now += 1.0
        self.progress.poll(self.board)


def test_plain_output_has_the_first_and_last_step_and_one_every_few_seconds(tmp_path: Path) -> None:
    stream = io.StringIO()
    run = Run(tmp_path, stream)
    run.progress.poll(run.board)
    for step in range(1, 14):
        run.step(step)
    run.progress.close()
    lines = stream.getvalue().splitlines()
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == [1, 6, 11, 13]
    assert PLAIN_EVERY_S == 5.0
    assert lines[0] == "step 1/500  loss 5.1234  12,345 tokens/s  expert load 1.32x"
    assert lines[1] == "step 6/500  loss 5.1234  12,345 tokens/s  expert load 1.32x  0:08:14 left"
    assert stream.getvalue().isascii() and "\x1b" not in stream.getvalue()


def test_the_last_row_is_shown_once(tmp_path: Path) -> None:
    stream = io.StringIO()
    run = Run(tmp_path, stream, total=1)
    run.step(1)
    run.progress.close()
    assert len(stream.getvalue().splitlines()) == 1


def test_a_validation_loss_of_an_earlier_step_is_named_as_such(tmp_path: Path) -> None:
    stream = io.StringIO()
    run = Run(tmp_path, stream)
    run.step(1, validation_loss=5.2)
    for step in range(2, 11):
        run.step(step)
    run.step(11, validation_loss=4.1)
    run.progress.close()
    validations = [line.split("  ")[2] for line in stream.getvalue().splitlines()]
    assert validations == [
        "validation 5.2000 (unigram 6.8120)",
        "validation 5.2000 at step 1 (unigram 6.8120)",
        "validation 4.1000 (unigram 6.8120)",
    ]


def test_non_finite_losses_are_shown(tmp_path: Path) -> None:
    stream = io.StringIO()
    run = Run(tmp_path, stream)
    run.step(1, loss=float("nan"))
    run.progress.close()
    assert stream.getvalue().startswith("step 1/500  loss nan  ")


def test_a_row_cannot_control_the_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    run = Run(tmp_path, stream)
    row = {"step": 1, "loss": "\x1b[2J", "not_finite": {"loss": "\x1b]0;owned\x07"}, "tokens_per_s": None}
    run.path.write_text(json.dumps(row) + "\n")
    run.rank.start_step(1)
    run.progress.poll(run.board)
    assert stream.getvalue() == "step 1/500  loss \\x1b]0;owned\\x07  ? tokens/s\n"


def test_after_a_resume_old_rows_are_not_shown_again(tmp_path: Path) -> None:
    first = Run(tmp_path, io.StringIO())
    for step in range(1, 11):
        first.step(step)
    stream = io.StringIO()
    second = Run(tmp_path, stream, resume_step=8)
    second.progress.poll(second.board)
    second.step(9)
    second.progress.close()
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 9/500"]


def test_messages_of_ranks_are_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, io.StringIO())
    run.rank.say("disk full\x1b[2J")
    run.progress.poll(run.board)
    run.rank.say("a line\nmore")
    run.rank.say("x" * 5000)
    run.step(1)
    run.progress.poll(run.board)
    first, second, *further = capsys.readouterr().err.splitlines()
    assert first == "disk full\\x1b[2J"
    assert second == "x" * len(second) and len(second) > 900 and not further, "the latest, where they are too long"
    assert run.board.read(0).step == 1 and run.board.failure(0) is None


# ---------------------------------------------------------------- terminals


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, int]]:
    """A stream to a terminal of 200 columns, and the descriptor from which its output can be read."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream:
        yield stream, master
    os.close(master)


def all_of(master: int) -> str:
    """The output to the terminal until its other end was closed."""
    data = b""
    with suppress(OSError):  # how a terminal reports it
        while part := os.read(master, 1 << 16):
            data += part
    return data.decode()


def test_a_terminal_gets_a_live_panel(tmp_path: Path, terminal: tuple[TextIO, int]) -> None:
    stream, master = terminal
    run = Run(tmp_path, stream, total=3)
    run.rank.set_action("load checkpoint\x1b]0;owned\x07")
    run.progress.poll(run.board)
    for step in (1, 2, 3):
        run.step(step)
        run.progress.poll(run.board)  # too soon to draw again
    run.progress.close()
    stream.close()
    output = all_of(master)
    assert LIVE_EVERY_S < 1.0
    assert output.count("load checkpoint") == 1
    for step in (1, 2):
        assert output.count(f"step {step}/3") == 1
    assert output.count("step 3/3  100%") == 2  # drawn, and left there
    assert output.count("12,345 tokens/s") == 4
    assert "\x1b]0;" not in output and r"\x1b]0;owned\x07" in output
    assert output.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_dumb_terminal_gets_plain_lines(
    tmp_path: Path, terminal: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream, master = terminal
    run = Run(tmp_path, stream)
    run.step(1)
    run.progress.close()
    stream.close()
    assert all_of(master).splitlines() == ["step 1/500  loss 5.1234  12,345 tokens/s  expert load 1.32x"]


# ---------------------------------------------------------------- output without a reader


def test_an_output_without_a_reader_is_abandoned(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        run = Run(tmp_path, stream)
        for step in range(1, 20):
            run.step(step)
        run.progress.close()
        stream.flush()  # as Python does at its exit: it must not fail


def test_a_closed_output_is_abandoned(tmp_path: Path) -> None:
    stream = (tmp_path / "out").open("w")
    stream.close()
    run = Run(tmp_path, stream)
    run.step(1)
    run.progress.close()


def test_follows_real_ranks(tmp_path: Path) -> None:
    def target(rank: int, world: int, board: Board) -> None:
        metrics = MetricsWriter(tmp_path)
        for step in (1, 2, 3):
            board.start_step(step)
            metrics.write({"step": step, "loss": 3.0 / step})
        metrics.close()

    stream = io.StringIO()
    progress = Progress(tmp_path, 3, stream=stream)
    assert launch(target, 1, folder=tmp_path, supervision=Supervision(progress.poll), backend=None).ok
    progress.close()
    assert stream.getvalue().splitlines()[-1].startswith("step 3/3  loss 1.0000")
