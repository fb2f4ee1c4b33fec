"""Numbers of a prediction in words, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.predict.prediction import Energy, Money, Whole

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


# --- Hours of devices → money and energy. What is not known is None, never 0

# The most that a device draws, by its name: thermal design power of the SXM modules, data sheets of the maker.
WATTS = {"a100": 400.0, "h100": 700.0, "h200": 700.0, "h800": 700.0, "b200": 1000.0, "gb200": 1200.0, "mi300x": 750.0}


def money_of(price: float | None, hours_per_trillion: float, whole: Whole, num_devices: int) -> Money:
    """Costs of a run at `price`, in USD an hour of one device."""
    if price is None:
        return Money(None, None, None)
    return Money(price, price * hours_per_trillion, price * num_devices * whole.seconds / 3600)


def energy_of(devices: Sequence[tuple[int, str]], hours_per_trillion: float) -> Energy:
    """Energy of (count, name) devices that always draw their design power, without hosts, network and cooling."""
    if any(name.lower() not in WATTS for _, name in devices):
        return Energy(None, None)
    watts = sum(count * WATTS[name.lower()] for count, name in devices) / sum(count for count, _ in devices)
    return Energy(watts, watts * hours_per_trillion / 1000)
