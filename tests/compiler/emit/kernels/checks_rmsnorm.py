"""Checks of the RMSNorm kernels in Triton's interpreter: against FP64, and fused ones against the separate kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved, rounded, same, within_tiles
from tests.compiler.emit.kernels.interpreted import EPS, double, random, run, within

CHECKED = (
    "rmsnorm", "rmsnorm_dgrad", "rmsnorm_wgrad_", "add_rmsnorm", "rmsnorm_dgrad_add",
    "head_rmsnorm", "head_rmsnorm_dgrad", "head_rmsnorm_wgrad_",
    "rmsnorm_quantise", "rmsnorm_quantise_wide", "add_rmsnorm_quantise", "add_rmsnorm_quantise_wide",
)  # fmt: skip


def view(dtype: torch.dtype, rows: int, columns: int, seed: int) -> Tensor:
    """Some columns of a wider tensor."""
    return random(rows, columns + 5, dtype=dtype, seed=seed)[:, 3 : columns + 3]


def gradient_magnitude(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> Tensor:
    """The sum of the magnitudes of the input gradient's terms, in FP64."""
    slope = (dy * w * x).abs().mean(-1, keepdim=True) * rstd[..., None] ** 2
    return rstd[..., None] * ((dy * w).abs() + x.abs() * slope)


def rmsnorm(dtype: torch.dtype, rows: int, columns: int) -> None:
    x, dy = view(dtype, rows, columns, seed=1), random(rows, columns, dtype=dtype)
    w = random(columns, dtype=dtype, seed=2)
    y, rstd = run("rmsnorm", x, w, EPS)
    y_exact, rstd_exact = ops.rmsnorm(*double(x, w), EPS)
    assert rstd.dtype == torch.float32
    within(rstd, rstd_exact, rstd_exact, columns + 6)
    within(y, y_exact, y_exact.abs(), columns + 8)

    exact = dy64, x64, _, rstd64 = double(dy, x, w, rstd)
    dx = run("rmsnorm_dgrad", dy, x, w, rstd)
    within(dx, ops.rmsnorm_dgrad(*exact), gradient_magnitude(*exact), columns + 10)

    acc = random(columns, seed=3)
    expected = acc.double() + ops.rmsnorm_wgrad(dy64, x64, rstd64)
    magnitude = expected.abs() + (dy64 * x64 * rstd64[:, None]).abs().sum(0)
    assert run("rmsnorm_wgrad_", acc, dy, x, rstd) is None
    within(acc, expected, magnitude, rows + 4)


def fused(dtype: torch.dtype, rows: int, columns: int) -> None:
    h, x = view(dtype, rows, columns, seed=1), view(dtype, rows, columns, seed=4)
    w, dy = random(columns, dtype=dtype, seed=2), random(rows, columns, dtype=dtype)
    total, y, rstd = run("add_rmsnorm", h, x, w, EPS)
    same(total, h + x)
    same((y, rstd), run("rmsnorm", total, w, EPS))
    y_exact, rstd_exact = ops.rmsnorm(*double(total, w), EPS)
    within(rstd, rstd_exact, rstd_exact, columns + 6)
    within(y, y_exact, y_exact.abs(), columns + 8)

    dx = run("rmsnorm_dgrad_add", dy, x, w, rstd, h)
    same(dx, run("rmsnorm_dgrad", dy, x, w, rstd) + h)
    exact = dy64, x64, w64, rstd64, _ = double(dy, x, w, rstd, h)
    dx_exact = ops.rmsnorm_dgrad(dy64, x64, w64, rstd64)
    before = rounded(dx_exact, dtype, gradient_magnitude(dy64, x64, w64, rstd64), columns + 10)
    sum_exact = ops.rmsnorm_dgrad_add(*exact)
    after = rounded(sum_exact.abs() + before, dtype, sum_exact.abs() + before, 1)
    assert ((dx.double() - sum_exact).abs() <= before + after).all()


