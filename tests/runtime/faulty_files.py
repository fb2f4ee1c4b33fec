"""Faults in the system calls of durable_files: a kill before, within or after each, and a full disk.

`Calls` replaces the module `os` there. `crash_states` replays recorded calls as a disk may show them after a power
loss: unsynced changes may be missing.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime.checkpoint.publish import Publisher, RetentionPolicy, TensorPart

MUTATING = ("open", "mkdir", "write", "fsync", "rename", "unlink", "rmdir")


class Killed(BaseException):
    """The process is dead: its later calls have no effect."""


@dataclass
class Calls:
    """Counts mutating calls (not opens for reading) and passes each to `before(number, name)`, then to `os`."""

    before: Callable[[int, str], None] = lambda number, name: None
    torn_write: int = -1  # number of the write that is half done at the kill
    count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in MUTATING:
            return function

        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return function(*args, **options)
            with self.lock:
                number, self.count = self.count, self.count + 1
                if name == "write" and number == self.torn_write:
                    os.write(args[0], bytes(args[1])[: len(args[1]) // 2])
                self.before(number, name)
                return function(*args, **options)

        return call


def kill_at(number: int) -> Callable[[int, str], None]:
    """A hook that kills the process, with all its ranks, before call `number`."""

    def before(now: int, _name: str) -> None:
        if now >= number:
            raise Killed

    return before


def fail_from(number: int, last: int, error: int) -> Callable[[int, str], None]:
    """A hook that fails calls `number` to `last` that need space, as on a full (ENOSPC) or broken (EIO) disk."""

    def before(now: int, name: str) -> None:
        if number <= now <= last and name in ("open", "mkdir", "write", "fsync", "rename"):
            raise OSError(error, os.strerror(error))

    return before


def save_all(
    folder: Path,
    step: int,
    shards: list[Mapping[str, Tensor | TensorPart]],
    keep: int | RetentionPolicy = 1,
    meta: Mapping[str, Any] | None = None,
) -> list[BaseException | None]:
    """Save with one thread per rank. Returns what each raised. A broken barrier means that the process ended."""
    world, keeping = len(shards), RetentionPolicy(keep) if isinstance(keep, int) else keep
    barrier = threading.Barrier(world)
    raised: list[BaseException | None] = [None] * world

    def rank_thread(rank: int) -> None:
        try:
            publisher = Publisher(folder, rank, world, lambda: void(barrier.wait()), keeping)
            publisher.save(step, shards[rank], meta or {"of": step})
        except BaseException as error:
            raised[rank] = error
            if isinstance(error, Killed):
                barrier.abort()

    threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def void(_: object) -> None:
    """Drop a value."""


# ---------------------------------------------------------------- power loss

Node = bytes | dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A recorded call. `folder` and `file` identify open files, across renames."""

    kind: str  # create, mkdir, write, sync, sync folder, rename, unlink
    folder: int = 0
    name: str = ""
    to: str = ""
    file: int = 0
    data: bytes = b""


class Recorder(Calls):
    """Records changes so that they can be replayed. New files get numbers, since inodes are reused."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Change] = []
        self.made: dict[int, int] = {}
        self.numbers = itertools.count(1)

    def node(self, descriptor: int, *, new: bool = False) -> int:
        inode = os.fstat(descriptor).st_ino
        if new or inode not in self.made:
            self.made[inode] = next(self.numbers)
        return self.made[inode]

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in MUTATING:
            return real

        def call(*args: Any, **options: Any) -> Any:
            with self.lock:
                folder_fd = options.get("dir_fd", options.get("src_dir_fd"))
                folder = 0 if folder_fd is None else self.node(folder_fd)
                result = real(*args, **options)
                if name == "open" and args[1] & os.O_CREAT:
                    self.changes.append(Change("create", folder, args[0], file=self.node(result, new=True)))
                elif name == "mkdir":
                    new_fd = os.open(args[0], os.O_RDONLY, dir_fd=folder_fd)
                    self.changes.append(Change("mkdir", folder, args[0], file=self.node(new_fd, new=True)))
                    os.close(new_fd)
                elif name == "write":
                    self.changes.append(Change("write", file=self.node(args[0]), data=bytes(args[1])[:result]))
                elif name == "fsync":
                    self.changes.append(Change("sync", file=self.node(args[0])))
                elif name == "rename":
                    self.changes.append(Change("rename", folder, args[0], args[1]))
                elif name in ("unlink", "rmdir"):
                    self.changes.append(Change("unlink", folder, args[0]))
                return result

        return call


def crash_states(changes: list[Change], root: int) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Folder trees that a power loss may leave: (calls made, what was lost, name → contents or folder).

    After each prefix of the calls, any changes to folders after the folder's last sync may be lost, and all, half or
    none of a file's bytes after its last sync. If there are many changes, 128 random sets are lost.
    """
    seen, choose = set(), random.Random(0)
    for done in range(len(changes) + 1):
        happened = changes[:done]
        open_changes = [i for i, c in enumerate(happened) if c.folder and not synced(happened, i, c.folder)]
        few = len(open_changes) <= 7
        for draw in range(2 ** len(open_changes) if few else 128):
            bits = draw if few else choose.getrandbits(len(open_changes))
            lost = {i for position, i in enumerate(open_changes) if bits >> position & 1}
            for share in (0.0, 0.5, 1.0):
                tree = _replay(happened, lost, root, share)
                if (key := repr(tree)) not in seen:
                    seen.add(key)
                    yield done, f"{done} calls, without {sorted(lost)}, {share:.0%} of unsynced data", tree


def synced(changes: list[Change], index: int, node: int) -> bool:
    """Whether a later sync of a file or folder covers a change."""
    return any(c.kind == "sync" and c.file == node for c in changes[index + 1 :])


def _replay(changes: list[Change], lost: set[int], root: int, share: float) -> dict[str, Any]:
    folders: dict[int, dict[str, int]] = {root: {}}
    data: dict[int, bytes] = {}
    for i, c in enumerate(changes):
        if c.kind == "write":
            num_bytes = len(c.data) if synced(changes, i, c.file) else int(len(c.data) * share)
            data[c.file] = data.get(c.file, b"") + c.data[:num_bytes]
        if c.kind == "mkdir":
            folders[c.file] = {}
        if c.kind == "create":
            data[c.file] = b""
        if i in lost or not c.folder:
            continue
        entries = folders[c.folder]
        if c.kind in ("create", "mkdir"):
            entries[c.name] = c.file
        elif c.kind == "unlink":
            entries.pop(c.name, None)
        elif c.kind == "rename" and c.name in entries:
            entries[c.to] = entries.pop(c.name)

    def tree(node: int) -> Node:
        return {n: tree(i) for n, i in sorted(folders[node].items())} if node in folders else data[node]

    result = tree(root)
    assert isinstance(result, dict)
    return result


def lay_out(tree: Mapping[str, Any], folder: Path) -> None:
    """Write the files of a tree."""
    folder.mkdir()
    for name, node in tree.items():
        if isinstance(node, dict):
            lay_out(node, folder / name)
        else:
            (folder / name).write_bytes(node)


NO_SPACE, BROKEN = errno.ENOSPC, errno.EIO
