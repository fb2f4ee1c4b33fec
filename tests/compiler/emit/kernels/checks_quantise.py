"""Checks of the quantising kernels in Triton's interpreter: bit for bit against the reference, and the bytes moved.

E4M3 has 4 bits of significand, so the error of rounding to nearest is at most 2⁻⁴ of a number, or 2⁻¹⁰ scales if it
is smaller than 2⁻⁶ scales: `within_tiles` checks quantised results for this bound against FP64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from runtime import ops
from runtime.ops.quantise import dequantise
from tests.compiler.emit.kernels.interpreted import STORED, U, random, run

CHECKED = (
    "quantise", "quantise_blocks", "quantise_both", "quantise_columns", "quantise_requantise", "requantise",
)  # fmt: skip


@contextmanager
def moved() -> Iterator[list[int]]:
    """Counts the bytes that programs load and store, in the only element of the list that it yields."""
    count = [0]
    before = {name: getattr(InterpreterBuilder, name) for name in ("create_masked_load", "create_masked_store")}

    def counting(name: str, mask_at: int) -> Any:
        def access(self: Any, pointers: Any, *rest: Any) -> Any:
            mask = rest[mask_at]
            inside = np.broadcast_to(np.asarray(getattr(mask, "data", mask), bool), np.shape(pointers.data))
            count[0] += int(inside.sum()) * (pointers.get_element_ty().primitive_bitwidth // 8)
            return before[name](self, pointers, *rest)

        return access

    InterpreterBuilder.create_masked_load = counting("create_masked_load", 0)
    InterpreterBuilder.create_masked_store = counting("create_masked_store", 1)
    try:
        yield count
    finally:
        for name, function in before.items():
            setattr(InterpreterBuilder, name, function)


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def same(found: Any, wanted: Any) -> None:
    """Assert that tensors, or tuples of them, have equal dtypes, shapes, strides and numbers; NaN equals NaN."""
    found, wanted = (value if isinstance(value, tuple) else (value,) for value in (found, wanted))
    for a, b in zip(found, wanted, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.numel() == 0 or a.stride() == b.stride() or min(a.shape) == 1
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def within_tiles(q: Tensor, s: Tensor, exact: Tensor, error: Tensor) -> None:
    """data · scale against FP64; `error`: error bound of the numbers before quantisation."""
    assert q.is_contiguous() and s.t().is_contiguous()
    scale = s.double().repeat_interleave(128, 1)[:, : q.shape[1]]
    largest = exact.abs() + error
    bound = error + torch.maximum(2.0**-4 * largest, 2.0**-10 * scale) * (1 + 4 * U) + 4 * U * largest
    assert ((dequantise(q, s).double() - exact).abs() <= bound).all()


def values(dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """A view of columns whose rows differ by 40 powers of two."""
    x = random(rows, columns + 16, dtype=dtype, seed=1) * 2.0 ** (torch.arange(rows) * 7 % 41 - 20)[:, None]
    return x.to(dtype)[:, 8 : columns + 8]


def casts(dtype: torch.dtype, rows: int, columns: int, pow2: bool) -> None:
    x = values(dtype, rows, columns)
    x[rows // 2 :, : columns // 2] = 0
    q, s = run("quantise", x, pow2)
    by_columns = run("quantise_columns", x, pow2)
    same((q, s), ops.quantise(x, pow2))
    same(by_columns, ops.quantise_columns(x, pow2))
    same(run("quantise_both", x, pow2), (q, s, *by_columns))
    again = run("requantise", q, s, pow2)
    same(again, ops.requantise(q, s, pow2))
    same(run("quantise_requantise", x, pow2), again)
    exact = x.double()
    within_tiles(q, s, exact, torch.zeros_like(exact))
    within_tiles(*by_columns, exact.t(), torch.zeros_like(exact.t()))
    if pow2:
        assert (torch.frexp(s).mantissa == 0.5).all()


def blocks(dtype: torch.dtype, shape: tuple[int, ...], pow2: bool) -> None:
    w = random(*shape, dtype=dtype, seed=2)
    outputs = run("quantise_blocks", w, pow2)
    same(outputs, ops.quantise_blocks(w, pow2))
    q, s, turned = outputs
    assert torch.equal(q.transpose(-1, -2).float(), turned.float())
    error = (dequantise(q, s).double() - w.double()).abs()
    scale = s.double().repeat_interleave(128, -1).repeat_interleave(128, -2)[..., : shape[-2], : shape[-1]]
    assert (error <= torch.maximum(2.0**-4 * w.double().abs(), 2.0**-10 * scale) * (1 + 8 * U)).all()


def special() -> None:
    """Zeros, numbers without a normal scale, infinities and NaN, in separate tiles and mixed with others."""
    x = random(9, 384, seed=3)
    x[0] = 0
    x[1] *= 1e-42
    x[2, 5] = torch.nan
    x[3, 200], x[3, 300] = torch.inf, -torch.inf
    x[4] = torch.nan
    x[5] *= 5e37
    x[6, :128] = torch.tensor([2.0e38, -1e-30]).repeat(64)
    for pow2 in (False, True):
        outputs = run("quantise_both", x, pow2)
        same(outputs, ops.quantise_both(x, pow2))
        q, s = outputs[:2]
        wide = dequantise(q, s)
        assert (s[0] == 1).all() and not wide[0].any()
        assert wide[2].isnan().sum() == 1 and wide[3, 128:].isnan().all() and not wide[3, :128].isnan().any()
        assert wide[4].isnan().all() and (s[4] == 1).all()
        assert torch.isfinite(wide[[0, 1, 5, 6]]).all()


def moves_each_byte_once() -> None:
    x = random(128, 256, dtype=torch.bfloat16)
    for name in ("quantise", "quantise_columns", "quantise_both", "quantise_requantise"):
        with moved() as count:
            results = run(name, x)
        assert count[0] == bytes_of(x, *results), name
    with moved() as count:
        results = run("quantise_blocks", x)
    assert count[0] == bytes_of(x, *results)
    quantised = ops.quantise(x)
    with moved() as count:
        results = run("requantise", *quantised)
    assert count[0] == bytes_of(*quantised, *results)


def rounded(exact: Tensor, dtype: torch.dtype, magnitude: Tensor, operations: int) -> Tensor:
    """The error bound of a stored result."""
    return STORED[dtype] * exact.abs() + operations * U * magnitude
