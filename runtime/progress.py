"""What a run looks like while it runs: a live line on a terminal, plain lines elsewhere.

The supervisor shows it: it reads the rows rank 0 appends to metrics.jsonl and what ranks say on the board, so training
never waits for a terminal. Only numbers and printable characters of either are shown.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runtime.launch.heartbeat import Board
from runtime.lines import NOT_FINITE, read_rows, to_stderr
from runtime.metrics import FILE
from runtime.outcome import printable

PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.25
BAR_COLUMNS = 24


class Progress:
    """Shows the metrics of the folder `run` up to step `total`; `unigram_nats` beside the validation loss, if known.

    A terminal gets one live line; anything else gets the first row, the last, and one every 5 s. `poll` is an `on_poll`
    of `launch`. An output that cannot be written is given up silently: the run matters more.
    """

    def __init__(
        self,
        run: Path,
        total: int,
        unigram_nats: float | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._total, self._unigram_nats = run / FILE, total, unigram_nats
        self._console = Console(file=stream or sys.stdout or io.StringIO(), highlight=False)
        self._clock = clock
        old, _ = read_rows(self._path)
        self._old_step = max((row["step"] for row in old), default=0)  # of a life before a resume
        self._first_step = 0
        self._offset = 0
        self._row: Mapping[str, Any] = {}
        self._shown_step = 0
        self._shown_s = -math.inf
        self._validation: tuple[int, float] | None = None  # step and loss of the last
        self._said: dict[int, int] = {}  # messages of each rank that have been shown
        self._began: tuple[int, float] | None = None  # step and time of the first row
        self._live: Live | None = None
        self._broken = False
        try:
            self._is_terminal = self._console.file.isatty() and not self._console.is_dumb_terminal
        except ValueError:  # closed
            self._broken = True

    def poll(self, board: Board) -> None:
        """Show what is new; called often."""
        beat = board.read(0)
        if beat.step:
            self._first_step = self._first_step or beat.step
            self._read()
        self._show_messages(board)
        if self._broken:
            return
        try:
            self._show(printable(beat.action))
        except (OSError, ValueError):  # closed, or nobody reads
            self._give_up()

    def close(self) -> None:
        """Show the last row, and give the terminal back."""
        if self._broken:
            return
        try:
            if self._live is not None:
                self._live.update(self._line(""))
                self._live.stop()
            elif self._row and self._shown_step != self._row["step"]:
                self._print()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        """Write nothing more; what is buffered goes nowhere, else Python's exit would fail on it."""
        self._broken = True
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._console.file.fileno())
            os.close(nowhere)

    def _read(self) -> None:
        """Take new rows. Rows of a life before a resume have been cut off, or are of steps already done: skipped."""
        rows, self._offset = read_rows(self._path, self._offset)
        for row in rows:
            if row["step"] <= self._old_step and row["step"] < self._first_step:
                continue
            self._row = row
            self._began = self._began or (row["step"], self._clock())
            if isinstance(row.get("validation_loss"), float):
                self._validation = row["step"], row["validation_loss"]

    @property
    def step(self) -> int:
        """The step of the last row that was read; 0 before there is one."""
        return int(self._row.get("step", 0))

    def _show_messages(self, board: Board) -> None:
        """Print what ranks have to say. A rank that shows its own progress has said it on its standard error."""
        for rank in range(board.world) if board.rank < 0 else ():
            self._said[rank], texts = board.said(rank, self._said.get(rank, 0))
            for text in map(printable, texts):
                if self._live is None or self._broken:
                    to_stderr(text)
                    continue
                with suppress(OSError, ValueError):  # `_show` meets the same, and gives up
                    self._console.print(Text(text))  # above the live line

    def _show(self, action: str) -> None:
        now = self._clock()
        if self._is_terminal:
            if now - self._shown_s >= LIVE_EVERY_S:
                self._shown_s = now
                self._start_live().update(self._line(action), refresh=True)
        elif self._row and self._row["step"] != self._shown_step and now - self._shown_s >= PLAIN_EVERY_S:
            self._print()

    def _print(self) -> None:
        self._shown_step, self._shown_s = self._row["step"], self._clock()
        print(self._text(), file=self._console.file, flush=True)

    def _start_live(self) -> Live:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        return self._live

    def _line(self, action: str) -> Table:
        """The live line; before the first row, what rank 0 is doing."""
        line = Table.grid(padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=self._total, completed=self._row.get("step", 0), width=BAR_COLUMNS)
        line.add_row(bar, Text(self._text() if self._row else f"rank 0: {action}"))
        return line

    def _text(self) -> str:
        """`step 12/90  loss 5.1  validation 5.2 at step 10 (unigram 6.8)  9,345 tokens/s  0:01:23 left`"""
        row = self._row
        parts = [f"step {row['step']}/{self._total}", f"loss {_number(row, 'loss', '.4f')}"]
        if self._validation is not None:
            step, loss = self._validation
            of_step = f" at step {step}" if step != row["step"] else ""
            baseline = f" (unigram {self._unigram_nats:.4f})" if self._unigram_nats is not None else ""
            parts.append(f"validation {loss:.4f}{of_step}{baseline}")
        if "tokens_per_s" in row:
            parts.append(f"{_number(row, 'tokens_per_s', ',.0f')} tokens/s")
        if "imbalance" in row:
            parts.append(f"expert load {_number(row, 'imbalance', '.2f')}x")  # busiest expert over the mean
        if left_s := self._left_s():
            parts.append(f"{_duration(left_s)} left")
        return "  ".join(parts)

    def _left_s(self) -> float | None:
        """Seconds to the last step at the pace since the first row; None before there is one."""
        if self._began is None or self._row["step"] <= self._began[0]:
            return None
        pace_s = (self._clock() - self._began[1]) / (self._row["step"] - self._began[0])
        return pace_s * max(0, self._total - self._row["step"])


def _number(row: Mapping[str, Any], name: str, style: str) -> str:
    """A number of a row; `nan` or `inf` where the row says so, `?` where it has none."""
    value = row.get(name)
    if isinstance(value, int | float):
        return format(float(value), style)
    flags = row.get(NOT_FINITE)
    return printable(str(flags.get(name, "?"))) if isinstance(flags, dict) else "?"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
