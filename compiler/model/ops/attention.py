"""Attention with RoPE inside, causal within each sequence of the micro-batch: latent (MLA) and grouped-query (GQA).

With theta = 0 there is no RoPE inside: queries and keys come rotated, or have no position. Where sequences hold several
documents, `starts` has for each token the position in its sequence where its document starts: a query sees only the
keys of its document, and positions count from the document's start. FLOPs are those of one document per sequence, an
upper bound.

With context parallelism a rank has some rows of each sequence as queries, and all rows as keys. `positions` then has
the position of each query in its sequence. A rank takes as many rows from the front of a sequence as from its end, so
half of its products are masked, too.

Each op has a variant `_peaks`, which also returns the largest logit of each query head over all queries and the keys
that they see. It is the largest scaled product before any softcap, and has no gradient. The variant has the gradients
of the op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from compiler.model.ops.rule import PLACES, Gradient, Rule, Shape, Tensor, are_places, elementwise, statistics_dtype

# --- Rotation by position outside attention: of part of each head, or with scaled frequencies

# The columns to rotate; the angles (`compiler.model.layers.rotation`); `magnitude`, a factor of the rotated columns;
# `scale`, a factor of all columns; and the positions of the rows. Without `positions`, rows are `stride` tokens apart
# from position 0 of a sequence on. A negative stride rotates backwards.
_SETTINGS = (
    *("sequence", "heads", "first", "width"),
    *("theta", "factor", "low", "high", "original", "magnitude", "scale"),
    *PLACES,
    "stride",
)


def _infer(
    x: Tensor,
    sequence: int,
    heads: int,
    first: int,
    width: int,
    theta: float,
    factor: float,
    low: float,
    high: float,
    original: float,
    magnitude: float,
    scale: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
    stride: int = 1,
) -> tuple[Tensor, ...]:
    assert are_places((starts, positions), x.shape[0]), (starts, positions)
    T, C, sequence_rows = x.shape[0], x.shape[1] // heads, sequence // abs(stride)
    assert abs(stride) == 1 or not (starts or positions), "rows of several tokens take no positions"
    assert x.shape[1] == heads * C and (positions or T % max(1, sequence_rows) == 0), (x, heads, sequence, stride)
    assert width % 2 == 0 and first >= 0 and first + width <= C, (x, first, width)
    assert low != high, (low, high)
    return (x,)


_ROTATION = {
    "rotate": Rule(
        args=("x", *_SETTINGS),
        optional=(*PLACES, "stride"),
        outputs=("y",),
        infer=_infer,
        kernel_class="rope",
        flops=elementwise("x", 3),
        dgrad=Gradient("rotate_dgrad", reads=("d_y", *_SETTINGS), gives=("x",), flops=elementwise("d_y", 3)),
    )
}


# --- attention

_MLA = ("sequence", "heads", "nope", "rope", "value", "theta", *PLACES)
_GQA = ("sequence", "heads", "kv_heads", "theta", *PLACES)
_BOUNDED = ("sequence", "heads", "kv_heads", "theta", "window", "softcap", *PLACES)


def _infer_mla(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    B, queries = _queries(q, kv, sequence, theta, starts, positions)
    assert q.shape[1] == heads * (nope + rope) and kv.shape[1] == heads * (nope + value), (q, kv)
    assert k_rope.shape == (kv.shape[0], rope), (k_rope, kv)
    return Tensor((q.shape[0], heads * value), q.dtype), Tensor((B, heads, queries), statistics_dtype(q.dtype))


def _queries(
    q: Tensor, k: Tensor, sequence: int, theta: float, starts: Tensor | None, positions: Tensor | None
) -> tuple[int, int]:
    """(sequences, queries per sequence). With positions, queries are some of the rows, and queries and keys come
    rotated."""
    B = k.shape[0] // sequence
    assert k.shape[0] % sequence == 0 and q.shape[0] % B == 0, (q, k, sequence)
    assert are_places((starts, positions), q.shape[0]), (starts, positions)
    assert q.shape[0] == k.shape[0] or positions, (q, k)
    assert not (positions and theta), "queries and keys of different rows are rotated before attention"
    return B, q.shape[0] // B


def _infer_gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    C, (B, queries) = q.shape[1] // heads, _queries(q, k, sequence, theta, starts, positions)
    assert heads % kv_heads == 0 and q.shape[1] == heads * C and C % 2 == 0, (q, heads, kv_heads)
    assert k.shape == v.shape and k.shape[1] == kv_heads * C, (k, v)
    return q, Tensor((B, kv_heads, queries, heads // kv_heads), statistics_dtype(q.dtype))


def _infer_bounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    window: int,
    softcap: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    assert sinks is None or sinks.shape == (heads,), (sinks, heads)
    return _infer_gqa(q, k, v, sequence, heads, kv_heads, theta, starts, positions)


def _mla_flops(keys: int, values: int) -> Callable[[SimpleNamespace], int]:
    """FLOPs of `keys` products over the width of a query and `values` over that of a value, half of each masked."""

    def flops(n: SimpleNamespace) -> int:
        return n.q[0] * n.sequence * n.heads * (keys * (n.nope + n.rope) + values * n.value)

    return flops


def _gqa_flops(products: int) -> Callable[[SimpleNamespace], int]:
    """FLOPs of `products` products over the width of the queries, half of each masked."""
    return lambda n: products * n.q[0] * n.sequence * n.q[1]


def _bounded_flops(products: int) -> Callable[[SimpleNamespace], int]:
    """FLOPs of `products` products over the width of the queries, for the keys in the window's band."""

    def flops(n: SimpleNamespace) -> int:
        keys = min(n.window or n.sequence, n.sequence)
        return products * n.q[0] * (2 * n.sequence - keys) * keys // n.sequence * n.q[1]

    return flops


