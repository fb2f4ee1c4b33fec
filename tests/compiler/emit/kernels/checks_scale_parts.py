"""Checks of the kernels that scale logits part by part, in Triton's interpreter: against FP64."""

from __future__ import annotations

import torch

from runtime import ops
from tests.compiler.emit.kernels.interpreted import double, random, run, within

CHECKED = ("scale_parts", "scale_parts_dgrad", "scale_parts_wgrad_")


def scale(dtype: torch.dtype, rows: int, logits: int, parts: int) -> None:
    """`dtype` is that of the scales; logits are FP32."""
    x, dy, scales = random(rows, logits, seed=1), random(rows, logits, seed=2), random(parts, dtype=dtype, seed=3)
    for op, argument in (("scale_parts", x), ("scale_parts_dgrad", dy)):
        found, expected = run(op, argument, scales), ops.OPS[op](*double(argument, scales))
        assert found.dtype == torch.float32
        within(found, expected, expected.abs(), 1)
    acc = random(parts, seed=4)
    twice = acc.clone()
    expected = acc.double() + ops.scale_parts_wgrad(*double(dy, x), parts)
    magnitude = expected.abs() + ops.scale_parts_wgrad(*double(dy.abs(), x.abs()), parts)
    assert run("scale_parts_wgrad_", acc, dy, x) is None
    run("scale_parts_wgrad_", twice, dy, x)
    within(acc, expected, magnitude, rows + logits + 2)
    assert torch.equal(acc, twice)
