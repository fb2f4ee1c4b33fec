"""QK-clip by hand: "Kimi K2", arXiv 2507.20534, §2.1, equations 1 to 3, head by head.

Query heads that share a key are clipped together, by the largest logit of them all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.reference.attention import Attention, GroupedQueryAttention, MultiHeadLatentAttention
from tests.reference.model import Reference


@torch.no_grad()
def clip_logits_(model: Reference, bound: float) -> tuple[float, int]:
    """Scale down queries and keys of heads whose largest logit exceeded the bound since the last call.

    Returns the largest logit of all heads, and the number of heads above the bound.
    """
    largest: list[float] = []
    for attention in model.modules():
        if isinstance(attention, Attention):
            of_heads = torch.stack(attention.largest).amax(0).tolist()
            attention.largest.clear()
            largest += of_heads
            if isinstance(attention, MultiHeadLatentAttention):
                _clip_latent_(attention, of_heads, bound)
            elif isinstance(attention, GroupedQueryAttention):
                _clip_grouped_(attention, of_heads, bound)
    return max(largest), sum(logit > bound for logit in largest)


def _clip_latent_(attention: MultiHeadLatentAttention, largest: list[float], bound: float) -> None:
    """q_C and k_C by √γ, q_R by γ; k_R, which all heads share, stays."""
    dims = attention.attention.head_dim
    query = attention.q if attention.attention.query_rank is None else attention.q_up
    for head, logit in enumerate(largest):
        if logit > bound:
            gamma, q, kv = bound / logit, head * (dims.nope + dims.rope), head * (dims.nope + dims.value)
            query[q : q + dims.nope] *= gamma**0.5
            query[q + dims.nope : q + dims.nope + dims.rope] *= gamma
            attention.kv_up[kv : kv + dims.nope] *= gamma**0.5


def _clip_grouped_(attention: GroupedQueryAttention, largest: list[float], bound: float) -> None:
    sizes, width = attention.attention, attention.attention.head_dim
    served = sizes.heads // sizes.kv_heads
    projections: list[Tensor] = [attention.qkv, *([attention.qkv_bias] if sizes.bias else [])]
    for group in range(sizes.kv_heads):
        logit = max(largest[group * served : (group + 1) * served])
        if logit > bound:
            for rows in projections:
                rows[group * served * width : (group + 1) * served * width] *= (bound / logit) ** 0.5
                rows[(sizes.heads + group) * width : (sizes.heads + group + 1) * width] *= (bound / logit) ** 0.5
