"""How much shorter a period of two or three micro-batches is than two or three periods of one (ADR 56).

    python -m benchmarks.periods [--ranks 4,8]     a few seconds per row; needs OR-tools
    python -m benchmarks.periods --out FILE        default: benchmarks/results/periods.txt

A period is given as the time per micro-batch, found with the search effort that `auto` spends. `=`: proven shortest.
The runs have eight micro-batches per rank, with filling and draining but without annealing. Times are in units of one
stage, and the same on every machine.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

from benchmarks.solver import PAIRED, table
from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V
from compiler.schedule.costs import Costs, any_pairs, parse_costs
from compiler.schedule.solver.core import SEVERAL, SEVERAL_WORK
from compiler.schedule.solver.cycle import Period, cycle_time, makespan_of, unrolled, waves
from compiler.schedule.solver.exact_period import shortest
from compiler.schedule.solver.problem import ScheduleProblem, make_problem

TABLES = {"FB=1.8": PAIRED, "FB=2.4": parse_costs("FB=2.4"), "pairs any, 0.6": any_pairs(PAIRED), "no pair": Costs()}
HEAD = (
    "costs",
    "placement",
    "P",
    "cap",
    *(f"of {size}" for size in (1, *SEVERAL)),
    "less",
    "run",
    "shorter run",
    "less",
)
OUT = Path(__file__).parent / "results" / "periods.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4", help="comma-separated")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows: list[tuple[str, ...]] = [HEAD]
    for P in map(int, args.ranks.split(",")):
        for about, costs in TABLES.items():
            for placement in (ONE_STAGE, V) if P % 2 else (BIDIRECTIONAL,):
                for cap in (Fraction(P - 1), Fraction(P), Fraction(2 * P + 1, 2)) if P % 2 else (P - 2, P - 1, P):
                    rows.append(measured(about, costs, placement, P, Fraction(cap)))
                    print(*rows[-1], sep="  ", flush=True)
                    args.out.write_text(table(rows), "utf-8")


def measured(about: str, costs: Costs, placement: StagePlacement, num_ranks: int, cap: Fraction) -> tuple[str, ...]:
    """A row of the table."""
    P, parts = num_ranks, placement.num_stages(num_ranks) // num_ranks
    folded = placement == BIDIRECTIONAL
    problem = make_problem(placement, P, 8 * P, costs.recut(P, P * parts), cap * parts, folded)
    start, periods, cells = next(waves(problem), None), [], []
    below: Fraction | None = None
    for size in (1, *SEVERAL):
        found = shortest(problem, size, SEVERAL_WORK, start if size == 1 else None, below and size * below)
        period = found.period
        if period is None:
            cells.append("= none" if below is not None and found.bound >= size * below else "none")
            continue
        periods.append(period)
        time = _time(problem, period)
        cells.append(f"{'= ' if found.bound >= size * time else ''}{_shown(time * problem.unit)}")
        below = time
    if not periods:
        return (about, str(placement), str(P), _shown(cap), *cells, "-", "-", "-", "-")
    runs = [makespan_of(problem, unrolled(problem, period)) or 0 for period in (periods[0], periods[-1])]
    less = 1 - _time(problem, periods[-1]) / _time(problem, periods[0])
    shown = [_shown(run * problem.unit) for run in runs]
    return (
        about,
        str(placement),
        str(P),
        _shown(cap),
        *cells,
        f"{float(less):.1%}",
        *shown,
        f"{1 - runs[1] / runs[0]:.1%}",
    )


def _time(problem: ScheduleProblem, period: Period) -> Fraction:
    """The time of a period per micro-batch, in units."""
    time = cycle_time(problem, period)
    assert time is not None
    return time / period.size


def _shown(time: Fraction) -> str:
    return f"{float(time):.6g}"


if __name__ == "__main__":
    main()
