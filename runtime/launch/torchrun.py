"""Ranks that torchrun started, with the features of the supervisor: run lock, watch, saving before a stop, restarts.

    place = Place.of(os.environ)
    ranks = attach(place, run_folder, build.digest, hang_timeout_s)     # meets the other ranks
    code = ranks.train(target, "gloo")                                  # target(rank, world, board)

A rank that fails, dies or hangs ends all, on every machine, with the exit codes of `Outcome`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from runtime.contract.options import START_TIMEOUT_S
from runtime.launch.rank_process import LEAVE_S, NO_TIMEOUT, Target, die_with_parent, use_one_thread
from runtime.launch.run_lock import LOCK, RunFolderBusyError, lock_folder
from runtime.launch.torchrun_meet import (
    Ending,
    Hello,
    MeetingError,
    MeetSession,
    Stores,
    TorchrunRank,
    interface_to,
    make_board,
    meet,
    new_nonce,
)
from runtime.launch.torchrun_watch import TorchrunWatch
from runtime.system.machine import machine
from runtime.system.outcome import EXIT_RETRY, EXIT_USAGE, refusal_code

SHARED_S = 10.0  # until a file that rank 0 wrote must be visible on other machines


class RefusedError(RuntimeError):
    """The ranks cannot train. `code` is the exit code. All ranks get the same message."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class AttachedRank:
    """A rank that has met the others and is being watched."""

    place: TorchrunRank
    session: MeetSession
    watch: TorchrunWatch
    stores: Stores
    lock: int | None  # descriptor on rank 0, held until its process ends

    @property
    def was_restarted(self) -> bool:
        """Whether torchrun has restarted these ranks (--max-restarts)."""
        return bool(self.session.decided["restarted"])

    @property
    def prints_shared(self) -> bool:
        """Whether this rank prints messages that are the same for all: one rank on each machine does."""
        return self.place.local_rank == 0

    def refuse(self, message: str, code: int) -> NoReturn:
        """End all ranks before they train, with this message. Does not return."""
        self.watch.end(Ending("refused", self.place.rank, reason=message, code=code))

    def run_on_first(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0, while the others wait. If it raises, rank 0 ends all."""
        store = self.stores.connect(f"{self.session.name}/first")
        if self.place.rank:
            store.wait(["done"], NO_TIMEOUT)
            return
        action()
        store.set("done", "")

    def train(self, target: Target, backend: str) -> int:
        """Run the target in this process. Return the exit code. If a rank fails, no rank returns."""
        rank, world, board = self.place.rank, self.place.world, self.watch.board
        try:
            use_one_thread()
            board.share(self.stores.connect(f"{self.session.name}/stop"))
            store = self.stores.connect(f"{self.session.name}/torch")
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=NO_TIMEOUT)
            self.watch.begin_training()
            target(rank, world, board)
            board.set_action("finish")
            dist.barrier()  # a peer may still read what this rank sent
        except BaseException as error:
            self.watch.fail(error)
        stopped = self.watch.requested_ending()
        self.watch.finish()
        _leave_within(LEAVE_S, stopped.exit_code if stopped else 0)
        dist.destroy_process_group()
        if stopped is None:
            return 0
        if self.prints_shared:
            with suppress(OSError, ValueError):
                print(stopped, file=sys.stderr, flush=True)
        return stopped.exit_code


def _leave_within(limit_s: float, code: int) -> None:
    """End this process with its exit code if something still keeps it after `limit_s`, such as a library's thread."""

    def leave() -> None:
        with suppress(OSError, ValueError):
            print(f"warning: this rank had finished, but did not end in {limit_s:g} s", file=sys.stderr, flush=True)
        os._exit(code)

    timer = threading.Timer(limit_s, leave)
    timer.daemon = True
    timer.start()


def attach(
    place: TorchrunRank, run: Path, digest: str, hang_timeout_s: float | None, start_timeout_s: float = START_TIMEOUT_S
) -> AttachedRank:
    """Meet the other ranks and start to watch. RefusedError if they cannot train in this folder.

    `digest`: digest of the build, which must be equal on all ranks. Rank 0 takes the run lock. `start_timeout_s`: how
    long to wait for the other ranks.
    """
    die_with_parent()
    board, descriptor = make_board(place.world, place.rank)
    board.set_action("meet")
    hello = Hello(new_nonce(), place.rank, machine(), place.agent, os.getpid(), descriptor, place.restarts, digest)
    lock: list[int] = []
    watch: list[TorchrunWatch] = []

    def enter(session: str) -> None:
        watch[:] = [TorchrunWatch(place.rank, board, stores.connect(session), place.agent, hang_timeout_s)]
        watch[0].enter()

    def decide(session: str, hellos: Sequence[Hello], restarted: bool) -> Mapping[str, Any]:
        store = stores.connect(session)
        for key in ("stops", "endings"):
            store.set(key, "")
        refusal, code = _other_build(hellos), EXIT_USAGE
        if not refusal:
            refusal, code = _lock(run, session, lock)
        return {"refusal": refusal, "code": code, "restarted": restarted}

    try:
        stores = Stores(place)
        session = meet(stores.connect("meeting"), place.world, hello, enter, decide, start_timeout_s)
    except MeetingError as error:
        raise RefusedError(str(error), EXIT_RETRY) from None
    except dist.DistError as error:
        message = f"the store of torchrun is gone: {str(error).splitlines()[0]}"
        raise RefusedError(message, EXIT_RETRY) from None
    if session.decided["refusal"]:
        raise RefusedError(session.decided["refusal"], session.decided["code"])
    if interface := "lo" if session.machines == 1 else interface_to(stores.host):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    watch[0].begin(session.hellos)
    attached = AttachedRank(place, session, watch[0], stores, lock[0] if lock else None)
    if not _sees_lock(run, session.name):
        attached.refuse(
            f"{run} of rank {place.rank} is not the folder that rank 0 trains in: all ranks need one", EXIT_USAGE
        )
    return attached


def _other_build(hellos: Sequence[Hello]) -> str:
    differing = [str(hello.rank) for hello in hellos if hello.digest != hellos[0].digest]
    if not differing:
        return ""
    ranks = f"rank{'s' * (len(differing) > 1)} {', '.join(differing)}"
    return f"{ranks} opened another build than rank 0: copy one build to all machines"


def _lock(run: Path, session: str, lock: list[int]) -> tuple[str, int]:
    """Take the run lock and write the session into it. Return an error message or "", and the exit code."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock[:] = [lock_folder(run)]
        os.ftruncate(lock[0], 0)
        os.pwrite(lock[0], session.encode(), 0)
        os.fsync(lock[0])
    except RunFolderBusyError as error:
        return str(error), EXIT_RETRY
    except OSError as error:
        return f"the run folder cannot be used: {error}", refusal_code(error)
    return "", 0


def _sees_lock(run: Path, session: str) -> bool:
    """Whether this rank sees the run folder of rank 0."""
    until = time.monotonic() + SHARED_S
    while True:
        with suppress(OSError):
            if (run / LOCK).read_text("ascii", "replace") == session:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
