"""Checks of the SwiGLU kernels in Triton's interpreter: against FP64, and fused ones against the separate kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from runtime.ops.quantise import dequantise
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved, rounded, same, within_tiles
from tests.compiler.emit.kernels.interpreted import U, double, random, run, within

CHECKED = (
    "swiglu", "swiglu_dgrad", "gated_swiglu", "gated_swiglu_dgrad",
    "swiglu_fp8", "swiglu_fp8_dgrad", "gated_swiglu_fp8", "gated_swiglu_fp8_dgrad",
    "swiglu_quantise", "gated_swiglu_quantise", "swiglu_quantise_kept", "gated_swiglu_quantise_kept",
    "swiglu_fp8_quantise_requantise", "gated_swiglu_fp8_quantise_requantise",
    "swiglu_dgrad_quantise_both", "gated_swiglu_dgrad_quantise_both",
    "swiglu_fp8_dgrad_quantise_both", "gated_swiglu_fp8_dgrad_quantise_both",
)  # fmt: skip
BF16 = torch.bfloat16


def operands(dtype: torch.dtype, rows: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    """h, dy, gate."""
    h, dy = 3 * random(rows, 2 * inner, dtype=dtype, seed=1), random(rows, inner, dtype=dtype, seed=2)
    if rows:
        h[0, :4] = torch.tensor([-200.0, -60.0, 60.0, 200.0])  # e^200 is more than FP32 holds
    return h, dy, random(rows, seed=3)


def magnitudes(dy: Tensor, h: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Magnitudes of the terms that dh and dgate are sums of, in FP64. h is FP64 too; it may be decoded from E4M3."""
    g, u = h.chunk(2, 1)
    weight = dy.abs() * (1 if gate is None else gate.abs()[:, None])
    slope = torch.sigmoid(g) * (1 + g.abs()) ** 2
    return torch.cat([weight * u.abs() * slope, weight * slope], 1), (dy * slope * u).abs().sum(1)


def swiglu(dtype: torch.dtype, rows: int, inner: int, gated: bool) -> None:
    h, dy, gate = operands(dtype, rows, inner)
    name, args = ("gated_swiglu", (h, gate)) if gated else ("swiglu", (h,))
    y = run(name, *args)
    exact = ops.OPS[name](*double(*args))
    # e^-h is off by |h| units, as its argument, h·log₂e in hardware, is rounded.
    within(y, exact, exact.abs() * (1 + h.double()[:, :inner].abs()), 12)

    gradients, expected = run(f"{name}_dgrad", dy, *args), ops.OPS[f"{name}_dgrad"](*double(dy, *args))
    (dh, dgate), (dh_exact, dgate_exact) = (gradients, expected) if gated else ((gradients, None), (expected, None))
    of_dh, of_dgate = magnitudes(dy.double(), h.double(), gate.double() if gated else None)
    within(dh, dh_exact, of_dh, 16)
    if gated:
        within(dgate, dgate_exact, of_dgate, inner + 16)


def of_eight_bits(rows: int, inner: int, gated: bool) -> None:
    """Check SwiGLU and its gradient for an input that was kept in E4M3."""
    wide, dy, gate = operands(BF16, rows, inner)
    h, s = ops.quantise(wide)
    narrow = dequantise(h, s)
    prefix, gates = ("gated_", (gate,)) if gated else ("", ())
    exact = ops.OPS[f"{prefix}swiglu"](*double(narrow, *gates))
    y = run(f"{prefix}swiglu_fp8", h, s, *gates)
    assert y.dtype == BF16
    within(y, exact, exact.abs() * (1 + narrow.double()[:, :inner].abs()), 14)

    gradients = run(f"{prefix}swiglu_fp8_dgrad", dy, h, s, *gates)
    expected = ops.OPS[f"{prefix}swiglu_dgrad"](*double(dy, narrow, *gates))
    (dh, dgate), (dh_exact, dgate_exact) = (gradients, expected) if gated else ((gradients, None), (expected, None))
    of_dh, of_dgate = magnitudes(dy.double(), narrow.double(), gate.double() if gated else None)
    within(dh, dh_exact, of_dh, 18)
    if gated:
        within(dgate, dgate_exact, of_dgate, inner + 18)


