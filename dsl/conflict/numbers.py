"""Divisors and multiples."""

from __future__ import annotations

from functools import cache
from math import gcd, isqrt


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Ascending. The numbers of a spec are at most 10⁸, so at most 10⁴ are tried; of larger ones, those up to 10⁴."""
    small = [each for each in range(1, min(isqrt(number), 10_000) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


def lcm(*numbers: int) -> int:
    """The least common multiple; 1 of none."""
    result = 1
    for each in numbers:
        result = result * each // gcd(result, each)
    return result


def common(*numbers: int) -> int:
    """The greatest common divisor; 0 of none."""
    return gcd(*numbers)


def around(value: int, unit: int) -> tuple[int, ...]:
    """The multiples of `unit` next to `value`: the largest up to it, and the smallest from it on."""
    below = value // unit * unit
    return tuple(each for each in dict.fromkeys((below, -(-value // unit) * unit)) if each > 0)
