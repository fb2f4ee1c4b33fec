"""QK-clip: attention returns the largest logit of each head, and the weights of queries and keys are scaled down by it
after the step.

Moonshot AI, "Kimi K2", arXiv 2507.20534, §2.1. If the largest logit of a head is above τ, with γ = τ / (largest logit),
the weights are scaled so that its logits are multiplied by γ. Latent attention multiplies a head's own parts of query
and key by √γ, and the rotated part of its query by γ, because all heads share the rotated key. Query heads that share a
key are clipped together by the largest logit of all of them: their queries and their key by √γ each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from compiler import ir
from compiler.model.layers.builder import Constant, Place
from dsl.schema import Gqa, Mla

OUTPUT = "peaks"  # output of the attention segment


class HeadRows(NamedTuple):
    """The rows of a weight that QK-clip scales, head after head from row `first` on."""

    weight: str  # local name
    first: int
    heads: int
    parts: tuple[tuple[int, float], ...]  # per part of a head: (rows, exponent of γ)


def is_clipped(place: Place) -> bool:
    """Whether QK-clip applies to the attention at a place."""
    sizes = place.attention or place.model.attention
    returns_peaks = isinstance(sizes, Gqa) or (isinstance(sizes, Mla) and sizes.indexer is None)
    return place.spec.train.optimizer.qk_clip is not None and returns_peaks


def constants(place: Place) -> dict[str, Constant]:
    """The constant of the attention segment for QK-clip, if it applies."""
    return {OUTPUT: True} if is_clipped(place) else {}


def outputs(place: Place) -> tuple[ir.Output, ...]:
    """The last output of the attention segment, if QK-clip applies."""
    return (ir.Output(OUTPUT, grad=False),) if is_clipped(place) else ()


def attend(ops: Any, op: str, peaks: bool, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    """Call an attention op. Returns its output and, with `peaks`, the largest logit of each head."""
    if not peaks:
        return getattr(ops, op)(*args), ()
    o_T, peaks_H = getattr(ops, f"{op}_peaks")(*args)
    return o_T, (peaks_H,)


def projections(sizes: Mla | Gqa) -> tuple[int, tuple[HeadRows, ...]]:
    """The number of key heads, each clipped separately, and the rows of queries and keys to scale."""
    if isinstance(sizes, Mla):
        heads, (nope, rope, value) = sizes.heads, (sizes.head_dim.nope, sizes.head_dim.rope, sizes.head_dim.value)
        query = "q_up" if sizes.query_rank else "q"
        query_rows = HeadRows(query, 0, heads, ((nope, 0.5), (rope, 1.0)))
        return heads, (query_rows, HeadRows("kv_up", 0, heads, ((nope, 0.5), (value, 0.0))))
    part = ((sizes.head_dim, 0.5),)
    rows = [
        HeadRows(weight, first, heads, part)
        for weight in ("qkv", *(("qkv_bias",) if sizes.bias is not None else ()))
        for first, heads in ((0, sizes.heads), (sizes.heads * sizes.head_dim, sizes.kv_heads))
    ]
    return sizes.kv_heads, tuple(rows)
