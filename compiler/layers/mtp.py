"""What multi-token prediction adds in front of its block. Source: DeepSeek-V3, arXiv 2412.19437, §2.2.

T tokens of a micro-batch · D hidden.
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.layers.builder import Place, index, segment
from compiler.layers.ends import embedded, embedding_factor

PARAMETERS = {
    "table": "embedding",  # the main model's
    "embedding_norm": "embedding_norm",
    "hidden_norm": "hidden_norm",
    "projection": "projection",
}


def mtp_input(ops: Any, p: Any, tokens_T: Any, h_TD: Any, *, eps: float, factor: float = 1.0) -> tuple[Any, ...]:
    """projection([rmsnorm(embedding of the next token) | rmsnorm(hidden state)])"""
    return _projected(ops, p, embedded(ops, p, tokens_T, factor), h_TD, eps)


def mtp_embedded(ops: Any, p: Any, e_TD: Any, h_TD: Any, *, eps: float) -> tuple[Any, ...]:
    """`mtp_input` of what the embedding gave, of which tensor ranks have rows."""
    return _projected(ops, p, e_TD, h_TD, eps)


def _projected(ops: Any, p: Any, e_TD: Any, h_TD: Any, eps: float) -> tuple[Any, ...]:
    next_TD, hidden_TD = ops.rmsnorm(e_TD, p.embedding_norm, eps), ops.rmsnorm(h_TD, p.hidden_norm, eps)
    return (ops.linear(ops.cat2(next_TD, hidden_TD), p.projection),)


def build(place: Place) -> ir.Segment:
    D = place.D
    own = (place.gain("embedding_norm", D), place.gain("hidden_norm", D), place.weight("projection", D, 2 * D))
    h = place.input("h", place.T, D)
    if place.spec.splits_vocabulary:
        inputs = (place.input("e", place.T, D), h)
        return segment("mtp_input", mtp_embedded, own, inputs, ("y",), eps=place.model.norm_eps)
    return segment(
        "mtp_input",
        mtp_input,
        (place.table("table", place.model.vocab), *own),
        (index("tokens", place.T), h),
        ("y",),
        eps=place.model.norm_eps,
        **embedding_factor(place),
    )
