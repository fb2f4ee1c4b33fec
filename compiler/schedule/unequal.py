"""A lower bound on the makespan where micro-batches have weights of their own.

No schedule of the placement that has these micro-batches at these positions ends sooner than any of them goes there and
back, nor than any rank has done its work: the first forward that comes to it, then every action at the best share of
its time that a pair gives it.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, pairwise

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import Costs
from compiler.schedule.exact import MOST
from runtime.contract.actions import KINDS


def bound_of_unequal(placement: StagePlacement, num_ranks: int, num_micro_batches: int, costs: Costs) -> Fraction:
    """The largest of the bounds of all micro-batches and ranks, in the unit of the costs."""
    costs.check(num_ranks, placement.num_stages(num_ranks), num_micro_batches)
    sides: dict[int, list[int]] = {}
    for m in range(num_micro_batches):
        sides.setdefault(placement.direction(num_micro_batches, m), []).append(m)
    forward, whole, inward, weights_only = map(costs.quickest, KINDS)
    num_stages = placement.num_stages(num_ranks)
    work, begin, ways = [Fraction(0)] * num_ranks, [MOST] * num_ranks, []
    for side in sides.values():
        weights = [costs.micro_batches[m] for m in side]
        ranks = [placement.rank_of(num_ranks, num_micro_batches, stage, side[0]) for stage in range(num_stages)]
        stages = [costs.weight(stage, rank) for stage, rank in enumerate(ranks)]
        hops = [
            *accumulate(
                (costs.message(a, b) if a != b else Fraction(0) for a, b in pairwise(ranks)), initial=Fraction(0)
            )
        ]
        heads = [*accumulate((forward * weight.F for weight in stages), initial=Fraction(0))]
        backs = [min(whole * weight.B, inward * weight.I) for weight in stages]
        last = min(whole * stages[0].B, inward * stages[0].I + weights_only * stages[0].W)  # of stage 0
        for stage, rank in enumerate(ranks):
            begin[rank] = min(begin[rank], heads[stage] * min(weights) + hops[stage])
            work[rank] += costs.least_work(stages[stage]) * sum(weights)
        way = heads[-1] + sum(backs[1:]) + last
        ways.append(way * max(weights) + 2 * hops[-1])
    return max(*ways, *(first + each for first, each in zip(begin, work, strict=True) if each))
