"""Writes docs/reliability.md from the stored results of its rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tests.reliability.results import ROOT, Results, figures_of, lacking, of_row
from tests.reliability.rows import ROWS, Row

PAGE = ROOT / "docs" / "reliability.md"
HEAD = """# What faults do to a run

This page shows what dsc does when processes die, ranks hang, disks fill up, files are damaged or inputs attack it. The
faults are real: signals to processes, errors of the system, full file systems. Each row says what is required and what
was measured.

    python -m tests.reliability                 # run all rows and write this page
    python -m tests.reliability --rows R1,R6    # run two rows; the others keep their results

Other programs ran on the machine, so the times are longer than on an idle one. `make test` or `make landing` runs a
sample of every row, and `make soak` all cases. [guarantees.md](guarantees.md) lists what else is tested.
"""
TESTS = "[tests/reliability/rows.py](../tests/reliability/rows.py) names the tests and programs of each row."


def rendered(results: Results) -> str:
    table = [("", "fault or check", "required", "measured", "passed"), ("---",) * 5]
    table += [(row.number, row.claim, row.bar, *reached(row, results)) for row in ROWS]
    lines = [HEAD, *(f"| {' | '.join(cells)} |" for cells in table), "", TESTS, "", "## Machine", ""]
    for machine, rows in machines(results).items():
        numbers = "all rows" if len(rows) == len(ROWS) else ", ".join(rows)
        lines += [f"- {numbers}: {machine}"]
    return "\n".join(lines) + "\n"


def reached(row: Row, results: Results) -> tuple[str, str]:
    """The results of a row's tests, and whether they reach the goal."""
    row_results, missing = of_row(row, results), lacking(row, results)
    if not row_results:
        return "not run", "–"
    figures = figures_of(row, results)
    text = row.reached.format(**figures | {"cases": f"{figures['cases'].total:,}"})
    if failed := [name for result in row_results for name in result.failed]:
        return f"{text}; {len(failed)} failed: {', '.join(failed)}", "no"
    if missing:
        return f"{text}; not run: {', '.join(name.rpartition('::')[2] for name in missing)}", "–"
    return text, "yes" if row.holds(figures) else "no"


def machines(results: Results) -> dict[str, list[str]]:
    """Machine → the rows that ran on it."""
    rows_of_machine: dict[str, list[str]] = defaultdict(list)
    for row in ROWS:
        for machine in dict.fromkeys(result.machine for result in of_row(row, results)):
            rows_of_machine[machine].append(row.number)
    return dict(sorted(rows_of_machine.items()))


def write(results: Results) -> None:
    PAGE.write_text(rendered(results), "utf-8")


def chosen(numbers: Sequence[str]) -> list[Row]:
    """Rows by their numbers; all if none is named. Raises ValueError for an unknown row."""
    if unknown := set(numbers) - {row.number for row in ROWS}:
        raise ValueError(f"there is no row {', '.join(sorted(unknown))}")
    return [row for row in ROWS if not numbers or row.number in numbers]
