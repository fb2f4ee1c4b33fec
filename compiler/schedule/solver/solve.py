"""`auto`: the shortest schedule found for given costs under a hard cap on activations.

Every named schedule that fits is a candidate, so none is better. Searches continue from the best of a placement.
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
from compiler.schedule.measure import MeasuredSchedule, measure, totals_of
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import held_at_most
from compiler.schedule.solver.core import Bound, Core, Report, solve_core
from compiler.schedule.solver.cycle import COPIES, stretch_slots, unroll_period, waves
from compiler.schedule.solver.problem import (
    MOST_CHUNKS,
    ScheduleProblem,
    Slots,
    make_problem,
    resize_problem,
    schedule_of_slots,
)
from compiler.schedule.solver.seeds import one_f_one_b_under_cap, slots_in_groups, without_last
from compiler.schedule.zero_bubble import zbv_both_ways
from runtime.contract.actions import Pair, Step, actions_of

# --- A request for `auto`, in its own units and in those of each placement, and its result

Cap = Fraction | int | tuple[Fraction | int, ...]  # one for all ranks, or one for each
lower_bound_of = lru_cache(maxsize=256)(lower_bound)  # used before a search, by the search, and for its result


@dataclass(frozen=True)
class ScheduleRequest:
    """A request: sizes, the costs of one of `num_stages` stages, and a cap in activations of such a stage.

    The weights of the costs may be those of smaller stages (`Costs.recut`).
    """

    num_ranks: int
    num_micro_batches: int
    costs: Costs
    num_stages: int
    cap: Cap | None

    def costs_on(self, placement: StagePlacement) -> Costs:
        """The costs of the model cut into the stages of a placement."""
        return self.costs.recut(self.num_stages, placement.num_stages(self.num_ranks))

    def caps(self, cap: Cap) -> tuple[Fraction, ...]:
        """A cap as one value per rank."""
        return tuple(map(Fraction, cap if isinstance(cap, tuple) else (cap,) * self.num_ranks))

    def caps_on(self, placement: StagePlacement, cap: Cap) -> tuple[Fraction, ...]:
        """A cap by rank, in activations of a placement's stages."""
        stages = placement.num_stages(self.num_ranks)
        return tuple(self.costs.round_cap(rank_cap * stages / self.num_stages) for rank_cap in self.caps(cap))

    def cap_on(self, placement: StagePlacement, cap: Cap | None) -> Fraction | None:
        """The most that a rank may hold, in activations of a placement's stages."""
        return None if cap is None else max(self.caps_on(placement, cap))

    def is_within(self, peaks: Sequence[Fraction], cap: Cap | None) -> bool:
        """Whether activations held, by rank, are within a cap."""
        return cap is None or all(peak <= limit for peak, limit in zip(peaks, self.caps(cap), strict=True))

    def bound(self, placement: StagePlacement, cap: Cap | None) -> Fraction:
        """A lower bound of the makespan on a placement under a cap."""
        P, N = self.num_ranks, self.num_micro_batches
        caps = None if cap is None else self.caps_on(placement, cap)
        return lower_bound_of(placement, P, N, self.costs_on(placement), caps)

    def time_schedule(self, origin: str, schedule: Schedule) -> FoundSchedule:
        """A schedule with its makespan and activations."""
        totals = totals_of(schedule, self.costs_on(schedule.stage_placement))
        held = tuple(peak * self.num_stages / schedule.num_stages for peak in totals.peak_activations)
        return FoundSchedule(totals.makespan, held, origin, schedule)


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule that was found."""

    makespan: Fraction
    held_activations: tuple[Fraction, ...]  # the most activations on each rank, in the unit of the cap
    origin: str  # "search", or the name of a schedule or start
    schedule: Schedule

    def key(self) -> tuple[Fraction, bool]:
        """A sort key; the least is the best."""
        return self.makespan, self.schedule.stage_placement == BIDIRECTIONAL


def check_request(request: ScheduleRequest) -> ScheduleRequest:
    """The same request. Raises ValueError if nothing can run with its sizes, weights or caps."""
    if request.num_ranks < 1 or request.num_micro_batches < 1:
        raise ValueError(
            f"auto needs at least 1 rank and 1 micro-batch, got {request.num_ranks} and {request.num_micro_batches}"
        )
    least = request.num_stages // request.num_ranks  # how often a micro-batch passes a rank before it turns back
    if isinstance(request.cap, tuple) and len(request.cap) != request.num_ranks:
        raise ValueError(f"auto needs a cap for each of {request.num_ranks} ranks, got {len(request.cap)}")
    if request.cap is not None and min(request.caps(request.cap)) < least:
        activations = f"{least} activation{'s' if least > 1 else ''}"
        raise ValueError(
            f"auto cannot run with a cap of {float(min(request.caps(request.cap))):g}: "
            f"a rank holds at least {activations}, use cap = {least}"
        )
    request.costs.check_cut(request.num_ranks, request.num_stages)
    return request


# --- solve

_CHUNKS = (2, 3, 4)  # stages per rank of `loop(v)` that are tried by default
# Share of the effort by placement. `loop(v)` starts from good named schedules and is large, so its share is small.
_SHARES, _SHARE_OF_LOOPS = {BIDIRECTIONAL: 1.0, V: 0.6, ONE_STAGE: 0.3}, 0.15
_Cores = dict[tuple[object, ...], Core | None]  # results of searches, by everything that they depend on
_MOST_STEPS = 4_000  # ranks times micro-batches up to which several stages per rank are tried
_WORTH = Fraction(5, 4)  # of the best makespan: starts beyond it are hopeless, as 6 s of annealing gained only 2%
_WAVES = 2  # waves that are tried if there are more than `_MOST_ACTIONS`
_MOST_ACTIONS = 10_000  # forwards and backwards of a core; with more of them, a search gains almost nothing in time


@dataclass(frozen=True)
class Solution:
    """A schedule named auto, with its makespan and origin."""

    schedule: Schedule
    costs: Costs  # of its actions
    cap: Fraction | None  # in its activations
    makespan: Fraction
    # No schedule within the cap ends sooner on its placement or one that was searched. Without a cap, the bound is for
    # schedules that hold no more than this one.
    lower_bound: Fraction
    origin: str  # "search", or the name of the schedule that it is
    searched: tuple[StagePlacement, ...]  # its placement, and those that could have had a better schedule

    def measure_schedule(self) -> MeasuredSchedule:
        """The schedule with the measures that are printed, and with the lower bound of the solution."""
        return replace(measure(self.schedule, self.costs, self.cap), lower_bound=self.lower_bound)


@dataclass(frozen=True)
class _ScheduleSearch:
    """The settings of a search, and the solver's cache of results."""

    effort: float
    cores: _Cores
    report: Report
    worth: Fraction | None = None  # starts that take longer are too far from the best to be improved

    def part(self, start: float, share: float, total: float, effort: float = 1.0) -> _ScheduleSearch:
        """One of several searches: `share` of the `total` work, after `start` of it."""
        return replace(
            self, effort=self.effort * effort, report=lambda done: self.report((start + share * done) / total)
        )


