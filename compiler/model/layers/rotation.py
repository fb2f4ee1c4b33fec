"""Rotation apart from attention: the constants of op `rotate`, and the factor by which queries are scaled.

Attention rotates whole rows by plain frequencies, and divides scores by the root of their width. Everything else is
done to queries and keys in front of it, which then gets theta = 0: rotated already, or without position.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt
from typing import Any

from dsl.schema import Compressed, Gqa, LinearScaling, Llama3Scaling, Mla, Rope, YarnScaling

Rotation = tuple[int | float, ...]  # width, theta, factor, low, high, original, magnitude; () where attention rotates


def rotation(attention: Mla | Gqa) -> Rotation:
    """How queries and keys are rotated in front of attention: (width, theta, factor, low, high, original, magnitude).

    The frequency f of pair i is divided by `factor`, by the share s of that: f·(1 − s) + f / factor·s. s rises from 0
    to 1 between `low` and `high`, over i if `original` is 0. Otherwise it falls from 1 to 0, over the turns in
    `original` tokens. The rotated columns are multiplied by `magnitude`.
    """
    rope, whole = attention.rope, _rotated_width(attention)
    width = whole if rope is None or rope.width is None else rope.width
    if rope is None:
        return () if query_scale(attention) == 1 else (0, 0.0, *_PLAIN)
    if rope.scaling is None and width == whole and query_scale(attention) == 1:
        return ()
    return (width, rope.theta, *_frequencies(rope, width))


def rotation_of_last(attention: Compressed) -> Rotation:
    """How the last columns of each head are rotated; () where none is."""
    if attention.rope is None:
        return ()
    width = attention.rope.width or attention.head_dim
    return (width, attention.rope.theta, *_frequencies(attention.rope, width))


@dataclass(frozen=True)
class Turning:
    """How queries and keys are rotated: by theta inside of attention, or by these angles in front of it. query_scale:
    what queries are multiplied by then."""

    theta: float
    angles: Rotation = ()
    query_scale: float = 1.0

    @property
    def constants(self) -> dict[str, float | Rotation]:
        """What an emitted segment prints of it."""
        if not self.angles:
            return {"theta": self.theta}
        found: dict[str, float | Rotation] = {"theta": self.theta, "rotation": self.angles}
        return found if self.query_scale == 1 else {**found, "query_scale": self.query_scale}


def turning(attention: Mla | Gqa, apart: bool = False) -> Turning:
    """`apart`: attention never rotates, for its queries and keys are those of different rows."""
    angles, scale = rotation(attention), query_scale(attention)
    if apart and not angles and attention.rope is not None:
        angles = (_rotated_width(attention), attention.rope.theta, *_PLAIN)
    if not angles:
        return Turning(attention.rope.theta if attention.rope else 0.0)
    return Turning(0.0, angles, scale)


@dataclass(frozen=True)
class Rotate:
    """Rotates columns of each head in sequences of so many tokens. apart: of rows of a context rank, whose positions
    are given."""

    sequence: int
    angles: Rotation
    apart: bool = False

    def __call__(
        self, ops: Any, x_T: Any, places_T: tuple[Any, ...], heads: int, first: int = 0, scale: float = 1.0
    ) -> Any:
        """x with the columns from `first` on of each head rotated, and all of them scaled; x if neither is to be."""
        if not self.angles or (scale == 1 and not self.angles[0]):
            return x_T
        places_T = placed(places_T) if self.apart else places_T
        return ops.rotate(x_T, self.sequence, heads, first, *self.angles, scale, *places_T)

    def first_of(self, columns: int) -> int:
        """Where in a head of so many columns the last ones begin that are rotated."""
        return columns - int(self.angles[0]) if self.angles else 0

    def by(self, ops: Any, x_T: Any, stride: int, heads: int, first: int = 0) -> Any:
        """x rotated likewise, its rows so many tokens apart; −1 turns them back."""
        if not self.angles or not self.angles[0]:
            return x_T
        return ops.rotate(x_T, self.sequence, heads, first, *self.angles, 1.0, None, None, stride)


def placed(places_T: tuple[Any, ...]) -> tuple[Any, ...]:
    """(starts, positions) of a context rank, whose segments are always given positions, and starts in front of them
    where sequences hold several documents."""
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
    """The pair, between two whole ones, that turns so often in the original context (arXiv 2309.00071, equation 17)."""
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
    """Columns of a head that plain RoPE rotates."""
    return attention.head_dim.rope if isinstance(attention, Mla) else attention.head_dim


def query_scale(attention: Mla | Gqa) -> float:
    """What queries are multiplied by, as attention divides scores by the root of their width; 1 where that is all."""
    latent = isinstance(attention, Mla)
    width = attention.head_dim.nope + attention.head_dim.rope if isinstance(attention, Mla) else attention.head_dim
    factor = 1.0 if attention.scale is None else attention.scale * sqrt(width)
    scaling = attention.rope.scaling if attention.rope else None
    if latent and isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        factor *= _grown(scaling.factor, scaling.mscale_all_dim) ** 2
    return factor
