"""Rates of pipeline ranks: alike for all of them, or of each, where a cluster has several kinds of devices."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.machine.rates.rates import Rates
from compiler.plan.spec_rates import experts_of, part_of, rates_of
from dsl.schema import Spec

OnRanks = Rates | Sequence[Rates]  # of all pipeline ranks, or of each


def parts_of_ranks(spec: Spec) -> tuple[int, ...]:
    """The part of the cluster (Cluster.parts) of each pipeline rank. Its data ranks are all there, the rules say."""
    return tuple(part_of(spec, rank) for rank in range(spec.parallel.pipeline))


def rank_rates(spec: Spec) -> tuple[Rates, ...]:
    """The rates of each pipeline rank; ranks on one kind of device whose expert groups lie alike share one value."""
    first = rates_of(spec)
    kinds = [(part, experts_of(spec, first.fabric, rank).spread) for rank, part in enumerate(parts_of_ranks(spec))]
    others = {kind: rates_of(spec, rank=kinds.index(kind)) for kind in dict.fromkeys(kinds) if kind != kinds[0]}
    return tuple(others.get(kind, first) for kind in kinds)


def on_ranks(rates: OnRanks, num_ranks: int) -> tuple[Rates, ...]:
    """The rates of each pipeline rank."""
    each = (rates,) * num_ranks if isinstance(rates, Rates) else tuple(rates)
    assert len(each) == num_ranks, "rates are of each pipeline rank"
    return each


def kinds_of(rates: Sequence[Rates]) -> tuple[int, ...]:
    """For each rank, the first rank with the same rates."""
    return tuple(rates.index(each) for each in rates)
