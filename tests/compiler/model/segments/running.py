"""Loads and runs emitted segments, and autograd over the plain op table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from compiler import ir
from compiler.emit.kernels import KernelTarget
from compiler.emit.segment_cache import emit
from compiler.model.segments.interpret import cut
from tests.compiler.model.segments import plain

TARGET = KernelTarget(112)
Functions = dict[str, Callable[..., Tensor | tuple[Tensor, ...] | None]]


def load(segment: ir.Segment) -> Functions:
    """F, I and W of the emitted module."""
    namespace: Functions = {"__file__": "build/segments/segment.py"}  # type: ignore[dict-item]
    exec(compile(emit(segment, TARGET).source, segment.kind, "exec"), namespace)  # type: ignore[arg-type]
    return {name: namespace[name] for name in "FIW"}


def call(functions: Functions, segment_cut: ir.Cut, name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """One function on values by their local names, under inference mode: autograd could not run if it wanted to."""
    signature: ir.Signature = getattr(segment_cut, name)
    with torch.inference_mode():
        result = functions[name](*(values[arg] for arg in signature.args))
    if not signature.returns:
        assert result is None
        return {}
    returned = result if isinstance(result, tuple) else (result,)
    return dict(zip(signature.returns, returned, strict=True))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Result:
    """Outputs, gradients of inputs (`d_x`) and of parameters (`g_w`), by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def by_segment(segment: ir.Segment, functions: Functions, operands: dict[str, Tensor]) -> Result:
    """Run F, I and W. `operands`: parameters, inputs, tangents, and the accumulators that W adds to."""
    segment_cut = cut(segment)
    before = {name: tensor.clone() for name, tensor in operands.items() if not name.startswith("g_")}
    operands = {name: tensor.clone() if name.startswith("g_") else tensor for name, tensor in operands.items()}
    values = operands | call(functions, segment_cut, "F", operands)
    _check_buffers(values, (*segment_cut.outputs, *segment_cut.saved))
    values |= call(functions, segment_cut, "I", values)
    _check_buffers(values, (*segment_cut.gradients, *segment_cut.deferred))
    call(functions, segment_cut, "W", values)
    for name, tensor in before.items():
        assert torch.equal(tensor, operands[name]), f"{name} was written to"
    names = [buffer.name for buffer in segment_cut.gradients]
    accumulated = {name: tensor for name, tensor in operands.items() if name.startswith("g_")}
    return Result(
        {buffer.name: values[buffer.name] for buffer in segment_cut.outputs},
        {name: values[name] for name in names} | accumulated,
    )


def _check_buffers(values: dict[str, Tensor], buffers: tuple[ir.Buffer, ...]) -> None:
    """Shapes, dtypes and aliasing match the cut. Nothing else shares storage."""
    for buffer in buffers:
        tensor = values[buffer.name]
        rows = [extent for extent in buffer.shape if isinstance(extent, int)]
        assert list(tensor.shape)[len(tensor.shape) - len(rows) :] == rows and tensor.dim() == len(buffer.shape)
        assert tensor.dtype == getattr(torch, buffer.dtype) and tensor.is_contiguous(), buffer
        shares = [
            name
            for name, other in values.items()
            if name != buffer.name and tensor.numel() and other.data_ptr() == tensor.data_ptr()
        ]
        if buffer.alias:
            assert values[buffer.alias].data_ptr() == tensor.data_ptr() and buffer.alias in shares, buffer
        else:
            aliases = {view.name for view in buffers if view.alias == buffer.name}
            assert set(shares) <= aliases, (buffer, shares)


def by_autograd(segment: ir.Segment, operands: dict[str, Tensor]) -> Result:
    """The segment's own function over the plain op table, differentiated by torch."""
    leaves = {a.name: operands[a.name].clone().requires_grad_() for a in (*segment.params, *segment.inputs) if a.grad}
    values = operands | leaves
    params = SimpleNamespace(**{param.name: values[param.name] for param in segment.params})
    outputs = segment.function(plain, params, *(values[argument.name] for argument in segment.inputs))
    named = {output.name: tensor for output, tensor in zip(segment.outputs, outputs, strict=True)}
    with_tangent = [output.name for output in segment.outputs if output.grad]
    gradients = torch.autograd.grad(
        [named[name] for name in with_tangent], list(leaves.values()), [operands[f"d_{name}"] for name in with_tangent]
    )
    params_ = {param.name for param in segment.params}
    total = {
        f"g_{name}" if name in params_ else f"d_{name}": gradient + operands[f"g_{name}"]
        if name in params_
        else gradient
        for name, gradient in zip(leaves, gradients, strict=True)
    }
    return Result({name: tensor.detach() for name, tensor in named.items()}, total)


def assert_equal(one: Result, other: Result, tolerance: float = 1e-12) -> None:
    """max|Δ| ≤ tolerance · max(1, max|other|) for every tensor."""
    for mine, theirs in ((one.outputs, other.outputs), (one.gradients, other.gradients)):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert mine[name].shape == tensor.shape and mine[name].dtype == tensor.dtype, name
            if tensor.numel():
                difference = (mine[name] - tensor).abs().max()
                assert difference <= tolerance * max(1.0, float(tensor.abs().max())), (name, float(difference))
