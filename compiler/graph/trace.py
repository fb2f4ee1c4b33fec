"""Traces a segment: the joint graph of its forward and of what autograd makes of it.

The segment runs on the torch op table, on tensors without storage, and then `torch.autograd.grad`; every call that
comes out of the dispatcher is written down. Our ops stay single calls, for their gradients are ops too. Autograd is
asked for the gradient of every value in between as well, so that each has its name in the graph.

Sizes are numbers, any of them, for nothing has storage. Where rows are received, R of them, the segment runs twice, on
two R: an extent that is R both times is R, and all else must be equal, so no R has become a constant of the graph.
torch has symbols for that, whose import takes longer than the traces of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiler import ir
from compiler.graph.convert import Call, Label, Recording, Value, convert
from compiler.graph.joint import Joint, arguments_of
from compiler.graph.recompute import recomputed
from compiler.oprules import Tensor

Extent = int | str
ROWS = (7, 11)  # two sizes R might have; 0 and 1 are of their own kind


def _add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert x.shape == y.shape and x.dtype == y.dtype
    return x.new_empty(x.shape)


def _cat(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    first, width = parts[0], sum(part.shape[-1] for part in parts)
    assert dim in (1, -1) and all(part.shape[0] == first.shape[0] and part.dtype == first.dtype for part in parts)
    return first.new_empty((first.shape[0], width))


# What torch's own ops return, beside views. Its own rules import torch.compile and sympy, which takes as long as all
# the rest of a compilation.
RESULTS: dict[str, Callable[..., torch.Tensor]] = {"aten.add.Tensor": _add, "aten.cat.default": _cat}


class Recorder:
    """The torch op table; keeps what each call returned as (op, occurrence, output index) and tensor."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.calls: Counter[str] = Counter()
        self.made: list[tuple[tuple[str, int, int], torch.Tensor]] = []

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = getattr(self.ops, op)(*args)
            outputs = result if isinstance(result, tuple) else (result,)
            self.made += [((op, self.calls[op], index), tensor) for index, tensor in enumerate(outputs)]
            self.calls[op] += 1
            return result

        return call


class Calls(TorchDispatchMode):
    """While entered, writes down what passes torch's dispatcher. Tensors are numbered in the order they are met."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.arguments: dict[str, Value] = {}
        self.values: dict[int, Value] = {}  # by id
        self.tensors: list[torch.Tensor] = []  # all of them are kept, so that no two have the same id

    def argument(self, name: str, tensor: torch.Tensor) -> None:
        self.arguments[name] = self._new(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = str(function)
        given = tuple(self._given(arg) for arg in args)
        result = RESULTS.get(target, function)(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        self.calls.append(Call(target, given, tuple(map(self._new, results)), tuple(kwargs or ())))
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch.compile, which is not used, is told that this is not for it: that would import it."""
        return False

    def _given(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return self.values[id(arg)]
        return tuple(self._given(part) for part in arg) if isinstance(arg, tuple | list) else arg

    def _new(self, tensor: torch.Tensor) -> Value:
        value = self.values.setdefault(id(tensor), Value(len(self.tensors)))
        if value.number == len(self.tensors):
            self.tensors.append(tensor)
        return value


class End(torch.autograd.Function):
    """A number whose gradients are the tangents; `autograd.grad`, given them, would import sympy to compare shapes."""

    @staticmethod
    def forward(ctx: Any, tangents: tuple[torch.Tensor, ...], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.tangents = tangents
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.tangents)


def trace(segment: ir.Segment, ops: Any) -> Joint:
    """The joint graph of a segment as autograd has it, and what is computed again. `ops`: `runtime.ops.library`'s."""
    recording = record(segment, ops, ROWS[0])
    if any("R" in argument.shape for argument in arguments_of(segment)):
        recording = with_rows(recording, record(segment, ops, ROWS[1]))
    return recomputed(convert(segment, recording))


def with_rows(one: Recording, other: Recording) -> Recording:
    """Of two recordings with ROWS as R, that with R."""
    first, second = ROWS

    def extent(a: Extent, b: Extent) -> Extent:
        assert a == b or (a, b) == ROWS, f"an extent is {a} where R is {first}, {b} where it is {second}"
        return a if a == b else "R"

    def merged(a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype == b.dtype and a.shape[1:] == b.shape[1:], f"{a} where R is {first}, {b} where it is {second}"
        return Tensor(tuple(map(extent, a.shape, b.shape)), a.dtype)

    assert one.calls == other.calls, "the number of rows decides what is called, or is a constant of a call"
    assert one.arguments == other.arguments and one.labels == other.labels
    return replace(one, tensors=tuple(map(merged, one.tensors, other.tensors)))


def record(segment: ir.Segment, ops: Any, rows: int) -> Recording:
    """What a segment and its gradients call. Labelled are its outputs, the gradients of its inputs and parameters, and
    every value in between and its gradient."""
    mode, recorder = Calls(), Recorder(ops)
    given = empty_arguments(segment, rows)
    for name, tensor in given.items():
        mode.argument(name, tensor)
    with mode:
        outputs = run(segment, recorder, given)
    ends = {output.name: tensor for output, tensor in zip(segment.outputs, outputs, strict=True) if output.grad}
    tangents = {f"d_{name}": tensor.new_empty(tensor.shape) for name, tensor in ends.items()}
    for name, tensor in tangents.items():
        mode.argument(name, tensor)
    leaves = [Label("gradient", i.name) for i in segment.inputs if i.grad]
    leaves += [Label("weight", p.name) for p in segment.params if p.grad]
    between = [(key, tensor) for key, tensor in recorder.made if tensor.requires_grad]
    of = [*(given[leaf.name] for leaf in leaves), *(tensor for _, tensor in between)]
    with mode:
        end = End.apply(tuple(tangents.values()), *ends.values())
        gradients = torch.autograd.grad(end, of, allow_unused=True)
    labels = [Label("output", output.name) for output in segment.outputs]
    labels += [*leaves, *(Label("between gradient", key=key) for key, _ in between)]
    labels += [Label("between", key=key) for key, _ in recorder.made]
    results = [*outputs, *gradients, *(tensor for _, tensor in recorder.made)]
    meant = {label: None if t is None else mode.values[id(t)] for label, t in zip(labels, results, strict=True)}
    return Recording(tuple(mode.calls), tuple(map(abstract, mode.tensors)), mode.arguments, meant)


def run(segment: ir.Segment, ops: Any, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    params = SimpleNamespace(**{param.name: given[param.name] for param in segment.params})
    outputs: tuple[torch.Tensor, ...] = segment.function(ops, params, *(given[i.name] for i in segment.inputs))
    return outputs


def empty_arguments(segment: ir.Segment, rows: int) -> dict[str, torch.Tensor]:
    """Parameters and inputs by name, each a tensor of its own without storage, with `rows` for R."""
    return {
        argument.name: torch.empty(
            tuple(rows if extent == "R" else int(extent) for extent in argument.shape),
            dtype=getattr(torch, argument.dtype),
            device="meta",
            requires_grad=argument.grad,
        )
        for argument in arguments_of(segment)
    }


def abstract(tensor: torch.Tensor) -> Tensor:
    return Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
