"""Checks of the kernels that mix residual streams, in Triton's interpreter: against FP64.

A division of positive numbers by their sums adds a few roundings to their relative errors. It takes away what the
errors of a row or column have in common and never lets the rest grow, so errors of the rounds add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved
from tests.compiler.emit.kernels.interpreted import double, random, run, within

CHECKED = ("hyper_mix", "hyper_mix_dgrad", "hyper_collapse", "hyper_collapse_dgrad")


def operands(dtype: torch.dtype, rows: int, streams: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, h, logits of all weights)."""
    dx, h = random(rows, columns, dtype=dtype, seed=1), random(rows, streams * columns, dtype=dtype, seed=2)
    return dx, h, 2 * random(rows, streams * streams + 2 * streams, seed=3)


def mix(dtype: torch.dtype, rows: int, streams: int, columns: int, rounds: int, eps: float) -> None:
    dx, h, logits = operands(dtype, rows, streams, columns)
    dpost, dcomb = random(rows, streams, seed=4), random(rows, streams * streams, seed=5)
    x, post, comb = run("hyper_mix", h, logits, rounds, eps)
    assert x.dtype == dtype and post.dtype == comb.dtype == torch.float32
    x_exact, post_exact, comb_exact = ops.hyper_mix(*double(h, logits), rounds, eps)
    within(x, x_exact, ops.hyper_mix(*double(h.abs(), logits), rounds, eps)[0], streams + 12)
    within(post, post_exact, post_exact, 12)
    divisions = 2 * rounds - 1
    within(comb, comb_exact, comb_exact, 12 + 2 * divisions * (streams + 4))

    dh, dlogits = run("hyper_mix_dgrad", dx, dpost, dcomb, h, logits, rounds, eps)
    assert dh.dtype == dtype and dlogits.dtype == torch.float32
    exact = ops.hyper_mix_dgrad(*double(dx, dpost, dcomb, h, logits), rounds, eps)
    within(dh, exact[0], exact[0].abs(), 12)
    # Each gradient of a number before a division is a difference of terms as large as the gradients of its sum.
    pre, slopes, _ = exact[1].split((streams, streams, streams * streams), 1)
    inward = (dx.double()[:, None] * h.double().unflatten(1, (streams, columns))).abs().sum(2)
    magnitudes = (pre.abs() + inward, slopes.abs() + dpost.double().abs())
    for found, part, magnitude, terms in zip(
        dlogits.split((streams, streams, streams * streams), 1)[:2],
        (pre, slopes),
        magnitudes,
        (columns, 1),
        strict=True,
    ):
        within(found.contiguous(), part, magnitude, terms + 16)
    of_comb, comb_slopes = dlogits[:, 2 * streams :].double(), exact[1][:, 2 * streams :]
    soft = logits.double()[:, 2 * streams :].unflatten(1, (streams, streams)).softmax(2)
    smallest = soft.sum(1).amin(1) if rows else soft.sum((1, 2))
    reach = soft.flatten(1) * (dcomb.double().abs().sum(1) / smallest)[:, None]
    within(of_comb.float(), comb_slopes, reach, 2 * divisions * (streams + 8))


def collapse(dtype: torch.dtype, rows: int, streams: int, columns: int) -> None:
    dx, h, logits = operands(dtype, rows, streams, columns)
    logits = logits[:, :streams].contiguous()
    x = run("hyper_collapse", h, logits, 1e-3)
    within(
        x,
        ops.hyper_collapse(*double(h, logits), 1e-3),
        ops.hyper_collapse(*double(h.abs(), logits), 1e-3),
        streams + 12,
    )
    dh, dlogits = run("hyper_collapse_dgrad", dx, h, logits, 1e-3)
    exact = ops.hyper_collapse_dgrad(*double(dx, h, logits), 1e-3)
    within(dh, exact[0], exact[0].abs(), 12)
    within(dlogits, exact[1], ops.hyper_collapse_dgrad(*double(dx.abs(), h.abs(), logits), 1e-3)[1], columns + 16)


def repeats(dtype: torch.dtype) -> None:
    """A second run gives the same bits."""
    dx, h, logits = operands(dtype, 9, 4, 40)
    dpost, dcomb = random(9, 4, seed=4), random(9, 16, seed=5)
    for op, args in (
        ("hyper_mix", (h, logits, 20, 1e-6)),
        ("hyper_mix_dgrad", (dx, dpost, dcomb, h, logits, 20, 1e-6)),
    ):
        assert all(map(torch.equal, run(op, *args), run(op, *args)))


def moves_each_byte_once() -> None:
    """Each byte of a stream moves once. Logits of `pre` are read by each tile of columns."""
    rows, streams, columns = 5, 4, 2048
    dx, h, logits = operands(torch.bfloat16, rows, streams, columns)
    dpost, dcomb = random(rows, streams, seed=4), random(rows, streams * streams, seed=5)
    with moved() as count:
        results = run("hyper_mix", h, logits, 20, 1e-6)
    assert count[0] == bytes_of(h, logits, *results) + rows * streams * 4
    with moved() as count:
        results = run("hyper_mix_dgrad", dx, dpost, dcomb, h, logits, 20, 1e-6)
    assert count[0] == bytes_of(dx, dpost, dcomb, h, logits, *results)
