"""Checks of the products of normed residual streams in Triton's interpreter: against FP64."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved
from tests.compiler.emit.kernels.interpreted import EPS, double, random, run, within

CHECKED = ("hyper_products", "hyper_products_dgrad", "hyper_products_wgrad_")


def operands(dtype: torch.dtype, rows: int, logits: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """dproducts, h, fn."""
    h, fn = random(rows, columns, dtype=dtype, seed=1), random(logits, columns, dtype=dtype, seed=2)
    return random(rows, logits, seed=3), h, fn


def products(dtype: torch.dtype, rows: int, logits: int, columns: int) -> None:
    _, h, fn = operands(dtype, rows, logits, columns)
    found, rstd = run("hyper_products", h, fn, EPS)
    assert found.dtype == rstd.dtype == torch.float32
    exact, rstd_exact = ops.hyper_products(*double(h, fn), EPS)
    within(rstd, rstd_exact, rstd_exact, columns + 6)
    magnitude = rstd_exact[:, None] * (h.double().abs() @ fn.double().abs().t())
    within(found, exact, magnitude, 2 * columns + 8)


def gradients(dtype: torch.dtype, rows: int, logits: int, columns: int) -> None:
    dproducts, h, fn = operands(dtype, rows, logits, columns)
    found, rstd = (x.float() for x in ops.hyper_products(*double(h, fn), EPS))
    given = double(dproducts, h, fn, found, rstd)
    dh = run("hyper_products_dgrad", dproducts, h, fn, found, rstd)
    assert dh.dtype == dtype
    slopes = given[0].abs() * given[4][:, None]
    inward = (slopes * given[3].abs()).sum(1, keepdim=True) * given[4][:, None] / columns
    within(dh, ops.hyper_products_dgrad(*given), slopes @ given[2].abs() + given[1].abs() * inward, 3 * logits + 8)

    acc = random(logits, columns, seed=4)
    expected = acc.double() + ops.hyper_products_wgrad(given[0], given[1], given[4])
    magnitude = expected.abs() + slopes.t() @ given[1].abs()
    assert run("hyper_products_wgrad_", acc, dproducts, h, rstd) is None
    within(acc, expected, magnitude, 3 * rows + 8)


def repeats(dtype: torch.dtype) -> None:
    """A second run gives the same bits."""
    dproducts, h, fn = operands(dtype, 70, 24, 200)
    products_TM, rstd = run("hyper_products", h, fn, EPS)
    assert all(map(torch.equal, run("hyper_products", h, fn, EPS), (products_TM, rstd)))
    arguments = dproducts, h, fn, products_TM, rstd
    assert torch.equal(run("hyper_products_dgrad", *arguments), run("hyper_products_dgrad", *arguments))
    first, second = torch.zeros(24, 200), torch.zeros(24, 200)
    for acc in (first, second):
        run("hyper_products_wgrad_", acc, dproducts, h, rstd)
    assert torch.equal(first, second)


def reads_the_streams_once() -> None:
    """Products and squares need h once. Each tile of tokens reads fn, and partial sums are written and read."""
    _, h, fn = operands(torch.bfloat16, 128, 24, 4096)
    with moved() as count:
        products_TM, rstd = run("hyper_products", h, fn, EPS)
    tiles, splits = 2, 2
    assert count[0] == bytes_of(h) + tiles * bytes_of(fn) + (2 * splits + 1) * bytes_of(products_TM, rstd)


def keeps_small_numbers() -> None:
    """Gradients as small as those of a scaled loss keep all their bits when three BF16 numbers stand for them."""
    dproducts, h, fn = operands(torch.bfloat16, 5, 24, 64)
    products_TM, rstd = run("hyper_products", h, fn, EPS)
    large = run("hyper_products_dgrad", dproducts, h, fn, products_TM, rstd)
    small = run("hyper_products_dgrad", dproducts * 2.0**-80, h, fn, products_TM, rstd)
    assert torch.equal(small.float(), large.float() * 2.0**-80)
