"""The kind of node that each layer's experts are on, in a cluster with several kinds: where the plan runs the layer."""

from __future__ import annotations

from compiler.ir import Use
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import parts_of_ranks
from dsl.schema import Spec
from runtime.contract.names import ParameterName


def devices_of_nodes(spec: Spec) -> dict[str, int]:
    """By layer, such as layers.3, the number of devices of a node that runs it.

    If two copies of a layer are on nodes of two sizes, the smaller size counts: one placement serves both.
    """
    plan, parts = make_plan(spec), parts_of_ranks(spec)
    sizes: dict[str, int] = {}
    for stage in plan.stages:
        ranks = plan.ranks_of_stage(stage.index)
        size = min(spec.cluster.parts[parts[rank]][1].devices for rank in ranks)
        uses = (step for step in stage.steps if isinstance(step, Use))
        names = [ParameterName(tensor) for use in uses for _, tensor in use.params]
        sizes |= {name.block: size for name in names if name.is_of_experts}
    return sizes