def _mla_kernel(n: SimpleNamespace) -> Shape:
    """(tokens, sequence, heads, width of a key, width of a value)."""
    return n.q[0], n.sequence, n.heads, n.nope + n.rope, n.value


def _gqa_kernel(n: SimpleNamespace) -> Shape:
    """(tokens, sequence, heads, width of a key, width of a value), for grouped queries."""
    width = n.q[1] // n.heads
    return n.q[0], n.sequence, n.heads, width, width


def _bounded_kernel(n: SimpleNamespace) -> Shape:
    """The extents of plain causal attention with the same average number of keys per query: a window or half a
    sequence."""
    tokens, sequence, *widths = _gqa_kernel(n)
    return tokens, min(sequence, 2 * n.window or sequence), *widths


MLA_ATTENTION = Rule(
    args=("q", "kv", "k_rope", *_MLA),
    optional=PLACES,
    outputs=("o", "lse"),
    hidden=1,
    differentiable=("o",),
    infer=_infer_mla,
    kernel_class="attention",
    flops=_mla_flops(1, 1),  # q·k and p·v
    kernel=_mla_kernel,
    dgrad=Gradient(  # q·k again, dk and dq; dv and dp
        "mla_attention_dgrad",
        reads=("d_o", "q", "kv", "k_rope", "o", "lse", *_MLA),
        gives=("q", "kv", "k_rope"),
        flops=_mla_flops(3, 2),
        kernel=_mla_kernel,
        kernel_class="attention_backward",
    ),
)
GQA_ATTENTION = Rule(
    args=("q", "k", "v", *_GQA),
    optional=PLACES,
    outputs=("o", "lse"),
    hidden=1,
    differentiable=("o",),
    infer=_infer_gqa,
    kernel_class="attention",
    flops=_gqa_flops(2),  # q·k and p·v
    kernel=_gqa_kernel,
    dgrad=Gradient(  # q·k again, dk and dq; dv and dp
        "gqa_attention_dgrad",
        reads=("d_o", "q", "k", "v", "o", "lse", *_GQA),
        gives=("q", "k", "v"),
        flops=_gqa_flops(5),
        kernel=_gqa_kernel,
        kernel_class="attention_backward",
    ),
)
BOUNDED_ATTENTION = Rule(
    args=("q", "k", "v", "sinks", *_BOUNDED),
    optional=PLACES,
    outputs=("o", "lse"),
    hidden=1,
    differentiable=("o",),
    infer=_infer_bounded,
    kernel_class="attention",
    flops=_bounded_flops(2),  # q·k and p·v
    kernel=_bounded_kernel,
    dgrad=Gradient(  # q·k again, dk and dq; dv and dp
        "bounded_attention_dgrad",
        reads=("d_o", "q", "k", "v", "o", "lse", *_BOUNDED),
        gives=("q", "k", "v"),
        flops=_bounded_flops(5),
        kernel=_bounded_kernel,
        kernel_class="attention_backward",
    ),
    wgrad=Gradient(
        "bounded_attention_wgrad",
        reads=("d_o", "o", "lse", "sinks"),
        gives=("sinks",),
        flops=elementwise("d_o", 2),
        kernel_class="norm",
    ),
)


def _add_peaks(rule: Rule) -> Rule:
    """The rule of the `_peaks` variant of an op."""

    def infer(*args: Any) -> tuple[Tensor, ...]:
        o, lse = rule.infer(*args)
        _, groups, _, *share = lse.shape  # [B, H, S], or with grouped queries [B, G, S, H/G]
        return o, Tensor((groups * (share[0] if share else 1),), lse.dtype), lse

    return replace(rule, outputs=("o", "peaks", "lse"), infer=infer)


_OPS = {"mla_attention": MLA_ATTENTION, "gqa_attention": GQA_ATTENTION, "bounded_attention": BOUNDED_ATTENTION}
RULES = _OPS | {f"{op}_peaks": _add_peaks(rule) for op, rule in _OPS.items()} | _ROTATION
