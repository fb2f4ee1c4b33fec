"""One rank's side of a launch: the code of a forked process before, around and after its target.

Linux only (PDEATHSIG). A rank does not return from here: it ends with `os._exit`, so that the supervisor's exit
handlers, buffers and temporary folders are not processed a second time.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeAlias

import torch
import torch.distributed as dist

from runtime.comm.collective import Meeting
from runtime.contract.options import START_TIMEOUT_S
from runtime.launch import debug
from runtime.launch.heartbeat import Board
from runtime.system.outcome import ReportedError

Target: TypeAlias = Callable[[int, int, Board], None]  # (rank, world, board)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STACK_SIGNAL = signal.SIGUSR1  # makes a rank write its Python stack into its log
FINISH = "finish"  # the action of a rank whose target has returned
LEAVE_S = 120.0  # until a rank that has finished must have ended: exporters take up to 70 s

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_PR_SET_PDEATHSIG = 1
NO_TIMEOUT = timedelta(days=365)  # the supervisor alone detects hangs: it can name the rank and the action
_LOST_PEER = re.compile(  # messages of gloo, NCCL and the stores
    r"connection (was )?(closed|reset|refused)|broken pipe|timed out waiting|connectFullMesh|remote process",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Seat:
    """Settings of a forked rank: its number, supervisor, log, rendezvous file and backend."""

    rank: int
    world: int
    supervisor: int  # process id
    log: Path
    rendezvous: Path
    backend: str | None  # None: no process group
    debugged: int | None = None  # the rank that keeps the supervisor's terminal, in a debug run
    start_timeout_s: float = START_TIMEOUT_S  # for the arrival of the other ranks

    @property
    def has_terminal(self) -> bool:
        return self.rank == self.debugged


def run_rank(target: Target, seat: Seat, board: Board) -> NoReturn:
    """Run `target` in this forked process and end the process: exit code 0 if it finished, 1 after an exception."""
    code = 1
    try:
        _die_with(seat.supervisor)
        if not seat.has_terminal:
            _redirect(seat.log)
        _handle_signals(board)
        if seat.has_terminal:
            debug.take_terminal(seat.log)
        elif seat.debugged is not None:
            debug.pass_breakpoints()
        use_one_thread()
        with _process_group(seat, board):
            target(seat.rank, seat.world, board)
            board.set_action(FINISH)
        board.finish()
        code = 0
    except BaseException as error:
        if seat.has_terminal and (stop_signal := debug.quit_signal(error)):
            board.request_stop(stop_signal)  # ends the others too
            board.finish()
            os._exit(0)
        is_reported = isinstance(error, ReportedError)
        summary = str(error) if is_reported else "".join(traceback.format_exception_only(error))
        slowdown = error.slowdown if isinstance(error, ReportedError) and not error.of_peer else 0.0
        detail = "" if is_reported else last_lines(error)
        board.fail(summary, detail, lost_peer=is_lost_peer(error), slowdown=slowdown)
        traceback.print_exception(error)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def use_one_thread() -> None:
    """Use one thread per rank; set the environment too, for libraries that start their pool later."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    torch.set_num_threads(1)
    keep_memory()


def keep_memory() -> None:
    """Tell glibc to keep freed memory: steps allocate the same sizes repeatedly, and fresh pages cost time."""
    malloc = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if malloc is not None:
        malloc(_M_MMAP_THRESHOLD, 1 << 30)
        malloc(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether an exception, or one of its causes, is a broken connection, so that another rank is at fault."""
    while error is not None:
        if isinstance(error, ReportedError) and error.of_peer:
            return True
        if isinstance(error, ConnectionError) or (isinstance(error, RuntimeError) and _LOST_PEER.search(str(error))):
            return True
        error = error.__cause__
    return False


def last_lines(error: BaseException, lines: int = 12) -> str:
    """Return the end of the traceback, including the exception itself."""
    return "\n".join("".join(traceback.format_exception(error)).rstrip().splitlines()[-lines:])


def _die_with(supervisor: int) -> None:
    """Ask the kernel to kill this process when the supervisor ends, however it ends."""
    die_with_parent()
    if os.getppid() != supervisor:  # the supervisor ended before the call
        os._exit(1)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


class _LogFile(io.FileIO):
    """A log file that drops what it cannot write, because a full disk must not end a training run."""

    def write(self, data: object) -> int:
        try:
            return super().write(data) or 0  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def _redirect(log: Path) -> None:
    """Redirect standard output and error to the log, for Python and C, and empty standard input."""
    null = os.open(os.devnull, os.O_RDONLY)
    log_file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    for source, descriptor in ((null, 0), (log_file, 1), (log_file, 2)):
        os.dup2(source, descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_LogFile(fd, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
        )
        for fd in (1, 2)
    )
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2)


def _handle_signals(board: Board) -> None:
    """Turn a signal into a stop request for all ranks: a rank that ended alone would leave the others waiting."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda received, _frame: board.request_stop(received))
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def _process_group(seat: Seat, board: Board) -> Iterator[None]:
    """Create a process group over a file store and the loopback interface. All ranks leave it together."""
    if seat.backend is None:
        yield
        return
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    store = dist.FileStore(str(seat.rendezvous), seat.world)
    Meeting(store, seat.rank, seat.start_timeout_s, board.set_action).arrive("start", range(seat.world))
    dist.init_process_group(seat.backend, store=store, rank=seat.rank, world_size=seat.world, timeout=NO_TIMEOUT)
    yield
    if dist.is_initialized():
        dist.barrier()  # a peer may still read what this rank sent
        dist.destroy_process_group()
