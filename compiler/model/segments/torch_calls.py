"""Calls of torch ops: converted from a traced graph to nodes, and executed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compiler.ir.module import DEVICE, TENSOR, Atom, OpNode, TorchCall
from compiler.model.segments.joint import COLUMNS

LEFT_OUT = ("layout", "pin_memory")  # options that stay at their defaults


def call_of(node: fx.Node) -> tuple[str, TorchCall, list[fx.Node]]:
    """Return the op of a call, its arguments, and its tensors in order."""
    tensors: list[fx.Node] = []
    args = tuple(_atom(arg, tensors) for arg in node.args)
    options = tuple((name, _atom(arg, tensors)) for name, arg in node.kwargs.items() if name not in LEFT_OUT)
    return str(node.target), TorchCall(args, options), tensors


def _atom(value: Any, tensors: list[fx.Node]) -> Atom:
    if isinstance(value, fx.Node):
        tensors.append(value)
        return TENSOR
    if isinstance(value, (list, tuple)):
        return tuple(_atom(item, tensors) for item in value)
    if isinstance(value, torch.device):
        return DEVICE
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value)
    assert value is None or isinstance(value, (bool, int, float)), value
    return value


def compute(nodes: Iterable[OpNode], values: dict[str, Tensor], device: torch.device) -> None:
    """Execute nodes in order, adding their results to `values`."""
    for node in nodes:
        result = _result(node, [values[arg] if isinstance(arg, str) else arg for arg in node.args], device)
        results = result if isinstance(result, (tuple, list)) else (result,)
        values |= zip(node.outputs, results, strict=True)


def _result(node: OpNode, args: Sequence[Any], device: torch.device) -> Any:
    if node.op == COLUMNS:
        x, low, high = args
        return x[:, low:high]
    if node.op == "add":
        return torch.add(*args)
    if node.op == "cat2":
        return torch.cat(tuple(args), dim=-1)
    assert node.call is not None, node
    tensors = iter(args)
    positional = [_value(atom, tensors, device) for atom in node.call.args]
    options = {name: _value(atom, tensors, device) for name, atom in node.call.options}
    namespace, name, overload = node.op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)(*positional, **options)


def _value(atom: Atom, tensors: Iterator[Any], device: torch.device) -> Any:
    if isinstance(atom, tuple):
        return [_value(item, tensors, device) for item in atom]
    if not isinstance(atom, str):
        return atom
    if atom == TENSOR:
        return next(tensors)
    if atom == DEVICE:
        return device
    return getattr(torch, atom.removeprefix("torch.")) if atom.startswith("torch.") else ast.literal_eval(atom)
