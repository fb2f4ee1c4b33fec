"""Checks of the kernels that add to residual streams, in Triton's interpreter: against FP64."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from tests.compiler.emit.kernels.checks_quantise import bytes_of, moved
from tests.compiler.emit.kernels.interpreted import double, random, run, within

CHECKED = ("hyper_add", "hyper_add_dgrad")


def operands(dtype: torch.dtype, rows: int, streams: int, columns: int) -> tuple[Tensor, ...]:
    """dout, h, y, post, comb."""
    return (
        random(rows, streams * columns, dtype=dtype, seed=1),
        random(rows, streams * columns, dtype=dtype, seed=2),
        random(rows, columns, dtype=dtype, seed=3),
        random(rows, streams, seed=4),
        random(rows, streams * streams, seed=5),
    )


def add(dtype: torch.dtype, rows: int, streams: int, columns: int) -> None:
    arguments = operands(dtype, rows, streams, columns)
    exact, magnitude = double(*arguments), [x.abs() for x in double(*arguments)]
    out = run("hyper_add", *arguments[1:])
    assert out.dtype == dtype
    within(out, ops.hyper_add(*exact[1:]), ops.hyper_add(*magnitude[1:]), streams + 2)
    results = run("hyper_add_dgrad", *arguments)
    assert [result.dtype for result in results] == [dtype, dtype, torch.float32, torch.float32]
    expected, magnitudes = ops.hyper_add_dgrad(*exact), ops.hyper_add_dgrad(*magnitude)
    terms = (streams, streams, columns, columns)
    for found, part, size, count in zip(results, expected, magnitudes, terms, strict=True):
        within(found, part, size, count + 2)


def repeats(dtype: torch.dtype) -> None:
    """A second run gives the same bits."""
    arguments = operands(dtype, 9, 4, 40)
    assert torch.equal(run("hyper_add", *arguments[1:]), run("hyper_add", *arguments[1:]))
    assert all(map(torch.equal, run("hyper_add_dgrad", *arguments), run("hyper_add_dgrad", *arguments)))


def moves_each_byte_once() -> None:
    """Each byte of a stream moves once. Each tile of columns reads post and comb."""
    arguments = operands(torch.bfloat16, 5, 4, 2048)
    with moved() as count:
        out = run("hyper_add", *arguments[1:])
    assert count[0] == bytes_of(out, *arguments[1:]) + bytes_of(*arguments[3:])
    with moved() as count:
        results = run("hyper_add_dgrad", *arguments)
    assert count[0] == bytes_of(*arguments, *results)
