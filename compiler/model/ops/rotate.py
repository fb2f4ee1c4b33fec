"""Rotation of some columns of every head by position, apart from attention: scaled frequencies, a part of a head."""

from __future__ import annotations

from compiler.model.ops.rule import PLACES, Gradient, Rule, Tensor, are_places, elementwise

# Which columns, by which angles (`compiler.model.layers.rotation`), factors of the rotated columns and of all of them,
# and where rows stand: `stride` tokens apart, from the first position of a sequence on, or backwards where it is
# negative.
_HOW = (
    *("sequence", "heads", "first", "width"),
    *("theta", "factor", "low", "high", "original", "magnitude", "scale"),
    *PLACES,
    "stride",
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
    stride: int = 1,
) -> tuple[Tensor, ...]:
    assert are_places((starts, positions), x.shape[0]), (starts, positions)
    T, C, of_sequence = x.shape[0], x.shape[1] // heads, sequence // abs(stride)
    assert abs(stride) == 1 or not (starts or positions), "rows of several tokens are not told where they are"
    assert x.shape[1] == heads * C and (positions or T % max(1, of_sequence) == 0), (x, heads, sequence, stride)
    assert width % 2 == 0 and first >= 0 and first + width <= C, (x, first, width)
    assert low != high, (low, high)
    return (x,)


RULES = {
    "rotate": Rule(
        args=("x", *_HOW),
        optional=(*PLACES, "stride"),
        outputs=("y",),
        infer=_infer,
        kernel_class="rope",
        flops=elementwise("x", 3),
        dgrad=Gradient("rotate_dgrad", reads=("d_y", *_HOW), gives=("x",), flops=elementwise("d_y", 3)),
    )
}
