"""Placements: which pipeline rank runs a stage on a micro-batch.

- `bidirectional`: stage s on rank s for the first half of the micro-batches (direction 0) and on rank P-1-s for the
  rest (direction 1); every stage has two copies. P is even. Of an odd N, direction 0 has one more.
- `v`: rank r holds stages r and 2P-1-r.
- `loop(v)`: stage s on rank s mod P, v stages a rank.

A schedule's placement says where its actions run, a plan's placement what each rank stores. They may differ where the
first asks for less: a `loop(1)` schedule runs on the storage of a `bidirectional` plan, every micro-batch in direction
0; `supports` is that rule.
"""

from __future__ import annotations

import re
import sys

BIDIRECTIONAL = "bidirectional"
V = "v"
_LOOP = re.compile(r"loop\(([1-9][0-9]{0,3})\)")


def loops(placement: str) -> int:
    """The v of `loop(v)`, or 0 for another placement; ValueError if it is none of the three."""
    if placement in (BIDIRECTIONAL, V):
        return 0
    match = _LOOP.fullmatch(placement)
    if match is None:
        raise ValueError(f"unknown placement {placement!r}: expected bidirectional, v or loop(1), … loop(9999)")
    return int(match.group(1))


def num_stages(placement: str, num_ranks: int) -> int:
    """Stages of the whole pipeline; ValueError where `num_ranks` does not fit the placement."""
    if num_ranks < 1:
        raise ValueError(f"a pipeline has at least 1 rank, got {num_ranks}")
    if placement == BIDIRECTIONAL:
        if num_ranks % 2:
            raise ValueError(f"placement bidirectional needs an even number of ranks, got {num_ranks}")
        return num_ranks
    return num_ranks * (2 if placement == V else loops(placement))


def turn(placement: str, num_micro_batches: int) -> int:
    """The first micro-batch of direction 1; where there is none, more than there are."""
    return (num_micro_batches + 1) // 2 if placement == BIDIRECTIONAL else sys.maxsize


def direction(placement: str, num_micro_batches: int, micro_batch: int) -> int:
    """0 or 1: from which end a micro-batch enters the pipeline; 1 only under `bidirectional`."""
    return int(micro_batch >= turn(placement, num_micro_batches))


def rank_of(placement: str, num_ranks: int, num_micro_batches: int, stage: int, micro_batch: int) -> int:
    """The pipeline rank that runs `stage` on `micro_batch`."""
    if placement == V:
        return min(stage, 2 * num_ranks - 1 - stage)
    if direction(placement, num_micro_batches, micro_batch):
        return num_ranks - 1 - stage
    return stage % num_ranks


def stages_of(placement: str, num_ranks: int, rank: int) -> tuple[int, ...]:
    """The stages whose parameters a pipeline rank stores, ascending."""
    if placement == BIDIRECTIONAL:
        return tuple(sorted((rank, num_ranks - 1 - rank)))
    if placement == V:
        return (rank, 2 * num_ranks - 1 - rank)
    return tuple(range(rank, num_stages(placement, num_ranks), num_ranks))


def ranks_of_stage(placement: str, num_ranks: int, stage: int) -> tuple[int, ...]:
    """The pipeline ranks that store a stage, that of direction 0 first."""
    return tuple(dict.fromkeys(rank_of(placement, num_ranks, 2, stage, micro_batch) for micro_batch in (0, 1)))


def supports(storage: str, placement: str, num_ranks: int) -> bool:
    """Whether every rank that stores its stages by `storage` has all that a schedule of `placement` runs on it."""
    if num_stages(storage, num_ranks) != num_stages(placement, num_ranks):
        return False
    return all(
        set(stages_of(placement, num_ranks, rank)) <= set(stages_of(storage, num_ranks, rank))
        for rank in range(num_ranks)
    )
