"""The table "Known best beside `auto`" of docs/reference/schedule-table.md: what is known elsewhere, and what is found.

    python -m benchmarks.known_best                    prints the rows; a few minutes
    python -m benchmarks.known_best --case 8-24        prints rows whose names contain this: `F=I=W=10 8-24-5`
    python -m benchmarks.schedules --known 8-24        writes these rows and missing ones into the page
    python -m benchmarks.schedules --known all         writes all rows

Makespans are the same on every machine; seconds are CPU time on the machine that wrote the page.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from compiler.cli.commands.schedule_answer import number_text, percent
from compiler.schedule import DEFAULT_CHUNKS
from compiler.schedule.costs import Costs, parse_costs, shipped_costs
from compiler.schedule.measure import MeasuredSchedule
from compiler.schedule.solver import Solver
from tests.compiler.schedule.independent import judge

COLUMNS = (
    "case",
    "P",
    "N",
    "cap",
    "best known",
    "its placement",
    "its source",
    "**auto**",
    "placement",
    "above",
    "CPU s",
)


@dataclass(frozen=True)
class Known:
    """A problem size with costs of 1/P of the model, the shortest known makespan, and its source."""

    about: str  # costs, and special settings
    num_ranks: int
    num_micro_batches: int
    cap: int
    costs: Costs
    best: str  # the shortest known makespan
    placement: str  # of the best known schedule
    source: str
    chunks: int = DEFAULT_CHUNKS

    @property
    def name(self) -> str:
        """Unique among all cases."""
        return f"{self.about} {self.num_ranks}-{self.num_micro_batches}-{self.cap}"


TENS, UNIT, PAIRED = parse_costs("F=10,I=10,W=10"), Costs(), parse_costs("FB=1.8")
LOW, HIGH = shipped_costs("deepseek-v3-low"), shipped_costs("deepseek-v3-high")
ON_V = "a search on `v`"
MEGATRON = "one more warm-up forward, then pairs (Megatron)"
KNOWN = (
    Known("F=I=W=10", 8, 24, 5, TENS, "805", "v", ON_V),
    Known("F=I=W=10", 8, 24, 4, TENS, "855", "v", ON_V),
    Known("F=I=W=10", 8, 25, 5, TENS, "835", "v", ON_V),
    Known("F=I=W=1", 4, 4, 1, UNIT, "26.5", "v", ON_V),
    Known("F=I=W=1", 2, 4, 1, UNIT, "16.5", "v", ON_V),
    Known("F=I=W=1", 4, 6, 2, UNIT, "23.5", "v", ON_V),
    Known("F=I=W=1", 4, 5, 3, UNIT, "17.5", "v", ON_V),
    Known("FB=1.8", 4, 5, 5, PAIRED, "15.6", "v", ON_V),
    Known("V3 low, 4 chunks", 16, 32, 20, LOW, "5952", "loop(4)", MEGATRON, 4),
    Known("FB=1.8, 6 chunks", 8, 40, 10, PAIRED, "83.93", "loop(6)", MEGATRON, 6),
    Known("F=I=W=1, 4 chunks", 8, 24, 8, UNIT, "73.75", "loop(4)", "interleaved zero bubble (torch)", 4),
    Known("V3 high", 16, 120, 16, HIGH, "25918", "bidirectional", "one repeated period"),
    # a period of 2.40 per micro-batch after the 92.8 of 32 micro-batches
    Known("FB=1.8", 16, 64, 16, PAIRED, "169.6", "bidirectional", "a period of 2.40"),
)


def table(page: str, part: str = "") -> Iterator[str]:
    """The lines of the table. Rows are taken from `page`, or computed if it has none or the case's name contains
    `part`."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|:---" + f"|{'---:|' * 4}:---|:---|---:|:---|---:|---:|"
    old = {_key(line): line for line in page.splitlines() if line.startswith("| ")}
    for case in KNOWN:
        line = old.get(case.name)
        yield row(case) if line is None or (part and part in case.name) else line


def _key(line: str) -> str:
    """The name of the case in a line."""
    about, P, N, cap = (cell.strip() for cell in line.strip("| ").split("|")[:4])
    return f"{about} {P}-{N}-{cap}"


def searched(case: Known) -> MeasuredSchedule:
    """The schedule that `auto` finds. An independent check of its text confirms the makespan and the cap."""
    solution = (
        Solver(case.costs, case.cap).solve(case.num_ranks, case.num_micro_batches, case.chunks).measure_schedule()
    )
    costs = solution.costs
    times = {kind: costs.lone_time(kind) for kind in "FBIW"} | dict(costs.pairs)
    judged = judge(solution.schedule.to_text(), times, costs.latency)
    assert judged.makespan == solution.makespan
    assert max(judged.peaks) <= case.cap * solution.stages_a_rank
    return solution


def row(case: Known) -> str:
    """The line of a case."""
    begin = time.process_time()
    solution = searched(case)
    seconds = time.process_time() - begin
    best = Fraction(case.best)
    cells = (
        *(case.about, str(case.num_ranks), str(case.num_micro_batches), str(case.cap)),
        *(number_text(best), case.placement, case.source),
        *(f"**{number_text(solution.makespan)}**", str(solution.schedule.stage_placement)),
        *(percent(solution.makespan / best - 1), f"{seconds:.0f}"),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", metavar="PART", help="only cases whose names contain PART")
    part = parser.parse_args().case
    for case in KNOWN:
        if part in case.name:
            print(row(case), flush=True)


if __name__ == "__main__":
    main()
