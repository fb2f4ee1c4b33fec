"""Rotation of some columns of every head by position, apart from attention: scaled frequencies, a part of a head."""

from __future__ import annotations

from compiler.ops.rule import PLACES, Gradient, Rule, Tensor, are_places, elementwise

# Which columns, by which angles (`compiler.layers.rotation`), factors of the rotated columns and of all of them, and
# where rows stand.
_HOW = (
    *("sequence", "heads", "first", "width"),
    *("theta", "factor", "low", "high", "original", "magnitude", "scale"),
    *PLACES,
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
    positions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    assert are_places((starts, positions), x.shape[0]), (starts, positions)
    T, C = x.shape[0], x.shape[1] // heads
    assert x.shape[1] == heads * C and (positions or T % sequence == 0), (x, heads, sequence)
    assert width % 2 == 0 and first >= 0 and first + width <= C, (x, first, width)
    assert low != high, (low, high)
    return (x,)


RULES = {
    "rotate": Rule(
        args=("x", *_HOW),
        optional=PLACES,
        outputs=("y",),
        infer=_infer,
        kernel_class="rope",
        flops=elementwise("x", 3),
        dgrad=Gradient("rotate_dgrad", reads=("d_y", *_HOW), gives=("x",), flops=elementwise("d_y", 3)),
    )
}
