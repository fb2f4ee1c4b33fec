"""The two ends of the model: embedding, and final norm, head and loss. T tokens of a micro-batch · D hidden."""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.layers.builder import Constant, Place, index, segment

EMBED_PARAMETERS = {"table": "embedding"}
FINAL_NORM_PARAMETERS = {"norm": "final_norm"}
HEAD_PARAMETERS = {"head": "head"}


def embed(ops: Any, p: Any, tokens_T: Any, *, factor: float = 1.0) -> tuple[Any, ...]:
    """The rows of the embedding, times a factor."""
    return (embedded(ops, p, tokens_T, factor),)


def embedded(ops: Any, p: Any, tokens_T: Any, factor: float) -> Any:
    """The embeddings of tokens as the model reads them."""
    y_TD = ops.embedding(tokens_T, p.table)
    return y_TD if factor == 1 else ops.scale(y_TD, factor)


def embedding_factor(place: Place) -> dict[str, Constant]:
    """What a segment says of the factor of embeddings; nothing where there is none."""
    factor = place.model.embedding_scale
    return {} if factor == 1 else {"factor": factor}


def build_embed(place: Place) -> ir.Segment:
    params = (place.weight("table", place.model.vocab, place.D),)
    return segment("embed", embed, params, (index("tokens", place.T),), ("y",), **embedding_factor(place))


def final_norm(ops: Any, p: Any, h_TD: Any, *, eps: float, copies: int) -> tuple[Any, ...]:
    """The normed hidden state, once for each of its readers: the head, and the MTP block if there is one."""
    return (ops.rmsnorm(h_TD, p.norm, eps),) * copies


def build_final_norm(place: Place) -> ir.Segment:
    outputs = ("y", "y_mtp") if place.model.mtp and not place.mtp else ("y",)
    params, inputs = (place.gain("norm", place.D),), (place.input("h", place.T, place.D),)
    return segment("final_norm", final_norm, params, inputs, outputs, eps=place.model.norm_eps, copies=len(outputs))


def head(ops: Any, p: Any, h_TD: Any, targets_T: Any, *, factor: float = 1.0, cap: float = 0.0) -> tuple[Any, ...]:
    """The cross entropy summed over the valid targets. The factor of logits is applied to the hidden state, which has
    fewer elements."""
    logits_TV = ops.linear(h_TD if factor == 1 else ops.scale(h_TD, factor), p.head)
    return (ops.cross_entropy(ops.softcap(logits_TV, cap) if cap else logits_TV, targets_T),)


def build_head(place: Place) -> ir.Segment:
    inputs = (place.input("h", place.T, place.D), index("targets", place.T))
    model = place.model
    constants = {
        **({"factor": model.logit_scale} if model.logit_scale != 1 else {}),
        **({"cap": model.logit_cap} if model.logit_cap is not None else {}),
    }
    return segment("head", head, (place.weight("head", model.vocab, place.D),), inputs, ("loss",), **constants)
