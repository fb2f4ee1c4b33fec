"""`dsc train --debug`: one rank has the terminal, so that `print` and `breakpoint()` in an edited build work.

The other ranks write logs as usual, ignore breakpoints, and wait for this rank without a timeout. Quitting the debugger
or typing Ctrl-C ends the run. No torch.
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

MARK = "debug.txt"  # in a run folder: marks a debug run and lists its edits
TIMEOUT_S = 365 * 24 * 3600.0  # for ranks that wait for the one at its prompt
_QUIT = signal.SIGQUIT  # stands for `q` at the prompt on the board; ranks never receive it otherwise
_A_RUN = ("metrics.jsonl", "spec.resolved", "checkpoints")


class LeftError(Exception):
    """The user quit the debugger or stopped the run. `exit_code`: 0 after a quit, else 128 + the signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the debugger was left, and the run has ended")
        self.exit_code = exit_code


def take_folder(run: Path, edits: Sequence[str]) -> str:
    """Mark a folder as a debug run of a build with these edits. Return why that is impossible, or "". OSError."""
    if not (run / MARK).exists() and any((run / name).exists() for name in _A_RUN):
        return f"{run} holds a run: name another folder for the debug run with --out"
    run.mkdir(parents=True, exist_ok=True)
    listed = "".join(f"{edit}\n" for edit in edits)
    write(run / MARK, f"A debug run: it may have run edited code, so its results are not valid.\n{listed}")
    return ""


def watch(board: Board) -> None:
    """Raise LeftError if anyone has asked to end the run. The supervisor calls this regularly."""
    if request := board.stop_request():
        raise LeftError(0 if request.signal == _QUIT else 128 + request.signal)


@contextmanager
def restore_terminal() -> Iterator[None]:
    """Restore the settings of the terminal, which a rank killed at its prompt leaves changed."""
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
    """In a rank that was just forked: keep the terminal, let Ctrl-C interrupt, and note that in its log."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    write(log, f"process {os.getpid()} had the terminal: its output is there\n")
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the supervisor's may have read ahead


def pass_breakpoints() -> None:
    """Make `breakpoint()` do nothing, in a rank of a debug run without the terminal."""
    sys.breakpointhook = lambda *_, **__: None


def quit_signal(error: BaseException) -> int:
    """Return the signal with which to stop all ranks, if the exception means that the user wants to end: `q` in pdb, or
    Ctrl-C. Return 0 for any other exception."""
    if isinstance(error, bdb.BdbQuit):
        return _QUIT
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
