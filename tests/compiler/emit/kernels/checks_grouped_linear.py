"""Checks of the grouped products. The reference is the op in FP64 on the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from tests.compiler.emit.kernels.interpreted import double, random, run, within

CHECKED = ("grouped_linear", "grouped_linear_dgrad", "grouped_linear_wgrad_")


def grouped_linear(dtype: torch.dtype, out: int, inner: int, experts: int, sizes: tuple[int, ...]) -> None:
    rows, offsets = sum(sizes), torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, dy = random(rows, inner, dtype=dtype, seed=1), random(rows, out, dtype=dtype, seed=2)
    w = random(experts, out, inner, dtype=dtype, seed=3)
    x64, dy64, w64 = double(x, dy, w)

    def product(name: str, found: Tensor, a: Tensor, b: Tensor, terms: int) -> None:
        within(found, ops.OPS[name](a, b, offsets), ops.OPS[name](a.abs(), b.abs(), offsets), terms + 2)

    product("grouped_linear", run("grouped_linear", x, w, offsets), x64, w64, inner)
    product("grouped_linear_dgrad", run("grouped_linear_dgrad", dy, w, offsets), dy64, w64, out)

    acc = random(experts, out, inner, seed=4)
    expected = acc.double() + ops.grouped_linear_wgrad(dy64, x64, offsets, experts)
    magnitude = expected.abs() + ops.grouped_linear_wgrad(dy64.abs(), x64.abs(), offsets, experts)
    assert run("grouped_linear_wgrad_", acc, dy, x, offsets) is None
    within(acc, expected, magnitude, max(rows, 1) + 2)


def grouped_linear_of_random_sizes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = int(torch.randint(1, 7, (), generator=generator))
    sizes = torch.randint(0, 250, (experts,), generator=generator)
    sizes[torch.rand(sizes.shape, generator=generator) < 0.3] = 0
    out_features, inner = (int(torch.randint(1, 100, (), generator=generator)) for _ in range(2))
    grouped_linear(torch.bfloat16 if seed % 2 else torch.float32, out_features, inner, experts, tuple(sizes.tolist()))


def grouped_linear_with_nan(dtype: torch.dtype, out: int, inner: int) -> None:
    """An expert's first row fills up a partial tile; its values must not reach other rows or other
    experts. The same holds for weights: a block may extend into the next expert's."""
    experts, offsets = 2, torch.tensor([35, 57], dtype=torch.int32)

    def results(first: float, second: float) -> list[Tensor]:
        x, dy = random(57, inner, dtype=dtype, seed=1), random(57, out, dtype=dtype, seed=2)
        w, acc = random(experts, out, inner, dtype=dtype, seed=3), random(experts, out, inner, seed=4)
        x[0], dy[0], w[1] = first, first, second
        run("grouped_linear_wgrad_", acc, dy, x, offsets)
        return [run("grouped_linear", x, w, offsets), run("grouped_linear_dgrad", dy, w, offsets), acc]

    without_nan = results(1.0, 1.0)
    for with_nan, without in zip(results(torch.nan, 1.0), without_nan, strict=True):
        assert with_nan[0].isnan().all() and torch.equal(with_nan[1:], without[1:])
    for with_nan, without in zip(results(1.0, torch.nan)[:2], without_nan, strict=False):
        second = torch.tensor([row >= 35 for row in range(57)])
        assert with_nan[second].isnan().all() and torch.equal(with_nan[~second], without[~second])
