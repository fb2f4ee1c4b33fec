"""Which kind of device each pipeline rank runs on, and the rates of each."""

from __future__ import annotations

from compiler.rates import Rates, rates_of
from dsl.schema import Spec


def parts_of_ranks(spec: Spec) -> tuple[int, ...]:
    """The part of the cluster (Cluster.parts) of each pipeline rank. Its data ranks are all there, the rules say.

    A plan may have fewer ranks than the cluster, as when one is planned alone; what is beyond is on the last part.
    """
    data, world = spec.parallel.data, spec.cluster.world
    return tuple(spec.cluster.part_of(min(rank * data, world - 1)) for rank in range(spec.parallel.pipeline))


def spec_on(spec: Spec, part: int) -> Spec:
    """The spec on a cluster of one kind of nodes: that of a part."""
    if len(spec.cluster.parts) == 1:
        return spec
    return spec.model_copy(update={"cluster": spec.cluster.only(part)})


def rank_rates(spec: Spec) -> tuple[Rates, ...]:
    """The rates of each pipeline rank; ranks on one kind of device share one value."""
    parts = parts_of_ranks(spec)
    rates = {part: rates_of(spec_on(spec, part)) for part in dict.fromkeys(parts)}
    return tuple(rates[part] for part in parts)
