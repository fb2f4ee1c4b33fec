"""docs/reliability.md equals the output of `python -m tests.reliability` for the stored results, and its rows name
tests that exist, with a sample of each in the tier `test`."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.reliability.page import PAGE, chosen, reached, rendered
from tests.reliability.results import Result, Results, kept, read_report
from tests.reliability.rows import ROWS, Program, Row
from tests.test_tiers import functions
from tests.tiers import tiers

TEST = "tests/a/test_b.py::test_c"
ROW = Row("R0", "", "2 in all", "{n.total:.0f} in {cases}", {"tests/a/test_b.py": ("test_c",)}, "")
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_b" name="test_c[x[1]]" time="0.5">
  <properties><property name="n" value="1" /></properties></testcase>
<testcase classname="tests.a.test_b" name="test_c[2]" time="0.25">{more}
  <properties><property name="n" value="2" /></properties></testcase>
</testsuite></testsuites>"""


def test_the_page_equals_the_output_of_the_command() -> None:
    assert PAGE.read_text("utf-8") == rendered(kept()), "python -m tests.reliability --rows none"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_a_row_names_tests_and_has_a_sample(row: Row) -> None:
    assert set(row.tests) <= set(functions())
    assert all(find_spec(program.module) for program in row.programs)
    sample = [test for test in functions() if test.startswith(row.sample)]
    assert sample and any(tier & {"test", "landing"} for tier in tiers(sample))


def test_results_belong_to_tests_and_programs_of_rows() -> None:
    named = {name for row in ROWS for name in (*row.tests, *(program.name for program in row.programs))}
    assert kept().keys() <= named


def test_a_report_is_counted() -> None:
    results = read_report(REPORT.format(more=""), [TEST])
    assert (results[TEST].passed, results[TEST].failed, results[TEST].seconds) == (2, [], 0.8)
    assert reached(ROW, results) == ("3 in 2", "yes")
    assert reached(replace(ROW, holds=lambda figures: figures["n"].most > 2), results) == ("3 in 2", "no")


@pytest.mark.parametrize("what", ["failure", "error", "skipped"])
def test_failed_tests_are_reported(what: str) -> None:
    results = read_report(REPORT.format(more=f"<{what} />"), [TEST])
    assert reached(ROW, results) == ("3 in 1; 1 failed: test_c[2]", "no")


def test_unrun_tests_are_reported() -> None:
    assert reached(ROW, {}) == ("not run", "–")
    with_program = replace(ROW, programs=(Program("m", (), ""),))
    results: Results = {TEST: Result("here", passed=1, figures={"n": [1.0]})}
    assert reached(with_program, results)[0].endswith("in 1; not run: python -m m ")
    with pytest.raises(ValueError, match="no row R99"):
        chosen(["R99"])
