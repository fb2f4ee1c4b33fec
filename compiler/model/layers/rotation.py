"""Rotation outside attention: the constants of op `rotate`, and the factor by which queries are scaled.

Attention ops rotate whole heads by plain frequencies, and divide scores by the square root of the width. Anything else
is done to queries and keys before attention, which then gets theta = 0: they are rotated already, or have no position.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt
from typing import Any

from dsl.schema import Compressed, Gqa, LinearScaling, Llama3Scaling, Mla, Rope, YarnScaling

Rotation = tuple[int | float, ...]  # (width, theta, factor, low, high, original, magnitude); () if attention rotates


def rotation(attention: Mla | Gqa) -> Rotation:
    """The rotation of queries and keys before attention: (width, theta, factor, low, high, original, magnitude).

    The frequency f of pair i becomes (1 − s)·f + s·f / factor. If `original` is 0, s rises from 0 to 1 as i goes from
    `low` to `high`. Otherwise s falls from 1 to 0 as the number of turns of the pair in `original` tokens goes from
    `low` to `high`. The rotated columns are multiplied by `magnitude`.
    """
    rope, full_width = attention.rope, _rotated_width(attention)
    width = full_width if rope is None or rope.width is None else rope.width
    if rope is None:
        return () if query_scale(attention) == 1 else (0, 0.0, *_PLAIN)
    if rope.scaling is None and width == full_width and query_scale(attention) == 1:
        return ()
    return (width, rope.theta, *_frequencies(rope, width))


def rotation_of_last(attention: Compressed) -> Rotation:
    """The rotation of the last columns of each head; () if there is none."""
    if attention.rope is None:
        return ()
    width = attention.rope.width or attention.head_dim
    return (width, attention.rope.theta, *_frequencies(attention.rope, width))


@dataclass(frozen=True)
class QueryKeyRotation:
    """The rotation of queries and keys: by theta inside attention, or by `angles` before it. query_scale: a factor of
    queries in the latter case."""

    theta: float
    angles: Rotation = ()
    query_scale: float = 1.0

    @property
    def constants(self) -> dict[str, float | Rotation]:
        """The constants that an emitted segment prints."""
        if not self.angles:
            return {"theta": self.theta}
        constants: dict[str, float | Rotation] = {"theta": self.theta, "rotation": self.angles}
        return constants if self.query_scale == 1 else {**constants, "query_scale": self.query_scale}


def query_key_rotation(attention: Mla | Gqa, apart: bool = False) -> QueryKeyRotation:
    """The rotation at attention. `apart`: attention never rotates, as its queries and keys are of different rows."""
    angles, scale = rotation(attention), query_scale(attention)
    if apart and not angles and attention.rope is not None:
        angles = (_rotated_width(attention), attention.rope.theta, *_PLAIN)
    if not angles:
        return QueryKeyRotation(attention.rope.theta if attention.rope else 0.0)
    return QueryKeyRotation(0.0, angles, scale)


@dataclass(frozen=True)
class Rotate:
    """Rotates columns of each head by position."""

    sequence: int  # tokens of a sequence
    angles: Rotation
    apart: bool = False  # rows are those of a context rank; their positions are an input

    def __call__(
        self, ops: Any, x_T: Any, places_T: tuple[Any, ...], heads: int, first: int = 0, scale: float = 1.0
    ) -> Any:
        """x with the columns of each head from `first` on rotated, and all columns scaled."""
        if not self.angles or (scale == 1 and not self.angles[0]):
            return x_T
        places_T = starts_and_positions(places_T) if self.apart else places_T
        return ops.rotate(x_T, self.sequence, heads, first, *self.angles, scale, *places_T)

    def first_of(self, columns: int) -> int:
        """The first rotated column of a head with this many columns, whose last columns are rotated."""
        return columns - int(self.angles[0]) if self.angles else 0

    def rotate_with_stride(self, ops: Any, x_T: Any, stride: int, heads: int, first: int = 0) -> Any:
        """x rotated likewise, where rows are `stride` tokens apart. A stride of −1 rotates back."""
        if not self.angles or not self.angles[0]:
            return x_T
        return ops.rotate(x_T, self.sequence, heads, first, *self.angles, 1.0, None, None, stride)


def starts_and_positions(places_T: tuple[Any, ...]) -> tuple[Any, ...]:
    """(starts, positions) of a context rank. Its segments always take positions, and starts before them if sequences
    hold several documents."""
    return (None, *places_T) if len(places_T) == 1 else places_T


_PLAIN = (1.0, 0.0, 1.0, 0.0, 1.0)


def _frequencies(rope: Rope, width: int) -> Rotation:
    """(factor, low, high, original, magnitude)."""
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return scaling.factor, -1.0, 0.0, 0.0, 1.0  # every pair is beyond the ramp
    if isinstance(scaling, Llama3Scaling):
        return scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, float(scaling.original), 1.0
    if isinstance(scaling, YarnScaling):
        low, high = (_pair(turns, scaling, rope.theta, width) for turns in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            low, high = floor(low), ceil(high)
        low, high = float(max(low, 0)), float(min(high, width - 1))
        return scaling.factor, low, high if high != low else low + 0.001, 0.0, magnitude(scaling)
    return _PLAIN


def _pair(turns: float, scaling: YarnScaling, theta: float, width: int) -> float:
    """The (fractional) pair that makes this many turns in the original context (arXiv 2309.00071, equation 17)."""
    return width * log(scaling.original / (turns * 2 * pi)) / (2 * log(theta))


def magnitude(scaling: YarnScaling) -> float:
    """The factor of sines and cosines."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _grown(scaling.factor, scaling.mscale) / _grown(scaling.factor, scaling.mscale_all_dim)
    return _grown(scaling.factor, 1.0)


def _grown(factor: float, slope: float) -> float:
    return 0.1 * slope * log(factor) + 1.0


def _rotated_width(attention: Mla | Gqa) -> int:
    """The number of columns of a head that plain RoPE rotates."""
    return attention.head_dim.rope if isinstance(attention, Mla) else attention.head_dim


def query_scale(attention: Mla | Gqa) -> float:
    """The factor of queries before attention, which itself divides scores by the square root of the width."""
    latent = isinstance(attention, Mla)
    width = attention.head_dim.nope + attention.head_dim.rope if isinstance(attention, Mla) else attention.head_dim
    factor = 1.0 if attention.scale is None else attention.scale * sqrt(width)
    scaling = attention.rope.scaling if attention.rope else None
    if latent and isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        factor *= _grown(scaling.factor, scaling.mscale_all_dim) ** 2
    return factor
