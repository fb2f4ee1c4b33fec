"""`auto`: the schedule that ends soonest for given costs under a hard cap on activations, as far as can be found.

Every named schedule of as many stages is a candidate, so that none is better; a search goes on from the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from compiler.schedules import SCHEDULES
from compiler.schedules.bound import lower_bound
from compiler.schedules.costs import Costs
from compiler.schedules.placement import BIDIRECTIONAL
from compiler.schedules.schedule import Schedule
from compiler.schedules.simulate import peak_activations, simulate
from compiler.solver.core import Core, Report, solve_core
from compiler.solver.periods import COPIES, stretched
from compiler.solver.problem import Form, Problem, make_problem, resized, schedule_of_slots
from compiler.solver.seeds import capped, without_last
from compiler.solver.tokens import Slots
from runtime.actions import Pair, actions_of

Cores = dict[tuple[object, ...], Core | None]  # what was searched, by all that it depends on


@dataclass(frozen=True)
class Solution:
    """A schedule named auto, its time, a bound that no schedule of its placement beats, and what it came from."""

    schedule: Schedule
    makespan: Fraction
    lower_bound: Fraction
    origin: str  # "search", or the name of the schedule that it is


def default_cap(num_ranks: int) -> int:
    """What a rank may hold where nobody says: what DualPipe holds, which full pairs need; more buys almost nothing."""
    return num_ranks + 1


def solve(
    num_ranks: int,
    num_micro_batches: int,
    costs: Costs,
    cap: int | None = None,
    effort: float = 1.0,
    cores: Cores | None = None,
    report: Report = lambda share: None,
) -> Solution:
    """The best schedule found for `cap` activations a rank (None: `default_cap`, or what a named schedule holds).

    `effort` scales how much is searched: about 12 s at most at 1. `cores` remembers searches: with the same dict, other
    numbers of micro-batches cost next to nothing once there are enough of them. `report` is told of progress. Equal
    arguments give equal schedules. ValueError for sizes, weights or a cap with which nothing runs.
    """
    P, N = num_ranks, num_micro_batches
    if P < 1 or N < 1:
        raise ValueError(f"auto needs at least 1 rank and 1 micro-batch, got {P} and {N}")
    if cap is not None and cap < 1:
        raise ValueError(f"auto cannot run with a cap of {cap}: a rank holds at least 1 activation, use cap = 1")
    costs.check(P, P)
    candidates = list(_named(P, N, cap))
    candidates += _searched(P, N, costs, cap or default_cap(P), effort, {} if cores is None else cores, report)
    makespan, at = min((simulate(schedule, costs).makespan, at) for at, (_, schedule) in enumerate(candidates))
    origin, schedule = candidates[at]
    bound = lower_bound(schedule.placement, P, N, costs, cap)
    return Solution(replace(schedule, name="auto"), makespan, bound, origin)


def _named(num_ranks: int, num_micro_batches: int, cap: int | None) -> Iterator[tuple[str, Schedule]]:
    """All named schedules of as many stages that fit the cap."""
    for name, row in SCHEDULES.items():
        if row.stored in ("loop(1)", BIDIRECTIONAL) and row.has(num_ranks, num_micro_batches):
            schedule = row.generate(num_ranks, num_micro_batches)
            if cap is None or max(peak_activations(schedule)) <= cap:
                yield name, schedule


def _searched(
    num_ranks: int, num_micro_batches: int, costs: Costs, cap: int, effort: float, cores: Cores, report: Report
) -> list[tuple[str, Schedule]]:
    """What a search finds, and what runs under any cap."""
    P, N = num_ranks, num_micro_batches
    chain = make_problem("chain", P, N, costs, cap)
    found = [("1f1b", schedule_of_slots(chain, capped(chain)))]
    form = _form(P, costs)
    problem = chain if form == "chain" else make_problem(form, P, N + N % 2, costs, cap)
    core = _core(problem, costs, effort, cores, report)
    if core is not None:
        found.append((core.origin, _first(_schedule(problem, core), N)))
    if core is not None and problem.num_micro_batches > N:  # a pair may take less than what is left of it: go on
        odd = make_problem("unfolded", P, N, costs, cap)
        slots = core.slots if form == "unfolded" else (*core.slots, *reversed(core.slots))
        core = _core(odd, costs, effort / 2, cores, report, (without_last(slots),))
        if core is not None:
            found.append((core.origin, _schedule(odd, core)))
    return found


def is_long(num_ranks: int, num_micro_batches: int) -> bool:
    """Whether a run is solved as a shorter one with a period to repeat, the same for all that are long."""
    short = _short(num_ranks) + COPIES - 1
    return num_micro_batches > (short if num_ranks % 2 else 2 * short)


def _short(num_ranks: int) -> int:
    """Micro-batches of a chunk that are enough to fill and to drain, with some steady state between."""
    return 2 * num_ranks + 2 if num_ranks % 2 else num_ranks + 2


def _core(
    problem: Problem, costs: Costs, effort: float, cores: Cores, report: Report, given: tuple[Slots, ...] = ()
) -> Core | None:
    """What a search finds from the given slots, or from all starts."""
    P, long = problem.num_ranks, is_long(problem.num_ranks, problem.num_micro_batches)
    count = _short(P) + (COPIES - 1 if given else 0) if long else problem.count
    placement = "loop(1)" if problem.form == "chain" else BIDIRECTIONAL

    @cache
    def bound(count: int) -> int:
        least = lower_bound(placement, P, resized(problem, count).num_micro_batches, costs, problem.cap)
        return math.ceil(least / problem.unit)

    key = (problem.form, problem.odd, P, count, long, costs, problem.cap, effort)
    if key not in cores:
        cores[key] = solve_core(resized(problem, count), effort, bound, long, report, given)
    return cores[key]


def _schedule(problem: Problem, core: Core) -> Schedule:
    """Of the problem's size, from a core of the same form."""
    slots = stretched(core.problem, core.slots, problem.count) if core.problem.count < problem.count else core.slots
    return schedule_of_slots(problem, slots)


def _form(num_ranks: int, costs: Costs) -> Form:
    if num_ranks % 2:
        return "chain"
    return "folded" if costs.ranks == costs.ranks[::-1] else "unfolded"


def _first(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """Without its last micro-batch, one of direction 1, if it has one more than these: legal, and no longer."""
    N = num_micro_batches
    if schedule.num_micro_batches == N:
        return schedule
    ranks = []
    for steps in schedule.actions:
        kept = [tuple(action for action in actions_of(step) if action.micro_batch < N) for step in steps]
        ranks.append(tuple(Pair(*actions) if len(actions) == 2 else actions[0] for actions in kept if actions))
    return replace(schedule, num_micro_batches=N, actions=tuple(ranks))
