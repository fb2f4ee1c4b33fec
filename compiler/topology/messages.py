"""What a message between pipeline ranks takes: of two that run neighbouring stages, over the links between them."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir import Plan
from compiler.stage_placement import StagePlacement
from compiler.topology.fabric import Fabric


def messages_s(fabric: Fabric, plan: Plan, placement: StagePlacement) -> Mapping[tuple[int, int], float]:
    """Seconds by (pipeline rank that sends, pipeline rank that receives), for both directions of micro-batches.

    All columns send at once, and the last message to be there counts. Empty where nothing crosses.
    """
    found: dict[tuple[int, int], float] = {}
    mesh, last = plan.mesh, len(plan.stages) - 1
    for stage, output in ((stage.index, stage.output) for stage in plan.stages if stage.output):
        for micro_batch in (0, 1) if stage < last else ():
            a, b = (placement.rank_of(mesh.pp, 2, each, micro_batch) for each in (stage, stage + 1))
            if a != b and (a, b) not in found:
                time_s = fabric.message_s(mesh.rank(a, 0), mesh.rank(b, 0), output.fixed_bytes, mesh.columns)
                found[a, b] = found[b, a] = time_s
    return found
