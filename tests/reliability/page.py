"""docs/reliability.md, from what is kept of the runs of its rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tests.reliability.results import ROOT, Results, figures_of, lacking, of_row
from tests.reliability.rows import ROWS, Row

PAGE = ROOT / "docs" / "reliability.md"
HEAD = """# What faults do to a run

`python -m tests.reliability` runs what this table names and writes this page; `--rows R1,R6` runs some of it and leaves
the rest as it was. Faults are real: signals to real processes, errors of the system, full file systems. Every row has a
sample in `make test` or `make landing`; all cases are in `make soak`. [guarantees.md](guarantees.md) lists what else is
tested.

"reached" says what was measured, also where that is short of the bar. The machine was busy with other work meanwhile,
which lengthens times.
"""


def rendered(results: Results) -> str:
    table = [("", "what is done", "bar", "reached", "holds"), ("---",) * 5]
    table += [(row.number, row.claim, row.bar, *reached(row, results)) for row in ROWS]
    lines = [HEAD, *(f"| {' | '.join(cells)} |" for cells in table), "", "## Which tests", ""]
    for row in ROWS:
        lines += [f"- **{row.number}**: {'; '.join(named(row))}. Before a change lands: `{row.sample}`."]
    lines += ["", "## Where", ""]
    lines += [f"- {', '.join(rows)}: {machine}" for machine, rows in machines(results).items()]
    return "\n".join(lines) + "\n"


def reached(row: Row, results: Results) -> tuple[str, str]:
    """What a row's tests gave, and whether that is the bar."""
    found, missing = of_row(row, results), lacking(row, results)
    if not found:
        return "not run", "–"
    figures = figures_of(row, results)
    text = row.reached.format(**figures | {"cases": f"{figures['cases'].total:,}"})
    if failed := [name for result in found for name in result.failed]:
        return f"{text}; {len(failed)} failed: {', '.join(failed)}", "no"
    if missing:
        return f"{text}; not run: {', '.join(name.rpartition('::')[2] for name in missing)}", "–"
    return text, "yes" if row.holds(figures) else "no"


def named(row: Row) -> list[str]:
    """The functions of a row by file, and its programs."""
    files = [f"[{file}](../{file}): `{'`, `'.join(names)}`" for file, names in row.shown_by.items()]
    return files + [f"`{program.name}`" for program in row.programs]


def machines(results: Results) -> dict[str, list[str]]:
    """Machine → the rows that ran on it."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in ROWS:
        for machine in dict.fromkeys(result.machine for result in of_row(row, results)):
            found[machine].append(row.number)
    return dict(sorted(found.items()))


def write(results: Results) -> None:
    PAGE.write_text(rendered(results), "utf-8")


def chosen(numbers: Sequence[str]) -> list[Row]:
    """Rows by their numbers; all where none is named. ValueError for one that is none."""
    if unknown := set(numbers) - {row.number for row in ROWS}:
        raise ValueError(f"there is no row {', '.join(sorted(unknown))}")
    return [row for row in ROWS if not numbers or row.number in numbers]
