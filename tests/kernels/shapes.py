"""The calls of ops a model makes, as meta tensors: what its kernels are emitted for and compiled with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiler.ir import Buffer


@dataclass(frozen=True, slots=True)
class Shapes:
    """Widths of a model on one expert rank."""

    norms: tuple[int, ...]  # columns of RMSNorms, the widest and a narrow one
    dense: tuple[int, ...]  # inner widths without gate weights: of a dense layer
    hidden: int
    inner: int  # of an expert
    experts: int  # of this rank
    sources: int
    rows: int  # any number: T, or R received


QUICKSTART = Shapes((192, 96), (512,), hidden=192, inner=128, experts=8, sources=2, rows=1023)
V3 = Shapes((7168, 512), (18432,), hidden=7168, inner=2048, experts=4, sources=64, rows=32768)

Call = tuple[str, tuple[Any, ...]]


def calls(shapes: Shapes, dtype: torch.dtype) -> Iterator[Call]:
    """(op, arguments) for every op that has a kernel; gradients accumulate in FP32."""
    rows = shapes.rows

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def fp32(*shape: int) -> Tensor:
        return tensor(*shape, dtype=torch.float32)

    for columns in shapes.norms:
        x, w, rstd = tensor(rows, columns), tensor(columns), fp32(rows)
        yield "rmsnorm", (x, w, 1e-6)
        yield "rmsnorm_dgrad", (x, x, w, rstd)
        yield "rmsnorm_wgrad_", (fp32(columns), x, x, rstd)
    for inner in shapes.dense:
        h, y = tensor(rows, 2 * inner), tensor(rows, inner)
        yield "swiglu", (h,)
        yield "swiglu_dgrad", (y, h)
    h, y, gate = tensor(rows, 2 * shapes.inner), tensor(rows, shapes.inner), fp32(rows)
    yield "gated_swiglu", (h, gate)
    yield "gated_swiglu_dgrad", (y, h, gate)
    offsets = tensor(shapes.sources * shapes.experts, dtype=torch.int32)
    for out, inner in ((2 * shapes.inner, shapes.hidden), (shapes.hidden, shapes.inner)):
        x, y, w = tensor(rows, inner), tensor(rows, out), tensor(shapes.experts, out, inner)
        yield "grouped_linear", (x, w, offsets)
        yield "grouped_linear_dgrad", (y, w, offsets)
        yield "grouped_linear_wgrad_", (fp32(shapes.experts, out, inner), y, x, offsets)


def describe(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments as the compiler knows them."""
    return tuple(
        Buffer("argument", tuple(argument.shape), str(argument.dtype).removeprefix("torch."))
        if isinstance(argument, Tensor)
        else argument
        for argument in arguments
    )