def heads(dtype: torch.dtype, rows: int, count: int, columns: int) -> None:
    x, dy = view(dtype, rows, count * columns, seed=1), view(dtype, rows, count * columns, seed=4)
    w = random(columns, dtype=dtype, seed=2)
    y, rstd = run("head_rmsnorm", x, w, EPS)
    y_exact, rstd_exact = ops.head_rmsnorm(*double(x, w), EPS)
    assert rstd.dtype == torch.float32
    within(rstd, rstd_exact, rstd_exact, columns + 6)
    within(y, y_exact, y_exact.abs(), columns + 8)

    exact = dy64, x64, w64, rstd64 = double(dy, x, w, rstd)
    by_head = (tensor.unflatten(1, (count, columns)) for tensor in (dy64, x64))
    magnitude = gradient_magnitude(*by_head, w64, rstd64).flatten(1)
    within(run("head_rmsnorm_dgrad", dy, x, w, rstd), ops.head_rmsnorm_dgrad(*exact), magnitude, columns + 10)

    acc = random(columns, seed=3)
    part = ops.head_rmsnorm_wgrad(dy64.abs(), x64.abs(), rstd64)
    expected = acc.double() + ops.head_rmsnorm_wgrad(dy64, x64, rstd64)
    assert run("head_rmsnorm_wgrad_", acc, dy, x, rstd) is None
    within(acc, expected, expected.abs() + part, rows * count + 4)


def quantised(dtype: torch.dtype, rows: int, columns: int, pow2: bool) -> None:
    h, x = view(dtype, rows, columns, seed=1), view(dtype, rows, columns, seed=4)
    w = random(columns, dtype=dtype, seed=2)
    q, s, rstd = run("rmsnorm_quantise", x, w, EPS, pow2)
    y, rstd_alone = run("rmsnorm", x, w, EPS)
    same((q, s, rstd), (*ops.quantise(y, pow2), rstd_alone))
    same(run("rmsnorm_quantise_wide", x, w, EPS, pow2), (y, q, s, rstd))
    exact = ops.rmsnorm(*double(x, w), EPS)[0]
    within_tiles(q, s, exact, rounded(exact, dtype, exact.abs(), columns + 8))

    total, q, s, rstd = run("add_rmsnorm_quantise", h, x, w, EPS, pow2)
    sum_alone, y, rstd_alone = run("add_rmsnorm", h, x, w, EPS)
    same((total, q, s, rstd), (sum_alone, *ops.quantise(y, pow2), rstd_alone))
    same(run("add_rmsnorm_quantise_wide", h, x, w, EPS, pow2), (total, y, q, s, rstd))


def moves_each_byte_once() -> None:
    """Each byte moves once, except the weight, which each program reads, mostly from L1."""
    rows, columns = 6, 1100
    h, x, dy = (random(rows, columns, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    w, rstd, acc = random(columns, dtype=torch.bfloat16), random(rows), random(columns)
    for name, tensors, constants in (
        ("rmsnorm", (x,), (EPS,)),
        ("add_rmsnorm", (h, x), (EPS,)),
        ("rmsnorm_quantise", (x,), (EPS,)),
        ("rmsnorm_quantise_wide", (x,), (EPS,)),
        ("add_rmsnorm_quantise", (h, x), (EPS,)),
        ("add_rmsnorm_quantise_wide", (h, x), (EPS,)),
        ("rmsnorm_dgrad", (dy, x), (rstd,)),
        ("rmsnorm_dgrad_add", (dy, x), (rstd, h)),
    ):
        with moved() as count:
            results = run(name, *tensors, w, *constants)
        read = (*tensors, *(constant for constant in constants if isinstance(constant, Tensor)))
        written = results if isinstance(results, tuple) else (results,)
        assert count[0] == bytes_of(*read, *written) + rows * bytes_of(w), name
    dy, x, rstd = random(40, columns, dtype=torch.bfloat16), random(40, columns, dtype=torch.bfloat16), random(40)
    with moved() as count:
        run("rmsnorm_wgrad_", acc, dy, x, rstd)
    splits, blocks = 8, 2  # 4 SMs; a block of columns reads rstd for itself, partial sums are written and read
    assert count[0] == bytes_of(dy, x) + blocks * bytes_of(rstd) + (2 * splits + 2) * bytes_of(acc)
