"""The schedules that the search finds, compared with DualPipe and the lower bound, and the CPU time.

    python -m benchmarks.solver [--cases NAME,…] [--effort 1] [--out benchmarks/results/solver.txt]

One core; times are CPU time, which other work on the machine changes little. `excess` is the time of a step beyond N
pairs F&B. Every schedule is checked and simulated again.
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from compiler.schedule.costs import Costs, parse_costs, shipped_costs, with_every_pair_gaining
from compiler.schedule.dualpipe import dualpipe
from compiler.schedule.simulate import simulate
from compiler.schedule.solver import Solver

PAIRED = parse_costs("F=1,I=1,W=1,FB=1.8")
TENFOLD = Costs(F=Fraction(10), I=Fraction(10), W=Fraction(10), latency=Fraction(1))
UNEVEN = Costs(stages=(Fraction(9, 10), *[Fraction(1)] * 6, Fraction(13, 10)))


@dataclass(frozen=True)
class Case:
    """A problem, and two goals for its makespan."""

    about: str
    num_ranks: int
    num_micro_batches: int
    costs: Costs
    cap: int
    wanted: str = ""
    ambitious: str = ""


CASES = {
    "no-gain": Case("no pair gains", 8, 20, Costs(), 8, "63", "63"),
    "fb": Case("F&B takes 0.6", 8, 20, PAIRED, 9, "49.2", "48.8"),
    "any": Case("every pair takes 0.6", 8, 20, with_every_pair_gaining(PAIRED), 9, "48.6", "47.0"),
    "small": Case("F&B takes 0.6", 4, 8, PAIRED, 5, "20.4", "20.4"),
    "v3-low": Case("V3, low table (ms)", 16, 120, shipped_costs("deepseek-v3-low"), 17, "17720", "17550"),
    "v3-high": Case("V3, high table (ms)", 16, 120, shipped_costs("deepseek-v3-high"), 17, "18480", "18250"),
    "short": Case("F&B takes 0.6, N < 2P", 8, 10, PAIRED, 9),
    "long": Case("F&B takes 0.6", 16, 32, PAIRED, 17),
    "tight": Case("F&B takes 0.6, one less held", 8, 20, PAIRED, 8),
    "latency": Case("no pair gains, latency F/10", 8, 20, TENFOLD, 9),
    "uneven": Case("first stage 0.9, last 1.3", 8, 20, UNEVEN, 9),
    "odd-ranks": Case("F&B takes 0.6", 7, 20, PAIRED, 8),
    "odd-batches": Case("F&B takes 0.6", 8, 21, PAIRED, 9),
}
HEAD = ("case", "costs", "P", "N", "cap", "DualPipe", "auto", "wanted", "ambitious", "bound", "gap", "excess", "CPU s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    parser.add_argument("--effort", type=float, default=1.0, help="search effort; the default of `Solver` is 1")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "solver.txt")
    args = parser.parse_args()
    rows: list[tuple[str, ...]] = [HEAD]
    for name in args.cases.split(","):
        rows.append(measured(name, CASES[name], args.effort))
        print(*rows[-1], sep="  ", flush=True)
    args.out.write_text(f"Python {platform.python_version()}, {platform.machine()}, one core\n\n{table(rows)}")


def measured(name: str, case: Case, effort: float) -> tuple[str, ...]:
    """A row of the table."""
    P, N, costs = case.num_ranks, case.num_micro_batches, case.costs
    begin = time.process_time()
    solution = Solver(costs, case.cap, effort=effort).solve(P, N)
    seconds = time.process_time() - begin
    solution.schedule.check()
    timeline = simulate(solution.schedule, solution.costs)
    chunks = solution.schedule.stage_placement.num_stages(P) // P  # activations are counted per chunk
    assert timeline.makespan == solution.makespan and max(timeline.peak_activations) <= case.cap * chunks
    exists = P % 2 == 0 and N % 2 == 0 and N >= 2 * P
    published = f"{float(simulate(dualpipe(P, N), costs).makespan):.6g}" if exists else "-"
    numbers = (float(solution.lower_bound), float(solution.makespan / solution.lower_bound - 1))
    excess = float(solution.makespan - N * costs.pair_time("BF"))
    reached = (f"{float(solution.makespan):.7g}", case.wanted or "-", case.ambitious or "-", f"{numbers[0]:.7g}")
    sizes = tuple(map(str, (P, N, case.cap)))
    return (name, case.about, *sizes, published, *reached, f"{numbers[1]:.1%}", f"{excess:.5g}", f"{seconds:.1f}")


def table(rows: list[tuple[str, ...]]) -> str:
    """A text table with aligned columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[(cell.ljust if k < 2 else cell.rjust)(widths[k]) for k, cell in enumerate(row)] for row in rows]
    return "".join("  ".join(row).rstrip() + "\n" for row in cells)


if __name__ == "__main__":
    main()
