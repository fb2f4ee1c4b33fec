"""Formats numbers and text for people. Equal values give equal text."""

from __future__ import annotations

import math
import unicodedata

_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
# Characters that reorder the text around them: they could make a name look like another.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def clean(text: str) -> str:
    """Replace control characters, lone surrogates and characters that reorder text by U+FFFD."""
    if text.isascii() and text.isprintable():  # the common case
        return text
    return "".join("\ufffd" if _is_unfit(c) else c for c in text)


def _is_unfit(c: str) -> bool:
    return c in _REORDERING or c in "\ufffe\uffff" or (unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t")


def px(value: float) -> str:
    """Format a coordinate to a tenth of a pixel."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def count(value: int) -> str:
    """Format a count, such as 8.23M; counts below ten thousand have all digits."""
    for size, name in _COUNTS:
        if value >= size and value >= 10_000:
            return f"{_three(value / size)}{name}"
    return f"{value:,}"


def num_bytes(value: int) -> str:
    """Format bytes, such as 41.2 MiB."""
    for size, name in _BYTES:
        if value >= size:
            return f"{_three(value / size)} {name}"
    return f"{value} B"


def _three(value: float) -> str:
    return f"{value:.{max(0, 2 - int(math.log10(value)))}f}"


def number(value: float) -> str:
    """Format four significant digits in the shorter notation: 3.142, 12,346, 2.2e-4."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.4g}".replace("e-0", "e-")


def tick(value: float, step: float) -> str:
    """Format a label of an axis whose labels are `step` apart, with as many decimals as that needs."""
    if value != 0 and step < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if value == 0:
        return "0"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def ticks(low: float, high: float, max_ticks: int) -> tuple[tuple[float, ...], float]:
    """Return at most `max_ticks` (≥ 2) round values in [low, high], and their distance: 1, 2 or 5 times a power of
    ten."""
    assert high > low and max_ticks >= 2
    power = 10.0 ** math.floor(math.log10((high - low) / max_ticks))
    step = next(k * power for k in (1, 2, 5, 10, 20) if (high - low) / (k * power) <= max_ticks - 1)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(i * step for i in range(first, last + 1)), step