def default_cap(num_ranks: int) -> int:
    """The default cap of a rank, in activations of 1/P of the model.

    It is what DualPipe holds and what full pairs need. A larger cap gains almost nothing.
    """
    return num_ranks + 1


@dataclass(frozen=True)
class Solver:
    """Searches for schedules at given costs under a cap on activations.

    Results are cached: with enough micro-batches, other numbers of them cost almost nothing. Equal arguments give equal
    schedules.

    costs: of an action on one stage. cap: one for all ranks, or one for each; None for `default_cap`, or for what a
    named schedule holds. effort: scales the work of a search, which takes at most about 30 s at 1. report: called with
    the share of the work that is done.
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
        """The best schedule found on any placement. Costs and cap are for 1/P of the model: with v stages per rank, an
        action takes 1/v of the costs and an activation counts as 1/v.

        The search covers `bidirectional` if P is even, `v`, `loop(1)` if there is one copy or P is odd, and
        `loop(chunks)`, or several loops if `chunks` is None. It skips placements whose bound shows that nothing better
        is possible. `copies` is the number of ranks that may hold a stage. With `placement`, only that is searched. All
        named schedules are candidates. Of equal ones, the one with fewer copies of the parameters is taken. Raises
        ValueError for sizes, weights or a cap with which nothing can run.
        """
        P, N = num_ranks, num_micro_batches
        request = check_request(ScheduleRequest(P, N, self.costs, P, self.cap))
        small = P * N <= _MOST_STEPS  # otherwise, several stages per rank are too many
        counts: tuple[int, ...] = (_CHUNKS if small else (DEFAULT_CHUNKS,)) if chunks is None else (chunks,)
        if placement is not None:
            placement.num_stages(P)
            placements: tuple[StagePlacement, ...] = (placement,)
            counts = (placement.loops,) if placement.loops > 1 else ()
        else:
            two_way = copies > 1 and P % 2 == 0
            placements = (BIDIRECTIONAL, V) if two_way else (V, ONE_STAGE)
            placements += tuple(loop(count) for count in counts if small)
        named = _named_schedules(request, counts, placement, copies)
        return _solve_placements(request, placements, named, _ScheduleSearch(self.effort, self.cores, self.report))

    def solve_on(
        self,
        placement: StagePlacement,
        num_ranks: int,
        num_micro_batches: int,
        effort: float | None = None,
        report: Report | None = None,
    ) -> Solution:
        """Find the shortest schedule for ranks that hold their stages by `placement`.

        Costs and cap are for one of its stages. `effort` and `report` replace those of the solver.
        """
        request = check_request(
            ScheduleRequest(num_ranks, num_micro_batches, self.costs, placement.num_stages(num_ranks), self.cap)
        )
        search = _ScheduleSearch(self.effort if effort is None else effort, self.cores, report or self.report)
        counts = (placement.loops,) if placement.loops > 1 else ()
        return _solve_placements(request, (placement,), _named_schedules(request, counts, placement), search)


def _named_schedules(
    request: ScheduleRequest, counts: Sequence[int], held_by: StagePlacement | None = None, copies: int = 2
) -> Iterator[FoundSchedule]:
    """All named schedules that fit the cap and have at most `copies` copies, with `counts` as chunks of `loop(v)`.

    If `held_by` is given, they must run on ranks that hold their stages by that placement.
    """
    P, N = request.num_ranks, request.num_micro_batches
    for name, row in SCHEDULES.items():
        for chunks in counts if row.facts.is_chunked else (DEFAULT_CHUNKS,):
            placement = row.stage_placement(chunks)
            runs = row.has_size(P, N) and placement.copies <= copies
            if runs and (held_by is None or held_by.supports(placement, P)):
                found = request.time_schedule(name, row.generate(P, N, chunks))
                if request.is_within(found.held_activations, request.cap):
                    yield found


def _solve_placements(
    request: ScheduleRequest,
    placements: Sequence[StagePlacement],
    named: Iterator[FoundSchedule],
    search: _ScheduleSearch,
) -> Solution:
    """The best of named schedules and of searches. A placement is searched if its bound allows a better schedule."""
    P = request.num_ranks
    best = min(named, key=FoundSchedule.key, default=None)
    cap = request.cap or Fraction(default_cap(P) * request.num_stages, P)
    shares = [_SHARES.get(placement, _SHARE_OF_LOOPS) if len(placements) > 1 else 1.0 for placement in placements]
    tried: dict[StagePlacement, FoundSchedule] = {}  # the best of each placement that was searched
    for index, placement in enumerate(placements):
        if best is None or request.bound(placement, cap) < best.makespan:
            part = search.part(sum(shares[:index]), shares[index], sum(shares), shares[index])
            part = replace(part, worth=_WORTH * best.makespan if best else None)
            timed = (request.time_schedule(*result) for result in _search_placement(placement, request, cap, part))
            tried[placement] = min(timed, key=FoundSchedule.key)
            best = min((candidate for candidate in (best, tried[placement]) if candidate), key=FoundSchedule.key)
    assert best is not None
    limit = max(best.held_activations) if request.cap is None else request.cap
    bounds = {placement: request.bound(placement, limit) for placement in (*placements, best.schedule.stage_placement)}
    search.report(1.0)
    schedule = best.schedule
    return Solution(
        replace(schedule, name="auto"),
        request.costs_on(schedule.stage_placement),
        request.cap_on(schedule.stage_placement, request.cap),
        best.makespan,
        min(bounds.values()),
        best.origin,
        tuple(bounds),
    )


def _search_placement(
    placement: StagePlacement, request: ScheduleRequest, cap: Cap, search: _ScheduleSearch
) -> Iterator[tuple[str, Schedule]]:
    """(origin, schedule) of a search on a placement, and of a start under any cap; one at a time, as they are large."""
    P, N, costs = request.num_ranks, request.num_micro_batches, request.costs_on(placement)
    caps = request.caps_on(placement, cap)
    folded = placement == BIDIRECTIONAL and costs.is_mirrored(P) and caps == caps[::-1]
    one_way = placement in (BIDIRECTIONAL, ONE_STAGE)
    fallback = make_problem(ONE_STAGE if one_way else placement, P, N, costs, caps)
    slots = one_f_one_b_under_cap(fallback) if one_way else slots_in_groups(fallback)
    yield "capped" if one_way else "groups", schedule_of_slots(fallback, slots)
    if placement == BIDIRECTIONAL:
        unfolded = zbv_both_ways(P, N)
        if all(peak <= limit for peak, limit in zip(held_at_most(unfolded, costs.keeps), caps, strict=True)):
            yield unfolded.name, unfolded
    is_odd = placement == BIDIRECTIONAL and N % 2 == 1
    problem = make_problem(placement, P, N + is_odd, costs, caps, folded)
    core = _core(problem, costs, search.part(0, 1, 1 + is_odd))
    if core is not None:
        yield core.origin, _first(_schedule(problem, core), N)
    else:  # too large for a search
        for period in islice(waves(problem), _WAVES):
            yield "wave", _first(schedule_of_slots(problem, unroll_period(problem, period)), N)
    if core is not None and is_odd:  # search on, as a pair may take less than the action that is left of it
        odd_problem = make_problem(placement, P, N, costs, caps)
        slots = (*core.slots, *reversed(core.slots)) if folded else core.slots
        core = _core(odd_problem, costs, search.part(1, 1, 2, 0.5), (without_last(slots),))
        if core is not None:
            yield core.origin, _schedule(odd_problem, core)


def is_long(placement: StagePlacement, num_ranks: int, num_micro_batches: int) -> bool:
    """Whether a run is solved as a shorter one with a period that is repeated, which is the same for all long runs.

    Under `loop(v)` groups of micro-batches alternate, so there is no period of one micro-batch.
    """
    if placement.loops > 1:
        return False
    short = _short(placement, num_ranks) + COPIES - 1
    return num_micro_batches > (2 * short if placement == BIDIRECTIONAL else short)


def _short(placement: StagePlacement, num_ranks: int) -> int:
    """Micro-batches per chunk that are enough for filling, draining, and some steady state between."""
    return num_ranks + 2 if placement == BIDIRECTIONAL else 2 * num_ranks + 2


def _core(
    problem: ScheduleProblem, costs: Costs, search: _ScheduleSearch, initial: tuple[Slots, ...] = ()
) -> Core | None:
    """The result of a search from the initial slots, or from all starts; None if the problem is too large."""
    P, placement = problem.num_ranks, problem.placement
    long = is_long(placement, P, problem.num_micro_batches)
    count = _short(placement, P) + (COPIES - 1 if initial else 0) if long else problem.count
    if 2 * problem.num_rows * problem.num_chunks * count > _MOST_ACTIONS or problem.num_chunks > MOST_CHUNKS:
        return None

    bound = _bound(problem, costs)
    worth = None if long or search.worth is None else math.floor(search.worth / problem.unit)
    key = (placement, problem.is_folded, problem.is_odd, P, count, long, costs, problem.caps, search.effort, worth)
    if key not in search.cores:
        short = resize_problem(problem, count)
        search.cores[key] = solve_core(short, search.effort, bound, long, search.report, initial, worth)
    return search.cores[key]


def _bound(problem: ScheduleProblem, costs: Costs) -> Bound:
    P, placement = problem.num_ranks, problem.placement
    caps = tuple(Fraction(problem.caps[problem.row_of(rank)], problem.activation_parts) for rank in range(P))

    @cache
    def bound(count: int) -> int:
        least = lower_bound_of(placement, P, resize_problem(problem, count).num_micro_batches, costs, caps)
        return math.ceil(least / problem.unit)

    return bound


def _schedule(problem: ScheduleProblem, core: Core) -> Schedule:
    """The schedule of the problem's size that a core gives."""
    short, count = core.problem, problem.count
    slots = stretch_slots(short, core.slots, count) if short.count < count else core.slots
    return schedule_of_slots(problem, slots)


def _first(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """The schedule without its last micro-batch, if it has one too many. It stays legal and does not get longer."""
    N = num_micro_batches
    if schedule.num_micro_batches == N:
        return schedule
    ranks: list[Sequence[Step]] = []
    for steps in schedule.actions:
        remaining = [tuple(action for action in actions_of(step) if action.micro_batch < N) for step in steps]
        ranks.append(tuple(Pair(*actions) if len(actions) == 2 else actions[0] for actions in remaining if actions))
    return replace(schedule, num_micro_batches=N, actions=tuple(ranks))
