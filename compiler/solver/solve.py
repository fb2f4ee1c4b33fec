"""`auto`: the schedule that ends soonest for given costs under a hard cap on activations, as far as can be found.

Every named schedule of as many stages is a candidate, so that none is better; a search goes on from the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from compiler.schedules import SCHEDULES
from compiler.schedules.bound import lower_bound
from compiler.schedules.costs import Costs
from compiler.schedules.placement import BIDIRECTIONAL
from compiler.schedules.schedule import Schedule
from compiler.schedules.simulate import peak_activations, simulate
from compiler.solver.core import Core, Report, solve_core
from compiler.solver.periods import COPIES, stretched
from compiler.solver.problem import Form, make_problem, resized, schedule_of_slots
from compiler.solver.seeds import capped
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
    problem = chain if form == "chain" else make_problem(form, P, (N + 1) // 2, costs, cap)
    short = 2 * P + 2 if form == "chain" else P + 2
    periodic = problem.count > short + COPIES - 1
    count = short if periodic else problem.count
    key = (form, P, count, periodic, costs, cap, effort)
    if key not in cores:
        placement = "loop(1)" if form == "chain" else BIDIRECTIONAL
        solved = count + (COPIES - 1 if periodic else 0)
        bound = lower_bound(placement, P, solved * problem.num_chunks, costs, cap)
        cores[key] = solve_core(resized(problem, count), effort, math.ceil(bound / problem.unit), periodic, report)
    core = cores[key]
    if core is not None:
        slots = stretched(core.problem, core.slots, problem.count) if periodic else core.slots
        found.append((core.origin, _first(schedule_of_slots(problem, slots), N)))
    return found


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
