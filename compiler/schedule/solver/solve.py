"""`auto`: the schedule that ends soonest for given costs under a hard cap on activations, as far as can be found.

Every named schedule that fits is a candidate, so that none is better; a search goes on from the best of a placement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, lru_cache
from itertools import islice

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V, loop
from compiler.schedule import DEFAULT_CHUNKS, SCHEDULES
from compiler.schedule.bound import lower_bound
from compiler.schedule.costs import Costs
from compiler.schedule.measure import MeasuredSchedule, measure
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import held_at_most, simulate
from compiler.schedule.solver.core import Bound, Core, Report, solve_core
from compiler.schedule.solver.cycle import COPIES, stretched, unrolled, waves
from compiler.schedule.solver.problem import (
    MOST_CHUNKS,
    ScheduleProblem,
    Slots,
    make_problem,
    resized,
    schedule_of_slots,
)
from compiler.schedule.solver.seeds import capped, in_groups, without_last
from compiler.schedule.zero_bubble import zbv_both_ways
from runtime.contract.actions import Pair, Step, actions_of

# --- What `auto` is asked for, in the units of the asker and of each placement, and what is found

Cap = Fraction | int | tuple[Fraction | int, ...]  # of every rank, or one for each
lower_bound_of = lru_cache(maxsize=256)(lower_bound)  # asked for before a search, by it, and for what was found


@dataclass(frozen=True)
class Asked:
    """Sizes, costs of one of `num_stages` stages, and a cap on activations of such a stage, of all ranks or of each."""

    num_ranks: int
    num_micro_batches: int
    costs: Costs
    num_stages: int
    cap: Cap | None

    def costs_on(self, placement: StagePlacement) -> Costs:
        """Costs of the model cut into the stages of a placement."""
        return self.costs.recut(self.num_stages, placement.num_stages(self.num_ranks))

    def caps(self, cap: Cap) -> tuple[Fraction, ...]:
        """A cap, by rank."""
        return tuple(map(Fraction, cap if isinstance(cap, tuple) else (cap,) * self.num_ranks))

    def caps_on(self, placement: StagePlacement, cap: Cap) -> tuple[Fraction, ...]:
        """A cap by rank, in activations of a placement's stages."""
        stages = placement.num_stages(self.num_ranks)
        return tuple(self.costs.in_parts(each * stages / self.num_stages) for each in self.caps(cap))

    def cap_on(self, placement: StagePlacement, cap: Cap | None) -> Fraction | None:
        """The most that a rank may hold, in activations of a placement's stages."""
        return None if cap is None else max(self.caps_on(placement, cap))

    def holds(self, held: Sequence[Fraction], cap: Cap | None) -> bool:
        """Whether so much, by rank, is under a cap."""
        return cap is None or all(each <= most for each, most in zip(held, self.caps(cap), strict=True))

    def bound(self, placement: StagePlacement, cap: Cap | None) -> Fraction:
        P, N = self.num_ranks, self.num_micro_batches
        caps = None if cap is None else self.caps_on(placement, cap)
        return lower_bound_of(placement, P, N, self.costs_on(placement), caps)

    def held(self, schedule: Schedule) -> tuple[Fraction, ...]:
        """The most that each rank of a schedule holds, in the unit of the cap."""
        peaks = held_at_most(schedule, self.costs.keeps)
        return tuple(each * self.num_stages / schedule.num_stages for each in peaks)

    def timed(self, origin: str, schedule: Schedule) -> FoundSchedule:
        makespan = simulate(schedule, self.costs_on(schedule.stage_placement)).makespan
        return FoundSchedule(makespan, self.held(schedule), origin, schedule)


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule, how long it takes, the most that each rank holds in the unit of the cap, and what it came from."""

    makespan: Fraction
    held: tuple[Fraction, ...]
    origin: str
    schedule: Schedule

    def key(self) -> tuple[Fraction, bool]:
        """The least is the best."""
        return self.makespan, self.schedule.stage_placement == BIDIRECTIONAL


def checked(asked: Asked) -> Asked:
    """What was asked; ValueError where nothing runs with such sizes, weights or caps."""
    if asked.num_ranks < 1 or asked.num_micro_batches < 1:
        raise ValueError(
            f"auto needs at least 1 rank and 1 micro-batch, got {asked.num_ranks} and {asked.num_micro_batches}"
        )
    least = asked.num_stages // asked.num_ranks  # a micro-batch comes by so often before it goes back
    if isinstance(asked.cap, tuple) and len(asked.cap) != asked.num_ranks:
        raise ValueError(f"auto needs a cap for each of {asked.num_ranks} ranks, got {len(asked.cap)}")
    if asked.cap is not None and min(asked.caps(asked.cap)) < least:
        what = f"{least} activation{'s' if least > 1 else ''}"
        raise ValueError(
            f"auto cannot run with a cap of {float(min(asked.caps(asked.cap))):g}: "
            f"a rank holds at least {what}, use cap = {least}"
        )
    asked.costs.check(asked.num_ranks, asked.num_stages)
    return asked


# --- solve

_CHUNKS = (2, 3, 4)  # stages a rank of `loop(v)` that are tried where nobody says
# By placement a share of the effort; `loop(v)` starts from good named schedules, and is large.
_SHARES, _SHARE_OF_LOOPS = {BIDIRECTIONAL: 1.0, V: 0.6, ONE_STAGE: 0.3}, 0.15
_Cores = dict[tuple[object, ...], Core | None]  # what was searched, by all that it depends on
_MOST_STEPS = 4_000  # ranks times micro-batches of which several stages a rank are tried
_WORTH = Fraction(5, 4)  # of the best makespan: from a start further off, 6 s of annealing took away 2%
_WAVES = 2  # tried where there are more actions than that
_MOST_ACTIONS = 10_000  # forwards and backwards of a core; in the time for more of them a search finds next to nothing


@dataclass(frozen=True)
class Solution:
    """A schedule named auto, what it takes, and what it came from.

    `costs` are those of its actions, and `cap` counts its activations. `lower_bound`: no schedule ends sooner that is
    on its placement or one that was searched, and holds no more than the cap, or where there is none, than this one.
    """

    schedule: Schedule
    costs: Costs
    cap: Fraction | None
    makespan: Fraction
    lower_bound: Fraction
    origin: str  # "search", or the name of the schedule that it is
    searched: tuple[StagePlacement, ...]  # its own, and those that could have had a better one

    def measured(self) -> MeasuredSchedule:
        """The measures of the schedule that are printed, with the lower bound of the solution."""
        return replace(measure(self.schedule, self.costs, self.cap), lower_bound=self.lower_bound)


@dataclass(frozen=True)
class _ScheduleSearch:
    """A search, and the cores that searches have found: those are the solver's."""

    effort: float
    cores: _Cores
    report: Report
    worth: Fraction | None = None  # starts that take longer than that are too far from the best to be improved

    def part(self, start: float, share: float, whole: float, effort: float = 1.0) -> _ScheduleSearch:
        """One of several searches, which is so much of the whole work, and starts behind so much of it."""
        return replace(
            self, effort=self.effort * effort, report=lambda done: self.report((start + share * done) / whole)
        )


