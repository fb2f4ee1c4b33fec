"""How many small schedules `auto` proves to be optimal over all placements, and the CPU time.

    python -m benchmarks.small [--costs FB] [--ranks 2,3,4] [--micro-batches 2,3,4,5,6]     about 40 minutes for all

One row per table of costs, P, N and cap; caps are those of 1f1b and of DualPipe. A case is proven if its bound equals
its makespan. The file is written after each row, and rows of other cases are kept. Times are CPU time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.solver import PAIRED, table
from compiler.schedule.costs import Costs, any_pairs
from compiler.schedule.solver import Solver

TABLES = {"no pair gains": Costs(), "FB takes 0.6": PAIRED, "all pairs take 0.6": any_pairs(PAIRED)}
HEAD = ("costs", "placement", "P", "N", "cap", "makespan", "bound", "gap", "CPU s", "proven")
OUT = Path(__file__).parent / "results" / "small.txt"
Key = tuple[str, int, int, int]  # costs, P, N, cap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--costs", default="", metavar="PART", help=f"only those of {', '.join(TABLES)} that contain PART"
    )
    parser.add_argument("--ranks", default="2,3,4", help="comma-separated")
    parser.add_argument("--micro-batches", default="2,3,4,5,6", help="comma-separated")
    args = parser.parse_args()
    ranks, counts = ([int(word) for word in text.split(",")] for text in (args.ranks, args.micro_batches))
    rows = stored()
    for about in TABLES:
        for P in ranks if args.costs in about else ():
            for key in ((about, P, N, cap) for N in counts for cap in (P, P + 1)):
                rows[key] = measured(*key)
                print(*rows[key], sep="  ", flush=True)
                OUT.write_text(written(rows), "utf-8")


def measured(about: str, num_ranks: int, num_micro_batches: int, cap: int) -> tuple[str, ...]:
    """A row of the table."""
    begin = time.process_time()
    solution = Solver(TABLES[about], cap).solve(num_ranks, num_micro_batches)
    seconds = time.process_time() - begin
    gap = float(solution.makespan / solution.lower_bound - 1)
    sizes = tuple(map(str, (num_ranks, num_micro_batches, cap)))
    times = (f"{float(solution.makespan):.6g}", f"{float(solution.lower_bound):.6g}", f"{gap:.1%}", f"{seconds:.1f}")
    placement = str(solution.schedule.stage_placement)
    return (about, placement, *sizes, *times, "no" if gap else "yes")


def stored() -> dict[Key, tuple[str, ...]]:
    """The rows of the file."""
    lines = OUT.read_text("utf-8").split("\n\n")[-1].splitlines()[1:] if OUT.exists() else []
    rows = [tuple(cell for cell in line.split("  ") if cell) for line in lines]
    return {(row[0], *(int(cell) for cell in row[2:5])): tuple(map(str.strip, row)) for row in rows}  # type: ignore[misc]


def written(rows: dict[Key, tuple[str, ...]]) -> str:
    """The text of the file: the number of proven cases per table of costs, and all rows."""
    keys = sorted(rows, key=lambda key: (list(TABLES).index(key[0]), *key[1:]))
    lines = []
    for about in dict.fromkeys(key[0] for key in keys):
        cases = [rows[key] for key in keys if key[0] == about]
        proven, most = sum(row[-1] == "yes" for row in cases), max(float(row[8]) for row in cases)
        lines.append(f"{about}: {proven} of {len(cases)} proven, {most:.0f} s at most\n")
    return "".join(lines) + "\n" + table([HEAD, *(rows[key] for key in keys)])


if __name__ == "__main__":
    main()
