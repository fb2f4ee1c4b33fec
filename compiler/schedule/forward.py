"""Forward only, for evaluation: every stage on every micro-batch, no backward. Not a choice of the language."""

from __future__ import annotations

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement
from compiler.schedule.schedule import Schedule
from runtime.contract.actions import Action


def forward_only(placement: StagePlacement, num_ranks: int, num_micro_batches: int) -> Schedule:
    """The schedule "evaluate" on any placement and N >= 1; ValueError for other sizes.

    Each rank runs its forwards in the order of `_start`, a time at which all of them fit: no rank waits in a circle.
    """
    stages = placement.num_stages(num_ranks)
    if num_micro_batches < 1:
        raise ValueError(f"evaluation needs at least 1 micro-batch, got {num_micro_batches}")
    starts: list[dict[int, Action]] = [{} for _ in range(num_ranks)]
    for micro_batch in range(num_micro_batches):
        for stage in range(stages):
            rank = placement.rank_of(num_ranks, num_micro_batches, stage, micro_batch)
            start = _start(placement, num_ranks, num_micro_batches, stage, micro_batch)
            assert start not in starts[rank], "two forwards of one rank at one time"
            starts[rank][start] = Action("F", stage, micro_batch)
    actions = tuple(tuple(rank[start] for start in sorted(rank)) for rank in starts)
    return Schedule("evaluate", num_ranks, num_micro_batches, placement, actions)


def _start(placement: StagePlacement, num_ranks: int, num_micro_batches: int, stage: int, micro_batch: int) -> int:
    """Start of a forward of one unit. It is one unit after the stage before, and no two of a rank coincide."""
    v = placement.loops
    if v:  # groups of P micro-batches go round the ring v times
        group, k = divmod(micro_batch, num_ranks)
        return group * v * num_ranks + k + stage
    # a rank's two stages differ in parity, so they take turns: k-th micro-batch of its direction every 2 units
    half = (num_micro_batches + 1) // 2
    k = micro_batch % half if placement == BIDIRECTIONAL else micro_batch
    return stage + 2 * k
