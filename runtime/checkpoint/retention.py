"""Which checkpoints of a folder stay when a new one has been written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from runtime.checkpoint.loading import Checkpoint
from runtime.checkpoint.shard_manifest import CheckpointError

LOSS = "validation_loss"  # of a checkpoint's meta, where the run was validated at its step


@dataclass(frozen=True)
class Keep:
    """The `newest` good checkpoints stay, the `best` by validation loss, and those of every `every`-th step for ever.

    A damaged checkpoint takes nobody's place. One is read only once, unless its files have changed since.
    """

    newest: int = 1
    best: int = 0
    every: int | None = None
    _verified: dict[Path, object] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        assert self.newest >= 1 and self.best >= 0 and (self.every is None or self.every >= 1)

    def retired(self, found: Sequence[Checkpoint]) -> list[Checkpoint]:
        """The checkpoints of `found`, the newest first, that do not stay.

        Raises CheckpointError if the newest is not what was written. Without anything to remove nothing is read.
        """
        if len(found) <= self.newest:
            return []
        self._verify(found[0])
        newest = list(islice(self._good(found), self.newest))
        oldest = newest[-1].manifest.serial if len(newest) == self.newest else 0
        scored = sorted((c for c in found if _loss(c) < math.inf), key=lambda c: (_loss(c), -c.manifest.serial))
        stay = {c.path for c in islice(self._good(scored), self.best)}
        stay |= {c.path for c in found if self.every is not None and c.step % self.every == 0}
        return [c for c in found if c.manifest.serial < oldest and c.path not in stay]

    def _good(self, found: Sequence[Checkpoint]) -> Iterator[Checkpoint]:
        for checkpoint in found:
            try:
                self._verify(checkpoint)
            except CheckpointError:
                continue
            yield checkpoint

    def _verify(self, checkpoint: Checkpoint) -> None:
        identity = _identity(checkpoint)
        if self._verified.get(checkpoint.path) != identity:
            checkpoint.verify()
            self._verified[checkpoint.path] = identity


def _identity(checkpoint: Checkpoint) -> object:
    """Changes when a file of the checkpoint is written or replaced."""
    try:
        stats = [(checkpoint.path / shard.file).lstat() for shard in checkpoint.manifest.shards]
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from None
    return [(s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]


def _loss(checkpoint: Checkpoint) -> float:
    loss = checkpoint.meta.get(LOSS)
    return loss if isinstance(loss, float) and math.isfinite(loss) else math.inf
