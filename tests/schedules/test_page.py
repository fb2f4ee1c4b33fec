"""docs/schedules.md says what is: its example, its tables of costs, and of the tables the smallest rows."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from benchmarks.schedules import BEGIN, CASES, END, PAGE, Case, row
from compiler.cli import main
from compiler.schedules.costs import costs_of_json, shipped

TEXT = PAGE.read_text("utf-8")
TABLES = TEXT.split(BEGIN)[1].split(END)[0]


def test_tables_are_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"```\n\$ dsc (.*)\n(schedule .*\n(?:.*\n)*?)```", TEXT)
    assert len(shown) == 2
    for command, table in shown:
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == table


def test_the_tables_of_costs_are_read() -> None:
    plain, lanes = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert costs_of_json(plain).two("FF") == costs_of_json(json.dumps(json.loads(plain))).two("FF")
    assert costs_of_json(lanes) == shipped("deepseek-v3-low")


@pytest.mark.parametrize("case", [case for case in CASES if (4, 8, 5) in case.sizes], ids=lambda case: case.title)
def test_the_smallest_rows_are_current(case: Case) -> None:
    _, _, rest = TABLES.partition(f"### {case.title}\n")
    assert row(case, (4, 8, 5)) in rest.partition("###")[0], "python -m benchmarks.schedules"


def test_every_row_is_there() -> None:
    """A table of every case, with its sizes in order; none was left out or is of yesterday."""
    titles = re.findall(r"^### (.*)$", TABLES, re.MULTILINE)
    assert titles == [case.title for case in CASES]
    for case, part in zip(CASES, TABLES.split("### ")[1:], strict=True):
        sizes = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|", part, re.MULTILINE)
        assert [tuple(map(int, size)) for size in sizes] == list(case.sizes)
