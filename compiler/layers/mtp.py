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
    next_TD = ops.rmsnorm(embedded(ops, p, tokens_T, factor), p.embedding_norm, eps)
    hidden_TD = ops.rmsnorm(h_TD, p.hidden_norm, eps)
    return (ops.linear(ops.cat2(next_TD, hidden_TD), p.projection),)


def build(place: Place) -> ir.Segment:
    D = place.D
    return segment(
        "mtp_input",
        mtp_input,
        (
            place.weight("table", place.model.vocab, D),
            place.gain("embedding_norm", D),
            place.gain("hidden_norm", D),
            place.weight("projection", D, 2 * D),
        ),
        (index("tokens", place.T), place.input("h", place.T, D)),
        ("y",),
        eps=place.model.norm_eps,
        **embedding_factor(place),
    )
