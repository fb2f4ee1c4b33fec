"""Checks of the grouped FP8 products. The reference is FP64, of dequantised operands; for bounds see linear_fp8's."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from tests.compiler.emit.kernels.checks_linear_fp8 import exact, operand, operations, weight
from tests.compiler.emit.kernels.interpreted import random, run, within

CHECKED = ("grouped_linear_fp8", "grouped_linear_fp8_dgrad", "grouped_linear_fp8_wgrad_")


def grouped_linear_fp8(out: int, inner: int, experts: int, sizes: tuple[int, ...]) -> None:
    rows, offsets = sum(sizes), torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, xs = operand(rows, inner, seed=1)
    dy, dys = operand(rows, out, seed=2)
    w, ws, w_turned = weight(experts, out, inner, seed=3)
    w64 = exact(w, ws)

    def product(name: str, found: Tensor, a: Tensor, terms: int) -> None:
        op = ops.OPS[name]
        within(found, op(a, w64, offsets), op(a.abs(), w64.abs(), offsets), operations(terms))

    product("grouped_linear", run("grouped_linear_fp8", x, xs, w, ws, offsets), exact(x, xs), inner)
    dx = run("grouped_linear_fp8_dgrad", dy, dys, w_turned, ws.transpose(1, 2), offsets)
    product("grouped_linear_dgrad", dx, exact(dy, dys), out)

    x, xs = operand(inner, rows, seed=4)
    dy, dys = operand(out, rows, seed=5)
    acc = random(experts, out, inner, seed=6)
    x64, dy64, acc64 = exact(x, xs).t().contiguous(), exact(dy, dys).t().contiguous(), acc.double()
    assert run("grouped_linear_fp8_wgrad_", acc, dy, dys, x, xs, offsets) is None
    expected = acc64 + ops.grouped_linear_wgrad(dy64, x64, offsets, experts)
    magnitude = acc64.abs() + ops.grouped_linear_wgrad(dy64.abs(), x64.abs(), offsets, experts)
    within(acc, expected, magnitude, operations(rows) + 1)


def grouped_linear_fp8_of_random_sizes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = int(torch.randint(1, 4, (), generator=generator))
    sizes = 128 * torch.randint(0, 3, (experts,), generator=generator)
    out_features, inner = (16 * int(torch.randint(1, 11, (), generator=generator)) for _ in range(2))
    grouped_linear_fp8(out_features, inner, experts, tuple(sizes.tolist()))


def nan_stays_where_it_is() -> None:
    """What one row holds must not reach other rows or other experts."""
    out_features, inner, experts, offsets = 48, 32, 2, torch.tensor([128, 256], dtype=torch.int32)

    def results(first: float) -> list[Tensor]:
        (x, xs), (dy, dys) = operand(256, inner, seed=1), operand(256, out_features, seed=2)
        w, ws, w_turned = weight(experts, out_features, inner, seed=3)
        x[0], dy[0] = first, first
        acc = random(experts, out_features, inner, seed=4)
        (x_turned, xs_turned), (dy_turned, dys_turned) = operand(inner, 256, seed=5), operand(out_features, 256, seed=6)
        x_turned[:, 0], dy_turned[:, 0] = first, first
        run("grouped_linear_fp8_wgrad_", acc, dy_turned, dys_turned, x_turned, xs_turned, offsets)
        dx = run("grouped_linear_fp8_dgrad", dy, dys, w_turned, ws.transpose(1, 2), offsets)
        return [run("grouped_linear_fp8", x, xs, w, ws, offsets), dx, acc]

    for with_nan, without in zip(results(torch.nan), results(1.0), strict=True):
        assert with_nan[0].isnan().all() and torch.equal(with_nan[1:], without[1:])
