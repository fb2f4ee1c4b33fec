"""Functions take fewer than eight parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("dsl", "compiler", "runtime", "benchmarks")
MOST = 7
# The parameters of an op are its operands and the constants of a layer: they are what they are.
NUMERICS = (
    "runtime/ops/",
    "runtime/native/",
    "runtime/optimizers/",
    "compiler/ops/",
    "compiler/kernels/",
    "compiler/layers/",
    "compiler/inference/op_tables.py",
    "benchmarks/gpu/libraries.py",
    "benchmarks/gpu/peers.py",
)


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function and method, with its file and name."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    yield f"{file}:{node.name}", node


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    of = function.args
    return [each for each in (*of.posonlyargs, *of.args, *of.kwonlyargs) if each.arg not in ("self", "cls")]


def test_functions_take_less_than_eight_parameters() -> None:
    long = {name for name, function in functions() if len(parameters(function)) > MOST}
    named = {name for name in long if not name.startswith(NUMERICS)}
    assert not named, "make it a method of a value that owns what it takes"
