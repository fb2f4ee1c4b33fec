"""Lower bounds of the makespan of all schedules of a placement, under a cap on activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from math import gcd, lcm

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import Costs
from compiler.schedule.rank_states import QUICK, SmallPipeline
from compiler.schedule.waits import Item, Slot, TimedSteps, Times, Waits
from compiler.schedule.weights import Weight
from runtime.contract.actions import KINDS, ActionKind

# --- The minimum of a small linear program, in exact rationals (the dual simplex method, Lemke 1954)
#
# A row of the table has whole numbers over one denominator, which takes a tenth of the time of fractions.

Row = tuple[dict[int, Fraction], Fraction]  # coefficients by variable, and a lower bound of their sum
MOST_PIVOTS = 2000


@dataclass
class _WholeRow:
    """A linear function of variables: (constant + Σ coefficient · variable) / denominator, in lowest terms."""

    coefficients: dict[int, int]
    constant: int
    denominator: int

    @staticmethod
    def of(coefficients: Mapping[int, Fraction], constant: Fraction) -> _WholeRow:
        common = lcm(constant.denominator, *(c.denominator for c in coefficients.values()))
        whole = {j: int(c * common) for j, c in coefficients.items() if c}
        return _WholeRow(whole, int(constant * common), common)

    @property
    def value(self) -> Fraction:
        """The value where all variables are 0."""
        return Fraction(self.constant, self.denominator)

    def solved_for(self, variable: int, name: int) -> _WholeRow:
        """`variable`, if this function is the variable `name`. Its coefficient must be positive."""
        rest = {j: -c for j, c in self.coefficients.items() if j != variable}
        return _WholeRow(rest | {name: self.denominator}, -self.constant, self.coefficients[variable])

    def replace(self, variable: int, solved: _WholeRow) -> None:
        """Replace a variable by the function that it is."""
        factor = self.coefficients.pop(variable, 0)
        if not factor:
            return
        scale, coefficients = solved.denominator, self.coefficients
        for j, c in coefficients.items():
            coefficients[j] = c * scale
        for j, c in solved.coefficients.items():
            total = coefficients.get(j, 0) + factor * c
            if total:
                coefficients[j] = total
            else:
                coefficients.pop(j, None)
        self.constant = self.constant * scale + factor * solved.constant
        self.denominator *= scale
        if (common := gcd(self.denominator, self.constant, *coefficients.values())) > 1:
            self.constant, self.denominator = self.constant // common, self.denominator // common
            self.coefficients = {j: c // common for j, c in coefficients.items()}


def least(costs: Sequence[Fraction], rows: Sequence[Row]) -> Fraction | None:
    """min costs·x over x ≥ 0 with every row's sum at least its bound; None if there is no such x.

    The costs must not be negative. The value after each pivot is a lower bound, so stopping early, at MOST_PIVOTS,
    still returns one.
    """
    assert all(cost >= 0 for cost in costs)
    num = len(costs)
    price = _WholeRow.of(dict(enumerate(costs)), Fraction(0))  # the objective in the non-basic variables
    names = [num + i for i in range(len(rows))]  # basic variable of each row, at first its slack
    table = [_WholeRow.of(row, -bound) for row, bound in rows]
    for pivot in range(MOST_PIVOTS):
        short = [i for i, row in enumerate(table) if row.constant < 0]
        if not short:
            break
        # The row that lacks most is fastest. Later the lowest name is taken, which cannot cycle (Bland).
        i = min(short, key=lambda i: (table[i].value if pivot < MOST_PIVOTS // 2 else 0, names[i]))
        ratios = [(Fraction(price.coefficients.get(j, 0), c), j) for j, c in table[i].coefficients.items() if c > 0]
        if not ratios:
            return None
        _, entering = min(ratios)
        names[i], table[i] = entering, table[i].solved_for(entering, names[i])
        for k, row in enumerate(table):
            if k != i:
                row.replace(entering, table[i])
        price.replace(entering, table[i])
    return price.value


# --- A lower bound of the makespan of all schedules of a placement, under a cap on activations
#
# The steps of a rank fall into four phases, by events that every schedule has:
#
#     fill | 1: only F | first B or I … | 2: anything | … last F | 3: no F | last B or I … | 4: only W
#
# The first step cannot start before the `head` of its F, nor phase 2 before that of the first B or I. After the last F,
# and after the last B or I, the rest of their micro-batch's way is still to come. The number of runs of each kind of
# step in each phase is relaxed to real numbers. This gives a linear program whose minimum no schedule of the rank can
# beat. The bound is the largest of all ranks. It holds for any table of pairs, uneven stages and ranks, and latency. It
# includes that nothing pairs with a forward before the first or after the last one: the cost of filling and draining.
#
# If activations can be copied to the host, there is no least time for which they are held, and no rank waits for room.
# The program still counts them: copies run one at a time, so a rank can exceed the cap only as far as there is time for
# copies.

# With more distinct weights on one rank, `shares` replaces the program.
_MOST_WEIGHTS = 3
_MOST_WAITS = 5000  # actions whose waits are followed, which takes about 20 ms
_MOST_RANKS = 64  # distinct ranks whose program is solved, which takes a few ms each
_PHASE_KINDS: dict[int, tuple[ActionKind, ...]] = {1: ("F",), 2: KINDS, 3: ("B", "I", "W"), 4: ("W",)}


def lower_bound(
    placement: StagePlacement,
    num_ranks: int,
    num_micro_batches: int,
    costs: Costs,
    cap: Fraction | int | Sequence[Fraction | int] | None = None,
) -> Fraction:
    """A lower bound of the makespan of schedules of these sizes in which no rank holds more than `cap` activations.

    `cap`: one for all ranks, or one for each. The bound is in the unit of the costs, whose micro-batches must be alike.
    Raises ValueError if the placement or the weights do not fit the sizes.
    """
    assert not costs.micro_batches
    P, N = num_ranks, num_micro_batches
    costs.check(P, placement.num_stages(P))
    caps = None if cap is None else (cap,) * P if isinstance(cap, (int, Fraction)) else tuple(cap)
    waits = Waits(placement, P, N, costs, caps)
    at_home = replace(waits, caps=None) if costs.can_offload else waits
    paths = _MicroBatchPaths.of(waits)
    ranks = {RankBound.of(paths, rank): None for rank in range(P)}  # mirrored ones are alike
    fullest = sorted(ranks, key=lambda rank: rank.fill + rank.shares(costs), reverse=True)[:_MOST_RANKS]
    least = max([paths.round_trip(), *(rank.bound(costs, waits.steps_by_weights) for rank in fullest)])
    if 2 * N * (waits.last + 1) > _MOST_WAITS:
        return least
    return SmallPipeline(at_home, QUICK).bound(max(least, at_home.longest()))


@dataclass(frozen=True)
class _MicroBatchPaths:
    """The way of a single micro-batch of each direction through the stages, in units of `alone`."""

    waits: Waits
    alone: Waits  # with one micro-batch of each direction
    heads: Times
    tails: Times

    @staticmethod
    def of(waits: Waits) -> _MicroBatchPaths:
        alone = replace(waits, num_micro_batches=len(waits.counts), caps=None)
        zeros = alone.zeros()
        return _MicroBatchPaths(waits, alone, alone.heads(zeros, zeros), alone.tails(zeros, zeros))

    def head(self, kind: str, slot: Slot) -> Fraction:
        """The earliest start of an F, or of a B or I, of a slot."""
        return self.heads[kind, slot][0] * self.alone.unit

    def tail(self, kind: str, slot: Slot) -> Fraction:
        """The least time from the end of an F, or of a B or I, of a slot to the end of all."""
        return self.tails[kind, slot][0] * self.alone.unit

    def life(self, slot: Slot) -> Fraction:
        """The least time from a forward to the last stage, back, and through the backward."""
        return self.head("B", slot) - self.head("F", slot) + self.alone.full_backward[slot] * self.alone.unit

    def activation_time(self, slot: Slot) -> Fraction:
        """An activation times the time for which it is held: all of it until its backward, then the part for its W."""
        backward, input_grad, weight_grad = (self.alone.quickest[kind, slot] for kind in "BIW")
        back = min(Fraction(backward), input_grad + self.waits.costs.keeps * weight_grad)
        return self.head("B", slot) - self.head("F", slot) + back * self.alone.unit

    def round_trip(self) -> Fraction:
        """The time of one micro-batch through all stages and back."""
        return max(self.life((direction, 0)) for direction in range(len(self.waits.counts)))


@dataclass(frozen=True)
class RankBound:
    """The values on which the bound of a rank depends."""

    amounts: tuple[tuple[Weight, int], ...]  # (weight, micro-batches of the stages of that weight)
    fill: Fraction  # earliest start of an F
    first_backward: Fraction  # earliest start of a B or I
    tail_forward: Fraction  # least time from the end of an F to the end of all
    tail_backward: Fraction  # the same for a B or I
    cap: int | Fraction | None
    activation_time: Fraction  # lower bound of the sum of activations times the time for which they are held

    @staticmethod
    def of(paths: _MicroBatchPaths, rank: int) -> RankBound:
        waits, slots = paths.waits, paths.waits.slots[rank]
        amounts: Counter[Weight] = Counter()
        for slot in slots:
            amounts[waits.weight(slot)] += waits.counts[slot[0]]
        return RankBound(
            tuple(sorted(amounts.items())),
            min((paths.head("F", slot) for slot in slots), default=Fraction(0)),
            min((paths.head("B", slot) for slot in slots), default=Fraction(0)),
            min((paths.tail("F", slot) for slot in slots), default=Fraction(0)),
            min((paths.tail("B", slot) for slot in slots), default=Fraction(0)),
            waits.caps[rank] if waits.caps else None,
            sum((waits.counts[slot[0]] * paths.activation_time(slot) for slot in slots), Fraction(0))
            + _ramps(paths, rank),
        )

    def bound(self, costs: Costs, steps_by_weights: Mapping[tuple[Weight, ...], TimedSteps]) -> Fraction:
        """A lower bound of the time in which the rank runs its steps and other ranks run what depends on them."""
        if not self.amounts:
            return Fraction(0)
        least = Fraction(0) if costs.can_offload else self.memory()
        if len(self.amounts) > _MOST_WEIGHTS:
            return self.fill + max(least, self.shares(costs))
        steps = steps_by_weights[tuple(weight for weight, _ in self.amounts)]
        in_turn = _LinearProgram(self, costs, steps, overlaps=True).least()
        one_by_one = _LinearProgram(self, costs, steps, overlaps=False).least()
        return self.fill + max(least, min(time for time in (in_turn, one_by_one) if time is not None))

    def memory(self) -> Fraction:
        """A lower bound from memory: the time for which activations are held, with at most `cap` at once."""
        if not self.cap or self.cap >= sum(amount for _, amount in self.amounts):
            return Fraction(0)
        return self.activation_time / self.cap

    def shares(self, costs: Costs) -> Fraction:
        """A lower bound from work: every action with the best share of its time in a pair."""
        return sum((costs.least_work(weight) * n for weight, n in self.amounts), Fraction(0))


def _ramps(paths: _MicroBatchPaths, rank: int) -> Fraction:
    """Activation time that a rank loses because it takes and releases activations one after the other.

    The lifetimes of activations form `cap` chains without overlap. The chains start with different forwards and end
    with different releases, and only a pair has two of them at once. An activation lives until nothing of it is kept.
    """
    waits, slots = paths.alone, paths.alone.slots[rank]
    if not slots or not paths.waits.caps:
        return Fraction(0)
    ramps = 0
    for kinds in ("F", "BW" if waits.costs.keeps else "BI"):
        steps = [(sum(kind in kinds for kind, _ in items), time) for items, time in waits.steps[rank]]
        largest, time = max(count for count, _ in steps), min(time for count, time in steps if count)
        rounds, remainder = divmod(int(paths.waits.caps[rank]), largest)
        ramps += (largest * rounds * (rounds - 1) // 2 + rounds * remainder) * time  # one waits for k // largest others
    return ramps * waits.unit


class _LinearProgram:
    """The linear program of a rank after its fill: how often each step runs in each phase, and how long phases are.

    With `overlaps`, the first backward starts before the last forward ends. Without it, all forwards are in phase 1,
    phase 2 is empty, and phase 3 begins with the first backward.
    """

    def __init__(self, rank: RankBound, costs: Costs, steps: TimedSteps, overlaps: bool) -> None:
        self.rank, self.overlaps, self.frees, self.copies = rank, overlaps, costs.frees, (costs.O, costs.R)
        self.lengths = {phase: k for k, phase in enumerate((1, 2, 3, 4))}  # the variables 0 to 3
        self.steps: list[tuple[int, tuple[Item, ...], Fraction]] = [
            (phase, items, time)
            for phase, kinds in _PHASE_KINDS.items()
            if overlaps or phase != 2
            for items, time in steps
            if all(kind in kinds for kind, _ in items)
        ]

    def least(self) -> Fraction | None:
        """The minimum; None if the cap allows no such schedule."""
        prices = [Fraction(1)] * 4 + [Fraction(0)] * len(self.steps)
        return least(prices, [*self._amounts(), *self._memory(), *self._times()])

    def _amounts(self) -> Iterator[Row]:
        """Rows: every micro-batch runs F, and B or I … W, once. The W of an I in phase 3 is in phase 3 or 4."""
        for k, (_, amount) in enumerate(self.rank.amounts):
            forwards, backwards = self._count("F", k), self._count("BI", k)
            deferred = _sum(self._count("W", k), self._count("I", k), -1)
            for row, count in ((forwards, amount), (backwards, amount), (deferred, 0)):
                yield row, Fraction(count)
                yield _sum({}, row, -1), Fraction(-count)
            yield _sum(self._count("W", k, (3, 4)), self._count("I", k, (3,)), -1), Fraction(0)

    def _memory(self) -> Iterator[Row]:
        """Rows: the cap on activations when the first backward starts, and when the last forward ends.

        Some activations may be on the host then. Their copies to the host ended in the time before, and their copies
        back begin in the time after.
        """
        if self.rank.cap is not None:
            indices = range(len(self.rank.amounts))
            started = [self._count("F", k, (1,)) for k in indices]
            behind = (3, 4) if self.overlaps else (1, 3, 4)
            for rows, copy, phases in (
                (started, self.copies[0], (1,)),
                ([self._late_releases()], self.copies[1], behind),
            ):
                empty: dict[int, Fraction] = {}
                row = reduce(lambda total, row: _sum(total, row, -1), rows, empty)
                if copy is None:
                    yield row, Fraction(-self.rank.cap)
                else:
                    lengths = {self.lengths[phase]: Fraction(-1) for phase in phases}
                    yield _sum({j: copy * n for j, n in row.items()}, lengths, -1), -copy * self.rank.cap

    def _times(self) -> Iterator[Row]:
        """Rows: lower bounds of the lengths of phases."""
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
        """The number of actions of some kinds and one weight in some phases, as coefficients of the steps."""
        counts = {}
        for j, (phase, items, _) in enumerate(self.steps, 4):
            if phase in phases and (count := sum(kind in kinds and k == weight for kind, k in items)):
                counts[j] = Fraction(count)
        return counts

    def _late_releases(self) -> dict[int, Fraction]:
        """The activations that are freed after the last forward, and so are held when it ends, as coefficients."""
        shares = {}
        for j, (phase, items, _) in enumerate(self.steps, 4):
            if phase in (3, 4) and (share := sum((self.frees(kind) for kind, _ in items), Fraction(0))):
                shares[j] = share
        return shares

    def _work(self, phase: int) -> dict[int, Fraction]:
        return {j: time for j, (step_phase, _, time) in enumerate(self.steps, 4) if step_phase == phase}


def _sum(row: dict[int, Fraction], addend: dict[int, Fraction], sign: int) -> dict[int, Fraction]:
    return row | {j: row.get(j, Fraction(0)) + sign * value for j, value in addend.items()}
