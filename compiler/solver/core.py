"""The search of one problem: annealing from the best starts, then from the best that came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from compiler.solver.anneal import anneal
from compiler.solver.periods import makespan_of, with_periods
from compiler.solver.problem import Problem
from compiler.solver.seeds import greedy_seeds, seeds
from compiler.solver.tokens import Slots

Report = Callable[[float], None]  # told the share of the work that is done
# Work is counted in microseconds of one core of 2024 by what is done, so that no clock decides what is found.
_WORK_A_SLOT, _LEAST_WORK, _MOST_WORK = 50_000, 300_000, 13_000_000
_RUN = 7_000  # work a slot of a run of the first round: shorter ones end high, longer ones are too few
_FIRST_ROUND = 0.65  # share of the work
_KEPT = 3  # starts of the first round
_HEATS = ((0.1, 0.02), (0.05, 0.05), (0.1, 0.1))
_LAST_HEATS = ((0.05, 0.01), (0.1, 0.05))


@dataclass(frozen=True)
class Core:
    """What was found, and of what it came: "search", or the start that was not improved."""

    problem: Problem
    slots: Slots
    origin: str


def solve_core(problem: Problem, effort: float, goal: int, periodic: bool, report: Report) -> Core | None:
    """The best slots found from all starts; None where no start is legal.

    `periodic` marks a period of the steady state, which stays as it is and can be repeated. Stops at `goal`.
    """
    begun = sorted(_starts(problem, periodic, goal), key=lambda start: start[0])
    if not begun:
        return None
    best, origin, problem, slots = begun[0]
    pool = list(dict.fromkeys(start[3] for start in begun))[:_KEPT]
    size = sum(map(len, slots))
    work = effort * min(max(_WORK_A_SLOT * size, _LEAST_WORK), _MOST_WORK)
    runs = max(1, round(_FIRST_ROUND * work / (_RUN * size)))
    rounds = ((runs, _FIRST_ROUND, _HEATS), (len(_LAST_HEATS), 1 - _FIRST_ROUND, _LAST_HEATS))
    seed, done = 0, 0.0
    for runs, share, heats in rounds:
        found = []
        for run in range(runs):
            if best <= goal:
                break
            seed += 1
            start = pool[run // len(heats) % len(pool)]
            found.append(anneal(problem, start, work * share / runs, heats[run % len(heats)], seed, goal))
            done += share / runs
            report(done)
            if found[-1].makespan < best:
                best, slots, origin = found[-1].makespan, found[-1].slots, "search"
        pool = [each.slots for each in sorted(found, key=lambda each: (each.makespan, each.value))] or pool
    return Core(problem, slots, origin)


def _starts(problem: Problem, periodic: bool, goal: int) -> Iterator[tuple[int, str, Problem, Slots]]:
    """Legal starts; greedy ones only where no named one is at the goal."""
    reached = False
    for make in (seeds, greedy_seeds):
        if reached:
            return
        for name, slots in make(problem):
            start = with_periods(problem, slots) if periodic else (problem, slots)
            makespan = start and makespan_of(*start)
            if start and makespan is not None:
                yield makespan, name, *start
                reached |= makespan <= goal
