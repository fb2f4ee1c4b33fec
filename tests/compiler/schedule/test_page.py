"""docs/schedules.md shows actual output and input, and the rows of docs/reference/schedule-table.md are current."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.schedules import BEGIN, CASES, COLUMNS, END, PAGE, TABLE_PAGE, Case, row, with_column
from compiler.cli.main import main
from compiler.schedule.costs import costs_of_json, shipped_costs

TEXT = PAGE.read_text("utf-8")
TABLES = TABLE_PAGE.read_text("utf-8").split(BEGIN)[1].split(END)[0]
PLAIN, LANES, BYTES = sorted(
    re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL), key=lambda table: ("bytes" in table, "lanes" in table)
)
SHOWN = re.findall(r"```\n\$ dsc (.*)\n((?:schedule |# ).*\n(?:.*\n)*?)```", TEXT)


@pytest.mark.parametrize(("command", "table"), SHOWN)
def test_tables_match_the_printed_output(
    command: str, table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "memory.json").write_text(BYTES)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == table


def test_the_tables_of_costs_are_read() -> None:
    assert costs_of_json(PLAIN).pair_time("FF") == costs_of_json(json.dumps(json.loads(PLAIN))).pair_time("FF")
    assert costs_of_json(LANES) == shipped_costs("deepseek-v3-low")


@pytest.mark.parametrize("case", [case for case in CASES if (4, 8, 5) in case.sizes], ids=lambda case: case.title)
def test_the_smallest_rows_are_current(case: Case) -> None:
    _, _, tail = TABLES.partition(f"### {case.title}\n")
    assert row(case, (4, 8, 5)) in tail.partition("###")[0], "python -m benchmarks.schedules"


def test_every_row_is_there() -> None:
    """There is a table for every case, with its sizes in order; none is missing or out of date."""
    titles = re.findall(r"^### (.*)$", TABLES, re.MULTILINE)
    assert titles == [case.title for case in CASES]
    for case, part in zip(CASES, TABLES.split("### ")[1:], strict=True):
        sizes = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|", part, re.MULTILINE)
        assert [tuple(map(int, size)) for size in sizes] == list(case.sizes)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_one_column_can_be_recomputed(name: str) -> None:
    """The column of a named schedule is rewritten if it is wrong, and added if it is missing."""
    place = COLUMNS.index(name) + 1  # a row begins with `|`
    without, wrong = [], []
    for line in TABLES.split("\n"):
        cells = line.split("|")
        is_row = len(cells) == len(COLUMNS) + 2
        without.append("|".join(cells[:place] + cells[place + 1 :]) if is_row else line)
        is_value = is_row and cells[1].strip().isdigit()
        wrong.append("|".join([*cells[:place], " 1 ", *cells[place + 1 :]]) if is_value else line)
    assert "\n".join(without) != TABLES != "\n".join(wrong)
    assert with_column("\n".join(without), name) == TABLES
    assert with_column("\n".join(wrong), name) == TABLES