def quantised(rows: int, inner: int, gated: bool, pow2: bool) -> None:
    """The fused forward gives the same bits as SwiGLU followed by quantisation."""
    h, _, gate = operands(BF16, rows, inner)
    prefix, gates = ("gated_", (gate,)) if gated else ("", ())
    y = run(f"{prefix}swiglu", h, *gates)
    q, s = run(f"{prefix}swiglu_quantise", h, *gates, pow2)
    same((q, s), ops.quantise(y, pow2))
    kept_h = ops.quantise(h, pow2)
    same(run(f"{prefix}swiglu_quantise_kept", h, *gates, pow2), (q, s, *kept_h))
    exact = ops.OPS[f"{prefix}swiglu"](*double(h, *gates))
    weight = exact.abs() * (1 + h.double()[:, :inner].abs())
    within_tiles(q, s, exact, rounded(exact, BF16, weight, 12))

    y = run(f"{prefix}swiglu_fp8", *kept_h, *gates)
    same(
        run(f"{prefix}swiglu_fp8_quantise_requantise", *kept_h, *gates, pow2),
        ops.requantise(*ops.quantise(y, pow2), pow2),
    )


def quantised_gradient(rows: int, inner: int, gated: bool, fp8: bool, pow2: bool) -> None:
    wide, dy, gate = operands(BF16, rows, inner)
    h = ops.quantise(wide, pow2) if fp8 else (wide,)
    name, gates = f"{'gated_' * gated}swiglu{'_fp8' * fp8}_dgrad", (gate,) if gated else ()
    outputs, alone = run(f"{name}_quantise_both", dy, *h, *gates, pow2), run(name, dy, *h, *gates)
    dh = alone[0] if gated else alone
    same(outputs[:4], ops.quantise_both(dh, pow2))

    h64 = (dequantise(*h) if fp8 else wide).double()
    expected = ops.OPS[f"{'gated_' * gated}swiglu_dgrad"](*double(dy), h64, *double(*gates))
    exact = expected[0] if gated else expected
    of_dh, of_dgate = magnitudes(dy.double(), h64, gate.double() if gated else None)
    within_tiles(outputs[0], outputs[1], exact, rounded(exact, BF16, of_dh, 18))
    within_tiles(outputs[2], outputs[3], exact.t(), rounded(exact, BF16, of_dh, 18).t())
    if gated:
        assert outputs[4].dtype == torch.float32
        assert ((outputs[4].double() - expected[1]).abs() <= (inner + 18) * U * of_dgate + 1e-37).all()


def moves_each_byte_once() -> None:
    """Each byte moves once, except for the quantised gradient: two programs read what its halves share."""
    h, dy, gate = operands(BF16, 24, 256)
    kept_h, partial = ops.quantise(h), 2 * bytes_of(gate)  # two tiles of columns
    gates_of = {"swiglu": (), "gated_swiglu": (gate,)}
    for name, gates in gates_of.items():
        for call, read in (
            (name, (h, *gates)),
            (f"{name}_quantise", (h, *gates)),
            (f"{name}_quantise_kept", (h, *gates)),
            (f"{name}_fp8", (*kept_h, *gates)),
            (f"{name}_dgrad", (dy, h, *gates)),
            (f"{name}_fp8_dgrad", (dy, *kept_h, *gates)),
        ):
            with moved() as count:
                results = run(call, *read)
            assert count[0] == bytes_of(*read, *(results if isinstance(results, tuple) else (results,))), call
        with moved() as count:
            results = run(f"{name}_fp8_quantise_requantise", *kept_h, *gates)
        assert count[0] == bytes_of(*kept_h, *results) + 2 * bytes_of(*gates)  # gates once for each tile of columns
        for fp8 in (False, True):
            halves = 2 if gates else 1.5  # h: with gates, both programs read all of it
            read = 2 * bytes_of(dy) + halves * bytes_of(*(kept_h if fp8 else (h,))) + 4 * bytes_of(*gates)
            call = f"{name}{'_fp8' * fp8}_dgrad_quantise_both"
            with moved() as count:
                results = run(call, dy, *(kept_h if fp8 else (h,)), *gates)
            assert count[0] == read + bytes_of(*results) + (2 * partial if gates else 0), call
