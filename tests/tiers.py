"""Which tests run when: `make check` in about a minute, `make test` before landing, `make soak` for the rest.

What tests/soak.txt names is in `soak`, except for a sample that stays in `test`; everything else is in `test`. `check`
is the part of `test` that pins the language, plans, schedules, proofs and goldens. `pytest` alone runs all tests,
`pytest --tier test` those of one tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

TIERS = ("check", "test", "soak", "all")


class Row(NamedTuple):
    """Tests whose ids begin with `prefix`: one of `every` cases of each function stays in `test`, the first among them.

    `every` 0: none stays, and `sample` is the beginning of the ids of tests in `test` that hold the same for less.
    """

    prefix: str
    every: int
    sample: str = ""


def read_rows(text: str) -> tuple[Row, ...]:
    """The rows of tests/soak.txt, which says how they are written."""
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            prefix, how = line.split(maxsplit=1)
            share, sample = how.removeprefix("1/"), how.removeprefix("by ")
            found.append(Row(prefix, int(share)) if share != how else Row(prefix, 0, sample))
    return tuple(found)


SOAK = read_rows(Path(__file__).with_name("soak.txt").read_text("utf-8"))

# What pins the language, plans, schedules, proofs and goldens.
CHECK = (
    "tests/compiler/test_layout.py",
    "tests/dsl/",
    "tests/golden/",
    "tests/proof/test_deadlocks.py",
    "tests/proof/test_mutants.py",
    "tests/schedules/",
    "tests/segments/",
    "tests/specs/",
    "tests/test_",
    "tests/topology/",
)
NOT_CHECK = (  # slow, and about how far predictions and searches hold
    "tests/dsl/test_conflicts.py",
    "tests/dsl/test_hostile.py",
    "tests/schedules/test_bound.py",
    "tests/schedules/test_optima.py",
    "tests/schedules/test_page.py",
    "tests/segments/test_fuse.py",
    "tests/segments/test_recompute.py",
    "tests/specs/test_memory.py",
    "tests/specs/test_trains.py",
    "tests/test_extending",
    "tests/test_progress.py",
    "tests/test_readme.py",
    "tests/test_tools.py",
    "tests/test_tutorial.py",
    "tests/topology/test_holding.py",
    "tests/topology/test_partition.py",
)


# Where modules take long. What is last are modules of seconds, so that no worker ends long before the other.
SLOW_FIRST = (
    "tests/runs/",
    "tests/training/",
    "tests/kernels/",
    "tests/test_",
    "tests/weights/",
    "tests/predict/",
    "tests/runtime/",
    "tests/gpu/",
    "tests/native/",
    "tests/proof/",
    "tests/fuzz/",
    "tests/modules/",
    "tests/specs/",
    "tests/experts/",
    "tests/solver/",
    "tests/dsl/",
    "tests/cli/",
)


@cache
def row_of(function: str) -> Row | None:
    """The row of SOAK that decides on a test function, by its id: the one with the longest prefix."""
    return max((row for row in SOAK if function.startswith(row.prefix)), key=lambda row: len(row.prefix), default=None)


def may_check(test: str) -> bool:
    """Whether a test, or a file of tests, is of `check` if it is in `test`."""
    return test.startswith(CHECK) and not test.startswith(NOT_CHECK)


def tiers(tests: Iterable[str]) -> list[set[str]]:
    """The tiers of each test, by the ids of all tests in the order of their collection."""
    cases: Counter[str] = Counter()
    found = []
    for test in tests:
        function = test.partition("[")[0]
        row = row_of(function)
        stays = row is None or (row.every > 0 and cases[function] % row.every == 0)
        cases[function] += 1
        if not stays:
            found.append({"soak"})
        elif may_check(test):
            found.append({"check", "test"})
        else:
            found.append({"test"})
    return found
