"""A lower bound of the makespan of all schedules of a placement if micro-batches have different weights.

It is the largest of these times, each with the weights of all micro-batches:

1. the way of one micro-batch through all stages and back;
2. of each rank: the wait for its first forward, then all its actions, each with the best share of its time in a pair;
3. of each rank: the same without the W, and then the way from its last B or I to the end of all;
4. of each rank under a cap: the wait for its first forward, then the sum of the times for which it holds activations,
   divided by the cap. It holds an activation at least until its micro-batch has gone to the last stage and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import Costs
from runtime.contract.actions import KINDS


def bound_of_unequal(
    placement: StagePlacement,
    num_ranks: int,
    num_micro_batches: int,
    costs: Costs,
    cap: Fraction | int | Sequence[Fraction | int] | None = None,
) -> Fraction:
    """The bound in the unit of the costs, for schedules in which no rank holds more than `cap` activations.

    `cap`: one for all ranks, or one for each. Raises ValueError if the weights do not fit the sizes.
    """
    P, N = num_ranks, num_micro_batches
    costs.check(P, placement.num_stages(P), N)
    by_direction: dict[int, list[int]] = {}
    for micro_batch in range(N):
        by_direction.setdefault(placement.direction(N, micro_batch), []).append(micro_batch)
    paths = [
        _Path(
            costs,
            tuple(placement.rank_of(P, N, stage, side[0]) for stage in range(placement.num_stages(P))),
            tuple(costs.micro_batches[m] for m in side),
        )
        for side in by_direction.values()
    ]
    caps = cap if isinstance(cap, Sequence) else (cap,) * P
    ranks = [_RankWork.of(paths, rank) for rank in range(P)]
    times = [time for work, limit in zip(ranks, caps, strict=True) for time in work.times(limit, costs.can_offload)]
    return max(*times, *(path.round_trip for path in paths))


@dataclass(frozen=True)
class _Path:
    """The way of the micro-batches of a direction. Each action takes the least time that a step with it can take."""

    costs: Costs
    ranks: tuple[int, ...]  # by stage
    micro_batches: tuple[Fraction, ...]  # the weights

    @cached_property
    def total(self) -> Fraction:
        """The sum of the weights."""
        return sum(self.micro_batches, Fraction(0))

    @cached_property
    def quickest(self) -> list[dict[str, Fraction]]:
        """By stage and kind, the least time of an action on a micro-batch of weight 1."""
        weights = [self.costs.weight(stage, rank) for stage, rank in enumerate(self.ranks)]
        least = {kind: self.costs.quickest(kind) for kind in KINDS}
        return [{kind: least[kind] * weight.factor(kind) for kind in KINDS} for weight in weights]

    @cached_property
    def hops(self) -> list[Fraction]:
        """By stage, the time of the messages before it."""
        messages = (self.costs.message(a, b) if a != b else Fraction(0) for a, b in pairwise(self.ranks))
        return [*accumulate(messages, initial=Fraction(0))]

    @cached_property
    def heads(self) -> list[Fraction]:
        """By stage, and then of all, the forwards before it on a micro-batch of weight 1."""
        return [*accumulate((times["F"] for times in self.quickest), initial=Fraction(0))]

    @cached_property
    def tails(self) -> list[Fraction]:
        """By stage, and then of all, the backwards after its own on a micro-batch of weight 1."""
        first, *others = self.quickest
        backs = [min(times["B"], times["I"]) for times in others]
        return [Fraction(0), *accumulate(backs, initial=min(first["B"], first["I"] + first["W"]))]

    @property
    def round_trip(self) -> Fraction:
        """The time of the heaviest micro-batch through all stages and back."""
        return (self.heads[-1] + self.tails[-1]) * max(self.micro_batches) + 2 * self.hops[-1]

    def head(self, stage: int) -> Fraction:
        """The earliest start of a forward."""
        return self.heads[stage] * min(self.micro_batches) + self.hops[stage]

    def tail(self, stage: int) -> Fraction:
        """The least time from the end of a B or I to the end of all."""
        return self.tails[stage] * min(self.micro_batches) + self.hops[stage]

    def held(self, stage: int) -> Fraction:
        """The sum over micro-batches of the activation of a stage times the time for which a rank holds it."""
        times = self.quickest[stage]
        to_last_and_back = self.heads[-1] - self.heads[stage] + self.tails[-1] - self.tails[stage + 1]
        release = min(times["B"], times["I"] + self.costs.keeps * times["W"])
        waits = 2 * (self.hops[-1] - self.hops[stage])
        return (to_last_and_back + release) * self.total + waits * len(self.micro_batches)


@dataclass(frozen=True)
class _RankWork:
    """What a rank does in every schedule. Times are sums over all stages and micro-batches of the rank."""

    begin: Fraction  # the earliest start of its first forward
    tail: Fraction  # the least time from its last B or I to the end of all
    work: Fraction  # the least time of all actions
    prompt_work: Fraction  # the same without W
    held: Fraction  # activations times the time for which they are held

    @staticmethod
    def of(paths: Sequence[_Path], rank: int) -> _RankWork:
        homes = [(path, stage) for path in paths for stage, owner in enumerate(path.ranks) if owner == rank]
        work = prompt_work = Fraction(0)
        for path, stage in homes:
            least = path.costs.least_shares(path.costs.weight(stage, rank))
            work += path.total * (least["F"] + min(least["B"], least["I"] + least["W"]))
            prompt_work += path.total * (least["F"] + min(least["B"], least["I"]))
        return _RankWork(
            min((path.head(stage) for path, stage in homes), default=Fraction(0)),
            min((path.tail(stage) for path, stage in homes), default=Fraction(0)),
            work,
            prompt_work,
            sum((path.held(stage) for path, stage in homes), Fraction(0)),
        )

    def times(self, cap: Fraction | int | None, can_offload: bool) -> Iterator[Fraction]:
        """Lower bounds of the makespan."""
        yield self.begin + self.work
        yield self.begin + self.prompt_work + self.tail
        if cap and not can_offload:  # an activation on the host is not held
            yield self.begin + self.held / cap
