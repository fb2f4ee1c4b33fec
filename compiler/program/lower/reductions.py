"""When each rank starts to sum the gradients of its buckets: as soon as nothing more is added to them.

A bucket's gradients on a rank are whole behind the rank's last weight gradient of the bucket's stages. Buckets with the
same holders share a channel, so all their pipeline ranks start them in one order: that in which the last of these ranks
can. A start never waits, so reductions run under what is left of the backward (PyTorch DDP, arXiv 2006.15704, §3.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from compiler.ir import Plan, Reduction
from runtime.contract.actions import Step, actions_of

Stages = tuple[int, ...]


def reductions_of(plan: Plan, steps: Sequence[Sequence[Step]]) -> tuple[tuple[Reduction, ...], ...]:
    """The reductions of every pipeline rank, whose invocations carry out its `steps`; all behind the last of them
    unless the plan has them overlap."""
    shared: dict[tuple[int, ...], set[Stages]] = defaultdict(set)  # by the pipeline ranks that hold them
    for bucket in plan.buckets:
        if bucket.is_reduced:
            shared[bucket.holders.pipeline_ranks].add(bucket.stages)
    whole = [_last_weight_gradients(row, plan.stages_of(rank)) for rank, row in enumerate(steps)]
    found: list[list[Reduction]] = [[] for _ in steps]
    for ranks, groups in sorted(shared.items()):
        places = {g: {rank: max(whole[rank].get(s, 0) for s in g) for rank in ranks} for g in groups}
        left = {g: min(len(steps[rank]) - at for rank, at in of_rank.items()) for g, of_rank in places.items()}
        after = dict.fromkeys(ranks, 0)
        for stages in sorted(groups, key=lambda g: (-left[g], g)):
            for rank in ranks:
                earliest = places[stages][rank] if plan.overlap_reduce else len(steps[rank]) - 1
                after[rank] = max(after[rank], earliest)
                found[rank].append(Reduction(after[rank], stages))
    return tuple(tuple(sorted(row, key=lambda each: each.after)) for row in found)


def _last_weight_gradients(steps: Sequence[Step], stages: Collection[int]) -> dict[int, int]:
    """Find the last step that adds to the gradients of each of a rank's stages: its number, by stage."""
    missing, found = set(stages), dict[int, int]()
    for at in range(len(steps) - 1, -1, -1):
        if not missing:
            break
        for action in actions_of(steps[at]):
            if action.kind in "BW" and action.stage in missing:
                found[action.stage] = at
                missing.remove(action.stage)
    return found
