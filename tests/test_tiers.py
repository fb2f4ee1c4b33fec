"""The tiers of tests: what leaves `make test` leaves a sample there, and every row names tests that exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.tiers import CHECK, NOT_CHECK, SLOW_FIRST, SOAK, Row, row_of, tiers

ROOT = Path(__file__).parents[1]


@cache
def functions() -> list[str]:
    """The ids of all test functions, without their cases."""
    return [
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


@pytest.mark.parametrize("row", SOAK, ids=lambda row: row.prefix)
def test_a_row_names_tests_and_leaves_a_sample(row: Row) -> None:
    tests = functions()
    assert any(row_of(test) is row for test in tests), "no test begins so, or other rows have all of them"
    if row.every == 0:
        sample = [test for test in tests if test.startswith(row.sample)]
        assert row.sample and sample and any("test" in tier for tier in tiers(sample)), row.sample
    else:
        assert row.every > 1 and not row.sample


@pytest.mark.parametrize("prefix", [*CHECK, *NOT_CHECK, *SLOW_FIRST])
def test_a_prefix_names_tests(prefix: str) -> None:
    assert any(test.startswith(prefix) for test in functions())


def test_every_test_is_in_a_tier_and_the_first_case_of_a_function_in_test() -> None:
    cases = [f"{test}[{index}]" for test in functions() for index in range(7)]
    found = dict(zip(cases, tiers(cases), strict=True))
    for case, tier in found.items():
        row = row_of(case.partition("[")[0])
        stays = row is None or (row.every > 0 and int(case[-2]) % row.every == 0)
        assert (
            (tier == {"soak"}) == (not stays)
            and (stays == ("test" in tier))
            and tier - {"check", "test", "soak"} == set()
        )
