"""Products of E4M3 operands in C++ against FP64, for any size, within the rounding errors of FP32.

The error of a sum of 128 exact products is 128 units of the sum of their magnitudes; each of its two scales adds one
unit, and each added tile, or part of a tile, one more.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime import ops
from runtime.ops.native import library
from runtime.ops.native import ops as native
from tests.runtime.ops.test_linear_fp8 import E4M3, HALF, U, exact, operand

some = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.integers(0, 2**31), st.integers(0, 300), st.integers(1, 300), st.integers(1, 300)
pytestmark = pytest.mark.usefixtures("instructions")


def within(found: Tensor, expected: Tensor, magnitude: Tensor, tiles: int, most: int) -> None:
    """`most`: the number of terms of the longest sum."""
    stored = HALF if found.dtype == torch.bfloat16 else 0.0
    bound = stored * expected.abs() + 1.01 * (min(most, 128) + 2 + tiles) * U * magnitude
    assert found.shape == expected.shape and ((found.double() - expected).abs() <= bound).all()


def test_products_run_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    def counted(name: str, dtype: torch.dtype, *args: Tensor | float | None) -> None:
        names.append((name, dtype))
        library.call(name, dtype, *args)

    monkeypatch.setattr(native, "call", counted)
    test_linear.hypothesis.inner_test(0, 5, 6, 7)  # type: ignore[attr-defined]
    test_groups.hypothesis.inner_test(0, [4, 3], 6, 7)  # type: ignore[attr-defined]
    products = ("linear", "linear", "linear_wgrad", *("linear",) * 6, "linear_wgrad")
    assert names == [(name, E4M3) for name in products]


@some
@given(*SIZES)
def test_linear(seed: int, R: int, K: int, N: int) -> None:
    x, dy, w = operand(R, K, seed=seed), operand(R, N, seed=seed + 1), operand(N, K, seed=seed + 2, tile=128)
    x64, dy64, w64 = exact(*x), exact(*dy), exact(*w)
    within(ops.linear_fp8(*x, *w), x64 @ w64.t(), x64.abs() @ w64.abs().t(), -(-K // 128), K)
    dx = ops.linear_fp8_dgrad(*dy, w[0].t().contiguous(), w[1].t())
    within(dx, dy64 @ w64, dy64.abs() @ w64.abs(), -(-N // 128), N)
    x, dy = operand(K, R, seed=seed + 3), operand(N, R, seed=seed + 4)
    x64, dy64 = exact(*x), exact(*dy)
    acc = torch.full((N, K), 3.0)
    ops.linear_fp8_wgrad_(acc, *dy, *x)
    within(acc, 3 + dy64 @ x64.t(), 3 + dy64.abs() @ x64.abs().t(), 1 - (-R // 128), R)


@some
@given(SIZES[0], st.lists(st.integers(0, 200), min_size=1, max_size=6), SIZES[2], SIZES[3])
def test_groups(seed: int, sizes: list[int], K: int, N: int) -> None:
    """Experts may have no rows and start anywhere; for weight gradients they have whole tiles."""
    E, R = len(sizes), sum(sizes)
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    (x, xs), (w, ws) = operand(R, K, seed=seed), operand(E, N, K, seed=seed + 1, tile=128)
    dy, dys = operand(R, N, seed=seed + 2)
    y, dx = (
        ops.grouped_linear_fp8(x, xs, w, ws, offsets),
        ops.grouped_linear_fp8_dgrad(dy, dys, w.mT.contiguous(), ws.mT, offsets),
    )
    for e, end in enumerate(offsets.tolist()):
        mine = slice(end - sizes[e], end)
        assert torch.equal(y[mine], ops.linear_fp8(x[mine], xs[mine], w[e], ws[e]))
        assert torch.equal(dx[mine], ops.linear_fp8_dgrad(dy[mine], dys[mine], w[e].t().contiguous(), ws[e].t()))
    sizes = [-(-size // 128) * 128 for size in sizes]
    R, offsets = sum(sizes), torch.tensor(sizes).cumsum(0).to(torch.int32)
    x_turned, dy_turned = operand(K, R, seed=seed + 3), operand(N, R, seed=seed + 4)
    x64, dy64 = exact(*x_turned), exact(*dy_turned)
    acc, total, magnitude = torch.full((E, N, K), 3.0), *torch.full((2, E, N, K), 3.0, dtype=torch.float64)
    ops.grouped_linear_fp8_wgrad_(acc, *dy_turned, *x_turned, offsets)
    for e, end in enumerate(offsets.tolist()):
        mine = slice(end - sizes[e], end)
        total[e] += dy64[:, mine] @ x64[:, mine].t()
        magnitude[e] += dy64[:, mine].abs() @ x64[:, mine].abs().t()
    within(acc, total, magnitude, 2 + R // 128, R)


@pytest.mark.parametrize("layout", ["rows", "columns", "view"])
def test_any_layout_of_scales_and_rows(layout: str) -> None:
    x, xs = operand(70, 300, seed=1)
    w, ws = operand(50, 300, seed=2, tile=128)
    wanted = ops.linear_fp8(x, xs, w, ws)
    if layout == "columns":
        xs, ws = xs.t().contiguous().t(), ws.t().contiguous().t()
    elif layout == "view":
        x = torch.cat((x.view(torch.uint8), torch.full((70, 9), 0x7F, dtype=torch.uint8)), 1)[:, :300].view(E4M3)
        xs = torch.cat((torch.full((70, 1), torch.nan), xs), 1)[:, 1:]
    assert torch.equal(ops.linear_fp8(x, xs, w, ws), wanted)


def test_every_pair_of_numbers_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    x, scales = torch.zeros(256, 3).to(E4M3), torch.ones(256, 1)
    x[:, 1] = codes  # the others of its row are zero: 0 · NaN is NaN, and there are two NaNs
    y = ops.linear_fp8(x, scales, x, torch.ones(2, 1))
    wanted = (codes.double()[:, None] * codes.double()).to(torch.bfloat16)
    assert torch.equal(y.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0)) and y.isnan().sum() == 2 * 256 * 2 - 4
    acc = torch.zeros(256, 256)
    ops.linear_fp8_wgrad_(acc, x, scales, x, scales)
    assert torch.equal(acc.nan_to_num(nan=7.0).double(), (codes.double()[:, None] * codes.double()).nan_to_num(nan=7.0))


def test_scales_far_apart_do_not_meet_each_other() -> None:
    """A sum is multiplied by one scale after the other: the product of the scales may overflow or underflow."""
    x, w = torch.ones(3, 256).to(E4M3), torch.ones(5, 256).to(E4M3)
    xs, ws = torch.tensor([[2.0**100, 2.0**-120]] * 3), torch.tensor([[2.0**-110, 2.0**100]])
    sums, wanted = ops.linear_fp8(x, xs, w, ws).double(), 128 * (2.0**-10 + 2.0**-20)
    assert ((sums - wanted).abs() <= HALF * wanted).all()


def test_nan_and_infinity_stay_in_their_row() -> None:
    x, xs = operand(200, 300, seed=1)
    w, ws = operand(70, 300, seed=2, tile=128)
    clean = ops.linear_fp8(x, xs, w, ws)
    x[3, 200], xs[150, 1] = torch.nan, torch.inf
    y = ops.linear_fp8(x, xs, w, ws)
    assert y[3].isnan().all() and not y[150].isfinite().any()
    clear = [r for r in range(200) if r not in (3, 150)]
    assert torch.equal(y[clear], clean[clear])


@pytest.mark.parametrize("width", [1, 64, 200])
def test_rows_of_padding_change_nothing(width: int) -> None:
    """Groups that end in rows of zeros, of either sign, have the same products as without these rows."""
    E, N, R = 4, 70, 640
    starts, sizes, ends = (0, 128, 128, 384), (3, 0, 130, 128), torch.tensor([128, 128, 384, R], dtype=torch.int32)
    real = torch.cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
    w, ws = operand(E, N, width, seed=1, tile=128)
    x, dy = torch.zeros(R, width), -torch.zeros(R, N)
    x[real], dy[real] = (operand(len(real), columns, seed=columns)[0].float() for columns in (width, N))
    data, scales = x.to(E4M3), torch.ones(R, -(-width // 128))
    scales[real] = operand(len(real), width, seed=2)[1]
    y = ops.grouped_linear_fp8(data, scales, w, ws, ends)
    turned = [
        (rows.t().contiguous().to(E4M3), operand(columns, R, seed=3)[1]) for rows, columns in ((dy, N), (x, width))
    ]
    dy64, x64 = (exact(*pair) for pair in turned)
    acc, total, magnitude = torch.zeros(E, N, width), *torch.zeros(2, E, N, width, dtype=torch.float64)
    ops.grouped_linear_fp8_wgrad_(acc, *turned[0], *turned[1], ends)
    for e, (start, size, end) in enumerate(zip(starts, sizes, ends.tolist(), strict=True)):
        rows = slice(start, start + size)
        assert torch.equal(y[rows], ops.linear_fp8(data[rows], scales[rows], w[e], ws[e]))
        assert not y[start + size : end].any()
        total[e] += dy64[:, rows] @ x64[:, rows].t()
        magnitude[e] += dy64[:, rows].abs() @ x64[:, rows].abs().t()
    within(acc, total, magnitude, 4, 128)


def test_rows_that_repeat_are_multiplied_as_they_are() -> None:
    """Only rows with equal data and scales count as repeated; NaN and infinity in a weight reach rows of zeros, too."""
    x, xs = operand(9, 300, seed=1)
    x[3:], xs[3:] = x[3].clone(), xs[3].clone()
    xs[8, 2] = 3.0
    w, ws = operand(50, 300, seed=2, tile=128)
    y = ops.linear_fp8(x, xs, w, ws)
    assert torch.equal(y[4:8], y[3].expand(4, 50)) and torch.equal(y[8:], ops.linear_fp8(x[8:], xs[8:], w, ws))
    w[7, 5] = torch.nan
    zeros = ops.linear_fp8(torch.zeros(4, 300).to(E4M3), torch.ones(4, 3), w, ws)
    assert zeros[:, 7].isnan().all() and zeros.isnan().sum() == 4
