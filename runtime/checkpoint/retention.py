"""Retention: which checkpoints of a folder are kept after a new one was written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

from runtime.checkpoint.loading import LoadedCheckpoint
from runtime.checkpoint.shard_manifest import CheckpointError, Manifest

Entry = TypeVar("Entry")
LOSS = "validation_loss"  # key in the meta of a checkpoint; present if the run validated at that step


@dataclass(frozen=True)
class RetentionPolicy:
    """Keeps the `newest` valid checkpoints, the `best` by validation loss, and those of every
    `every`-th step forever.

    A damaged checkpoint does not count. A checkpoint is verified once, and again if its files change.
    """

    newest: int = 1
    best: int = 0
    every: int | None = None
    _verified_identities: dict[Path, object] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        assert self.newest >= 1 and self.best >= 0 and (self.every is None or self.every >= 1)

    def checkpoints_to_remove(self, checkpoints: Sequence[LoadedCheckpoint]) -> list[LoadedCheckpoint]:
        """Return the checkpoints to remove. `checkpoints`: newest first.

        Raises CheckpointError if the newest is damaged. If there is nothing to remove, nothing is read.
        """
        for removed in self._verified_identities.keys() - {checkpoint.path for checkpoint in checkpoints}:
            del self._verified_identities[removed]
        if len(checkpoints) <= self.newest:
            return []
        self._verify(checkpoints[0])
        return self._entries_to_remove([(checkpoint, checkpoint.manifest) for checkpoint in checkpoints], self._is_good)

    def names_to_remove(self, rows: Sequence[tuple[str, Manifest]]) -> list[str]:
        """Return the names of the checkpoints to remove. `rows`: name and manifest of checkpoints that are already
        verified, in any order."""
        newest_first = sorted(rows, key=lambda row: row[1].serial, reverse=True)
        return self._entries_to_remove(newest_first, lambda _: True)

    def _entries_to_remove(
        self, rows: Sequence[tuple[Entry, Manifest]], is_good: Callable[[Entry], bool]
    ) -> list[Entry]:
        """Return the entries of `rows` to remove. `rows`: newest first."""
        newest = list(islice((m for checkpoint, m in rows if is_good(checkpoint)), self.newest))
        first_recent_serial = newest[-1].serial if len(newest) == self.newest else 0
        scored = sorted(
            (e for e in rows if _validation_loss(e[1]) < math.inf), key=lambda e: (_validation_loss(e[1]), -e[1].serial)
        )
        kept_serials = {m.serial for m in islice((m for checkpoint, m in scored if is_good(checkpoint)), self.best)}
        kept_serials |= {m.serial for _, m in rows if self.every is not None and m.step % self.every == 0}
        return [checkpoint for checkpoint, m in rows if m.serial < first_recent_serial and m.serial not in kept_serials]

    def _is_good(self, checkpoint: LoadedCheckpoint) -> bool:
        try:
            self._verify(checkpoint)
        except CheckpointError:
            return False
        return True

    def _verify(self, checkpoint: LoadedCheckpoint) -> None:
        identity = _identity(checkpoint)
        if self._verified_identities.get(checkpoint.path) != identity:
            checkpoint.verify()
            self._verified_identities[checkpoint.path] = identity


def _identity(checkpoint: LoadedCheckpoint) -> object:
    """Return a value that changes when a file of the checkpoint is written or replaced."""
    try:
        stats = [(checkpoint.path / shard.file).lstat() for shard in checkpoint.manifest.shards]
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from None
    return [(s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]


def _validation_loss(manifest: Manifest) -> float:
    """Return the validation loss of a checkpoint; inf if it has none, or none that is finite."""
    loss = manifest.meta.get(LOSS)
    return loss if isinstance(loss, float) and math.isfinite(loss) else math.inf
