"""What a message between pipeline ranks takes: of two that run neighbouring stages, over the links between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compiler.ir import Plan
from compiler.ir.stage_placement import StagePlacement
from compiler.machine.topology.fabric import Fabric

RankOf = Callable[[int], int]  # stage → the pipeline rank that runs it on the micro-batch at hand


@dataclass(frozen=True)
class Messages:
    """What messages take, by (pipeline rank that sends, pipeline rank that receives): a price for every schedule."""

    seconds: Mapping[tuple[int, int], float]

    def sent_ns(self, kind: str, stage: int, num_stages: int, rank_of: RankOf) -> int:
        """Nanoseconds that the result of an action is on the links to the next rank; 0 where it stays on its own."""
        to = receiver(kind, stage, num_stages, rank_of)
        here = rank_of(stage)
        return 0 if to is None or to == here else round(self.seconds[here, to] * 1e9)


def receiver(kind: str, stage: int, num_stages: int, rank_of: RankOf) -> int | None:
    """The pipeline rank that the result of an action goes to; None where it goes nowhere."""
    if kind not in ("F", "B", "I"):
        return None
    after = stage + (1 if kind == "F" else -1)
    return rank_of(after) if 0 <= after < num_stages else None


def messages_of(fabric: Fabric, plan: Plan, placement: StagePlacement) -> Messages:
    """The messages of a placement, in both directions of micro-batches.

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
    return Messages(found)
