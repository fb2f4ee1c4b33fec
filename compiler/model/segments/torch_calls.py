"""Calls of torch's ops: taken from a traced graph as nodes, and computed again."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compiler.ir.module import DEVICE, TENSOR, Atom, OpNode, TorchCall
from compiler.model.segments.joint import COLUMNS

LEFT_OUT = ("layout", "pin_memory")  # how a new tensor lies: dense, and where its device wants it


def call_of(node: fx.Node) -> tuple[str, TorchCall, list[fx.Node]]:
    """The op of a call, what it is called with, and its tensors in their order."""
    tensors: list[fx.Node] = []
    args = tuple(_atom(each, tensors) for each in node.args)
    options = tuple((name, _atom(each, tensors)) for name, each in node.kwargs.items() if name not in LEFT_OUT)
    return str(node.target), TorchCall(args, options), tensors


def _atom(value: Any, tensors: list[fx.Node]) -> Atom:
    if isinstance(value, fx.Node):
        tensors.append(value)
        return TENSOR
    if isinstance(value, (list, tuple)):
        return tuple(_atom(each, tensors) for each in value)
    if isinstance(value, torch.device):
        return DEVICE
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value)
    assert value is None or isinstance(value, (bool, int, float)), value
    return value


def compute(nodes: Iterable[OpNode], values: dict[str, Tensor], device: torch.device) -> None:
    """Adds the results of nodes, in their order, to the values that they read."""
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
    given = [_value(each, tensors, device) for each in node.call.args]
    options = {name: _value(each, tensors, device) for name, each in node.call.options}
    namespace, name, overload = node.op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)(*given, **options)


def _value(atom: Atom, tensors: Iterator[Any], device: torch.device) -> Any:
    if isinstance(atom, tuple):
        return [_value(each, tensors, device) for each in atom]
    if not isinstance(atom, str):
        return atom
    if atom == TENSOR:
        return next(tensors)
    if atom == DEVICE:
        return device
    return getattr(torch, atom.removeprefix("torch.")) if atom.startswith("torch.") else ast.literal_eval(atom)
