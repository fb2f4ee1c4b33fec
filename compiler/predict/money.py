"""Hours of devices → money and energy. What is not known is None, never 0."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.predict.prediction import Energy, Money, Whole

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
