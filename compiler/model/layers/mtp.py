"""What multi-token prediction adds in front of its block. Source: DeepSeek-V3, arXiv 2412.19437, §2.2.

T tokens of a micro-batch · D hidden · N = n·D numbers of a token, of n residual streams. Of several streams the block
takes all, each normed and projected on its own, and the embedding is added to each, as in DeepSeek-V4.
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.model.layers.builder import Constant, Place, index, segment
from compiler.model.layers.ends import embedded, embedding_factor

PARAMETERS = {
    "table": "embedding",  # the main model's
    "embedding_norm": "embedding_norm",
    "hidden_norm": "hidden_norm",
    "projection": "projection",
    "embedding_projection": "embedding_projection",
    "hidden_projection": "hidden_projection",
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


def mtp_streams(
    ops: Any, p: Any, tokens_T: Any, h_TN: Any, *, eps: float, streams: int, factor: float = 1.0
) -> tuple[Any, ...]:
    """The projection of the normed embedding of the next token, and added to it that of each normed stream."""
    return _projected_streams(ops, p, embedded(ops, p, tokens_T, factor), h_TN, eps, streams)


def mtp_embedded_streams(ops: Any, p: Any, e_TD: Any, h_TN: Any, *, eps: float, streams: int) -> tuple[Any, ...]:
    """`mtp_streams` of what the embedding gave, of which tensor ranks have rows."""
    return _projected_streams(ops, p, e_TD, h_TN, eps, streams)


def _projected_streams(ops: Any, p: Any, e_TD: Any, h_TN: Any, eps: float, streams: int) -> tuple[Any, ...]:
    e_TD = ops.linear(ops.rmsnorm(e_TD, p.embedding_norm, eps), p.embedding_projection)
    width = h_TN.shape[1] // streams
    done: Any = None
    for left in range(streams, 0, -1):
        h_TD, h_TN = ops.split2(h_TN, width) if left > 1 else (h_TN, None)
        y_TD = ops.add(e_TD, ops.linear(ops.rmsnorm(h_TD, p.hidden_norm, eps), p.hidden_projection))
        done = y_TD if done is None else ops.cat2(done, y_TD)
    return (done,)


def build(place: Place) -> ir.Segment:
    D, hyper = place.D, place.model.hyper_connections
    norms = (place.gain("embedding_norm", D), place.gain("hidden_norm", D))
    projections = (place.weight(f"{name}_projection", D, D) for name in ("embedding", "hidden"))
    own = (*norms, *(projections if hyper else (place.weight("projection", D, 2 * D),)))
    how: dict[str, Constant] = {"streams": hyper.streams} if hyper else {}
    h = place.input("h", place.T, place.N)
    if place.spec.splits_vocabulary:
        inputs = (place.input("e", place.T, D), h)
        function = mtp_embedded_streams if hyper else mtp_embedded
        return segment("mtp_input", function, own, inputs, ("y",), eps=place.model.norm_eps, **how)
    return segment(
        "mtp_input",
        mtp_streams if hyper else mtp_input,
        (place.table("table", place.model.vocab), *own),
        (index("tokens", place.T), h),
        ("y",),
        eps=place.model.norm_eps,
        **how,
        **embedding_factor(place),
    )
