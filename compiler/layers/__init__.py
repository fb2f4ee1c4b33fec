"""The layers, each stated once as segments over a table of ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compiler import ir
from compiler.layers import attention, dense, ends, moe, mtp
from compiler.layers.build import Place

__all__ = ["LAYERS", "Layer", "Place"]


@dataclass(frozen=True)
class Layer:
    """A kind of segment: its builder, and the logical name below its block of each parameter."""

    build: Callable[[Place], ir.Segment]
    parameters: Mapping[str, str]


LAYERS: dict[str, Layer] = {
    "attention": Layer(attention.build, attention.PARAMETERS),
    "dense": Layer(dense.build, dense.PARAMETERS),
    "embed": Layer(ends.build_embed, ends.EMBED_PARAMETERS),
    "experts": Layer(moe.build_experts, moe.EXPERTS_PARAMETERS),
    "final_norm": Layer(ends.build_final_norm, ends.FINAL_NORM_PARAMETERS),
    "head": Layer(ends.build_head, ends.HEAD_PARAMETERS),
    "join": Layer(moe.build_join, {}),
    "mtp_input": Layer(mtp.build, mtp.PARAMETERS),
    "router": Layer(moe.build_router, moe.ROUTER_PARAMETERS),
    "shared": Layer(moe.build_shared, moe.SHARED_PARAMETERS),
}
