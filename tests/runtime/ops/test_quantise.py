"""Quantising ops against exact rounding to the table of all E4M3 numbers, and composed ops against their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime import ops
from runtime.ops import OPS
from runtime.ops.quantise import dequantise, quantise, quantise_blocks, quantise_both, quantise_columns, requantise

NUMBERS = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn)[:-1].double()  # non-negative, without NaN
U = 2.0**-24


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def expected(tile: Tensor, pow2: bool) -> tuple[Tensor, float]:
    """The nearest E4M3 numbers of a tile and its scale, in FP64; ties to even codes."""
    largest = tile.double().abs().amax()
    if largest == 0:
        return torch.zeros_like(tile, dtype=torch.float64), 1.0
    scale = max(float((largest.float() * (1 / 448)).double()), 2.0**-126)
    if pow2:
        scale = 2.0 ** (torch.frexp(torch.tensor(scale * (1 - 2.0**-30), dtype=torch.float64)).exponent.item())
    ratio = tile.double() / scale
    distance = (ratio.abs()[..., None] - NUMBERS).abs()
    nearest = distance.amin(-1, keepdim=True)
    codes = torch.arange(len(NUMBERS))
    best = torch.where(distance == nearest, 2 * (codes % 2) * 1000 + codes, 10**6).argmin(-1)
    return NUMBERS[best].copysign(ratio), scale


def assert_rounded(data: Tensor, scale: Tensor, tile: Tensor, pow2: bool) -> None:
    """Assert that codes are equal or equally near, since FP32 multiplies by the scale's rounded inverse."""
    wanted, wanted_scale = expected(tile, pow2)
    assert scale.item() == wanted_scale
    ratio = tile.double() / wanted_scale
    excess = (data.double() - ratio).abs() - (wanted - ratio).abs()
    assert (excess <= 4 * U * ratio.abs()).all()


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 128), (2, 300), (1, 127), (1, 129), (1, 257)])
def test_tiles_are_rounded_to_the_nearest(rows: int, columns: int, dtype: torch.dtype, pow2: bool) -> None:
    x = random(rows, columns, dtype=dtype) * 2.0 ** (10 * torch.arange(rows) - 10)[:, None].to(dtype)
    x[-1, : columns // 2] = 0
    q, s = quantise(x, pow2)
    assert (q.shape, q.dtype, s.shape, s.dtype) == (
        x.shape,
        torch.float8_e4m3fn,
        (rows, -(-columns // 128)),
        torch.float32,
    )
    for r in range(rows):
        for b, tile in enumerate(x[r].split(128)):
            assert_rounded(q[r, 128 * b : 128 * b + 128], s[r, b], tile, pow2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.booleans(),
)
def test_any_tile(numbers: list[float], pow2: bool) -> None:
    tile = torch.tensor([numbers])
    if tile.abs().amax() < 3e38:  # near the largest FP32 number, the value of a code may overflow
        q, s = quantise(tile, pow2)
        assert_rounded(q[0], s[0, 0], tile[0], pow2)


@pytest.mark.parametrize("power", range(-100, 100, 7))
def test_the_largest_number_is_exact_if_representable(power: int) -> None:
    """448·2^n has the scale 2^n, though 1/448 is rounded; with pow2 the next number has twice that."""
    x = torch.tensor([[448.0, 448.00003]]).t() * 2.0**power
    for pow2, second in ((False, None), (True, 2.0 ** (power + 1))):
        q, s = quantise(x, pow2)
        assert s[0, 0] == 2.0**power and q[0, 0].float() == 448
        assert second is None or s[1, 0] == second


def test_nan_and_infinity() -> None:
    x = random(4, 256, dtype=torch.float32)
    x[0, 3], x[1, 130], x[2] = torch.nan, -torch.inf, 0
    wide = dequantise(*quantise(x))
    assert wide[0].isnan().nonzero().tolist() == [[3]]
    assert wide[1, 128:].isnan().all() and wide[[0, 1, 3], :2].isfinite().all()
    assert not wide[2].any() and (quantise(x)[1][2] == 1).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 256), (130, 300), (0, 5), (127, 129), (129, 127)])
