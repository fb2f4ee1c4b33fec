"""The weights of several sources as whole numbers: of so many samples, how many are of each.

The order in which sources are drawn repeats after as many samples as these numbers sum to.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

MAX_PERIOD = 100_000  # samples; a rank finds their order when it starts, in 0.2 s (measured on a core)


def whole(weights: Sequence[float]) -> tuple[int, ...]:
    """The least whole numbers in the proportions of weights, of which some is above 0: (0.7, 0.3) are (7, 3)."""
    exact = [Fraction(repr(weight)) for weight in weights]  # as they are written, not as binary fractions
    unit = lcm(*(each.denominator for each in exact))
    counts = [int(each * unit) for each in exact]
    common = gcd(*counts)
    return tuple(count // common for count in counts)
