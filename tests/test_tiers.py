"""Rows of the tiers name tests that exist, and leave a sample in an earlier tier."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.tiers import CHECK, FUNCTION, LANDING, NOT_CHECK, SLOW_FIRST, SOAK, Moved, tiers, tiers_of_file

ROOT = Path(__file__).parents[1]


@cache
def functions() -> list[str]:
    """The ids of all test functions, without their cases."""
    return [
        f"{path.relative_to(ROOT)}::{name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in FUNCTION.findall(path.read_text("utf-8"))
    ]


@pytest.mark.parametrize("moved", [SOAK, LANDING], ids=["soak", "landing"])
def test_rows_name_tests_and_leave_a_sample(moved: Moved) -> None:
    tests = functions()
    rows = {moved.row_of(test) for test in tests}
    tiers_of_tests = tiers(tests)
    for row in moved.rows.values():
        assert row in rows, f"{row.prefix}: no test begins so, or other rows have all of them"
        if row.every == 0 and moved is SOAK:
            sample = [tier for test, tier in zip(tests, tiers_of_tests, strict=True) if test.startswith(row.sample)]
            assert row.sample and any(tier & {"test", "landing"} for tier in sample), row.prefix
        else:
            assert not row.sample


def test_tiers_of_a_file_equal_those_of_its_functions() -> None:
    shares = [(function, SOAK.row_of(function)) for function in functions()]
    # a case that stays, one that the soak takes, and the next that stays, which `landing` may take
    tests = [f"{function}[{case}]" for function, row in shares for case in range((row.every if row else 1) + 2)]
    tiers_by_file = defaultdict(set)
    for test, test_tiers in zip(tests, tiers(tests), strict=True):
        tiers_by_file[test.partition("::")[0]] |= test_tiers
    for file, expected in tiers_by_file.items():
        assert tiers_of_file(file, (ROOT / file).read_text("utf-8")) == expected, file


@pytest.mark.parametrize("prefix", [*CHECK, *NOT_CHECK, *SLOW_FIRST])
def test_a_prefix_names_tests(prefix: str) -> None:
    assert any(test.startswith(prefix) for test in functions())


def test_landing_samples_the_cases_that_soak_leaves() -> None:
    function = next(
        test for test in functions() if (row := SOAK.row_of(test)) and row.every == 2 and LANDING.row_of(test) is None
    )
    assert tiers(f"{function}[{case}]" for case in range(4)) == [{"test"}, {"soak"}] * 2
    function = next(
        test for test in functions() if (row := LANDING.row_of(test)) and row.every == 2 and SOAK.row_of(test) is None
    )
    case_tiers = tiers(f"{function}[{case}]" for case in range(4))
    assert ["test" in tier for tier in case_tiers] == [True, False] * 2 and case_tiers[1] == {"landing"}
