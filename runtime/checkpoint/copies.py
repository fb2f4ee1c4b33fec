"""Copies the checkpoints of a run to another place, in a thread of each rank, while the run continues.

Each rank copies the shard that it wrote, reads it back and compares its sha256. When all ranks have done so, rank 0
writes the manifest, reads it back, and removes surplus checkpoints. So at any interruption the place has either the
whole checkpoint or no manifest of it. A started copy is finished; then the newest checkpoint is copied that was
published meanwhile, and older ones are skipped. After a failure the next checkpoint is tried.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from runtime.checkpoint import durable_files as files
from runtime.checkpoint.places import CopyPlace, manifest_of
from runtime.checkpoint.publish import PublishedCheckpoint, SaveResult
from runtime.checkpoint.retention import RetentionPolicy
from runtime.checkpoint.shard_manifest import MANIFEST, CheckpointError, CheckpointShard, Manifest, render

_STOP = -1


class CopyMeeting(Protocol):
    """Collective operations of the threads that copy to one place, one thread per rank."""

    def all(self, yes: bool) -> bool:
        """Whether `yes` is true on every rank."""

    def broadcast(self, numbers: list[int]) -> list[int]:
        """Return the numbers of rank 0."""


@dataclass(frozen=True)
class CopyResult:
    """The result of a copy on this rank. `reason`: why it failed. `was_skipped`: a newer checkpoint was copied
    instead."""

    step: int
    name: str
    place: str
    num_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    was_skipped: bool = False
    note: str = ""  # a problem after a complete copy


@dataclass
class Copier:
    """Copies checkpoints from the folder `checkpoints` to one place. Every rank of a run constructs it."""

    place: CopyPlace
    checkpoints: Path
    rank: int
    keep: RetentionPolicy
    meeting: CopyMeeting
    moved: int = 0  # bytes of `to_move` that this rank has written or read back
    to_move: int = 0
    _ended: SimpleQueue[CopyResult] = field(default_factory=SimpleQueue)
    _change: threading.Condition = field(default_factory=threading.Condition)
    _shards: dict[int, CheckpointShard] = field(default_factory=dict)  # of this rank, by step
    _next: PublishedCheckpoint | None = None  # of rank 0
    _current: str = ""  # name of the checkpoint that is being copied
    _closing: bool = False
    _manifests: dict[str, Manifest] = field(default_factory=dict)  # in the place, as far as they were read
    _thread: threading.Thread | None = None

    def offer(self, step: int, saved: SaveResult) -> None:
        """Queue a published checkpoint for copying. Called in the thread that saves."""
        with self._change:
            self._shards[step] = saved.shard
            if saved.published is not None:
                if (late := self._next) is not None:
                    self._ended.put(CopyResult(late.manifest.step, late.name, self.place.text, was_skipped=True))
                self._next = saved.published
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
                self._thread.start()
            self._change.notify()

    def held_names(self) -> frozenset[str]:
        """Return the names of checkpoints that must not be removed: they are copied now or next."""
        with self._change:
            return frozenset({self._current, self._next.name if self._next else ""})

    def finished_copies(self) -> Iterator[CopyResult]:
        """Yield the copies that have ended since the last call."""
        while True:
            try:
                yield self._ended.get_nowait()
            except Empty:
                return

    def close(self, most_s: float, tick: Callable[[str], None]) -> bool:
        """Wait until queued checkpoints are copied. Return whether that took at most `most_s`. Every rank calls it.

        `tick` is called each second with a line of progress.
        """
        if self._thread is None:
            return True
        with self._change:
            self._closing = True
            self._change.notify()
        until = time.monotonic() + most_s
        while self._thread.is_alive() and time.monotonic() < until:
            share = f", {self.moved / self.to_move:.0%}" if self.to_move else ""
            tick(f"copy {self._current or 'checkpoint'} to {self.place.text}{share}")
            self._thread.join(1.0)
        return not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._copy_next():
                pass
        except RuntimeError:  # another rank has ended, which ends the run
            return

    def _copy_next(self) -> bool:
        """Wait for the next checkpoint and copy it. Return False at the end of the run."""
        new = self._wait() if self.rank == 0 else None
        repetition = int(new.name.partition(".")[2] or 0) if new else 0
        step, repetition = self.meeting.broadcast([new.manifest.step if new else _STOP, repetition])
        if step == _STOP:
            return False
        name = f"step-{step:08d}" + (f".{repetition}" if repetition else "")
        self._copy(step, name, new)
        return True

    def _wait(self) -> PublishedCheckpoint | None:
        """Return the checkpoint that rank 0 copies next; None at the end of the run."""
        with self._change:
            self._change.wait_for(lambda: self._next is not None or self._closing)
            new, self._next = self._next, None
            self._current = new.name if new else ""
            return new

    def _copy(self, step: int, name: str, new: PublishedCheckpoint | None) -> None:
        """Copy a checkpoint. `new`: the checkpoint, on rank 0."""
        start_s = time.perf_counter()
        with self._change:
            self._change.wait_for(lambda: step in self._shards)  # rank 0 may learn first that it is published
            shard = self._shards.pop(step)
            self._shards = {
                later_step: later_shard for later_step, later_shard in self._shards.items() if later_step > step
            }
            self._current, self.moved, self.to_move = name, 0, 2 * shard.size
        reason = self._attempt(lambda: self._begin(new)) if new else ""
        if self.meeting.all(not reason):
            reason = self._attempt(lambda: self._copy_file(name, shard))
            if not self.meeting.all(not reason) and new:
                reason = reason or "another rank could not copy its shard, see its log"
        elif new is None:
            return
        if new and not reason:
            reason = self._attempt(lambda: self._publish(new))
        note = self._attempt(self._retire) if new and not reason else ""
        if new or reason:
            size = sum(saved.size for saved in new.manifest.shards) if new else shard.size
            seconds = round(time.perf_counter() - start_s, 3)
            self._ended.put(CopyResult(step, name, self.place.text, size, seconds, reason, note=note))
        with self._change:
            self._current = ""

    def _attempt(self, action: Callable[[], None]) -> str:
        """Run `action`. Return why it failed, or "": a rank that cannot copy must still meet the others."""
        try:
            action()
        except OSError as error:
            return f"{self.place.text}: {error.strerror or error}"
        except (CheckpointError, ValueError) as error:
            return str(error)
        return ""

    def _begin(self, new: PublishedCheckpoint) -> None:
        """Remove an incomplete copy with this name. CheckpointError if the place has another checkpoint of the name."""
        if new.name not in self.place.names():
            return
        existing = self._manifest(new.name)
        if existing is not None and existing != new.manifest:
            raise CheckpointError(f"{self.place.text} has another checkpoint {new.name}: move it away")
        self._manifests.pop(new.name, None)
        self.place.remove(new.name)

    def _copy_file(self, name: str, shard: CheckpointShard) -> None:
        with files.open_folder(self.checkpoints / name) as folder, files.open_file(folder, shard.file) as file:
            if files.file_size(file) != shard.size:
                raise CheckpointError(f"{self.checkpoints / name / shard.file}: is not what was written")
            self.place.write(name, shard.file, self._count_bytes(files.chunks(file, shard.size)))
        digest = hashlib.sha256()
        for chunk in self._count_bytes(self.place.read(name, shard.file)):
            digest.update(chunk)
        if digest.hexdigest() != shard.sha256:
            raise CheckpointError(f"{self.place.text}: {name}/{shard.file} is not what was written")

    def _count_bytes(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            yield chunk
            self.moved += len(chunk)

    def _publish(self, new: PublishedCheckpoint) -> None:
        text = render(new.manifest).encode()
        self.place.write(new.name, MANIFEST, [text])
        if b"".join(self.place.read(new.name, MANIFEST)) != text:
            raise CheckpointError(f"{self.place.text}: {new.name}/{MANIFEST} is not what was written")
        self._manifests[new.name] = new.manifest

    def _retire(self) -> None:
        """Remove surplus checkpoints and incomplete copies from the place."""
        rows = [(name, self._manifest(name)) for name in self.place.names()]
        old = self.keep.names_to_remove([(name, manifest) for name, manifest in rows if manifest is not None])
        for name in (*old, *(name for name, manifest in rows if manifest is None and self._is_incomplete(name))):
            self.place.remove(name)
            self._manifests.pop(name, None)

    def _is_incomplete(self, name: str) -> bool:
        """Whether a copy has no manifest, so it is incomplete. A damaged manifest is left for the user to look at."""
        try:
            next(iter(self.place.read(name, MANIFEST)), b"")
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False

    def _manifest(self, name: str) -> Manifest | None:
        """Return the manifest of a checkpoint in the place, parsed once; None if it is missing or invalid."""
        if name not in self._manifests:
            try:
                self._manifests[name] = manifest_of(self.place, name)
            except (OSError, ValueError, CheckpointError):
                return None
        return self._manifests[name]
