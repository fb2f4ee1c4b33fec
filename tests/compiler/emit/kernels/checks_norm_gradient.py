"""Checks of the gradient of a norm fused with its neighbours, in Triton's interpreter: bit for bit against the separate
kernels, which have checks of their own, and against FP64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runtime import ops
from tests.compiler.emit.kernels.checks_permute import chosen
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved, rounded, same, within_tiles
from tests.compiler.emit.kernels.checks_rmsnorm import gradient_magnitude, view
from tests.compiler.emit.kernels.interpreted import EPS, double, random, run, within

CHECKED = (
    "rmsnorm_again_dgrad_add", "rmsnorm_again_quantise_dgrad_add",
    "sum_rmsnorm_dgrad_add", "sum_rmsnorm_again_dgrad_add", "sum_rmsnorm_again_quantise_dgrad_add",
    "permuted_rmsnorm_dgrad_add", "permuted_rmsnorm_again_dgrad_add",
)  # fmt: skip


def apart(sums: str, remade: str, parts: tuple[Any, ...], norm: tuple[Tensor, ...], pow2: bool) -> tuple[Tensor, ...]:
    """The results of the separate kernels; `norm`: x, w, rstd, add."""
    x, w, rstd, add = norm
    dy = parts[0]
    if sums == "sum_":
        dy = parts[0] + parts[1]
    elif sums:
        dy = run("permute_dgrad_add", *parts)
    y: tuple[Tensor, ...] = ()
    if remade:
        y = run("rmsnorm_quantise", x, w, EPS, pow2) if "quantise" in remade else run("rmsnorm", x, w, EPS)
        rstd = y[-1]
    return *((dy,) if sums else ()), *y, run("rmsnorm_dgrad_add", dy, x, w, rstd, add)


def against_fp64(found: tuple[Tensor, ...], dy: Tensor, norm: tuple[Tensor, ...], remade: str) -> None:
    """Check results against FP64 for the computed dy; the first result follows from dy."""
    x, w, rstd, add = norm
    columns, dtype = x.shape[1], x.dtype
    dy64, x64, w64, add64 = double(dy, x, w, add)
    y_exact, rstd64 = ops.rmsnorm(x64, w64, EPS) if remade else (None, rstd.double())
    if remade:
        *y, rstd_found, _ = found
        within(rstd_found, rstd64, rstd64, columns + 6)
        if "quantise" in remade:
            within_tiles(*y, y_exact, rounded(y_exact, dtype, y_exact.abs(), columns + 8))
        else:
            within(y[0], y_exact, y_exact.abs(), columns + 8)
    # A recomputed rstd has columns + 6 roundings, and occurs in the gradient three times.
    operations = columns + 10 + (3 * (columns + 6) if remade else 0)
    before = rounded(
        ops.rmsnorm_dgrad(dy64, x64, w64, rstd64), dtype, gradient_magnitude(dy64, x64, w64, rstd64), operations
    )
    exact = ops.rmsnorm_dgrad_add(dy64, x64, w64, rstd64, add64)
    after = rounded(exact.abs() + before, dtype, exact.abs() + before, 1)
    assert ((found[-1].double() - exact).abs() <= before + after).all()


def gradient(dtype: torch.dtype, rows: int, columns: int, k: int) -> None:
    """All ops. Arguments that may be views are views."""
    x, add = (view(dtype, rows, columns, seed=seed) for seed in (1, 4))
    w = random(columns, dtype=dtype, seed=2)
    norm = x, w, run("rmsnorm", x, w, EPS)[1], add
    order = ops.permute(x, *chosen(rows, k + 3, k), k + 3)[2]
    addend = random(rows, columns, dtype=dtype, seed=8)
    permuted = random(rows * k, columns, dtype=dtype, seed=6), order, k, random(rows, columns, dtype=dtype, seed=7)
    summed = tuple(view(dtype, rows, columns, seed=seed) for seed in (9, 10))
    for sums, parts in (
        ("", summed[:1]),
        ("sum_", summed),
        ("permuted_", (*permuted, None)),
        ("permuted_", (*permuted, addend)),
    ):
        for remade in ("", "_again", "_again_quantise"):
            op = f"{sums}rmsnorm{remade}_dgrad_add"
            if op in CHECKED:
                pow2 = (columns % 2 > 0,) if "quantise" in remade else ()
                outputs = run(op, *parts, x, w, EPS if remade else norm[2], add, *pow2)
                same(outputs, apart(sums, remade, parts, norm, *pow2 or (False,)))
                of_dy = (outputs[0], outputs[1:]) if sums else (parts[0], outputs)
                against_fp64(of_dy[1], of_dy[0], norm, remade)
                assert all(output.is_contiguous() or output.t().is_contiguous() for output in outputs)


def moves_each_byte_once() -> None:
    """Each byte moves once, except the weight, which each program reads, mostly from L1; and the order, inverted."""
    rows, columns, k = 4, 1100, 3
    a, b, x, add, shared, addend = (random(rows, columns, dtype=torch.bfloat16, seed=seed) for seed in range(6))
    w, rstd = random(columns, dtype=torch.bfloat16), random(rows)
    drows, order = random(rows * k, columns, dtype=torch.bfloat16), ops.permute(x, *chosen(rows, 5, k), 5)[2]
    for op in CHECKED:
        sums = op.split("rmsnorm")[0]
        parts = {"": (a,), "sum_": (a, b), "permuted_": (drows, order, k, shared, addend)}[sums]
        arguments = *parts, x, w, EPS if "again" in op else rstd, add
        with moved() as count:
            results = run(op, *arguments)
        read = [tensor for tensor in arguments if isinstance(tensor, Tensor) and tensor is not w]
        places = 2 * 4 * rows * k if sums == "permuted_" else 0
        assert count[0] == bytes_of(*read, *results) + rows * bytes_of(w) + places, op
