"""QK-clip: attention gives the largest logit of each head, by which queries and keys are made smaller after the step.

Moonshot AI, "Kimi K2", arXiv 2507.20534, §2.1. With γ = τ / (the largest logit of a head), where that is above τ, the
head's logits become γ times what they were. Latent attention multiplies a head's own parts of query and key by √γ, and
the rotated part of its query by γ, as the rotated key is of all heads. Query heads that share a key are clipped
together, by the largest logit of all of them: their queries and their key by √γ each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from compiler import ir
from compiler.model.layers.builder import Constant, Place
from dsl.schema import Gqa, Mla

OUTPUT = "peaks"  # of the segment that attends


class HeadRows(NamedTuple):
    """Rows of a weight, by its local name, from row `first` on: of each of `heads` heads so many, one part below the
    other, and the exponent of γ by which each part is multiplied."""

    weight: str
    first: int
    heads: int
    parts: tuple[tuple[int, float], ...]


def is_clipped(place: Place) -> bool:
    """Whether the logits of the attention at a place are bounded by those of the last step."""
    sizes = place.attention or place.model.attention
    tells = isinstance(sizes, Gqa) or (isinstance(sizes, Mla) and sizes.indexer is None)
    return place.spec.train.optimizer.qk_clip is not None and tells


def constants(place: Place) -> dict[str, Constant]:
    """What the segment that attends says of it; nothing where nobody asks for logits."""
    return {OUTPUT: True} if is_clipped(place) else {}


def outputs(place: Place) -> tuple[ir.Output, ...]:
    """What that segment returns behind everything else."""
    return (ir.Output(OUTPUT, grad=False),) if is_clipped(place) else ()


def attended(ops: Any, op: str, peaks: bool, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    """What an op of attention gives, and the largest logit of each head, if it is asked for."""
    if not peaks:
        return getattr(ops, op)(*args), ()
    o_T, peaks_H = getattr(ops, f"{op}_peaks")(*args)
    return o_T, (peaks_H,)


def projections(sizes: Mla | Gqa) -> tuple[int, tuple[HeadRows, ...]]:
    """The heads of keys, each clipped apart, and the rows of queries and keys that are multiplied."""
    if isinstance(sizes, Mla):
        heads, (nope, rope, value) = sizes.heads, (sizes.head_dim.nope, sizes.head_dim.rope, sizes.head_dim.value)
        query = "q_up" if sizes.query_rank else "q"
        of_queries = HeadRows(query, 0, heads, ((nope, 0.5), (rope, 1.0)))
        return heads, (of_queries, HeadRows("kv_up", 0, heads, ((nope, 0.5), (value, 0.0))))
    part = ((sizes.head_dim, 0.5),)
    found = [
        HeadRows(weight, first, heads, part)
        for weight in ("qkv", *(("qkv_bias",) if sizes.bias is not None else ()))
        for first, heads in ((0, sizes.heads), (sizes.heads * sizes.head_dim, sizes.kv_heads))
    ]
    return sizes.kv_heads, tuple(found)
