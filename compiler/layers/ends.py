"""The two ends of the model: embedding, and final norm, head and loss. T tokens of a micro-batch · D hidden."""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.layers.builder import Place, index, segment

EMBED_PARAMETERS = {"table": "embedding"}
FINAL_NORM_PARAMETERS = {"norm": "final_norm"}
HEAD_PARAMETERS = {"head": "head"}


def embed(ops: Any, p: Any, tokens_T: Any) -> tuple[Any, ...]:
    """The rows of the embedding."""
    return (ops.embedding(tokens_T, p.table),)


def build_embed(place: Place) -> ir.Segment:
    params = (place.weight("table", place.model.vocab, place.D),)
    return segment("embed", embed, params, (index("tokens", place.T),), ("y",))


def final_norm(ops: Any, p: Any, h_TD: Any, *, eps: float, copies: int) -> tuple[Any, ...]:
    """The normed hidden state, once for each of its readers: the head, and the MTP block if there is one."""
    return (ops.rmsnorm(h_TD, p.norm, eps),) * copies


def build_final_norm(place: Place) -> ir.Segment:
    outputs = ("y", "y_mtp") if place.model.mtp and not place.mtp else ("y",)
    params, inputs = (place.gain("norm", place.D),), (place.input("h", place.T, place.D),)
    return segment("final_norm", final_norm, params, inputs, outputs, eps=place.model.norm_eps, copies=len(outputs))


def head(ops: Any, p: Any, h_TD: Any, targets_T: Any) -> tuple[Any, ...]:
    """The cross entropy summed over the valid targets."""
    return (ops.cross_entropy(ops.linear(h_TD, p.head), targets_T),)


def build_head(place: Place) -> ir.Segment:
    inputs = (place.input("h", place.T, place.D), index("targets", place.T))
    return segment("head", head, (place.weight("head", place.model.vocab, place.D),), inputs, ("loss",))
