"""Checks of the kernels of short convolutions in Triton's interpreter: against FP64.

The sum of J products is off by J units of the sum S of their magnitudes. This moves the SiLU and its derivative by at
most as much, and rounding their argument moves them by a few units of 1 + S each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved
from tests.compiler.emit.kernels.interpreted import double, random, run, within

CHECKED = ("convolve", "convolve_dgrad", "convolve_wgrad_")


def shifted(x: Tensor, before: Tensor, back: int) -> Tensor:
    """The rows `back` rows before each row, 0 where a sequence or document begins in between."""
    rows = torch.arange(len(x))[:, None] - back
    return torch.where((before >= back)[:, None], x[rows.clamp(min=0)[:, 0]], 0.0)


def places(rows: int, sequence: int, documents: bool) -> Tensor | None:
    """Where the documents of rows start: at every third row of a sequence, and where it does."""
    if not documents:
        return None
    place = torch.arange(rows) % sequence
    return (place - place % 3).to(torch.int32)


def convolve(dtype: torch.dtype, rows: int, sequence: int, columns: int, taps: int, documents: bool) -> None:
    x, dy = random(rows, columns + 5, dtype=dtype, seed=1)[:, 3 : columns + 3], random(rows, columns, dtype=dtype)
    w, starts = random(columns, taps, dtype=dtype, seed=2), places(rows, sequence, documents)
    y, before = run("convolve", x, w, sequence, starts) if documents else run("convolve", x, w, sequence)
    x64, w64, dy64 = double(x, w, dy)
    y_exact, before_exact = ops.convolve(x64, w64, sequence, starts)
    assert y.dtype == dtype and before.dtype == torch.int32 and torch.equal(before, before_exact)
    parts = [shifted(x64.abs(), before, back) * w64[:, -1 - back].abs() for back in range(taps)]
    size = sum(parts, torch.zeros_like(x64))
    within(y, y_exact, size * (1 + size), taps + 12)

    slopes = dy64.abs() * (1 + size)
    dx = run("convolve_dgrad", dy, x, w, before)
    assert dx.dtype == dtype
    magnitude = torch.zeros_like(x64)
    for back in range(taps):
        gated = torch.where((before >= back)[:, None], slopes, 0.0) * w64[:, -1 - back].abs()
        magnitude[: max(0, rows - back)] += gated[back:]
    within(dx, ops.convolve_dgrad(dy64, x64, w64, before), magnitude, 2 * taps + 16)

    acc = random(columns, taps, seed=3)
    twice, expected = acc.clone(), acc.double() + ops.convolve_wgrad(dy64, x64, w64, before)
    of_taps = [(shifted(x64.abs(), before, back) * slopes).sum(0) for back in reversed(range(taps))]
    assert run("convolve_wgrad_", acc, dy, x, w, before) is None
    within(acc, expected, expected.abs() + torch.stack(of_taps, 1), rows + taps + 20)
    run("convolve_wgrad_", twice, dy, x, w, before)
    assert torch.equal(acc, twice)
    assert torch.equal(dx, run("convolve_dgrad", dy, x, w, before))


def moves_few_bytes_twice() -> None:
    """Each program reads three rows before its own, and the gradient up to seven behind them."""
    rows, columns, taps = 64, 1024, 4
    x, w = random(rows, columns, dtype=torch.bfloat16, seed=1), random(columns, taps, dtype=torch.bfloat16, seed=2)
    with moved() as count:
        y, before = run("convolve", x, w, rows)
    assert count[0] == bytes_of(x, y, before) + 2 * bytes_of(w) + 3 * columns * 2
    with moved() as count:
        dx = run("convolve_dgrad", y, x, w, before)
    assert count[0] <= bytes_of(x, y, before, dx) + 2 * bytes_of(w) + (3 + 4 + 4) * columns * 2 + 4 * 4
