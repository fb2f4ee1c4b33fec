"""A lower bound for every placement with one copy of the model: v stages a rank of equal size, any v, anywhere.

Costs and cap are those of 1/P of the model; a stage takes 1/v of them. What remains true of all such placements:

- Each rank runs N micro-batches through 1/P of the model. The program of its four phases (bound.py) counts steps in
  real numbers, so v steps of 1/v each are one step to it.
- A backward can only start when a micro-batch has been through the whole model: all of its forwards, and a message
  wherever it changes rank, at least those of the shortest tree that joins all ranks. Until then a rank runs forwards
  of at most `cap` activations.
- Behind a rank's last forward there is still the whole way back.
- The first forward can start at once, and nothing need follow a rank's last backward: with v the stages before and
  behind shrink to nothing. Only the rank of the first stage is without a message, though; ranks of equal weight have
  the others' bound.
- An activation is held while its micro-batch goes to the last stage and back. The mean stage is half way, so that over
  all ranks these are at least N · P / 2 ways of the model there and back, for P · cap activations.

If stages have unequal weights, any rank may have the heavy ones: what remains is all work, shared by the ranks, at the
best share that a pair gives each action, and the way of one micro-batch. Both are sums over the stages that the weights
are of: those of a mean stage may be more, where a B takes less than its I and W on some stages alone.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from compiler.schedule.bound import Rank
from compiler.schedule.costs import Costs
from compiler.schedule.weights import Weight, by_kind


def one_copy_bound(
    num_ranks: int, num_micro_batches: int, num_stages: int, costs: Costs, cap: int | Fraction | None
) -> Fraction:
    """No schedule ends sooner that has one copy of every stage, v stages of equal size a rank, and holds at most `cap`.

    Costs and cap are those of one of `num_stages` stages. ValueError where the weights do not fit the sizes.
    """
    P, N = num_ranks, num_micro_batches
    costs.check(P, num_stages)
    if costs.micro_batches:  # all are taken to be as short as the shortest
        costs = replace(costs.longer(min(costs.micro_batches)), micro_batches=())
    ranks = costs.ranks or (Fraction(1),) * P
    messages = costs.links.visit_all(P, costs.latency)
    weights = [*map(by_kind, costs.stages or (Fraction(1),))]
    if len(set(weights)) > 1:
        way = sum((time for weight in weights for time in _there_and_back(costs, weight)), Fraction(0))
        work = sum(map(costs.least_work, weights), Fraction(0))
        return max(way * min(ranks) + 2 * messages, N * work / sum(1 / rank for rank in ranks))
    costs = costs.recut(num_stages, P)  # of alike stages
    cap = cap * Fraction(P, num_stages) if cap else cap
    weight, equal = weights[0], P > 1 and len(set(ranks)) == 1
    there, back = _there_and_back(costs, weight)
    whole = sum(ranks)
    end = costs.links.least(P, costs.latency) if equal else Fraction(0)
    held = Fraction(N * P, 2) * (there + back) * min(ranks)
    each = (
        Rank(((weight.longer(rank), N),), end, there * whole + messages, back * whole + messages, end, cap, Fraction(0))
        for rank in {*ranks}
    )
    memory = held / cap if cap and not costs.offloads else Fraction(0)
    return max((there + back) * whole + 2 * messages, memory, *(rank.bound(costs) for rank in each))


def _there_and_back(costs: Costs, weight: Weight) -> tuple[Fraction, Fraction]:
    """The least time of a stage's forward, and of the backward that the stage before waits for."""
    back = min(costs.quickest("B") * weight.B, costs.quickest("I") * weight.I)
    return costs.quickest("F") * weight.F, back
