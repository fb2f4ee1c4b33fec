"""`dsc train --debug`: one rank has the terminal, so that `print` and `breakpoint()` in an edited build work.

The others run as usual, with their logs and past their breakpoints, and wait for it as long as it takes. Who quits the
debugger, or types Ctrl-C, ends the run. No torch.
"""

from __future__ import annotations

import bdb
import os
import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.launch.heartbeat import Board
from runtime.system.regular_files import write

MARK = "debug.txt"  # of a run folder: this was a debug run, of what
TIMEOUT_S = 365 * 24 * 3600.0  # of ranks that wait for the one at its prompt
_QUIT = signal.SIGQUIT  # what `q` at the prompt is on the board: no rank of a run receives it otherwise
_A_RUN = ("metrics.jsonl", "spec.resolved", "checkpoints")


class LeftError(Exception):
    """The debugger was left, or the run asked to stop. `exit_code`: 0 after a quit, else 128 + the signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the debugger was left, and the run has ended")
        self.exit_code = exit_code


def take_folder(run: Path, edits: Sequence[str]) -> str:
    """Mark a run folder as that of a debug run of a build with these edits; or why it cannot be one. OSError."""
    if not (run / MARK).exists() and any((run / name).exists() for name in _A_RUN):
        return f"{run} holds a run: name another folder for the debug run with --out"
    run.mkdir(parents=True, exist_ok=True)
    listed = "".join(f"{edit}\n" for edit in edits)
    write(run / MARK, f"A debug run: it may have run edited code, and its numbers count for nothing.\n{listed}")
    return ""


def watch(board: Board) -> None:
    """For the supervisor to call now and then: raises LeftError as soon as anybody asks for the end."""
    if request := board.stop_request():
        raise LeftError(0 if request.signal == _QUIT else 128 + request.signal)


@contextmanager
def terminal_restored() -> Iterator[None]:
    """Give the terminal its settings back, which a rank that is killed at its prompt has changed."""
    try:
        before = termios.tcgetattr(0)
    except (OSError, termios.error):  # no terminal
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError, termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def take_terminal(log: Path) -> None:
    """In a rank that has just been forked: keep standard streams, let Ctrl-C interrupt, and say so in its log."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    write(log, f"process {os.getpid()} had the terminal: what it said is there\n")
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the supervisor's may have read ahead


def pass_breakpoints() -> None:
    """In a rank of a debug run that has no terminal: nobody is there to answer, so `breakpoint()` does nothing."""
    sys.breakpointhook = lambda *_, **__: None


def left_by(error: BaseException) -> int:
    """What to ask all ranks to stop by, after an exception that is the wish to end: `q` at the prompt of pdb, or Ctrl-C
    elsewhere. 0 after any other."""
    if isinstance(error, bdb.BdbQuit):
        return _QUIT
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
