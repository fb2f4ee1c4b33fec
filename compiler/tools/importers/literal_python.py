"""Literals of Python as values, without running anything.

Numbers, texts, lists, tuples, names, sums and products of lists are literals; so is a call, whose arguments are keys of
their own. What else an expression computes is not known here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from compiler.files.text import python_of
from dsl.messages.diagnostics import Diagnostic, SpecError
from dsl.messages.source import Source, Span

MAX_LIST = 10_000  # items of a list that is written as a product


class NotLiteralError(ValueError):
    """A value that is computed."""


@dataclass(frozen=True)
class Name:
    """A dotted name, such as torch.bfloat16, or the name of a function that is called."""

    text: str


def module_of(source: Source) -> ast.Module:
    """The statements of a module; SpecError where the text is no Python."""
    try:
        return python_of(source.text)
    except SyntaxError as error:
        start = source.line_starts[min(error.lineno or 1, len(source.line_starts)) - 1]
        message = f"this is no Python: {error.msg}"
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
        (statement,) = python_of(text.strip()).body
        if isinstance(statement, ast.Expr):
            return value_of(statement.value)
    except (SyntaxError, ValueError, RecursionError):
        pass
    raise NotLiteralError(text)


def span_of(source: Source, node: ast.expr | ast.stmt) -> Span:
    """Where a node is written. Columns of `ast` count bytes of UTF-8."""

    def at(line: int, column: int) -> int:
        start = source.line_starts[line - 1]
        return start + len(source.text[start:].split("\n", 1)[0].encode()[:column].decode(errors="ignore"))

    return Span(source, at(node.lineno, node.col_offset), at(node.end_lineno or node.lineno, node.end_col_offset or 0))