def test_layouts(rows: int, columns: int) -> None:
    x = random(rows, columns + 3)[:, 2:-1]
    q, s, turned, s_turned = quantise_both(x)
    for data, scale, source in ((q, s, x), (turned, s_turned, x.t())):
        assert data.shape == source.shape and data.is_contiguous()
        assert scale.shape == (len(source), -(-source.shape[1] // 128)) and scale.t().is_contiguous()
    assert torch.equal(turned.float(), quantise_columns(x)[0].float())
    again, s_again = requantise(q, s)
    assert (again.shape, s_again.shape) == (turned.shape, s_turned.shape)
    exact = dequantise(q, s).t()
    error = 2.0**-4 * exact.abs() + 2.0**-10 * s_again.repeat_interleave(128, 1)[:, :rows]
    assert ((dequantise(again, s_again) - exact).abs() <= error * (1 + 8 * U)).all()


@pytest.mark.parametrize("shape", [(1, 1), (256, 128), (130, 300), (3, 129, 5), (127, 257)])
@pytest.mark.parametrize("pow2", [False, True])
def test_blocks(shape: tuple[int, ...], pow2: bool) -> None:
    w = random(*shape)
    q, s, turned = quantise_blocks(w, pow2)
    assert s.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)) and s.is_contiguous()
    assert turned.is_contiguous() and torch.equal(turned.float(), q.float().transpose(-1, -2))
    experts = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (w, q, s))
    for weight, data, scale in zip(*experts, strict=True):
        for n in range(s.shape[-2]):
            for k in range(s.shape[-1]):
                tile = slice(128 * n, 128 * n + 128), slice(128 * k, 128 * k + 128)
                assert_rounded(data[tile], scale[n, k], weight[tile], pow2)
    wide = dequantise(q, s)
    assert torch.equal(wide.transpose(-1, -2), dequantise(turned, s.transpose(-1, -2))), (
        "its scales are these transposed"
    )


def test_fused_ops_equal_their_composition() -> None:
    """With odd sizes and the dtypes of a run; results are bit-identical."""
    h, x, w = random(5, 300, seed=1), random(5, 300, seed=2), random(300, seed=3)
    dy, rstd, gate = (
        random(5, 300, seed=4),
        random(5, dtype=torch.float32).abs(),
        random(5, dtype=torch.float32, seed=6),
    )
    pair, dy2 = random(5, 512, seed=5), random(5, 256, seed=7)
    y, r = ops.rmsnorm(x, w, 1e-6)
    ys, rs = ops.rmsnorm(h + x, w, 1e-6)
    packed = quantise(pair)
    wide = dequantise(*packed)
    dwide, dgate = ops.gated_swiglu_dgrad(dy2.float(), wide, gate)
    dh, dg = ops.gated_swiglu_dgrad(dy2, pair, gate)
    silu = {(): ops.swiglu(pair), (gate,): ops.gated_swiglu(pair, gate)}
    cases: list[tuple[str, tuple[Any, ...], tuple[Tensor, ...]]] = [
        ("add_rmsnorm", (h, x, w, 1e-6), (h + x, ys, rs)),
        ("rmsnorm_dgrad_add", (dy, x, w, rstd, h), (ops.rmsnorm_dgrad(dy, x, w, rstd) + h,)),
        ("rmsnorm_quantise", (x, w, 1e-6), (*quantise(y), r)),
        ("rmsnorm_quantise_wide", (x, w, 1e-6), (y, *quantise(y), r)),
        ("add_rmsnorm_quantise", (h, x, w, 1e-6), (h + x, *quantise(ys), rs)),
        ("add_rmsnorm_quantise_wide", (h, x, w, 1e-6), (h + x, ys, *quantise(ys), rs)),
        ("swiglu_fp8", packed, (ops.swiglu(wide).bfloat16(),)),
        ("gated_swiglu_fp8", (*packed, gate), (ops.gated_swiglu(wide, gate).bfloat16(),)),
        ("swiglu_fp8_dgrad", (dy2, *packed), (ops.swiglu_dgrad(dy2.float(), wide).bfloat16(),)),
        ("gated_swiglu_fp8_dgrad", (dy2, *packed, gate), (dwide.bfloat16(), dgate)),
        ("swiglu_dgrad_quantise_both", (dy2, pair), quantise_both(ops.swiglu_dgrad(dy2, pair))),
        ("gated_swiglu_dgrad_quantise_both", (dy2, pair, gate), (*quantise_both(dh), dg)),
        ("gated_swiglu_fp8_dgrad_quantise_both", (dy2, *packed, gate), (*quantise_both(dwide.bfloat16()), dgate)),
        *(
            (f"{'gated_' * len(gates)}swiglu_quantise{kind}", (pair, *gates), (*quantise(value), *saved))
            for gates, value in silu.items()
            for kind, saved in (("", ()), ("_kept", packed))
        ),
        (
            "gated_swiglu_fp8_quantise_requantise",
            (*packed, gate),
            requantise(*quantise(ops.gated_swiglu(wide, gate).bfloat16())),
        ),
        ("quantise_requantise", (x,), requantise(*quantise(x))),
    ]
    for name, arguments, wanted in cases:
        result = OPS[name](*arguments)
        for a, b in zip(result if isinstance(result, tuple) else (result,), wanted, strict=True):
            assert a.dtype == b.dtype and torch.equal(a.float(), b.float()), name
