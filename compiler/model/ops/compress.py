"""Compressed entries, each of several tokens, and attention to them and to a window of keys (DeepSeek-V4).

Attention FLOPs count what queries see: the band of the window, and all earlier entries or the chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from compiler.model.ops.indexer import twice_seen
from compiler.model.ops.rule import Gradient, Rule, Shape, Tensor, elementwise, statistics_dtype


def _infer_compress(x: Tensor, bias: Tensor, sequence: int, overlap: bool) -> tuple[Tensor, ...]:
    rate, width = bias.shape
    B, E, C = x.shape[0] // sequence, sequence // rate, width // 2 if overlap else width
    assert x.shape == (B * sequence, 2 * width) and width == (2 * C if overlap else C), (x, bias, sequence, overlap)
    return Tensor((B * E, C), x.dtype), Tensor((B, E, C), statistics_dtype(x.dtype))


def _infer_attention(
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    sinks: Tensor | None,
    sequence: int,
    heads: int,
    window: int,
    rate: int,
) -> tuple[Tensor, ...]:
    T, C = kv.shape
    B = T // sequence
    assert q.shape == (T, heads * C) and B * sequence == T, (q, kv, heads, sequence)
    assert entries.shape == (B * (sequence // rate), C), (entries, kv, sequence, rate)
    assert chosen is None or (chosen.shape[0] == T and chosen.dtype == "int32"), chosen
    assert sinks is None or sinks.shape == (heads,), (sinks, heads)
    return q, Tensor((B, 1, sequence, heads), statistics_dtype(q.dtype))


def _twice_seen(n: SimpleNamespace) -> int:
    """Twice the number of keys and entries that the queries of a sequence see in total."""
    entries = twice_seen(n.sequence, None if n.chosen is None else n.chosen[1], n.rate)
    return twice_seen(n.sequence, n.window, 1) + entries


def _flops(products: int) -> Callable[[SimpleNamespace], int]:
    """FLOPs of `products` products over the width of the queries."""
    return lambda n: products * (n.q[0] // n.sequence) * _twice_seen(n) * n.q[1]


def _kernel(n: SimpleNamespace) -> Shape:
    """The extents of plain causal attention with the same average number of keys per query."""
    width = n.q[1] // n.heads
    return n.q[0], max(1, _twice_seen(n) // n.sequence), n.heads, width, width


_ATTENTION = ("sequence", "heads", "window", "rate")

COMPRESS = Rule(
    args=("x", "bias", "sequence", "overlap"),
    outputs=("y", "lse"),
    hidden=1,
    infer=_infer_compress,
    kernel_class="norm",
    flops=elementwise("x", 3),
    dgrad=Gradient("compress_dgrad", reads=("d_y", "x", "bias", "lse"), gives=("x",), flops=elementwise("x", 6)),
    wgrad=Gradient("compress_wgrad", reads=("d_y", "x", "bias", "lse"), gives=("bias",), flops=elementwise("x", 6)),
)

COMPRESSED_ATTENTION = Rule(
    args=("q", "kv", "entries", "chosen", "sinks", *_ATTENTION),
    outputs=("o", "lse"),
    hidden=1,
    differentiable=("o",),
    infer=_infer_attention,
    kernel_class="attention",
    flops=_flops(2),  # q·k and p·k
    kernel=_kernel,
    dgrad=Gradient(  # q·k again, dq, and dk of both; dp
        "compressed_attention_dgrad",
        reads=("d_o", "q", "kv", "entries", "chosen", "o", "lse", *_ATTENTION),
        gives=("q", "kv", "entries"),
        flops=_flops(5),
        kernel=_kernel,
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

RULES = {"compress": COMPRESS, "compressed_attention": COMPRESSED_ATTENTION}
