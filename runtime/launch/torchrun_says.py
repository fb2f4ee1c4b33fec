"""What ranks under torchrun say to one another through its store: what they do, why all end, when all stop."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from runtime.launch.heartbeat import Board, size_bytes
from runtime.system.outcome import EXIT_USAGE, Kind, Outcome, Waiting, printable

State = Literal["prepare", "train", "done", "leaving"]


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank tells the others. `number` grows; `since_ns` is of its machine's clock."""

    number: int
    state: State
    step: int
    action: str
    since_ns: int
    for_s: float
    process: str  # state of the process: "running", "sleeping", …
    where: str  # innermost Python frame of its main thread
    waits: bool  # that frame is communication


@dataclass(frozen=True, slots=True)
class Ending:
    """Why all ranks end, as the rank that found it told it. `kind` is an Outcome's, or "refused" before training."""

    kind: Kind | Literal["refused"]
    rank: int
    step: int = 0
    action: str = ""
    how: str = ""
    detail: str = ""
    lost_peer: bool = False
    code: int = EXIT_USAGE  # of "refused"
    signal: int = 0  # of "stopped" and "killed"
    waiting: tuple[Waiting, ...] = ()  # what the other ranks wait in; of "hung", what all do

    @property
    def exit_code(self) -> int:
        return self.code if self.kind == "refused" else self._outcome.exit_code

    @property
    def _outcome(self) -> Outcome:
        assert self.kind != "refused"
        if self.kind in ("stopped", "killed"):
            return Outcome(self.kind, self.how, signal=self.signal)
        return Outcome(
            self.kind,
            self.how,
            self.rank,
            self.step,
            self.action,
            detail=self.detail,
            waiting=self.waiting,
        )

    def __str__(self) -> str:
        if self.kind == "refused":
            return f"error: {printable(self.how)}"
        return f"{self._outcome}; go on with --resume" if self.kind == "stopped" else f"error: {self._outcome}"

    @staticmethod
    def read(line: str) -> Ending:
        row = json.loads(line)
        return Ending(**row | {"waiting": tuple(Waiting(**each) for each in row["waiting"])})


class SharedBoard(Board):
    """The board of a rank under torchrun: the memory is this rank's alone, a stop is agreed on in the store."""

    __slots__ = ("_last", "_store")

    def share(self, store: dist.Store) -> None:
        """From now on stops are agreed on in this connection, which only the main thread uses."""
        self._store, self._last = store, 0

    def should_stop(self, step: int) -> bool:
        """Decide as Board does: rank 0 decides one step ahead, and every rank has heard from it before it asks."""
        if not self._last and self.rank == 0:
            if request := self.stop_request():
                self._last = step + 1
                said = {"last": self._last, "signal": request.signal, "rank": request.rank}
                self._store.set("last", json.dumps(said))
                self._store.check(["last"])  # answered after the line before was done: `set` alone waits for nobody
        elif not self._last and self._store.check(["last"]):
            said = json.loads(self._store.get("last"))
            self._last = said["last"]
            self.request_stop(said["signal"], said["rank"])
        return bool(self._last) and step >= self._last


def make_board(world: int, rank: int) -> tuple[SharedBoard, int]:
    """A board in a file of memory, and its descriptor, by which other ranks of the machine find it."""
    descriptor = os.memfd_create("dsc-board", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes(world))
    return SharedBoard(world, _memory=mmap.mmap(descriptor, size_bytes(world)), _rank=rank), descriptor


@dataclass
class Peer:
    """What is known of another rank. `pidfd` and `board`: of a rank that the same torchrun started."""

    rank: int
    beat: Beat
    heard_s: float = 0.0  # since its last beat, by time this process ran
    pidfd: int | None = None
    board: Board | None = None
    ended: bool = False

    def hear(self, beat: Beat) -> None:
        if beat.number != self.beat.number:
            self.heard_s = 0.0
        self.beat = beat

    @property
    def is_over(self) -> bool:
        """It does not beat any more, and need not."""
        return self.beat.state in ("done", "leaving") or self.ended

    def last(self) -> tuple[int, str]:
        """Step and action, as fresh as can be."""
        if self.board is None:
            return self.beat.step, self.beat.action
        beat = self.board.read(self.rank)
        return beat.step, beat.action
