"""Rates of pipeline ranks: of all of them alike, or of each, where a cluster has several kinds of devices."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.rates.rates import Rates

OnRanks = Rates | Sequence[Rates]  # of all pipeline ranks, or of each


def on_ranks(rates: OnRanks, num_ranks: int) -> tuple[Rates, ...]:
    """The rates of each pipeline rank."""
    each = (rates,) * num_ranks if isinstance(rates, Rates) else tuple(rates)
    assert len(each) == num_ranks, "rates are of each pipeline rank"
    return each


def kinds_of(rates: Sequence[Rates]) -> tuple[int, ...]:
    """For each rank, the first rank with the same rates."""
    return tuple(rates.index(each) for each in rates)
