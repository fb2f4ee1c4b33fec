"""Rotation of some columns of every head by position, apart from attention: scaled frequencies, a part of a head."""

from __future__ import annotations

from compiler.ops.rule import STARTS, Gradient, Rule, Tensor, elementwise, is_starts

# Which columns, by which angles (`compiler.layers.rotation`), factors of the rotated columns and of all of them, and
# where documents begin.
_HOW = (
    *("sequence", "heads", "first", "width"),
    *("theta", "factor", "low", "high", "original", "magnitude", "scale"),
    *STARTS,
)


def _infer(
    x: Tensor,
    sequence: int,
    heads: int,
    first: int,
    width: int,
    theta: float,
    factor: float,
    low: float,
    high: float,
    original: float,
    magnitude: float,
    scale: float,
    starts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    assert is_starts(starts, x.shape[0]), starts
    T, C = x.shape[0], x.shape[1] // heads
    assert x.shape[1] == heads * C and T % sequence == 0, (x, heads, sequence)
    assert width % 2 == 0 and first >= 0 and first + width <= C, (x, first, width)
    assert low != high, (low, high)
    return (x,)


RULES = {
    "rotate": Rule(
        args=("x", *_HOW),
        optional=STARTS,
        outputs=("y",),
        infer=_infer,
        kernel_class="rope",
        flops=elementwise("x", 3),
        dgrad=Gradient("rotate_dgrad", reads=("d_y", *_HOW), gives=("x",), flops=elementwise("d_y", 3)),
    )
}
