"""Reads the arguments of the calls that a Python function returns, by their paths, without running it.

`return Config(training=Training(steps=3))` becomes `training.steps = 3`. Names are replaced by the values that the
function or the module assigns to them, and calls of the module's functions by the values that they return.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from compiler.files.text import python_of
from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.key_files import ComputedValue
from dsl.messages.diagnostics import Diagnostic, Source, Span, SpecError

# --- Python literals as values, without running anything
#
# Numbers, strings, lists, tuples, names, sums and products of lists count as literals; so does a call, whose keyword
# arguments become separate keys. The value of any other expression is unknown here.

MAX_LIST = 10_000  # items of a list written as a product


class NotLiteralError(ValueError):
    """The value of an expression is computed, not literal."""


@dataclass(frozen=True)
class DottedName:
    """A dotted name such as `torch.bfloat16`, or the text of a call."""

    text: str


def module_of(source: Source) -> ast.Module:
    """Parse a module. Raises SpecError if the text is not Python."""
    try:
        return python_of(source.text)
    except SyntaxError as error:
        start = source.line_starts[min(error.lineno or 1, len(source.line_starts)) - 1]
        message = f"this is not Python: {error.msg}"
        raise SpecError([Diagnostic("I0103", message, Span(source, start, start + 1))]) from None


def value_of(node: ast.expr) -> Any:
    """The value of a literal. Raises NotLiteralError if it is computed."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [value_of(item) for item in items]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = value_of(operand)
            if type(value) in (int, float):
                return -value
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as op, right=right):
            a, b = value_of(left), value_of(right)
            if isinstance(op, ast.Add) and isinstance(a, list) and isinstance(b, list):
                return a + b
            if isinstance(op, ast.Mult) and isinstance(a, list) and type(b) is int and len(a) * b <= MAX_LIST:
                return a * b
        case ast.Name() | ast.Attribute():
            return DottedName(ast.unparse(node))
        case ast.Call(func=ast.Name() | ast.Attribute() as function):
            return DottedName(f"{ast.unparse(function)}({', '.join(map(ast.unparse, node.args))})")
    raise NotLiteralError(ast.unparse(node))


def list_of(text: str) -> Any:
    """The value of a text such as `([0]*3+[1]*58)`. Raises NotLiteralError if it is not a literal."""
    try:
        (statement,) = python_of(text.strip()).body
        if isinstance(statement, ast.Expr):
            return value_of(statement.value)
    except (SyntaxError, ValueError, RecursionError):
        pass
    raise NotLiteralError(text)


def span_of(source: Source, node: ast.expr | ast.stmt) -> Span:
    """The span of a node. `ast` counts columns in UTF-8 bytes."""

    def offset_of(line: int, column: int) -> int:
        start = source.line_starts[line - 1]
        return start + len(source.text[start:].split("\n", 1)[0].encode()[:column].decode(errors="ignore"))

    return Span(
        source,
        offset_of(node.lineno, node.col_offset),
        offset_of(node.end_lineno or node.lineno, node.end_col_offset or 0),
    )


# --- Calls

MOST_STEPS = 50_000  # visited nodes: a name may be used many times
MAX_DEPTH = 40
Members = dict[str, list[JsonValue]]


def read_returned_call(source: Source, kind: str, chosen: str | None) -> tuple[str, Members, list[Diagnostic]]:
    """The name of the function that returns a `kind(…)`, the call's arguments by path, and warnings.

    `chosen`: the name of the function, needed if several return one. Raises SpecError if there is no such function, or
    the text is not Python.
    """
    reader = _CallReader(source, module_of(source))
    functions = [name for name, node in reader.functions.items() if kind in ast.unparse(node.returns or _result(node))]
    functions = functions or [name for name, node in reader.functions.items() if not _is_none(_result(node))]
    if chosen is None and len(functions) == 1:
        chosen = functions[0]
    if chosen not in functions:
        problem = f"{len(functions)} functions return a {kind}" if chosen is None else f"no {chosen}() returns a {kind}"
        hint = f"choose one: --config {functions[0]}" if functions else f"write one: `def mine() -> {kind}`"
        names = f": {', '.join(functions[:20])}" if functions else ""
        raise SpecError([Diagnostic("I0202", f"{problem}{names}", None, hint)])
    reader.function("", reader.functions[chosen], 0)
    return chosen, reader.members, reader.mistakes


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _result(function: ast.FunctionDef) -> ast.expr:
    """The expression that a function's last statement returns; the constant `None` if it returns nothing."""
    last = function.body[-1]
    if isinstance(last, ast.Return) and last.value is not None:
        return last.value
    return ast.copy_location(ast.Constant(None), last)


