"""Fifth pass, over collectives: each one that the plan needs runs exactly once and in its place, and none can hang.

A program has one list of collectives for all ranks of the world. Each rank skips those of groups that it is not in, so
ranks reach the collectives of their common groups in the same order: all members of the first unfinished collective
come to it next. No collective waits while messages are in flight: the lists run before the first body, and after the
last send was taken.

Reductions start between bodies, and a start waits for nobody, so each rank starts all of its own whatever the others
do. All ranks of a channel start the same reductions on it in the same order, so the right ones meet. Each starts after
the last weight gradient of its stages was added. The waits for them are in the epilogue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from compiler.ir import BucketCollective, Plan, Program
from compiler.program.lower.lowering import LOGITS, NORM, RECORDS, TARGETS
from compiler.program.proof.certificate import ProofError
from runtime.contract import Reduction


def check_collectives(program: Program, plan: Plan, trains: bool) -> None:
    """Raise ProofError unless the collectives are those of the plan.

    Targets are counted before the first body, and records are summed after the last one. In training, every gradient
    with several holders is reduced exactly once, before the norm is summed, and updated parts of weights are gathered
    after it. If the plan clips logits, training also finds the largest ones. Sharded gradients and weights are in no
    list, as bodies scatter and gather them, unless several copies of a shard exist: on pipeline ranks or in groups of
    columns.
    """
    shared = [bucket for bucket in plan.buckets if len(bucket.holders) > 1 and not bucket.is_still]
    copied = plan.mesh.copies > 1
    alike = [bucket for bucket in shared if not bucket.sites or copied or len(bucket.holders.pipeline_ranks) > 1]
    reduces = [BucketCollective("reduce", bucket.name, bucket) for bucket in alike if trains]
    parted = {0: [], 3: alike}.get(plan.zero, shared)
    gathers = [BucketCollective("gather", bucket.name, bucket) for bucket in parted if trains or plan.evaluates_average]
    logits = [LOGITS] if trains and plan.clips_logits else []
    norm = [NORM] if trains else []
    _check("before the first body", program.prologue, [TARGETS])
    _check("after the last body", program.epilogue, [RECORDS, *logits, *reduces, *norm])
    _check("with the update", program.update, gathers)
    if trains and program.epilogue[-1] != NORM:
        raise ProofError(f"{NORM}: runs before {program.epilogue[-1]}, whose gradients it needs")


def check_reductions(program: Program, plan: Plan, trains: bool) -> None:
    """Raise ProofError unless each rank starts each of its reductions once, not too early, and in the common order.

    Takes O(invocations) time; in practice it reads the last few invocations of each rank.
    """
    shared = {(bucket.holders.pipeline_ranks, bucket.stages) for bucket in plan.buckets if trains and bucket.is_reduced}
    if len(program.reductions) != (len(program.invocations) if trains else 0):
        raise ProofError(f"{len(program.reductions)} ranks start reductions, of {len(program.invocations)}")
    for rank, row in enumerate(program.reductions):
        _check_starts(program, rank, {stages for ranks, stages in shared if rank in ranks}, row)
    for ranks in sorted({ranks for ranks, _ in shared}):
        orders = [[r.stages for r in program.reductions[rank] if (ranks, r.stages) in shared] for rank in ranks]
        for rank, order in zip(ranks, orders, strict=True):
            if order != orders[0]:
                raise ProofError(f"rank {rank}: starts reductions in another order than rank {ranks[0]} does")


def _check_starts(program: Program, rank: int, wanted: set[tuple[int, ...]], row: Sequence[Reduction]) -> None:
    """Raise ProofError unless a rank starts the wanted reductions once each, after the gradients they sum."""
    counts, invocations = Counter(reduction.stages for reduction in row), program.invocations[rank]
    for stages in sorted(wanted | counts.keys()):
        if counts[stages] != (stages in wanted):
            times = f"{counts[stages]} times instead of {int(stages in wanted)}"
            raise ProofError(f"rank {rank}, {Reduction(0, stages)}: started {times}")
    after = [reduction.after for reduction in row]
    if after != sorted(after) or any(not 0 <= index < len(invocations) for index in after):
        raise ProofError(f"rank {rank}: reductions are not behind its invocations in their order")
    adds = {
        body.name: {action.stage for action in body.actions if action.adds_gradients} for body in program.bodies[rank]
    }
    for index in range(min(after, default=len(invocations)) + 1, len(invocations)):
        for reduction in row:
            if reduction.after < index and not adds[invocations[index].body].isdisjoint(reduction.stages):
                raise ProofError(
                    f"rank {rank}, {reduction}: started before {invocations[index].body} adds to what it sums"
                )


def _check(moment: str, listed: Sequence[BucketCollective], wanted: Sequence[BucketCollective]) -> None:
    """Raise ProofError unless a list has the wanted collectives, each once, in any order."""
    if len(listed) == len(wanted) and all(a == b for a, b in zip(listed, wanted, strict=True)):
        return
    expected, counts = Counter(wanted), Counter(listed)
    for collective in (*expected, *counts):
        if expected[collective] != counts[collective]:
            times = f"{counts[collective]} times instead of {expected[collective]}"
            raise ProofError(f"{collective}: runs {times} {moment}")
