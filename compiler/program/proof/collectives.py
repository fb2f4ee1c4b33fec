"""Fifth pass, over collectives: each that the plan needs runs exactly once and in its place, and none can hang.

A program has one list of collectives for all ranks of the world, of which a rank leaves out the groups that it is not
in. So any two ranks that are in the same groups come to them in the same order: of the collectives that are not over
yet, all members of the first one come to it next. None waits beside a message: the lists begin before the first body
and after the last send was taken.

Reductions are started between the bodies, and a start waits for nobody: each rank comes to all of its own whatever the
others do. All ranks of a channel start the same on it in the same order, so the sums meet their likes, and each starts
when the last weight gradient of its stages has been added. What waits for them is in the epilogue.
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

    Targets are counted before the first body, records are summed after the last one, and in training every gradient
    with several holders is reduced exactly once, before the norm is summed; weights of parts are gathered after it. Of
    logits that are clipped, the largest are found in training.
    Bodies scatter the gradients that are divided, and gather the weights that are: those are in no list, but for parts
    that several pipeline ranks have.
    """
    shared = [bucket for bucket in plan.buckets if len(bucket.holders) > 1 and not bucket.still]
    alike = [bucket for bucket in shared if not bucket.sites or len(bucket.holders.pipeline_ranks) > 1]
    reduces = [BucketCollective("reduce", bucket.name, bucket) for bucket in alike if trains]
    parted = {0: [], 3: alike}.get(plan.zero, shared)
    gathers = [BucketCollective("gather", bucket.name, bucket) for bucket in parted if trains or plan.averaged]
    logits = [LOGITS] if trains and plan.clips_logits else []
    norm = [NORM] if trains else []
    _check("before the first body", program.prologue, [TARGETS])
    _check("after the last body", program.epilogue, [RECORDS, *logits, *reduces, *norm])
    _check("with the update", program.update, gathers)
    if trains and program.epilogue[-1] != NORM:
        raise ProofError(f"{NORM}: runs before {program.epilogue[-1]}, whose gradients it needs")


def check_reductions(program: Program, plan: Plan, trains: bool) -> None:
    """Raise ProofError unless each rank starts each reduction that it is in once, not too early, in one common order.

    O(invocations), in practice of the last few of each rank.
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
    """Raise ProofError unless a rank starts the wanted reductions once each, behind what they sum."""
    counts, invocations = Counter(each.stages for each in row), program.invocations[rank]
    for stages in sorted(wanted | counts.keys()):
        if counts[stages] != (stages in wanted):
            times = f"{counts[stages]} times instead of {int(stages in wanted)}"
            raise ProofError(f"rank {rank}, {Reduction(0, stages)}: started {times}")
    after = [each.after for each in row]
    if after != sorted(after) or any(not 0 <= at < len(invocations) for at in after):
        raise ProofError(f"rank {rank}: reductions are not behind its invocations in their order")
    adds = {body.name: {each.stage for each in body.actions if each.adds_gradients} for body in program.bodies[rank]}
    for at in range(min(after, default=len(invocations)) + 1, len(invocations)):
        for each in row:
            if each.after < at and not adds[invocations[at].body].isdisjoint(each.stages):
                raise ProofError(f"rank {rank}, {each}: started before {invocations[at].body} adds to what it sums")


def _check(when: str, given: Sequence[BucketCollective], wanted: Sequence[BucketCollective]) -> None:
    """Raise ProofError unless the same are given as wanted, each once, in whatever order."""
    if len(given) == len(wanted) and all(a == b for a, b in zip(given, wanted, strict=True)):
        return
    expected, counts = Counter(wanted), Counter(given)
    for collective in (*expected, *counts):
        if expected[collective] != counts[collective]:
            times = f"{counts[collective]} times instead of {expected[collective]}"
            raise ProofError(f"{collective}: runs {times} {when}")
