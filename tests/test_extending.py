"""Extension points are where docs/extending.md says, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from dsl.schedules import FACTS
from tests.test_imports import ROOT

NAMED_IN = ("dsl/schedules.py", "compiler/schedules/__init__.py")  # besides, a schedule's own file says its name


def strings(path: Path) -> Iterator[str]:
    """The texts that stand alone in a module: neither in a sentence nor in a docstring."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_a_schedule_is_named_in_its_rows_and_its_file() -> None:
    for package in ("dsl", "compiler", "runtime"):
        for path in sorted((ROOT / package).rglob("*.py")):
            at = path.relative_to(ROOT).as_posix()
            found = {text for text in strings(path) if text in FACTS}
            assert at in NAMED_IN or len(found) <= at.startswith("compiler/schedules/"), f"{at} names {sorted(found)}"