def default_cap(num_ranks: int) -> int:
    """What a rank may hold where nobody says, in activations of 1/P of the model: what DualPipe holds, which full pairs
    need; more buys almost nothing."""
    return num_ranks + 1


@dataclass(frozen=True)
class Solver:
    """Searches at given costs under a cap on activations. It remembers them: once there are enough micro-batches,
    other numbers of these cost next to nothing.

    `cap` None: what a named schedule holds, or `default_cap`; it may be a fraction, or one for each rank. `effort`
    scales how much is searched: about 30 s at most at 1. `report` is told of progress. Equal arguments give equal
    schedules.
    """

    costs: Costs
    cap: Cap | None = None
    effort: float = 1.0
    report: Report = lambda share: None
    cores: _Cores = field(default_factory=dict, repr=False, compare=False)

    def solve(
        self,
        num_ranks: int,
        num_micro_batches: int,
        chunks: int | None = None,
        copies: int = 2,
        placement: StagePlacement | None = None,
    ) -> Solution:
        """The best schedule found of any placement. Costs and cap are those of 1/P of the model: with v stages a rank,
        an action takes 1/v of them and an activation counts 1/v.

        Searched on are `bidirectional` where P is even, `v`, `loop(1)` where there is one copy or P is odd, and
        `loop(chunks)`, or some where that is None: each where a bound says that something better could be there.
        `copies` is how many ranks may hold a stage; with `placement`, nothing else is searched. Candidates are all
        named schedules. Of equal ones that with fewer copies of the parameters is taken. ValueError for sizes, weights
        or a cap with which nothing runs.
        """
        P, N = num_ranks, num_micro_batches
        asked = checked(Asked(P, N, self.costs, P, self.cap))
        small = P * N <= _MOST_STEPS  # else, more stages a rank are too much
        counts: tuple[int, ...] = (_CHUNKS if small else (DEFAULT_CHUNKS,)) if chunks is None else (chunks,)
        if placement is not None:
            placement.num_stages(P)
            placements: tuple[StagePlacement, ...] = (placement,)
            counts = (placement.loops,) if placement.loops > 1 else ()
        else:
            both = copies > 1 and P % 2 == 0
            placements = (BIDIRECTIONAL, V) if both else (V, ONE_STAGE)
            placements += tuple(loop(count) for count in counts if small)
        named = _named(asked, counts, placement, copies)
        return _solved(asked, placements, named, _ScheduleSearch(self.effort, self.cores, self.report))

    def solve_on(
        self,
        placement: StagePlacement,
        num_ranks: int,
        num_micro_batches: int,
        effort: float | None = None,
        report: Report | None = None,
    ) -> Solution:
        """Find the shortest schedule for ranks that hold their stages by `placement`.

        Costs and cap are those of one of its stages. `effort`, `report`: of this search, where they are others.
        """
        asked = checked(Asked(num_ranks, num_micro_batches, self.costs, placement.num_stages(num_ranks), self.cap))
        search = _ScheduleSearch(self.effort if effort is None else effort, self.cores, report or self.report)
        counts = (placement.loops,) if placement.loops > 1 else ()
        return _solved(asked, (placement,), _named(asked, counts, placement), search)


