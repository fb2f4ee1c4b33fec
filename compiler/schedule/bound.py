"""Lower bounds on the makespan of every schedule of a placement, under a cap on activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import accumulate, pairwise

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import MOST, Costs
from compiler.schedule.rank_states import QUICK, SmallPipeline
from compiler.schedule.waits import Item, Slot, Times, Waits, steps_of
from compiler.schedule.weights import Weight
from runtime.contract.actions import KINDS, ActionKind

# --- The least value of a small linear program, in exact rationals (the dual simplex method, Lemke 1954)

Row = tuple[dict[int, Fraction], Fraction]  # coefficients by variable, and what their sum is at least
MOST_PIVOTS = 2000


def least(costs: Sequence[Fraction], rows: Sequence[Row]) -> Fraction | None:
    """min costs·x over x ≥ 0 with every row's sum at least its bound; None where there is no such x.

    The costs must not be negative. Each pivot's value is a lower bound already, so that stopping early, at
    MOST_PIVOTS, still gives one.
    """
    assert all(cost >= 0 for cost in costs)
    num = len(costs)
    price = {j: cost for j, cost in enumerate(costs) if cost}  # the objective in the non-basic variables
    value = Fraction(0)
    names = [num + i for i in range(len(rows))]  # basic variable of each row: at first its slack
    table = [({j: c for j, c in row.items() if c}, -bound) for row, bound in rows]
    for pivot in range(MOST_PIVOTS):
        short = [i for i, (_, constant) in enumerate(table) if constant < 0]
        if not short:
            break
        # the shortest row goes fastest; the lowest name, taken later, cannot circle (Bland)
        i = min(short, key=lambda i: (table[i][1] if pivot < MOST_PIVOTS // 2 else 0, names[i]))
        row, constant = table[i]
        ratios = [(price.get(j, Fraction(0)) / c, j) for j, c in row.items() if c > 0]
        if not ratios:
            return None
        _, entering = min(ratios)
        # row: leaving = constant + Σ row·x, solved for the entering variable
        c = row.pop(entering)
        solved = {j: -a / c for j, a in row.items()} | {names[i]: 1 / c}
        at = -constant / c
        names[i] = entering
        table[i] = (solved, at)
        for k, (other, rest) in enumerate(table):
            if k != i and (factor := other.pop(entering, None)):
                table[k] = (_added(other, factor, solved), rest + factor * at)
        if factor := price.pop(entering, None):
            price = _added(price, factor, solved)
            value += factor * at
    return value


def _added(row: dict[int, Fraction], factor: Fraction, other: dict[int, Fraction]) -> dict[int, Fraction]:
    for j, a in other.items():
        total = row.get(j, 0) + factor * a
        if total:
            row[j] = total
        else:
            row.pop(j, None)
    return row


# --- A lower bound on the makespan of every schedule of a placement, under a cap on activations
#
# Per rank, its steps fall into four phases, by events that every schedule has:
#
#     fill | 1: only F | first B or I … | 2: anything | … last F | 3: no F | last B or I … | 4: only W
#
# The first step cannot start before `head` of its F, nor phase 2 before that of the first B or I; behind the last F and
# behind the last B or I the rest of their micro-batch's way is still to go. How often each kind of step is run in each
# phase is relaxed to real numbers: a linear program, whose least makespan no schedule of the rank can beat. The bound
# is the largest of the ranks'. It holds for any table of pairs, uneven stages and ranks, and latency, and it knows that
# nothing pairs with a forward before the first or behind the last one: that is what filling and draining cost.
#
# Where activations can be copied to the host, they are held for no least time and make nobody wait. The program still
# counts them: copies go one at a time, so a rank has more than the cap of them on their way only as there is time for
# it.

# With more different weights on one rank, they are left out of the program (`shares`).
_MOST_WEIGHTS = 3
_MOST_WAITS = 5000  # actions whose waits are followed, which takes some 20 ms
_MOST_RANKS = 64  # of so many different ones the program is solved, which takes some ms each
_PHASE_KINDS: dict[int, tuple[ActionKind, ...]] = {1: ("F",), 2: KINDS, 3: ("B", "I", "W"), 4: ("W",)}


def lower_bound(
    placement: StagePlacement,
    num_ranks: int,
    num_micro_batches: int,
    costs: Costs,
    cap: Fraction | int | Sequence[Fraction | int] | None = None,
) -> Fraction:
    """No schedule of these sizes on this placement ends sooner, if no rank holds more than `cap` activations.

    `cap`: of every rank, or one for each. ValueError where the placement or the weights do not fit the sizes. In the
    unit of the costs, whose micro-batches are alike.
    """
    assert not costs.micro_batches
    P, N = num_ranks, num_micro_batches
    costs.check(P, placement.num_stages(P))
    caps = None if cap is None else (cap,) * P if isinstance(cap, (int, Fraction)) else tuple(cap)
    waits = Waits(placement, P, N, costs, caps)
    at_home = replace(waits, caps=None) if costs.offloads else waits
    ways = _MicroBatchWays.of(waits)
    ranks = {RankBound.of(ways, rank): None for rank in range(P)}  # mirrored ones are alike
    fullest = sorted(ranks, key=lambda rank: rank.fill + rank.shares(costs), reverse=True)[:_MOST_RANKS]
    least = max([ways.one(), *(rank.bound(costs) for rank in fullest)])
    if 2 * N * (waits.last + 1) > _MOST_WAITS:
        return least
    return SmallPipeline(at_home, QUICK).bound(max(least, at_home.longest()))


@dataclass(frozen=True)
class _MicroBatchWays:
    """The way of a lone micro-batch of each direction through the stages, in the ticks of `alone`."""

    waits: Waits
    alone: Waits  # with one micro-batch of each direction
    heads: Times
    tails: Times

    @staticmethod
    def of(waits: Waits) -> _MicroBatchWays:
        alone = replace(waits, num_micro_batches=len(waits.counts), caps=None)
        zeros = alone.zeros()
        return _MicroBatchWays(waits, alone, alone.heads(zeros, zeros), alone.tails(zeros, zeros))

    def head(self, kind: str, slot: Slot) -> Fraction:
        """An F cannot start before, or a B or an I."""
        return self.heads[kind, slot][0] * self.alone.unit

    def tail(self, kind: str, slot: Slot) -> Fraction:
        """Behind the end of an F, or of a B or an I, there is at least this to come."""
        return self.tails[kind, slot][0] * self.alone.unit

    def life(self, slot: Slot) -> Fraction:
        """The least time from a forward to the last stage, back, and through the backward."""
        return self.head("B", slot) - self.head("F", slot) + self.alone.whole[slot] * self.alone.unit

    def held(self, slot: Slot) -> Fraction:
        """Activations times how long they are held, of one: all of it until its backward, then what W keeps."""
        whole, inward, weights = (self.alone.quickest[kind, slot] for kind in "BIW")
        back = min(Fraction(whole), inward + self.waits.costs.keeps * weights)
        return self.head("B", slot) - self.head("F", slot) + back * self.alone.unit

    def one(self) -> Fraction:
        """One micro-batch, there and back."""
        return max(self.life((direction, 0)) for direction in range(len(self.waits.counts)))


@dataclass(frozen=True)
class RankBound:
    """What the bound of one rank depends on."""

    amounts: tuple[tuple[Weight, int], ...]  # (weight, micro-batches of the stages of that weight)
    fill: Fraction
    first_backward: Fraction
    tail_forward: Fraction
    tail_backward: Fraction
    cap: int | Fraction | None
    held: Fraction  # activations times how long they are held, at least

    @staticmethod
    def of(ways: _MicroBatchWays, rank: int) -> RankBound:
        waits, slots = ways.waits, ways.waits.slots[rank]
        amounts: Counter[Weight] = Counter()
        for slot in slots:
            amounts[waits.weight(slot)] += waits.counts[slot[0]]
        return RankBound(
            tuple(sorted(amounts.items())),
            min((ways.head("F", slot) for slot in slots), default=Fraction(0)),
            min((ways.head("B", slot) for slot in slots), default=Fraction(0)),
            min((ways.tail("F", slot) for slot in slots), default=Fraction(0)),
            min((ways.tail("B", slot) for slot in slots), default=Fraction(0)),
            waits.caps[rank] if waits.caps else None,
            sum((waits.counts[slot[0]] * ways.held(slot) for slot in slots), Fraction(0)) + _ramps(ways, rank),
        )

    def bound(self, costs: Costs) -> Fraction:
        """The least time by which the rank has run its steps, and the other ranks what depends on them."""
        if not self.amounts:
            return Fraction(0)
        least = Fraction(0) if costs.offloads else self.memory()
        if len(self.amounts) > _MOST_WEIGHTS:
            return self.fill + max(least, self.shares(costs))
        in_turn = _LinearProgram(self, costs, overlaps=True).least()
        one_by_one = _LinearProgram(self, costs, overlaps=False).least()
        return self.fill + max(least, min(time for time in (in_turn, one_by_one) if time is not None))

    def memory(self) -> Fraction:
        """All the time for which activations are held, of which there are at most `cap` at once."""
        if not self.cap or self.cap >= sum(amount for _, amount in self.amounts):
            return Fraction(0)
        return self.held / self.cap

    def shares(self, costs: Costs) -> Fraction:
        """All work, every action at the best share of its time that a pair gives it."""
        return sum((costs.least_work(weight) * n for weight, n in self.amounts), Fraction(0))


def _ramps(ways: _MicroBatchWays, rank: int) -> Fraction:
    """What a rank that could hold `cap` activations cannot: it takes and releases them one after the other.

    The lives of the activations are `cap` chains without overlap. Their starts are different forwards, and their ends
    different releases; only a pair has two at once. An activation lives until nothing of it is kept.
    """
    waits, slots = ways.alone, ways.alone.slots[rank]
    if not slots or not ways.waits.caps:
        return Fraction(0)
    ramps = 0
    for kinds in ("F", "BW" if waits.costs.keeps else "BI"):
        steps = [(sum(kind in kinds for kind, _ in items), time) for items, time in waits.steps[rank]]
        most, time = max(count for count, _ in steps), min(time for count, time in steps if count)
        rounds, rest = divmod(int(ways.waits.caps[rank]), most)
        ramps += (most * rounds * (rounds - 1) // 2 + rounds * rest) * time  # one waits for k // most others
    return ramps * waits.unit


class _LinearProgram:
    """The linear program of a rank, from its fill on: how often each step is run in each phase, and how long they are.

    `overlaps`: the first backward starts before the last forward ends. If not, all forwards are in phase 1, phase 2 is
    empty, and phase 3 begins with the first backward.
    """

    def __init__(self, rank: RankBound, costs: Costs, overlaps: bool) -> None:
        self.rank, self.overlaps, self.frees, self.copies = rank, overlaps, costs.frees, (costs.O, costs.R)
        self.lengths = {phase: k for k, phase in enumerate((1, 2, 3, 4))}  # the variables 0 to 3
        self.steps: list[tuple[int, tuple[Item, ...], Fraction]] = [
            (phase, items, time)
            for phase, kinds in _PHASE_KINDS.items()
            if overlaps or phase != 2
            for items, time in steps_of(kinds, [weight for weight, _ in rank.amounts], costs)
        ]

    def least(self) -> Fraction | None:
        """The least time; None where the cap leaves no such schedule."""
        prices = [Fraction(1)] * 4 + [Fraction(0)] * len(self.steps)
        return least(prices, [*self._amounts(), *self._memory(), *self._times()])

    def _amounts(self) -> Iterator[Row]:
        """Every micro-batch runs F, then B or I … W, once; an I of phase 3 has its W there or behind."""
        for k, (_, amount) in enumerate(self.rank.amounts):
            forwards, backwards = self._count("F", k), self._count("BI", k)
            deferred = _sum(self._count("W", k), self._count("I", k), -1)
            for row, count in ((forwards, amount), (backwards, amount), (deferred, 0)):
                yield row, Fraction(count)
                yield _sum({}, row, -1), Fraction(-count)
            yield _sum(self._count("W", k, (3, 4)), self._count("I", k, (3,)), -1), Fraction(0)

    def _memory(self) -> Iterator[Row]:
        """What is held when the first backward starts, and when the last forward ends.

        Of what has been forward then, some may be on the host: the copies there have ended in the time before, and
        those back begin in the time behind.
        """
        if self.rank.cap is not None:
            every = range(len(self.rank.amounts))
            started = [self._count("F", k, (1,)) for k in every]
            behind = (3, 4) if self.overlaps else (1, 3, 4)
            for rows, copy, phases in ((started, self.copies[0], (1,)), ([self._freed()], self.copies[1], behind)):
                nothing: dict[int, Fraction] = {}
                row = reduce(lambda all, row: _sum(all, row, -1), rows, nothing)
                if copy is None:
                    yield row, Fraction(-self.rank.cap)
                else:
                    lengths = {self.lengths[phase]: Fraction(-1) for phase in phases}
                    yield _sum({j: copy * n for j, n in row.items()}, lengths, -1), -copy * self.rank.cap

    def _times(self) -> Iterator[Row]:
        """How long each phase is at least."""
        rank, length = self.rank, self.lengths
        for phase, variable in length.items():
            yield _sum({variable: Fraction(1)}, self._work(phase), -1), Fraction(0)
        yield {length[1]: Fraction(1)}, rank.first_backward - rank.fill
        yield {length[4]: Fraction(1)}, rank.tail_backward
        behind = {length[3]: Fraction(1), length[4]: Fraction(1)}  # the last forward
        if not self.overlaps:  # it may end long before phase 1 does
            behind = _sum(behind | {length[1]: Fraction(1)}, self._work(1), -1)
        yield behind, rank.tail_forward

    def _count(self, kinds: str, weight: int, phases: tuple[int, ...] = (1, 2, 3, 4)) -> dict[int, Fraction]:
        """How many actions of some kinds and one weight are run in some phases, as a sum over the steps."""
        counts = {}
        for j, (phase, items, _) in enumerate(self.steps, 4):
            if phase in phases and (count := sum(kind in kinds and k == weight for kind, k in items)):
                counts[j] = Fraction(count)
        return counts

    def _freed(self) -> dict[int, Fraction]:
        """What is freed behind the last forward, so held when it ends: an I there has its W there, too."""
        shares = {}
        for j, (phase, items, _) in enumerate(self.steps, 4):
            if phase in (3, 4) and (share := sum((self.frees(kind) for kind, _ in items), Fraction(0))):
                shares[j] = share
        return shares

    def _work(self, phase: int) -> dict[int, Fraction]:
        return {j: time for j, (each, _, time) in enumerate(self.steps, 4) if each == phase}


def _sum(row: dict[int, Fraction], other: dict[int, Fraction], sign: int) -> dict[int, Fraction]:
    return row | {j: row.get(j, Fraction(0)) + sign * value for j, value in other.items()}


# --- A lower bound on the makespan where micro-batches have weights of their own
#
# No schedule of the placement that has these micro-batches at these positions ends sooner than any of them goes there
# and back, nor than any rank has done its work: the first forward that comes to it, then every action at the best share
# of its time that a pair gives it.


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
