"""What a rule finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsl.schema import Spec


@dataclass(frozen=True)
class Finding:
    """A broken rule, at a path of the spec; notes point at other paths."""

    code: str
    message: str
    at: str
    hint: str
    notes: tuple[tuple[str, str], ...] = ()


Rule = Callable[[Spec], Iterator[Finding]]


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is closest to `wanted`, the smaller one of two."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    divisors = {*small, *(number // each for each in small)}
    return min(divisors, key=lambda each: (abs(each - wanted), each))


def nearest_multiple(number: int, unit: int) -> int:
    """The multiple of `unit` that is closest to `number`, the larger one of two."""
    return max(unit, (2 * number + unit) // (2 * unit) * unit)
