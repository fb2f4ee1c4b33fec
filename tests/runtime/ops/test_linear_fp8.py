"""Products of E4M3 operands against FP64 products of the dequantised operands, and against each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime import ops
from runtime.ops.quantise import quantise, quantise_blocks

U, HALF = 2.0**-24, 2.0**-8  # units of FP32 and BF16
E4M3 = torch.float8_e4m3fn


def operand(*shape: int, seed: int, tile: int = 1) -> tuple[Tensor, Tensor]:
    """(data, scales of `tile` × 128 tiles)."""
    generator = torch.Generator().manual_seed(seed)
    data = (8 * torch.randn(shape, generator=generator)).to(E4M3)
    return data, torch.randn((*shape[:-2], -(-shape[-2] // tile), -(-shape[-1] // 128)), generator=generator).exp2()


def exact(data: Tensor, scales: Tensor) -> Tensor:
    tile = 1 if scales.shape[-2] == data.shape[-2] else 128
    wide = scales.double().repeat_interleave(128, -1).repeat_interleave(tile, -2)
    return data.double() * wide[..., : data.shape[-2], : data.shape[-1]]


def within(found: Tensor, expected: Tensor, magnitude: Tensor, terms: int) -> None:
    """Assert the errors of one rounding, and of sums of 128 exact products, each scaled (three roundings) and added."""
    stored = HALF if found.dtype == torch.bfloat16 else 0.0
    bound = stored * expected.abs() + (132 + terms / 128) * U * magnitude
    assert found.shape == expected.shape and ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("rows", "out", "inner"), [(1, 1, 1), (5, 130, 300), (140, 64, 128), (0, 3, 5), (127, 129, 256), (129, 256, 127)]
)
def test_products_equal_those_of_the_scaled_operands(rows: int, out: int, inner: int) -> None:
    x, dy, w = operand(rows, inner, seed=1), operand(rows, out, seed=2), operand(out, inner, seed=3, tile=128)
    x64, dy64, w64 = exact(*x), exact(*dy), exact(*w)
    y = ops.linear_fp8(*x, *w)
    assert y.dtype == torch.bfloat16
    within(y, x64 @ w64.t(), x64.abs() @ w64.abs().t(), inner)
    dx = ops.linear_fp8_dgrad(*dy, w[0].t().contiguous(), w[1].t())
    within(dx, dy64 @ w64, dy64.abs() @ w64.abs(), out)

    x, dy = operand(inner, rows, seed=4), operand(out, rows, seed=5)
    x64, dy64 = exact(*x), exact(*dy)
    acc = torch.ones(out, inner)
    assert ops.linear_fp8_wgrad_(acc, *dy, *x) is None
    within(acc, 1 + dy64 @ x64.t(), 1 + dy64.abs() @ x64.abs().t(), rows + 128)


def test_sums_of_integers_are_exact() -> None:
    x, w = (torch.randint(-8, 9, shape).to(E4M3) for shape in ((9, 200), (7, 200)))
    scales = torch.ones(9, 2), torch.ones(1, 2)
    exact_sum = (x.double() @ w.double().t()).to(torch.bfloat16)
    assert torch.equal(ops.linear_fp8(x, scales[0], w, scales[1]), exact_sum)


def test_quantised_operands_give_the_product() -> None:
    """The error of a product is that of E4M3, at most 2⁻⁴ of a number, for both operands, and that of BF16."""
    x, w = torch.randn(70, 200), torch.randn(150, 200)
    x_data, x_scales = quantise(x)
    w_data, w_scales, _ = quantise_blocks(w)
    error = ops.linear_fp8(x_data, x_scales, w_data, w_scales).double() - x.double() @ w.double().t()
    assert error.norm() <= (2 * 2.0**-4 + HALF) * (x.double().norm(dim=1)[:, None] * w.double().norm(dim=1)).norm()


@pytest.mark.parametrize("sizes", [(0, 0), (3, 0, 5, 1), (128, 130, 0, 126), (0, 300), (127, 129, 256, 1)])
def test_groups_meet_their_experts(sizes: tuple[int, ...]) -> None:
    E, N, K, rows = len(sizes), 20, 140, sum(sizes)
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    (x, xs), (w, ws) = operand(rows, K, seed=1), operand(E, N, K, seed=2, tile=128)
    y = ops.grouped_linear_fp8(x, xs, w, ws, offsets)
    dy, dys = operand(rows, N, seed=3)
    w_turned, ws_turned = w.transpose(1, 2).contiguous(), ws.transpose(1, 2)
    dx = ops.grouped_linear_fp8_dgrad(dy, dys, w_turned, ws_turned, offsets)
    for e, end in enumerate(offsets.tolist()):
        mine = slice(end - sizes[e], end)
        assert torch.equal(y[mine], ops.linear_fp8(x[mine], xs[mine], w[e], ws[e]))
        assert torch.equal(dx[mine], ops.linear_fp8_dgrad(dy[mine], dys[mine], w_turned[e], ws_turned[e]))


@pytest.mark.parametrize("sizes", [(0, 0), (128, 0), (0, 384), (256, 128)])
def test_weight_gradients_of_groups_of_whole_tiles(sizes: tuple[int, int]) -> None:
    E, N, K, rows = 2, 20, 140, sum(sizes)
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x_turned, dy_turned = operand(K, rows, seed=4), operand(N, rows, seed=5)
    x64, dy64 = exact(*x_turned), exact(*dy_turned)
    acc, total, magnitude = torch.ones(E, N, K), torch.ones(E, N, K).double(), torch.ones(E, N, K).double()
    ops.grouped_linear_fp8_wgrad_(acc, *dy_turned, *x_turned, offsets)

    for e, end in enumerate(offsets.tolist()):
        mine = slice(end - sizes[e], end)
        total[e] += dy64[:, mine] @ x64[:, mine].t()
        magnitude[e] += dy64[:, mine].abs() @ x64[:, mine].abs().t()
    within(acc, total, magnitude, rows + 128)
    with pytest.raises(AssertionError):
        ops.grouped_linear_fp8_wgrad_(acc, *dy_turned, *x_turned, offsets - 1)
