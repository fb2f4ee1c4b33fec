"""The time that copying activations to the host saves under small memory caps, by the time of a copy.

    python -m benchmarks.offload

Makespans of `auto` without and with copies, for P=8, N=24, F=I=W=1 for 1/P of the model. The results are the same on
every machine. A few minutes on one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from compiler.cli.commands.schedule_answer import number_text, percent
from compiler.schedule.costs import Costs
from compiler.schedule.solver import Solution, Solver, solve_with_copies
from tests.compiler.schedule.independent import judge

RANKS, MICRO_BATCHES = 8, 24
CAPS, TIMES = (3, 4, 5), (Fraction(1), Fraction(2))
COLUMNS = ("cap", "a copy takes", "without", "**with**", "less", "copied")


def table() -> Iterator[str]:
    """The lines of the table."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---:|' * len(COLUMNS)}"
    for cap in CAPS:
        without = Solver(Costs(), Fraction(cap)).solve(RANKS, MICRO_BATCHES).makespan
        for time in TIMES:
            yield row(cap, time, without)


def row(cap: int, time: Fraction, without: Fraction) -> str:
    """A row of the table. An independent check of the schedule's text confirms the makespan and the cap."""
    solver = Solver(replace(Costs(), O=time, R=time), Fraction(cap))
    solution = solve_with_copies(solver, RANKS, RANKS, _search)
    parts = solution.schedule.stage_placement.stages_per_rank
    times = {kind: solution.costs.lone_time(kind) for kind in "FIWBOR"}
    judged = judge(solution.schedule.to_text(), times)
    assert judged.makespan == solution.makespan <= without and max(judged.peaks) <= cap * parts
    copied = sum(map(len, solution.measure_schedule().timeline.copies)) // 2
    share = percent(Fraction(copied, solution.schedule.num_stages * MICRO_BATCHES))
    saving = percent(1 - solution.makespan / without)
    cells = (
        str(cap),
        f"{number_text(time)} F",
        number_text(without),
        f"**{number_text(solution.makespan)}**",
        saving,
        share,
    )
    return f"| {' | '.join(cells)} |"


def _search(solver: Solver) -> Solution:
    return solver.solve(RANKS, MICRO_BATCHES)


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
