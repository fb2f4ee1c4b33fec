"""Checks of the FP8 products and of how the interpreter rounds E4M3. The reference is FP64, of dequantised operands.

Products of E4M3 numbers are exact in FP32, so the sum of a tile of 128 is off by at most 127 units of the sum of their
magnitudes. The tile's two scales and their product round three times, and adding up tiles rounds once per tile.
(Hopper's tensor cores sum with fewer bits; only a run on a GPU shows their error.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.compiler.emit.kernels.interpreted import random, run, within

CHECKED = ("linear_fp8", "linear_fp8_dgrad", "linear_fp8_wgrad_")
E4M3 = torch.float8_e4m3fn


def operand(*shape: int, seed: int) -> tuple[Tensor, Tensor]:
    """Data and scales of 1 × 128 tiles, in column-major order."""
    scales = random(-(-shape[1] // 128), shape[0], seed=seed + 100).exp2().t()
    return (8 * random(*shape, seed=seed)).to(E4M3), scales


def weight(*shape: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Data of [.., N, K], scales of 128 × 128, data transposed."""
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    data = (8 * random(*shape, seed=seed)).to(E4M3)
    return data, random(*blocks, seed=seed + 100).exp2(), data.transpose(-1, -2).contiguous()


def exact(data: Tensor, scales: Tensor) -> Tensor:
    """The operand in FP64; scales may belong to rows or to blocks."""
    wide = scales.double().repeat_interleave(128, -1)[..., : data.shape[-1]]
    if scales.shape[-2] != data.shape[-2]:
        wide = wide.repeat_interleave(128, -2)[..., : data.shape[-2], :]
    return data.double() * wide


def operations(terms: int) -> int:
    """Roundings of a sum of `inner` products, as above; tiles may be shared by groups."""
    return 130 + -(-terms // 128)


def linear_fp8(rows: int, out: int, inner: int) -> None:
    x, xs = operand(rows, inner, seed=1)
    dy, dys = operand(rows, out, seed=2)
    w, ws, w_turned = weight(out, inner, seed=3)
    x64, dy64, w64 = exact(x, xs), exact(dy, dys), exact(w, ws)

    y = run("linear_fp8", x, xs, w, ws)
    assert y.dtype == torch.bfloat16
    within(y, x64 @ w64.t(), x64.abs() @ w64.abs().t(), operations(inner))
    dx = run("linear_fp8_dgrad", dy, dys, w_turned, ws.t())
    within(dx, dy64 @ w64, dy64.abs() @ w64.abs(), operations(out))

    x, xs = operand(inner, rows, seed=4)
    dy, dys = operand(out, rows, seed=5)
    acc = random(out, inner, seed=6)
    x64, dy64, acc64 = exact(x, xs), exact(dy, dys), acc.double()
    assert run("linear_fp8_wgrad_", acc, dy, dys, x, xs) is None
    within(acc, acc64 + dy64 @ x64.t(), acc64.abs() + dy64.abs() @ x64.abs().t(), operations(rows) + 1)


def nan_stays_where_it_is() -> None:
    """A NaN stays in its row of y and of a weight's gradient; so does a NaN of a scale."""
    (x, xs), (w, ws, _) = operand(40, 144, seed=1), weight(48, 144, seed=3)
    without_nan = run("linear_fp8", x, xs, w, ws)
    for bad in (x, xs):
        bad[39, -1], before = torch.nan, bad[39, -1].clone()
        output = run("linear_fp8", x, xs, w, ws)
        assert output[39].isnan().all() and torch.equal(output[:39], without_nan[:39])
        bad[39, -1] = before

    (dy, dys), (x, xs) = operand(48, 40, seed=5), operand(144, 40, seed=6)
    results = []
    for number in (1.0, torch.nan):
        dy[47, 39] = number
        acc = torch.zeros(48, 144)
        run("linear_fp8_wgrad_", acc, dy, dys, x, xs)
        results.append(acc)
    assert results[1][47].isnan().all() and torch.equal(results[0][:47], results[1][:47])


@triton.jit
def _cast(source: Any, target: Any, BLOCK: tl.constexpr) -> None:
    i = tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i).to(target.dtype.element_ty))


def cast(source: Tensor, dtype: torch.dtype) -> Tensor:
    target = torch.empty(source.shape, dtype=dtype)
    _cast[(1,)](source, target, source.numel())
    return target


def e4m3_casts() -> None:
    """Casts to E4M3 are torch's in the range and saturate beyond it; casts from E4M3 are right for every code."""
    codes = torch.arange(256).to(torch.uint8).view(E4M3)
    for dtype in (torch.float32, torch.bfloat16):
        torch.testing.assert_close(cast(codes, dtype), codes.to(dtype), rtol=0, atol=0, equal_nan=True)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 449.0, -1e9, 2.0**-10, 3 * 2.0**-10])  # with two ties
    scattered = random(4088, seed=1) * torch.logspace(-4, 3, 4088)
    for x in (torch.cat([special, scattered]), torch.cat([special, scattered]).bfloat16()):
        expected = x.float().clamp(-448, 448).to(E4M3)
        assert torch.equal(cast(x, E4M3).view(torch.uint8), expected.view(torch.uint8))
    nan = cast(torch.tensor([torch.nan, -torch.nan]), E4M3)
    assert nan.view(torch.uint8).tolist() == [0x7F, 0x7F]


@triton.jit
def _multiply(a: Any, b: Any, c: Any, BLOCK: tl.constexpr) -> None:
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(c + offsets, tl.dot(tl.load(a + offsets), tl.load(b + offsets)))


def e4m3_products() -> None:
    a, b = ((8 * random(64, 64, seed=seed)).to(E4M3) for seed in (1, 2))
    c = torch.empty(64, 64)
    _multiply[(1,)](a, b, c, 64)
    within(c, a.double() @ b.double(), a.double().abs() @ b.double().abs(), 63)
