"""Fifth pass, over collectives: each that the plan needs runs exactly once and in its place, and none can hang.

A program has one list of collectives for all ranks of the world, of which a rank leaves out the groups that it is not
in. So any two ranks that are in the same groups come to them in the same order: of the collectives that are not over
yet, all members of the first one come to it next. None runs beside a message, for the lists begin before the first body
and after the last send was taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from compiler.ir import Collective, Plan, Program
from compiler.lower.collectives import NORM, RECORDS, TARGETS
from compiler.proof.certificate import ProofError


def check_collectives(program: Program, plan: Plan, trains: bool) -> None:
    """Raise ProofError unless the collectives are those of the plan.

    Targets are counted before the first body, records are summed after the last one, and in training every gradient
    with several holders is reduced exactly once, before the norm is summed; weights of parts are gathered after it.
    Bodies scatter the gradients that are divided, and gather the weights that are: those are in no list.
    """
    shared = [bucket for bucket in plan.buckets if len(bucket.holders) > 1]
    reduces = [Collective("reduce", bucket.name, bucket) for bucket in shared if trains and not bucket.sites]
    whole = [bucket for bucket in shared if plan.zero in (1, 2) or (plan.zero == 3 and not bucket.sites)]
    gathers = [Collective("gather", bucket.name, bucket) for bucket in whole if trains or plan.averaged]
    norm = [NORM] if trains else []
    _check("before the first body", program.prologue, [TARGETS])
    _check("after the last body", program.epilogue, [RECORDS, *reduces, *norm])
    _check("with the update", program.update, gathers)
    if trains and program.epilogue[-1] != NORM:
        raise ProofError(f"{NORM}: runs before {program.epilogue[-1]}, whose gradients it needs")


def _check(when: str, given: Sequence[Collective], wanted: Sequence[Collective]) -> None:
    """Raise ProofError unless the same are given as wanted, each once, in whatever order."""
    if len(given) == len(wanted) and all(a == b for a, b in zip(given, wanted, strict=True)):
        return
    expected, counts = Counter(wanted), Counter(given)
    for collective in (*expected, *counts):
        if expected[collective] != counts[collective]:
            times = f"{counts[collective]} times instead of {expected[collective]}"
            raise ProofError(f"{collective}: runs {times} {when}")