@dataclass
class _CallReader:
    """State of reading a module: the arguments and warnings so far."""

    source: Source
    tree: ast.Module
    members: Members = field(default_factory=dict)
    mistakes: list[Diagnostic] = field(default_factory=list)
    steps: int = 0
    ended: bool = False  # whether a limit stopped the resolution

    def __post_init__(self) -> None:
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        self.constants = dict[str, ast.expr]()
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.constants[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.constants[name] = value

    def function(self, path: str, node: ast.FunctionDef, depth: int) -> None:
        """Follow the value that a function returns, and the attributes that it sets."""
        names, later = dict(self.constants), list[tuple[str, ast.expr]]()
        self._statements(node.body, names, later)
        result = _result(node)
        self.follow(path, result, names, depth + 1)
        for target, value in later:
            if target.startswith(("for ", "if ")):
                self._add_value(target, value, span_of(self.source, value))
                continue
            root, _, attribute = target.partition(".")
            if isinstance(result, ast.Name) and root == result.id:  # overrides a part of the returned value
                target = f"{path}.{attribute}".lstrip(".")
                for stale in [key for key in self.members if key == target or key.startswith(f"{target}.")]:
                    del self.members[stale]
            self.follow(target, value, names, depth + 1)

    def _statements(self, body: list[ast.stmt], names: dict[str, ast.expr], later: list[tuple[str, ast.expr]]) -> None:
        for statement in body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    names[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    names[name] = value
                case ast.Assign(targets=[ast.Attribute() as target], value=value):
                    later.append((ast.unparse(target), value))
                case ast.AnnAssign(target=ast.Attribute() as target, value=ast.expr() as value):
                    later.append((ast.unparse(target), value))
                case ast.For(target=ast.Name(id=name), iter=items, body=inner, orelse=[]):
                    later.append((f"for {name}", ast.copy_location(ast.Name(id=ast.unparse(items)), items)))
                    self._statements(inner, names, later)
                case ast.If(test=test, body=inner, orelse=[]):
                    later.append((f"if {ast.unparse(test)}", ast.copy_location(ast.Constant(True), test)))
                    self._statements(inner, names, later)
                case ast.Return() | ast.Pass() | ast.Expr(value=ast.Constant()) | ast.AnnAssign(value=None):
                    pass
                case ast.Import() | ast.ImportFrom():
                    pass
                case _:
                    self._report_computed(ast.unparse(statement), "this statement", span_of(self.source, statement))

    def follow(self, path: str, node: ast.expr, names: Mapping[str, ast.expr], depth: int) -> None:
        """Record the values of a node under `path`."""
        self.steps += 1
        if depth > MAX_DEPTH or self.steps > MOST_STEPS:
            if not self.ended:
                self._report_computed("names that refer to each other", path, span_of(self.source, node))
            self.ended = True
            return
        match node:
            case ast.Name(id=name) if name in names and name not in self._names_of(names[name]):
                self.follow(path, names[name], names, depth + 1)
            case ast.Lambda(body=body):
                self.follow(path, body, names, depth + 1)
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]) if name in self.functions:
                self.function(path, self.functions[name], depth)
            case ast.Call(keywords=[_, *_] as keywords, func=ast.Name() | ast.Attribute()):
                self._add_value(path, node, span_of(self.source, node.func))
                for keyword in keywords:
                    keyword_path = f"{path}.{keyword.arg or '**'}".lstrip(".")
                    self.follow(keyword_path, keyword.value, names, depth + 1)
            case ast.Dict(keys=keys, values=values) if all(_is_text(key) for key in keys):
                for key, value in zip(keys, values, strict=True):
                    assert isinstance(key, ast.Constant) and isinstance(key.value, str)
                    self.follow(f"{path}.{key.value}", value, names, depth + 1)
            case ast.List(elts=items) | ast.Tuple(elts=items) if any(isinstance(item, ast.Call) for item in items):
                for index, item in enumerate(items):
                    self.follow(f"{path}.{index}", item, names, depth + 1)
            case _:
                self._add_value(path, node, span_of(self.source, node))

    @staticmethod
    def _names_of(node: ast.expr) -> set[str]:
        """The name that a node consists of, if it is one. Guards against `model = model`."""
        return {node.id} if isinstance(node, ast.Name) else set()

    def _add_value(self, path: str, node: ast.expr, span: Span) -> None:
        try:
            value = value_of(node)
        except (NotLiteralError, RecursionError) as error:
            self._report_computed(str(error), path, span)
            value = ComputedValue(str(error))
        self.members.setdefault(path or "return", []).append(JsonValue(value, span, span))

    def _report_computed(self, text: str, path: str, span: Span) -> None:
        message = f"`{path}` is computed, and nothing is executed here: {text[:80]}"
        self.mistakes.append(Diagnostic("I0104", message, span, "write its value", severity="warning"))


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
