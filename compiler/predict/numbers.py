"""Numbers of a prediction in words, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Sequence

GIB = 2**30


def seconds(value: float) -> str:
    """Four digits: 19.93 s, 137.0 ms, 12.34 us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= scale or (unit == "s" and not value):
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value / 1e-6)} us"


def span(value: float) -> str:
    """A long time: 53.2 days, 4.12 hours, 3.10 minutes."""
    for scale, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if value >= scale:
            return f"{_digits(value / scale, 3)} {unit}"
    return seconds(value)


def count(value: float) -> str:
    """A count: 671.0B, 180.2K, 512."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= scale:
            return f"{_digits(value / scale)}{suffix}"
    return f"{value:.4g}"


def size(value: int) -> str:
    """Bytes: 66.5 GiB, 12.0 MiB."""
    for scale, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} bytes"


def ranges(numbers: Sequence[int]) -> str:
    """0–3, 7, 12–15."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs)


def _digits(value: float, digits: int = 4) -> str:
    whole = len(str(int(value)))
    return f"{value:.{max(0, digits - whole)}f}"