def _named(
    asked: Asked, counts: Sequence[int], held_by: StagePlacement | None = None, copies: int = 2
) -> Iterator[FoundSchedule]:
    """All named schedules that fit the cap and have so many copies at most, those of `loop(v)` with some counts for v.

    They run on ranks that hold their stages by `held_by`, if that is given.
    """
    P, N = asked.num_ranks, asked.num_micro_batches
    for name, row in SCHEDULES.items():
        for chunks in counts if row.facts.is_chunked else (DEFAULT_CHUNKS,):
            placement = row.stage_placement(chunks)
            runs = row.has(P, N) and placement.copies <= copies
            if runs and (held_by is None or held_by.supports(placement, P)):
                schedule = row.generate(P, N, chunks)
                if asked.cap is None or asked.holds(asked.held(schedule), asked.cap):
                    yield asked.timed(name, schedule)


def _solved(
    asked: Asked, placements: Sequence[StagePlacement], named: Iterator[FoundSchedule], search: _ScheduleSearch
) -> Solution:
    """The best of the named ones and of what searches find; later ones where a bound says that they may be better."""
    P = asked.num_ranks
    best = min(named, key=FoundSchedule.key, default=None)
    cap = asked.cap or Fraction(default_cap(P) * asked.num_stages, P)
    shares = [_SHARES.get(each, _SHARE_OF_LOOPS) if len(placements) > 1 else 1.0 for each in placements]
    tried: dict[StagePlacement, FoundSchedule] = {}  # the best of each placement that was searched
    for at, placement in enumerate(placements):
        if best is None or asked.bound(placement, cap) < best.makespan:
            part = search.part(sum(shares[:at]), shares[at], sum(shares), shares[at])
            part = replace(part, worth=_WORTH * best.makespan if best else None)
            found = (asked.timed(*each) for each in _searched(placement, asked, cap, part))
            tried[placement] = min(found, key=FoundSchedule.key)
            best = min((each for each in (best, tried[placement]) if each), key=FoundSchedule.key)
    assert best is not None
    held = max(best.held) if asked.cap is None else asked.cap
    bounds = {each: asked.bound(each, held) for each in (*placements, best.schedule.stage_placement)}
    search.report(1.0)
    schedule = best.schedule
    return Solution(
        replace(schedule, name="auto"),
        asked.costs_on(schedule.stage_placement),
        asked.cap_on(schedule.stage_placement, asked.cap),
        best.makespan,
        min(bounds.values()),
        best.origin,
        tuple(bounds),
    )


