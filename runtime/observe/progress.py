"""Progress of a run: a live panel on a terminal, plain lines elsewhere.

The supervisor reads the rows that rank 0 appends to metrics.jsonl and the messages of ranks on the board, so training
never waits for a terminal. Only numbers and printable characters are shown.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from runtime.launch.heartbeat import Board
from runtime.observe.watch.follow import Follower
from runtime.observe.watch.run_state import RunState
from runtime.observe.watch.view import event_line, has_blocks, line, panel
from runtime.system.lines import print_to_stderr
from runtime.system.outcome import printable

PLAIN_EVERY_S = 5.0
LIVE_EVERY_S = 0.25
OF_EXPORTERS = ("export", "export_failed")  # events that no rank reports


class _FirstRow(NamedTuple):
    step: int
    time_s: float  # of the monotonic clock


class Progress:
    """Shows the metrics of the folder `run` up to step `total`, with `unigram_nats` next to the validation loss, if
    known.

    A terminal gets a live panel; other outputs get the first row, the last, and one every 5 s. `poll` is an `on_poll`
    of `launch`. An output that cannot be written is silently given up: the run is more important.
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
        self._total, self._unigram_nats = total, unigram_nats
        self._console = Console(file=stream or sys.stdout or io.StringIO(), highlight=False)
        self._clock = clock
        self._follower, self._state = Follower.of_recent(run), RunState(run)
        for item in self._follower.poll():  # from before a resume
            self._state.take(item)
        self._step = 0
        self._shown_step = 0
        self._shown_s = -math.inf
        self._num_shown: dict[int, int] = {}  # messages of each rank that have been shown
        self._began: _FirstRow | None = None
        self._live: Live | None = None
        self._broken = False
        try:
            self._is_terminal = self._console.file.isatty() and not self._console.is_dumb_terminal
        except ValueError:  # closed
            self._broken = True

    def poll(self, board: Board) -> None:
        """Show news. Called often."""
        beat = board.read(0)
        self._read(board)
        self._show_messages(board)
        if self._broken:
            return
        try:
            self._show(printable(beat.action))
        except (OSError, ValueError):  # closed, or a broken pipe
            self._give_up()

    def close(self) -> None:
        """Show the last row, and restore the terminal."""
        if self._broken:
            return
        try:
            if self._live is not None:
                self._live.update(self._panel(""))
                self._live.stop()
            elif self._step and self._shown_step != self._step:
                self._print()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        """Stop writing. Redirect to /dev/null, because Python's exit would fail on buffered output."""
        self._broken = True
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._console.file.fileno())
            os.close(nowhere)

    def _read(self, board: Board) -> None:
        """Read new rows and events."""
        for item in self._follower.poll():
            self._state.take(item)
            if item.kind == "row":
                self._step = item.step
                self._began = self._began or _FirstRow(item.step, self._clock())
            elif item.fields.get("event") in OF_EXPORTERS and board.rank < 0 and (text := event_line(item.fields)):
                self._tell(text)

    @property
    def step(self) -> int:
        """Step of the last row that was read; 0 before the first."""
        return self._step

    def _show_messages(self, board: Board) -> None:
        """Print messages of ranks. A rank that shows its own progress prints them itself."""
        for rank in range(board.world) if board.rank < 0 else ():
            self._num_shown[rank], texts = board.messages(rank, self._num_shown.get(rank, 0))
            for text in map(printable, texts):
                self._tell(text)

    def _tell(self, text: str) -> None:
        if self._live is None or self._broken:
            print_to_stderr(text)
            return
        with suppress(OSError, ValueError):  # `_show` will fail too, and give up
            self._console.print(Text(text))  # above the live panel

    def _show(self, action: str) -> None:
        now_s = self._clock()
        if self._is_terminal:
            if now_s - self._shown_s >= LIVE_EVERY_S:
                self._shown_s = now_s
                self._start_live().update(self._panel(f"rank 0: {action}"), refresh=True)
        elif self._step and self._step != self._shown_step and now_s - self._shown_s >= PLAIN_EVERY_S:
            self._print()

    def _print(self) -> None:
        self._shown_step, self._shown_s = self._step, self._clock()
        print(line(self._state, self._total, self._unigram_nats, self._left_s()), file=self._console.file, flush=True)

    def _start_live(self) -> Live:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        return self._live

    def _panel(self, note: str) -> RenderableType:
        return panel(self._state, self._total, self._unigram_nats, note, blocks=has_blocks(self._console))

    def _left_s(self) -> float | None:
        """Return the seconds to the last step at the pace since the first row; None before that is known."""
        if self._began is None or self._step <= self._began.step:
            return None
        pace_s = (self._clock() - self._began.time_s) / (self._step - self._began.step)
        return pace_s * max(0, self._total - self._step)
