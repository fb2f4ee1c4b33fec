"""Which kind of device each pipeline rank runs on, and the rates of each."""

from __future__ import annotations

from compiler.rates import Rates, rates_of
from compiler.rates.spec_rates import experts_of, part_of
from dsl.schema import Spec


def parts_of_ranks(spec: Spec) -> tuple[int, ...]:
    """The part of the cluster (Cluster.parts) of each pipeline rank. Its data ranks are all there, the rules say."""
    return tuple(part_of(spec, rank) for rank in range(spec.parallel.pipeline))


def rank_rates(spec: Spec) -> tuple[Rates, ...]:
    """The rates of each pipeline rank; ranks on one kind of device whose expert groups lie alike share one value."""
    first = rates_of(spec)
    kinds = [(part, experts_of(spec, first.fabric, rank).spread) for rank, part in enumerate(parts_of_ranks(spec))]
    others = {kind: rates_of(spec, rank=kinds.index(kind)) for kind in dict.fromkeys(kinds) if kind != kinds[0]}
    return tuple(others.get(kind, first) for kind in kinds)
