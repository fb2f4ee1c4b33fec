"""The supervisor: forks the ranks of a run, watches them, and reports which rank failed first, in which action, and
why.

    outcome = launch(target, world, folder=run_folder, supervision=Supervision(progress))  # target(rank, world, board)
    print(outcome); sys.exit(outcome.exit_code)

Ranks are forked, so torch is imported once. Any rank's exception, exit or signal ends the run at once: a dead rank is
detected by its process descriptor, a hang by boards that do not change. If the supervisor dies, even by SIGKILL, its
ranks die too. SIGINT or SIGTERM, to the supervisor or a rank, asks all ranks to end after a whole step; a second one to
the supervisor kills them. Exit codes are those of `Outcome`. Nothing listens outside loopback.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch

from runtime.launch.heartbeat import Board
from runtime.launch.rank_process import STOP_SIGNALS, Seat, Target, run_rank
from runtime.launch.rank_watch import Interrupts, RankProcess, Supervision
from runtime.launch.run_lock import lock_folder
from runtime.system.outcome import Outcome, oom_kills_so_far

UNSEEN = Supervision()  # shows nothing while ranks run
_OMP_PAUSE_HARD = 2  # ends the threads of the pool


def launch(
    target: Target,
    world: int,
    *,
    folder: Path,
    supervision: Supervision = UNSEEN,
    backend: str | None = "gloo",
    debugged: int | None = None,
    is_locked: bool = False,
) -> Outcome:
    """Run `target(rank, world, board)` in `world` forked single-thread processes, with logs in `folder/logs`.

    Each has a process group of `backend` (None: none). `debugged`: the rank that keeps this process's terminal instead
    of a log. `is_locked`: the caller holds the folder's lock. Call from the main thread, before CUDA is initialised.
    Raises RunFolderBusyError, or OSError if the folder cannot be written.
    """
    assert world >= 1 and threading.current_thread() is threading.main_thread() and not torch.cuda.is_initialized()
    board = Board(world)
    processes: list[RankProcess] = []
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lock = nullcontext() if is_locked else _hold_lock(folder)
    with lock, _meeting_place(folder) as meeting, Interrupts() as interrupts:
        oom_kills = oom_kills_so_far()
        try:
            _prepare_fork()
            for rank in range(world):
                log = folder / "logs" / f"rank_{rank}.log"
                seat = Seat(
                    rank, world, os.getpid(), log, meeting / "store", backend, debugged, supervision.start_timeout_s
                )
                processes.append(_fork(target, seat, board))
            outcome = supervision.watch(processes, board, interrupts, oom_kills)
        finally:
            _kill(processes)
        supervision.poll(board)
        return outcome


# ---------------------------------------------------------------- before and after


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Lock the folder. Ranks inherit the lock, so it lasts until they have ended."""
    lock = lock_folder(folder)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def _meeting_place(folder: Path) -> Iterator[Path]:
    """Create a private folder for the rendezvous file of the ranks, and remove those of killed launches.

    A leftover that cannot be removed does no harm, and the next launch tries again.
    """
    for stale in folder.glob(".meeting-*"):
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            with suppress(OSError):
                stale.unlink()
    place = Path(tempfile.mkdtemp(prefix=".meeting-", dir=folder))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _prepare_fork() -> None:
    """End thread pools and flush buffers before a fork, because the child would inherit them in a broken state.

    This ends the pool of OpenMP, which restarts when needed; OpenBLAS ends its own pool at a fork.
    """
    for library in set(re.findall(r"/\S*/lib(?:g|i)?omp\S*\.so\S*", Path("/proc/self/maps").read_text())):
        ctypes.CDLL(library).omp_pause_resource_all(_OMP_PAUSE_HARD)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the parent process
        with suppress(OSError, ValueError):  # closed
            stream.flush()


def _fork(target: Target, seat: Seat, board: Board) -> RankProcess:
    own_board = board.bind(seat.rank)
    own_board.set_action("start")
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the rank has its own handlers
    try:
        pid = os.fork()
        if pid == 0:
            run_rank(target, seat, own_board)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return RankProcess(seat.rank, pid, os.pidfd_open(pid), seat.log)


def _kill(processes: Iterable[RankProcess]) -> None:
    """Kill the remaining processes, and reap all, so that no zombie is left."""
    for process in processes:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
    for process in processes:
        with suppress(ChildProcessError):  # already reaped
            os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED)
        os.close(process.pidfd)
