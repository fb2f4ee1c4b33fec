"""Checks of the E5M6 kernels in Triton's interpreter: bit for bit against the reference, and the bytes moved."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from runtime.ops.elements import E5M6
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved, same, values
from tests.compiler.emit.kernels.interpreted import random, run

CHECKED = (
    "dequantise_e5m6", "dequantise_quantise_requantise_e5m6", "quantise_e5m6", "quantise_kept_e5m6",
)  # fmt: skip
KEPT, MADE = ops.OPS["quantise_e5m6"], ops.OPS["dequantise_e5m6"]


def unsigned(planes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Planes of E5M6 without the sign of NaN, which depends on the processor."""
    high, low, s = planes
    nan = ((high & 0x7F) == 0x7F) & (torch.stack((low & 15, low >> 4), -1).flatten(1)[:, : high.shape[1]] == 15)
    return torch.where(nan, high & 0x7F, high), low, s.view(torch.uint8)


def all_ops(x: Tensor) -> None:
    expected_planes = unsigned(KEPT(x))
    same(unsigned(run("quantise_e5m6", x)), expected_planes)
    for pow2 in (False, True):
        q, s, *planes = run("quantise_kept_e5m6", x, pow2)
        same(unsigned(tuple(planes)), expected_planes)
        same((q, s), ops.quantise(x, pow2))
        again = run("dequantise_quantise_requantise_e5m6", *KEPT(x), pow2)
        same(again, ops.OPS["dequantise_quantise_requantise_e5m6"](*KEPT(x), pow2))
    same(run("dequantise_e5m6", *KEPT(x)), MADE(*KEPT(x)))


def casts(dtype: torch.dtype, rows: int, columns: int) -> None:
    """Rows that span 40 binades; half of the columns are tiles of zeros."""
    x = values(dtype, rows, columns)
    x[rows // 2 :, : columns // 2] = 0
    all_ops(x)


def codes() -> None:
    """All E5M6 numbers, midpoints, and their neighbours in FP32. Each tile has the largest number: its scale is 1."""
    table = torch.tensor([code / 64 * 2.0**-14 for code in range(64)])
    normal = [(1 + f / 64) * 2.0**e for e in range(-14, 17) for f in range(64) if (e, f) != (16, 63)]
    table = torch.cat((table, torch.tensor(normal)))
    assert table[-1] == E5M6.largest
    numbers = torch.cat((table, (table[1:] + table[:-1]) / 2))
    around = torch.cat((numbers, torch.nextafter(numbers, numbers * 2 + 1), torch.nextafter(numbers, numbers * 0)))
    around = torch.cat((around, -around)).clamp(-E5M6.largest, E5M6.largest)
    filled = torch.cat((around, torch.zeros(-len(around) % 127))).view(-1, 127)
    x = torch.cat((filled, torch.full((len(filled), 1), E5M6.largest)), 1)
    planes = run("quantise_e5m6", x)
    assert (planes[2].float() == 1).all()
    same(unsigned(planes), unsigned(KEPT(x)))
    back = run("dequantise_e5m6", *planes)
    same(back, MADE(*planes))
    assert torch.isin(back.float().abs(), table).all() and len(back.float().abs().unique()) == len(table)


def special() -> None:
    """Zeros, numbers with no normal scale, infinities and NaN; a largest number that takes the next scale."""
    x = random(11, 384, seed=3)
    x[0] = 0
    x[1] *= 1e-42
    x[2, 5] = torch.nan
    x[3, 200], x[3, 300] = torch.inf, -torch.inf
    x[4] = torch.nan
    x[5] *= 5e37
    x[6, :128] = torch.tensor([2.0e38, -1e-30]).repeat(64)
    x[7], x[8] = E5M6.largest, torch.nextafter(torch.tensor(E5M6.largest), torch.tensor(1e9))
    x[9] = -0.0
    all_ops(x)
    planes = run("quantise_e5m6", x)
    assert (planes[2].float()[[0, 4, 7, 9]] == 1).all() and (planes[2].float()[8] == 2).all()
    back = run("dequantise_e5m6", *planes)
    assert back[2].isnan().sum() == 1 and back[3, 128:].isnan().all() and not back[3, :128].isnan().any()
    assert back[9].signbit().all() and back[4].isnan().all() and back[[0, 1, 5, 6, 7, 8]].isfinite().all()


def moves_each_byte_once() -> None:
    x = random(128, 256, dtype=torch.bfloat16)
    planes = KEPT(x)
    for name, arguments in (
        ("quantise_e5m6", (x,)),
        ("quantise_kept_e5m6", (x,)),
        ("dequantise_e5m6", planes),
        ("dequantise_quantise_requantise_e5m6", planes),
    ):
        with moved() as count:
            results = run(name, *arguments)
        results = results if isinstance(results, tuple) else (results,)
        assert count[0] == bytes_of(*arguments, *results), name
