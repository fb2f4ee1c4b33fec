"""On which kind of nodes the experts of each layer are, where a cluster has several: where the plan runs the layer."""

from __future__ import annotations

from compiler.ir import Use
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import parts_of_ranks
from dsl.schema import Spec
from runtime.contract.names import ParameterName


def devices_of_nodes(spec: Spec) -> dict[str, int]:
    """Devices of a node by layer, as in layers.3.

    Where two copies of a layer are on nodes of two sizes, of the smaller ones: one placement serves both.
    """
    plan, parts = make_plan(spec), parts_of_ranks(spec)
    found: dict[str, int] = {}
    for stage in plan.stages:
        ranks = plan.ranks_of_stage(stage.index)
        size = min(spec.cluster.parts[parts[rank]][1].devices for rank in ranks)
        uses = (step for step in stage.steps if isinstance(step, Use))
        names = [ParameterName(tensor) for use in uses for _, tensor in use.params]
        found |= {name.block: size for name in names if name.is_of_experts}
    return found
