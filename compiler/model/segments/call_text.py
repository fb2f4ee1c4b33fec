"""Calls of torch's ops as Python text, and back. No torch."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from compiler.ir.module import TENSOR, Atom, Call
from compiler.model.segments.joint import Node


def text_of(node: Node) -> str:
    """`aten.sum.dim_IntList(x, [0], dtype=torch.float32)`."""
    assert node.call is not None
    tensors = iter(node.reads)
    args = [_atom(atom, tensors) for atom in node.call.args]
    options = [f"{name}={_atom(atom, tensors)}" for name, atom in node.call.options]
    text = f"{node.op}({', '.join([*args, *options])})"
    assert next(tensors, None) is None, f"{node} has more tensors than its call"
    return text


def _atom(atom: Atom, tensors: Iterator[str]) -> str:
    if isinstance(atom, tuple):
        return f"[{', '.join(_atom(each, tensors) for each in atom)}]"
    if atom == TENSOR:
        return next(tensors)
    if isinstance(atom, float) and not math.isfinite(atom):
        return f'float("{atom}")'
    return atom if isinstance(atom, str) else repr(atom)


def node_of(call: ast.Call, outputs: tuple[str, ...]) -> Node:
    """The node that a printed call is; the inverse of `text_of`."""
    tensors: list[str] = []
    args = tuple(_read(each, tensors) for each in call.args)
    options = tuple((str(each.arg), _read(each.value, tensors)) for each in call.keywords)
    return Node(ast.unparse(call.func), tuple(tensors), outputs, Call(args, options))


def _read(value: ast.expr, tensors: list[str]) -> Atom:
    if isinstance(value, ast.List):
        return tuple(_read(each, tensors) for each in value.elts)
    if isinstance(value, ast.Name) and value.id != "device":
        tensors.append(value.id)
        return TENSOR
    if isinstance(value, ast.Call):  # float("inf")
        return float(value.args[0].value)  # type: ignore[attr-defined]
    if isinstance(value, (ast.Name, ast.Attribute)):
        return ast.unparse(value)
    literal = ast.literal_eval(value)
    return repr(literal) if isinstance(literal, str) else literal
