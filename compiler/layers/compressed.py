"""The attention of DeepSeek-V4, arXiv 2606.19348, §2.3: a window over one head of keys, and compressed entries.

T tokens of a micro-batch · D hidden · C columns of a head · E entries. Queries are of low rank, and each head is normed
without a gain. One head is both key and value, so what attention returns is rotated back by the position of its query:
a value then depends on its distance alone. Groups of heads are projected apart, and then together.

`pool` gives the values and, below them, the gates of entries (`compress`), which are normed, and rotated as the first
tokens of their windows are.
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.layers.builder import Constant, Place, segment
from compiler.layers.residual import entering, entrance, exit_of, leaving, post_gain, pre_gain
from compiler.layers.rotation import Rotation, rotated, rotation_of_last
from dsl.schema import Compressed

NAMES = (
    *("norm", "q_down", "q_norm", "q_up", "kv", "kv_norm", "pool", "pool_bias", "pool_norm", "sinks"),
    *("group_out", "out", "post_norm"),
)
PARAMETERS = {name: f"attention.{name}" for name in NAMES}


def compressed(
    ops: Any,
    p: Any,
    h_TD: Any,
    *,
    eps: float,
    sequence: int,
    heads: int,
    head_dim: int,
    window: int,
    rotation: Rotation = (),
    sinks: bool = False,
    rate: int = 0,
    pre: bool = True,
    post: bool = False,
    factor: float = 1.0,
) -> tuple[Any, ...]:
    """h, handed through, and out(group_out(attend(q, kv, entries))); with `rate` 0 there are no entries."""
    x_TD = entering(ops, p, h_TD, eps, pre)
    first = head_dim - int(rotation[0]) if rotation else 0
    latent_TC = ops.rmsnorm(ops.linear(x_TD, p.q_down), p.q_norm, eps)
    q_T = ops.unweighted_rmsnorm(ops.linear(latent_TC, p.q_up), heads, eps)
    q_T = rotated(ops, q_T, (), sequence, heads, first, rotation)
    kv_TC = rotated(ops, ops.rmsnorm(ops.linear(x_TD, p.kv), p.kv_norm, eps), (), sequence, 1, first, rotation)
    logits = p.sinks if sinks else None
    if rate:
        entries_EC = ops.compress(ops.linear(x_TD, p.pool), p.pool_bias, sequence, False)
        entries_EC = ops.rmsnorm(entries_EC, p.pool_norm, eps)
        entries_EC = rotated(ops, entries_EC, (), sequence, 1, first, rotation, stride=rate)
        o_T = ops.compressed_attention(q_T, kv_TC, entries_EC, None, logits, sequence, heads, window, rate)
    else:
        o_T = ops.bounded_attention(q_T, kv_TC, kv_TC, logits, sequence, heads, 1, 0.0, window, 0.0)
    o_T = rotated(ops, o_T, (), sequence, heads, first, rotation, stride=-1)
    y_TD = ops.linear(ops.block_linear(o_T, p.group_out), p.out)
    return h_TD, leaving(ops, p, y_TD, eps, post, factor)


def build(place: Place, sizes: Compressed) -> ir.Segment:
    how = rotation_of_last(sizes)
    return segment(
        "attention",
        compressed,
        (*pre_gain(place), *_parameters(place, sizes), *post_gain(place)),
        (place.input("h", place.T, place.D),),
        ("entered", "y"),
        eps=place.model.norm_eps,
        sequence=place.spec.train.sequence,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        window=sizes.window,
        **({"rotation": how} if how else {}),
        **_options(sizes),
        **entrance(place),
        **exit_of(place),
    )


def _parameters(place: Place, sizes: Compressed) -> tuple[ir.Param, ...]:
    D, C, heads = place.D, sizes.head_dim, sizes.heads
    blocks = (sizes.out_rank,) * sizes.groups
    return (
        place.weight("q_down", sizes.query_rank, D),
        place.gain("q_norm", sizes.query_rank),
        place.weight("q_up", heads * C, sizes.query_rank),
        place.weight("kv", C, D),
        place.gain("kv_norm", C),
        *(_pools(place, "pool", C, C, sizes.compress.rate) if sizes.compress else ()),
        *((place.vector("sinks", heads, place.model.init_std),) if sizes.sinks else ()),
        *place.fused((place.weight("group_out", sum(blocks), heads * C // sizes.groups),), *blocks),
        place.weight("out", D, sum(blocks)),
    )


def _pools(place: Place, name: str, columns: int, width: int, rate: int) -> tuple[ir.Param, ...]:
    """The parameters of entries of so many columns, of values and gates of `width` columns."""
    return (
        *place.fused((place.weight(name, 2 * width, place.D),), width, width),
        place.positions(f"{name}_bias", rate, width),
        place.gain(f"{name}_norm", columns),
    )


def _options(sizes: Compressed) -> dict[str, Constant]:
    """The constants of what a layer has beside the window."""
    return {**({"sinks": True} if sizes.sinks else {}), **({"rate": sizes.compress.rate} if sizes.compress else {})}
