"""Counts of what the steps of a trainer do.

`python -m tests.runtime.counts FOLDER WORLD [bytes]` writes FOLDER/rank_<r>.json: the counts of two steps of
FOLDER/build. Nothing is timed: a build has the same counts on every machine. Each step starts from the same weights and
samples, so that the same experts get no row, and the gradient is clipped in all steps or in none.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.build.build import Build
from runtime.comm import host, memory
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.step.trainer import Trainer
from tests.runtime.step.samples import RandomSamples

BEFORE = 2  # steps

Counts = Counter[str]  # "F0 dispatches" → how many


class SameSamples(RandomSamples):
    """The samples of the first step, in every step."""

    def __init__(self, vocab: int, sequence: int, batch: int) -> None:
        super().__init__(vocab, sequence)
        self.batch = batch

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        return super().tokens(index % self.batch)


class Place:
    """The action whose body runs, or "tail"."""

    def __init__(self) -> None:
        self.now = "tail"

    def of(self, name: str, body: Callable[..., None], *args: Any) -> None:
        self.now = name
        body(*args)
        self.now = "tail"


class Dispatches(TorchDispatchMode):
    """Counts ops that torch dispatches and the storages that they allocate."""

    def __init__(self, place: Place, counts: Counts) -> None:
        super().__init__()
        self.place, self.counts = place, counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_storage(leaf).data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = [_storage(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        outputs = [storage for storage in outputs if storage.nbytes() and storage.data_ptr() not in inputs]
        self.counts[f"{self.place.now} dispatches"] += 1
        self.counts[f"{self.place.now} allocations"] += len(outputs)
        self.counts[f"{self.place.now} allocated bytes"] += sum(storage.nbytes() for storage in outputs)
        return result


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


@contextmanager
def moved(counts: Counts) -> Iterator[None]:
    """Count bytes that a rank sends. Rows that it keeps count, so that sums over ranks do not depend on routing."""

    def counted(original: Any, what: Callable[..., tuple[str, int]]) -> Any:
        def call(self: Any, *args: Any) -> Any:
            name, size = what(*args)
            counts[f"moved bytes of {name}"] += size
            return original(self, *args)

        return call

    def flat(name: str, _: str, elements: int, dtype: torch.dtype, *_shares: object) -> tuple[str, int]:
        return name, elements * dtype.itemsize

    table: tuple[tuple[type, str, Callable[..., tuple[str, int]]], ...] = (
        (host.HostEdge, "send", lambda _, tensor: ("messages", tensor.nbytes)),
        (host.HostSwap, "start", lambda name, rows, _: (name.partition(" ")[0], rows.to_contiguous().nbytes)),
        (memory.Circle, "all_reduce", lambda tensor, _largest=False: ("sums", tensor.nbytes)),
        (memory.Circle, "start_reduce", partial(flat, "reductions")),
        (memory.Circle, "gather_parts", partial(flat, "gathers")),
    )
    patches = [patch.object(owner, name, counted(getattr(owner, name), size_of)) for owner, name, size_of in table]
    for patcher in patches:
        patcher.start()
    try:
        yield
    finally:
        for patcher in patches:
            patcher.stop()


def counted(build: Build, rank: int, board: Board, only_bytes: bool) -> list[dict[str, int]]:
    """Counts of two consecutive steps, from several pairs of steps: one pair for each kind of count."""
    plan = build.plan
    samples = SameSamples(plan.model.vocab, plan.train.sequence, plan.batches[0][1])
    trainer, place = Trainer(build, rank, samples, None, board), Place()
    tensors = [*(bucket.parameters for bucket in trainer.state.buckets), *trainer.state.biases.values()]
    start = [(tensor, tensor.clone()) for tensor in tensors]
    trainer.bodies = {name: partial(place.of, name, body) for name, body in trainer.bodies.items()}
    for _ in range(BEFORE):
        trainer.train_step()
    counts_of_steps: list[Counts] = [Counter(), Counter()]

    def both(means: Callable[[Counts], AbstractContextManager[object]]) -> None:
        for counts in counts_of_steps:
            for tensor, value in start:
                tensor.copy_(value)
            with means(counts):
                trainer.train_step()

    both(moved)
    if not only_bytes:
        both(lambda counts: Dispatches(place, counts))
    return [dict(sorted(counts.items())) for counts in counts_of_steps]


def main(folder: Path, world: int, only_bytes: bool) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        text = json.dumps(counted(Build.open(folder / "build"), rank, board, only_bytes))
        (folder / f"rank_{rank}.json").write_text(text)

    outcome = launch(target, world, folder=folder)
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), "bytes" in sys.argv[3:]))