def _searched(
    placement: StagePlacement, asked: Asked, cap: Cap, search: _ScheduleSearch
) -> Iterator[tuple[str, Schedule]]:
    """What a search finds on a placement, and what runs there under any cap; one at a time, as they may be large."""
    P, N, costs = asked.num_ranks, asked.num_micro_batches, asked.costs_on(placement)
    caps = asked.caps_on(placement, cap)
    folded = placement == BIDIRECTIONAL and costs.is_mirrored(P) and caps == caps[::-1]
    one_way = placement in (BIDIRECTIONAL, ONE_STAGE)
    anyway = make_problem(ONE_STAGE if one_way else placement, P, N, costs, caps)
    slots = capped(anyway) if one_way else in_groups(anyway)
    yield "capped" if one_way else "groups", schedule_of_slots(anyway, slots)
    if placement == BIDIRECTIONAL:
        both = zbv_both_ways(P, N)
        if all(held <= most for held, most in zip(held_at_most(both, costs.keeps), caps, strict=True)):
            yield both.name, both
    twice = placement == BIDIRECTIONAL and N % 2 == 1
    problem = make_problem(placement, P, N + twice, costs, caps, folded)
    core = _core(problem, costs, search.part(0, 1, 1 + twice))
    if core is not None:
        yield core.origin, _first(_schedule(problem, core), N)
    else:  # too large for more
        for period in islice(waves(problem), _WAVES):
            yield "wave", _first(schedule_of_slots(problem, unrolled(problem, period)), N)
    if core is not None and twice:  # a pair may take less than what is left of it: go on
        odd = make_problem(placement, P, N, costs, caps)
        slots = (*core.slots, *reversed(core.slots)) if folded else core.slots
        core = _core(odd, costs, search.part(1, 1, 2, 0.5), (without_last(slots),))
        if core is not None:
            yield core.origin, _schedule(odd, core)


def is_long(placement: StagePlacement, num_ranks: int, num_micro_batches: int) -> bool:
    """Whether a run is solved as a shorter one with a period to repeat, the same for all that are long.

    Under `loop(v)` groups of micro-batches take turns, and there is no period of one.
    """
    if placement.loops > 1:
        return False
    short = _short(placement, num_ranks) + COPIES - 1
    return num_micro_batches > (2 * short if placement == BIDIRECTIONAL else short)


def _short(placement: StagePlacement, num_ranks: int) -> int:
    """Micro-batches of a chunk that are enough to fill and to drain, with some steady state between."""
    return num_ranks + 2 if placement == BIDIRECTIONAL else 2 * num_ranks + 2


def _core(
    problem: ScheduleProblem, costs: Costs, search: _ScheduleSearch, given: tuple[Slots, ...] = ()
) -> Core | None:
    """What a search finds from the given slots, or from all starts."""
    P, placement = problem.num_ranks, problem.placement
    long = is_long(placement, P, problem.num_micro_batches)
    count = _short(placement, P) + (COPIES - 1 if given else 0) if long else problem.count
    if 2 * problem.num_rows * problem.num_chunks * count > _MOST_ACTIONS or problem.num_chunks > MOST_CHUNKS:
        return None

    bound = _bound(problem, costs)
    worth = None if long or search.worth is None else math.floor(search.worth / problem.unit)
    key = (placement, problem.folded, problem.odd, P, count, long, costs, problem.caps, search.effort, worth)
    if key not in search.cores:
        short = resized(problem, count)
        search.cores[key] = solve_core(short, search.effort, bound, long, search.report, given, worth)
    return search.cores[key]


def _bound(problem: ScheduleProblem, costs: Costs) -> Bound:
    P, placement = problem.num_ranks, problem.placement
    caps = tuple(Fraction(problem.caps[problem.row_of(rank)], problem.whole) for rank in range(P))

    @cache
    def bound(count: int) -> int:
        least = lower_bound_of(placement, P, resized(problem, count).num_micro_batches, costs, caps)
        return math.ceil(least / problem.unit)

    return bound


def _schedule(problem: ScheduleProblem, core: Core) -> Schedule:
    """The schedule of the problem's size, from a core of the same form."""
    short, count = core.problem, problem.count
    slots = stretched(short, core.slots, count) if short.count < count else core.slots
    return schedule_of_slots(problem, slots)


def _first(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """The schedule without its last micro-batch, of direction 1, if it has one too many: still legal, and no longer."""
    N = num_micro_batches
    if schedule.num_micro_batches == N:
        return schedule
    ranks: list[Sequence[Step]] = []
    for steps in schedule.actions:
        left = [tuple(action for action in actions_of(step) if action.micro_batch < N) for step in steps]
        ranks.append(tuple(Pair(*actions) if len(actions) == 2 else actions[0] for actions in left if actions))
    return replace(schedule, num_micro_batches=N, actions=tuple(ranks))
