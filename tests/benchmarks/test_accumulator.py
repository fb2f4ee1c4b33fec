"""Low-bit sums against integers that are truncated after each 32 products."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from benchmarks.studies import accumulator
from runtime.ops import OPS
from runtime.ops.linear import scaled_product
from runtime.ops.quantise import dequantise

E4M3 = torch.float8_e4m3fn


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All products of this process are cut until the test ends."""
    for name in accumulator.USERS:
        for attribute in ("runs_natively", "scaled_product"):
            monkeypatch.setattr(sys.modules[name], attribute, getattr(sys.modules[name], attribute))
    accumulator.replace()
    return


def operand(rows: int, columns: int, seed: int, tile: int = 1) -> tuple[Tensor, Tensor]:
    """Multiples of 1/64 below 2 with scales of 1 and 2: sums of some hundreds of their products are exact in FP32."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(-15, 16, (rows, columns), generator=generator) / 8
    data *= 2.0 ** -torch.randint(0, 4, (rows, columns), generator=generator)
    scales = 2.0 ** torch.randint(0, 2, (-(-rows // tile), -(-columns // 128)), generator=generator)
    return data.to(E4M3), scales


def cut(total: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The 14 highest bits."""
    bits = np.frexp(total.astype(np.float64))[1].astype(np.int64)
    units = 1 << np.maximum(bits - 14, 0)
    return np.sign(total) * (np.abs(total) // units * units)


def expected(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], start: int = 0, end: int | None = None) -> Tensor:
    """Sums of integers, units of 2⁻¹²."""
    integers = [
        (64 * x.double() * s.double().repeat_interleave(128, 1)[:, : x.shape[1]])[:, start:end] for x, s in (a, b)
    ]
    left, right = (tensor.numpy().astype(np.int64) for tensor in integers)
    total = np.zeros((len(left), len(right)), np.int64)
    for first in range(0, left.shape[1], 32):
        total = cut(total + left[:, first : first + 32] @ right[:, first : first + 32].T)
    return torch.from_numpy(total * 2.0**-12).float()


@pytest.mark.parametrize("columns", [1, 31, 128, 300])
def test_sums_are_truncated_after_each_32_products(columns: int) -> None:
    a, b = operand(5, columns, 1), operand(4, columns, 2)
    product = accumulator.cut_product(*a, *b)
    assert torch.equal(product, expected(a, b))
    assert torch.equal(product, dequantise(*a) @ dequantise(*b).t()) == (columns == 1), "cuts change longer sums"


def test_errors_are_bounded_by_the_truncations() -> None:
    """With any scales: each truncation changes a sum by less than 2⁻¹³ of it, towards zero."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 40, 512, generator=generator).abs()
    (a, scales_a), (b, scales_b) = (OPS["quantise"](matrix) for matrix in x)
    product = accumulator.cut_product(a, scales_a, b, scales_b).double()
    exact = dequantise(a, scales_a).double() @ dequantise(b, scales_b).double().t()
    assert (product < exact).all() and (product > exact * (1 - 16 * 2.0**-13)).all()
    promoted = scaled_product(a, scales_a, b, scales_b)
    assert ((promoted - exact).abs() < 2.0**-18 * exact).all(), "these are the sums of fp8_block"
    assert ((exact - product) / exact).mean() > 2.0**-14


@pytest.mark.usefixtures("replaced")
def test_all_fp8_products_truncate_their_sums() -> None:
    """Plain and grouped products, forward and both gradients."""
    x, dy, w = operand(256, 96, 4), operand(256, 40, 5), operand(40, 96, 6, tile=128)
    rows = w[1].expand(40, -1)
    assert torch.equal(OPS["linear_fp8"](*x, *w).float(), expected(x, (w[0], rows)).bfloat16().float())
    offsets = torch.tensor([128, 256], dtype=torch.int32)
    experts = w[0].expand(2, 40, 96), w[1].expand(2, 1, 1)
    assert torch.equal(OPS["grouped_linear_fp8"](*x, *experts, offsets), OPS["linear_fp8"](*x, *w))
    back = w[0].t().contiguous(), w[1].t()
    dx = expected(dy, (back[0], back[1].expand(96, -1))).bfloat16()
    assert torch.equal(OPS["linear_fp8_dgrad"](*dy, *back), dx)
    assert torch.equal(OPS["grouped_linear_fp8_dgrad"](*dy, back[0].expand(2, 96, 40), experts[1], offsets), dx)
    left, right = operand(8, 256, 7), operand(6, 256, 8)
    acc, of_experts = torch.ones(8, 6), torch.ones(2, 8, 6)
    OPS["linear_fp8_wgrad_"](acc, *left, *right)
    assert torch.equal(acc, 1 + expected(left, right))
    OPS["grouped_linear_fp8_wgrad_"](of_experts, *left, *right, offsets)
    halves = expected(left, right, 0, 128), expected(left, right, 128, 256)
    assert torch.equal(of_experts, 1 + torch.stack(halves))
