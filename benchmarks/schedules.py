"""The tables of docs/reference/schedule-table.md: every named schedule, the one searched for, and the lower bound.

    python -m benchmarks.schedules                    some minutes; writes the tables into the page
    python -m benchmarks.schedules --print            to stdout
    python -m benchmarks.schedules --schedule zbv     seconds; writes the column of one named schedule, and no other
    python -m benchmarks.schedules --known 8-24-5     writes rows of the table of known_best.py, and no other table
    python -m benchmarks.schedules --orders           a minute; writes the table of orders.py into docs/schedules.md

Only the seconds of known_best.py depend on the machine: the search is limited in steps, not in time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from benchmarks.known_best import table as known_best
from benchmarks.orders import table as orders
from compiler.cli.commands.schedule_answer import number_text, percent
from compiler.schedule import AUTO, SCHEDULES
from compiler.schedule.costs import Costs, parse_costs, shipped_costs, with_every_pair_gaining
from compiler.schedule.measure import MeasuredSchedule, measure
from compiler.schedule.schedule import Schedule
from compiler.schedule.solver import Solver

DOCS = Path(__file__).parent.parent / "docs"
PAGE, TABLE_PAGE = DOCS / "schedules.md", DOCS / "reference" / "schedule-table.md"
ORDERS, ORDERS_END = "<!-- orders: python -m benchmarks.orders -->\n", "<!-- end of orders -->\n"
KNOWN, KNOWN_END = "<!-- known best: python -m benchmarks.known_best -->\n", "<!-- end of known best -->\n"
BEGIN, END = "<!-- tables: python -m benchmarks.schedules -->\n", "<!-- end of tables -->\n"

COLUMNS = ("P", "N", "cap", *SCHEDULES, f"**{AUTO}**", "bound", "gap", "excess")
Size = tuple[int, int, int]  # ranks, micro-batches, cap
SIZES: tuple[Size, ...] = (
    *((4, n, cap) for n in (8, 20) for cap in (4, 5)),
    *((8, n, cap) for n in (10, 20, 40) for cap in (8, 9)),
    *((16, n, cap) for n in (32, 64) for cap in (16, 17)),
)


@dataclass(frozen=True)
class Case:
    """A table: costs of 1/P of the model, and sizes."""

    title: str
    flags: str  # the flags of `dsc schedule --compare` for it
    costs: Costs
    sizes: tuple[Size, ...] = SIZES


GAIN = parse_costs("FB=1.8")
UNEVEN = (Fraction(9, 10), *[Fraction(1)] * 6, Fraction(13, 10))
CASES = (
    Case("No gain from pairing", "--costs F=1,I=1,W=1", Costs()),
    Case("F&B takes 0.6 of F + B, no other pair gains", "--costs F=1,I=1,W=1,FB=1.8", GAIN),
    Case("Every pair of F, B and I takes 0.6", "--costs F=1,I=1,W=1,FB=1.8 --pairs any", with_every_pair_gaining(GAIN)),
    Case(
        "A message takes a tenth of F",
        "--costs F=10,I=10,W=10 --latency 1",
        replace(parse_costs("F=10,I=10,W=10"), latency=Fraction(1)),
        ((8, 20, 8), (8, 20, 9)),
    ),
    Case(
        "The first stage takes 0.9, the last 1.3",
        '--costs uneven.json, `{"F": 1, "I": 1, "W": 1, "stages": [0.9, 1, 1, 1, 1, 1, 1, 1.3]}`',
        Costs(stages=UNEVEN),
        ((8, 20, 8), (8, 20, 9)),
    ),
    Case(
        "DeepSeek-V3, the faster network, ms",
        "--costs deepseek-v3-low",
        shipped_costs("deepseek-v3-low"),
        ((16, 32, 17), (16, 120, 16), (16, 120, 17)),
    ),
    Case(
        "DeepSeek-V3, the slower network, ms",
        "--costs deepseek-v3-high",
        shipped_costs("deepseek-v3-high"),
        ((16, 32, 17), (16, 120, 16), (16, 120, 17)),
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--print", action="store_true", help="print the tables instead of writing the page")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), help="compute only the column of this schedule")
    parser.add_argument(
        "--known", metavar="PART", help="compute only the rows of known_best.py whose names contain PART, or all"
    )
    parser.add_argument("--orders", action="store_true", help="compute only the table of orders.py")
    args = parser.parse_args()
    if args.orders or not (args.known or args.schedule):
        _write(PAGE, ORDERS, ORDERS_END, lambda old: "\n".join(["", *orders(), "", ""]), args.print)
    if args.orders:
        return 0
    if not args.known:
        _write(TABLE_PAGE, BEGIN, END, lambda old: _tables(old, args.schedule), args.print)
    if not args.schedule:
        part = "-" if args.known in (None, "all") else args.known  # every name has one
        _write(TABLE_PAGE, KNOWN, KNOWN_END, lambda old: "\n".join(["", *known_best(old, part), "", ""]), args.print)
    return 0


def _write(page: Path, begin: str, end: str, made: Callable[[str], str], only_print: bool) -> None:
    """Rewrite the text between two marks of a page."""
    new = made(page.read_text("utf-8").split(begin)[1].split(end)[0])
    if only_print:
        print(new)
        return
    before, after = page.read_text("utf-8").split(begin)  # again: it may be edited meanwhile
    page.write_text(f"{before}{begin}{new}{end}{after.split(end)[1]}", "utf-8")


def _tables(old: str, schedule: str | None) -> str:
    if schedule:
        return with_column(old, schedule)
    lines = "\n".join(line for case in CASES for line in table(case))
    return f"\n{lines}\n"


def with_column(tables: str, name: str) -> str:
    """The tables of the page with the column of a named schedule recomputed, or inserted in its place."""
    first, *parts = tables.split("### ")
    titles = {case.title: case for case in CASES}
    return "### ".join([first, *(_with_column(part, titles[part.partition("\n")[0]], name) for part in parts)])


def _with_column(table: str, case: Case, name: str) -> str:
    lines = table.split("\n")
    header = next(index for index, line in enumerate(lines) if line.startswith("| P |"))
    columns = _cells(lines[header])
    place = [column for column in COLUMNS if column in (*columns, name)].index(name)
    end = place + (name in columns)
    texts = [name, None, *(_text(_named(name, size, case.costs), size[2]) for size in case.sizes)]
    for index, text in enumerate(texts, header):
        if text is None:
            lines[index] = f"|{'---:|' * (len(columns) + (name not in columns))}"
        else:
            cells = _cells(lines[index])
            lines[index] = f"| {' | '.join([*cells[:place], text, *cells[end:]])} |"
    return "\n".join(lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def table(case: Case) -> Iterator[str]:
    """The lines of a table."""
    yield f"### {case.title}\n\n`{case.flags}`\n" if "`" not in case.flags else f"### {case.title}\n\n{case.flags}\n"
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---:|' * len(COLUMNS)}"
    for size in case.sizes:
        print(f"{case.title}: {size}", file=sys.stderr)
        yield row(case, size)
    yield ""


def row(case: Case, size: Size) -> str:
    """One line: makespans, in brackets if a schedule exceeds the cap. Gap and excess are those of auto."""
    P, N, cap = size
    named = [_named(name, size, case.costs) for name in SCHEDULES]
    auto = Solver(case.costs, cap).solve(P, N).measure_schedule()
    assert auto.peak_activations <= cap * auto.stages_a_rank
    texts = [_text(schedule, cap) for schedule in named]
    cells: Sequence[str] = (
        *map(str, size),
        *texts,
        f"**{number_text(auto.makespan)}**",
        number_text(auto.lower_bound),
        percent(auto.gap),
        number_text(auto.excess),
    )
    return f"| {' | '.join(cells)} |"


def _named(name: str, size: Size, costs: Costs) -> MeasuredSchedule | None:
    """A named schedule with costs of 1/P of the model, or None if it does not exist for this size."""
    P, N, _ = size
    if not SCHEDULES[name].has_size(P, N):
        return None
    try:
        schedule: Schedule = SCHEDULES[name].generate(P, N)
    except ValueError:
        return None
    return measure(schedule, costs.recut(P, schedule.stage_placement.num_stages(P)))


def _text(measured: MeasuredSchedule | None, cap: int) -> str:
    if measured is None:
        return "–"
    fits = Fraction(measured.peak_activations, measured.stages_a_rank) <= cap
    return number_text(measured.makespan) if fits else f"({number_text(measured.makespan)})"


if __name__ == "__main__":
    sys.exit(main())
