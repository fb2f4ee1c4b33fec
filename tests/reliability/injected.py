"""Injects a fault into a rank of a real run. All processes of `tests.forks` call `install`.

The environment variable FAULT is the JSON of a Fault. It happens once in a run; the file
`note` then describes it. Faults are real: signals, exits, system errors, exhausted memory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint import durable_files
from runtime.launch.heartbeat import Board
from runtime.state import snapshot
from runtime.step.executor import Executor
from tests.progress import children

VARIABLE = "FAULT"
STEP = 5  # in which actions are disturbed: the checkpoint of step 3 is there or being written
SAVE = 6  # the step whose save is disturbed; it replaces that of step 3
ACTIONS = {
    "init": r"connect",
    "data": r"read samples",
    "F": r"F\d+\.\d+",
    "B": r"B\d+\.\d+",
    "W": r"W\d+\.\d+",
    "R": r"R\d+\.\d+",
    "recv": r"recv .*",
    "reduce": r"reduce .*",
    "optimizer": r"optimizer",
}
TRAINING = ("init", "data", "F", "B", "W", "send", "recv", "reduce", "optimizer", "copy for a save")
SAVING = ("shard", "sync of a shard", "manifest", "rename", "LATEST", "purge")  # on another thread, during training
PHASES = (*TRAINING, *SAVING)
BY_RANK_0 = ("manifest", "rename", "LATEST", "purge")
LAUNCHER, COMMAND = -1, -2  # victims that are not ranks
LASTS = 3  # steps for which a disk is full


@dataclass(frozen=True)
class Fault:
    """`victims`: ranks, or LAUNCHER or COMMAND. The first of them to reach the phase strikes all; if only rank 0
    reaches it, rank 0 does."""

    phase: str
    kind: str
    victims: tuple[int, ...]
    note: str

    def strikes(self, rank: int) -> bool:
        """Whether this rank is the one that strikes when it comes to the phase."""
        return rank == 0 if self.phase in BY_RANK_0 or self.victims[0] < 0 else rank in self.victims

    def environment(self) -> dict[str, str]:
        """What makes `tests.forks` do it."""
        return {"FORKS_RUN_FIRST": __name__, VARIABLE: json.dumps(asdict(self))}


@dataclass(frozen=True)
class Note:
    """A fault that happened: when (CLOCK_REALTIME), and the reported action of its rank."""

    time_ns: int
    rank: int
    step: int
    action: str

    @classmethod
    def read(cls, path: Path) -> Note:
        return cls(**json.loads(path.read_text("utf-8")))


def install() -> None:
    """Let the fault of the environment happen in this process or in those it forks; once."""
    fields = json.loads(os.environ[VARIABLE])
    fault = Fault(**fields | {"victims": tuple(fields["victims"])})
    if not hasattr(Board, "is_watched"):
        Board.is_watched = True  # type: ignore[attr-defined]
        _Injector(fault).watch()


class _Injector:
    def __init__(self, fault: Fault) -> None:
        self.fault, self.board = fault, Board(1)  # of the rank that this process is, from its first action on

    def watch(self) -> None:
        set_action = Board.set_action
        pattern = ACTIONS.get(self.fault.phase)

        def watched(board: Board, text: str) -> None:
            set_action(board, text)
            self.board = board
            if board.step == STEP + LASTS:
                Path(f"{self.fault.note}.disk").unlink(missing_ok=True)
            if pattern and re.fullmatch(pattern, text) and board.step == (STEP if self.fault.phase != "init" else 0):
                self.reached()

        Board.set_action = watched  # type: ignore[method-assign]
        self._before(Executor, "send", "send", lambda *_: self.board.step == STEP)
        self._before(snapshot.HostCopy, "of", "copy for a save", lambda *_: self.board.step == SAVE)
        part = f".tmp-{SAVE}"
        self._before(
            durable_files, "create", "shard", lambda folder, name, _: name[:5] == "shard" and _name(folder) == part
        )
        self._before(os, "fsync", "sync of a shard", lambda file: f"{part}/shard." in _path(file))
        self._before(
            durable_files,
            "create",
            "manifest",
            lambda folder, name, _: f"{_name(folder)}/{name}" == f"{part}/manifest.json",
        )
        self._before(durable_files, "rename", "rename", lambda _, old, new: old == part)
        self._before(durable_files, "replace", "LATEST", lambda _, name, text: text == f"step-{SAVE:08d}\n")
        self._before(durable_files, "remove", "purge", lambda _, name: name.startswith(".purge-"))

    def _before(self, owner: Any, name: str, phase: str, is_it: Callable[..., bool]) -> None:
        """Enter the phase before each call of `name` for which `is_it` holds."""
        if phase != self.fault.phase:
            return
        real = getattr(owner, name)

        def call(*words: Any, **named: Any) -> Any:
            if is_it(*words):
                self.reached()
            return real(*words, **named)

        setattr(owner, name, call)

    def reached(self) -> None:
        """The rank of this process has come to the phase."""
        if not self.fault.strikes(self.board.rank):
            return
        beat = self.board.read(self.board.rank)
        note = Note(time.time_ns(), self.board.rank, beat.step, beat.action)
        try:
            with Path(self.fault.note).open("x", encoding="utf-8") as file:
                file.write(json.dumps(asdict(note)))
        except FileExistsError:
            return
        if self.fault.kind in signal.Signals.__members__:
            _send(signal.Signals[self.fault.kind], self.fault.victims, self.board.rank)
        elif self.fault.kind == "full disk":
            _fill(Path(f"{self.fault.note}.disk"))
        else:
            FAULTS[self.fault.kind]()


def _fill(file: Path) -> None:
    """Leave no byte of a file system."""
    with suppress(OSError), file.open("wb", buffering=0) as opened:
        for size in (1 << 16, 1 << 8, 1):
            with suppress(OSError):
                while True:
                    opened.write(bytes(size))


def _talk() -> None:
    """Print more than a disk has."""
    for _ in range(64):
        print("x" * (1 << 16))
        print("y" * (1 << 16), file=sys.stderr)


def _send(number: signal.Signals, victims: Iterable[int], rank: int) -> None:
    """Signal the victims, the striking rank itself last, as it signals the others."""
    processes = _ranks()
    launcher = os.getppid()
    processes |= {LAUNCHER: launcher, COMMAND: _parent(launcher), rank: os.getpid()}
    for victim in sorted(victims, key=lambda victim: victim == rank):
        os.kill(processes[victim], number)


def _ranks() -> dict[int, int]:
    """Rank → process id, by the log that each writes to."""
    logs = {pid: re.search(r"/rank_(\d+)\.log$", _path(1, pid)) for pid in children(os.getppid())}
    return {int(log[1]): pid for pid, log in logs.items() if log}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _path(descriptor: int, pid: int | str = "self") -> str:
    return str(Path(f"/proc/{pid}/fd/{descriptor}").readlink())


def _name(descriptor: int) -> str:
    return Path(_path(descriptor)).name


def _raise(error: BaseException) -> None:
    raise error


FAULTS: Mapping[str, Callable[[], object]] = {
    "exception": lambda: _raise(ValueError("no such expert")),
    "EIO": lambda: _raise(OSError(errno.EIO, os.strerror(errno.EIO))),
    "ENOSPC": lambda: _raise(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    "out of memory": lambda: torch.empty(1 << 50),
    "_exit(0)": lambda: os._exit(0),
    "_exit(7)": lambda: os._exit(7),
    "abort": os.abort,
    "slow": lambda: time.sleep(4.0),
    "talk": _talk,
}
