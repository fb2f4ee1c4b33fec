"""Checks of the kernels that copy rows into residual streams, in Triton's interpreter."""

from __future__ import annotations

import torch

from runtime import ops
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved, same
from tests.compiler.emit.kernels.interpreted import random, run, within

CHECKED = ("hyper_copy", "hyper_copy_dgrad")


def copy(dtype: torch.dtype, rows: int, streams: int, columns: int) -> None:
    x, dy = random(rows, columns, dtype=dtype, seed=1), random(rows, streams * columns, dtype=dtype, seed=2)
    same(run("hyper_copy", x, streams), ops.hyper_copy(x, streams))
    dx = run("hyper_copy_dgrad", dy, streams)
    assert dx.dtype == dtype
    within(dx, ops.hyper_copy_dgrad(dy.double(), streams), ops.hyper_copy_dgrad(dy.double().abs(), streams), streams)


def moves_each_byte_once() -> None:
    x, dy = random(6, 1100, dtype=torch.bfloat16, seed=1), random(6, 4400, dtype=torch.bfloat16, seed=2)
    with moved() as count:
        y = run("hyper_copy", x, 4)
    assert count[0] == bytes_of(x, y)
    with moved() as count:
        dx = run("hyper_copy_dgrad", dy, 4)
    assert count[0] == bytes_of(dy, dx)
