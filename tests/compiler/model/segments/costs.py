"""What blocks cost in floating point operations, from the costs of their segments."""

from __future__ import annotations

from compiler import ir
from compiler.model.segments.interpret import cut
from compiler.plan.blocks import StageBlock


def forward_flops(block: StageBlock) -> int:
    """FLOPs of the forward of a block, where every expert rank receives as many rows as it sends."""
    rows = next((int(s.sizes[0].shape[0]) for s in block.steps if isinstance(s, ir.Communication)), 0)
    costs = [dict(cut(use.segment).costs)["F"] for use in block.uses]
    return sum(cost.flops + cost.flops_row * rows for cost in costs)
