"""A recipe in Python, read without running it: what is assigned, where it is a literal.

Numbers, texts, lists, tuples, names, sums and products of lists are literals; so is a call, whose arguments are keys of
their own. What else a statement computes is not known here: it is said at its place.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from compiler.importers.json_text import Json
from dsl.diagnostics import Diagnostic, SpecError
from dsl.source import Source, Span

MAX_LIST = 10_000  # items of a list that is written as a product


class NotLiteralError(ValueError):
    """A value that is computed."""


@dataclass(frozen=True)
class Name:
    """A dotted name, such as torch.bfloat16, or the name of a function that is called."""

    text: str


def assignments(source: Source) -> tuple[dict[str, Json], list[Diagnostic]]:
    """What the functions of a module assign: `cfg.model = Provider(a=1)` is `model.a`, `cfg.train.b = 2` is `train.b`.

    SpecError where the text is no Python. With it what is not a literal, as warnings at their places.
    """
    tree = module_of(source)
    found: dict[str, Json] = {}
    mistakes: list[Diagnostic] = []
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        for statement in function.body:
            for name, node in _assigned(statement):
                _put(found, mistakes, source, name, node)
    return found, mistakes


def module_of(source: Source) -> ast.Module:
    """The statements of a module; SpecError where the text is no Python."""
    try:
        return ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        at = getattr(error, "lineno", None) or 1
        start = source.line_starts[min(at, len(source.line_starts)) - 1]
        message = f"this is no Python: {getattr(error, 'msg', error)}"
        raise SpecError([Diagnostic("I0103", message, Span(source, start, start + 1))]) from None


def value_of(node: ast.expr) -> Any:
    """The value of a literal; NotLiteralError where it is computed."""
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
            return Name(ast.unparse(node))
        case ast.Call(func=ast.Name() | ast.Attribute() as function):
            return Name(f"{ast.unparse(function)}({', '.join(map(ast.unparse, node.args))})")
    raise NotLiteralError(ast.unparse(node))


def list_of(text: str) -> Any:
    """The value of a text such as `([0]*3+[1]*58)`; NotLiteralError where it is none."""
    try:
        return value_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotLiteralError(text) from None


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The attributes that a statement gives values, without the name of the configuration; calls by their arguments."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return
    target = statement.targets[0]
    if isinstance(target, ast.Attribute):
        name = ast.unparse(target).partition(".")[2]
        if isinstance(statement.value, ast.Call) and statement.value.keywords:
            yield name, statement.value.func
            for keyword in statement.value.keywords:
                yield f"{name}.{keyword.arg or '**'}", keyword.value
        else:
            yield name, statement.value


def _put(found: dict[str, Json], mistakes: list[Diagnostic], source: Source, name: str, node: ast.expr) -> None:
    span = span_of(source, node)
    try:
        found[name] = Json(value_of(node), span, span)
    except (NotLiteralError, RecursionError) as error:
        text = f"`{name}` is computed, and nothing is executed here: {str(error)[:80]}"
        mistakes.append(Diagnostic("I0104", text, span, "write its value", severity="warning"))


def span_of(source: Source, node: ast.expr | ast.stmt) -> Span:
    """Where a node is written. Columns of `ast` count bytes of UTF-8."""

    def at(line: int, column: int) -> int:
        start = source.line_starts[line - 1]
        return start + len(source.text[start:].split("\n", 1)[0].encode()[:column].decode(errors="ignore"))

    return Span(source, at(node.lineno, node.col_offset), at(node.end_lineno or node.lineno, node.end_col_offset or 0))
