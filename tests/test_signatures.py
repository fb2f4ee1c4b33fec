"""What functions take: fewer than eight parameters, and no dict to remember results in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

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
MEMOS = ("made", "best", "written", "told", "known", "codes", "kept", "cached", "memo")
MUTABLE = ("dict", "defaultdict", "Counter", "set", "list", "MutableMapping", "MutableSet", "MutableSequence")


@cache
def functions() -> list[tuple[str, ast.FunctionDef]]:
    """Every function and method, with its file and name."""
    return list(_functions())


def _functions() -> Iterator[tuple[str, ast.FunctionDef]]:
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


def test_no_parameter_is_a_memo_by_its_name() -> None:
    found = [
        f"{name}({each.arg})"
        for name, function in functions()
        for each in parameters(function)
        if each.arg in MEMOS and each.annotation is not None and is_mutable(each.annotation)
    ]
    assert not found, "an object remembers, which has the function as a method"


def is_mutable(annotation: ast.expr) -> bool:
    """Whether a value of a type, or of one of its alternatives, can be added to."""
    if isinstance(annotation, ast.BinOp):
        return is_mutable(annotation.left) or is_mutable(annotation.right)
    whole = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return isinstance(whole, ast.Name) and whole.id in MUTABLE


def test_no_function_remembers_in_a_parameter() -> None:
    """Whatever its name: `if key not in memo: memo[key] = ...`, or `memo.get(key)` and then `x = memo[key] = ...`."""
    found = [f"{name}({each})" for name, function in functions() for each in memos(function)]
    assert not found, "an object remembers, which has the function as a method"


def memos(function: ast.FunctionDef) -> list[str]:
    """The parameters of a function in which it looks a key up and, where that is missing, puts what it goes on with."""
    names = {each.arg for each in parameters(function)}
    missed, asked, put, used = set[str](), set[str](), set[str](), set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn):
            missed |= named(node.comparators[0], names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            asked |= named(node.func.value, names)
        if isinstance(node, ast.Assign):
            found = {name for t in node.targets if isinstance(t, ast.Subscript) for name in named(t.value, names)}
            put |= found
            used |= found if len(node.targets) > 1 else set()
    return sorted(missed & put | asked & used)


def named(node: ast.expr, names: set[str]) -> set[str]:
    return {node.id} if isinstance(node, ast.Name) and node.id in names else set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(memo, key):\n    if key not in memo:\n        memo[key] = 1\n    return memo[key]\n", ["memo"]),
        ("def f(memo, key):\n    x = memo.get(key)\n    if x is None:\n        x = memo[key] = 1\n", ["memo"]),
        ("def f(self, key):\n    if key not in self.memo:\n        self.memo[key] = 1\n", []),
        ("def f(rows, key):\n    if key not in rows:\n        raise KeyError(key)\n", []),
    ],
)
def test_what_a_memo_is(source: str, expected: list[str]) -> None:
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert memos(function) == expected
