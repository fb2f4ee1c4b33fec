"""Which tests run when: the tiers of docs/testing.md.

Tests that tests/soak.txt names are in `soak`, except for a sample. Of the others, those that tests/landing.txt names
are in `landing`, except for a sample. All others are in `test`. `check` is the part of `test` that pins the language,
plans, schedules, proofs and goldens. `pytest` alone runs all tests, `pytest --tier test` those of one tier.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

FUNCTION = re.compile(r"^def (test_\w+)", re.MULTILINE)
TIERS = ("check", "test", "landing", "soak", "all")


class Row(NamedTuple):
    """Tests whose ids begin with `prefix` move to a later tier, except one of `every` cases of each function.

    `every` 0: all move. `sample`: the beginning of the ids of tests that stay and check the same at less cost, if any.
    """

    prefix: str
    every: int
    sample: str = ""


class Moved:
    """Tests that move to a tier, by the rows of a file."""

    def __init__(self, file: str) -> None:
        text = Path(__file__).with_name(file).read_text("utf-8")
        rows = [read_row(line) for line in text.splitlines() if line and not line.startswith("#")]
        self.rows = {row.prefix: row for row in rows}

    def row_of(self, function: str) -> Row | None:
        """The row for a test function, by its id: the one with the longest prefix."""
        prefixes = (function[:length] for length in range(len(function), 0, -1))
        return next((self.rows[prefix] for prefix in prefixes if prefix in self.rows), None)


def read_row(line: str) -> Row:
    """`PREFIX 1/N`, `PREFIX by SAMPLE`, or `PREFIX`."""
    prefix, _, share = line.partition(" ")
    return (
        Row(prefix, int(share.removeprefix("1/")))
        if share.startswith("1/")
        else Row(prefix, 0, share.removeprefix("by "))
    )


SOAK, LANDING = Moved("soak.txt"), Moved("landing.txt")

# Tests that pin the language, plans, schedules, proofs and goldens.
CHECK = (
    "tests/compiler/test_layout.py",
    "tests/dsl/",
    "tests/golden/",
    "tests/compiler/program/proof/test_deadlocks.py",
    "tests/compiler/program/proof/test_mutants.py",
    "tests/compiler/schedule/",
    "tests/compiler/model/segments/",
    "tests/specs/",
    "tests/test_",
    "tests/compiler/machine/topology/",
)
NOT_CHECK = (  # slow tests of the accuracy of predictions and searches
    "tests/dsl/test_conflicts.py",
    "tests/dsl/test_hostile.py",
    "tests/compiler/schedule/test_bound.py",
    "tests/compiler/schedule/test_optima.py",
    "tests/compiler/schedule/test_page.py",
    "tests/compiler/model/segments/test_fuse.py",
    "tests/compiler/model/segments/test_recompute.py",
    "tests/specs/test_memory.py",
    "tests/specs/test_trains.py",
    "tests/test_extending",
    "tests/test_fine_tuning.py",
    "tests/test_laptop_to_cluster.py",
    "tests/test_progress.py",
    "tests/test_readme.py",
    "tests/test_tools.py",
    "tests/test_tutorial.py",
    "tests/compiler/machine/topology/test_holding.py",
    "tests/compiler/machine/topology/test_partition.py",
)


# Folders with slow modules. Fast modules come last, so that workers end at nearly the same time.
SLOW_FIRST = (
    "tests/runtime/run/",
    "tests/runtime/step/",
    "tests/compiler/emit/kernels/",
    "tests/test_",
    "tests/compiler/tools/weights/",
    "tests/compiler/predict/",
    "tests/runtime/",
    "tests/gpu/",
    "tests/runtime/ops/native/",
    "tests/compiler/program/proof/",
    "tests/fuzz/",
    "tests/compiler/model/modules/",
    "tests/specs/",
    "tests/compiler/plan/experts/",
    "tests/compiler/schedule/solver/",
    "tests/dsl/",
    "tests/compiler/cli/",
)


def may_check(test: str) -> bool:
    """Whether a test, or a file of tests, is in `check` if it is in `test`."""
    return test.startswith(CHECK) and not test.startswith(NOT_CHECK)


def tiers(tests: Iterable[str]) -> list[set[str]]:
    """The tiers of each test, by the ids of all tests in the order of their collection."""
    soak, landing = Stays(SOAK), Stays(LANDING)
    tiers_of_tests = []
    for test in tests:
        if not soak(test):
            tiers_of_tests.append({"soak"})
        elif not landing(test):
            tiers_of_tests.append({"landing"})
        else:
            tiers_of_tests.append({"check", "test"} if may_check(test) else {"test"})
    return tiers_of_tests


def tiers_of_file(file: str, text: str) -> set[str]:
    """The tiers that some test of a file may be in, by its functions."""
    file_tiers = set[str]()
    for name in FUNCTION.findall(text):
        function = f"{file}::{name}"
        soak, landing = SOAK.row_of(function), LANDING.row_of(function)
        if soak is not None:
            file_tiers.add("soak")
        if soak is None or soak.every:
            file_tiers |= {"landing"} if landing is not None else set()
            file_tiers |= {"test"} if landing is None or landing.every else set()
    return file_tiers | ({"check"} if "test" in file_tiers and may_check(file) else set())


class Stays:
    """Whether a test stays in its tier although rows move others. Counts a function's cases in the order of calls."""

    def __init__(self, moved: Moved) -> None:
        self.row_of = cache(moved.row_of)
        self.cases: Counter[str] = Counter()

    def __call__(self, test: str) -> bool:
        function = test.partition("[")[0]
        row, case = self.row_of(function), self.cases[function]
        self.cases[function] += 1
        return row is None or (row.every > 0 and case % row.every == 0)
