"""Hyper-connections: several residual streams. A part of a layer reads a weighted sum of them, mixes them, and adds its
output to each.

Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880; DeepSeek-V4, arXiv 2606.19348, section 2.2.

T tokens · D hidden · n streams · N = n·D numbers per token, stream after stream. Each part has one projection of the
normed streams to three sets of weights: `pre`, the weights of the sum that the part reads; `post`, the weights by which
its output is added to each stream; and `comb`, the n × n matrix that mixes the streams, whose rows and columns sum to
1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from compiler import ir
from compiler.model.layers.builder import Place, segment

Streams = tuple[int | float, ...]  # (Sinkhorn rounds, their epsilon, epsilon of norms); () with one stream


def paths(part: str) -> dict[str, str]:
    """The logical names of the parameters of the mixing before a part."""
    return {f"hyper_{name}": f"{part}_hyper.{name}" for name in ("fn", "base", "scale")}


def mix_streams(ops: Any, p: Any, h_TN: Any, streams: Streams) -> tuple[Any, Any, Any]:
    """The input of a part from the streams h, and `post` and `comb`, by which its output is added."""
    rounds, eps, norm_eps = streams
    return ops.hyper_mix(h_TN, _logits(ops, p, h_TN, norm_eps), rounds, eps)


def collapse_streams(ops: Any, p: Any, h_TN: Any, streams: Streams) -> Any:
    """The weighted sum of the streams h that the end of the model reads."""
    _, eps, norm_eps = streams
    return ops.hyper_collapse(h_TN, _logits(ops, p, h_TN, norm_eps), eps)


def _logits(ops: Any, p: Any, h_TN: Any, norm_eps: float) -> Any:
    products_TM = ops.hyper_products(h_TN, p.hyper_fn, norm_eps)
    return ops.add_bias(ops.scale_parts(products_TM, p.hyper_scale), p.hyper_base)


def copy(ops: Any, p: Any, h_TD: Any, *, streams: int) -> tuple[Any, ...]:
    """Copy h into each of `streams` streams."""
    return (ops.hyper_copy(h_TD, streams),)


def build_copy(place: Place) -> ir.Segment:
    """The segment that copies the embeddings (T·D) into every residual stream (T·N)."""
    return segment(
        "streams", copy, (), (place.input("h", place.T, place.D),), ("y",), streams=_streams_block(place).streams
    )


def streams_of(place: Place) -> dict[str, Streams]:
    """The constant for the streams that a segment reads; none with one stream."""
    hyper = place.model.hyper_connections
    return {"streams": (hyper.rounds, hyper.eps, place.model.norm_eps)} if hyper else {}


def mixers(place: Place) -> tuple[ir.Param, ...]:
    """The parameters of pre, post and comb, if there are several streams."""
    hyper = place.model.hyper_connections
    if hyper is None:
        return ()
    n = hyper.streams
    return _params(place, n, n, n * n)


def collapsers(place: Place) -> tuple[ir.Param, ...]:
    """The parameters of `collapse_streams`, if there are several streams. Its matrix belongs to the head: it is not a
    matrix of a layer."""
    hyper = place.model.hyper_connections
    return tuple(replace(param, matrices=()) for param in _params(place, hyper.streams)) if hyper else ()


def _params(place: Place, *parts: int) -> tuple[ir.Param, ...]:
    """A matrix with a row per logit, a bias per logit, and a scale per set of weights, initialized to 1."""
    fn = place.weight("hyper_fn", sum(parts), place.N)
    return replace(fn, matrices=parts), place.vector("hyper_base", sum(parts)), place.gain("hyper_scale", len(parts))


def mixing(place: Place) -> tuple[ir.Input, ...]:
    """`post` and `comb` of a part as inputs of the segment that adds its output; none with one stream."""
    hyper = place.model.hyper_connections
    if hyper is None:
        return ()
    n, dtype = hyper.streams, place.wide_dtype
    return ir.Input("post", (place.T, n), dtype), ir.Input("comb", (place.T, n * n), dtype)


def following(place: Place) -> tuple[str, ...]:
    """`post` and `comb` as outputs of the segment at the beginning of a part."""
    return tuple(f"next_{tensor.name}" for tensor in mixing(place))


def around(place: Place, plain: ir.Segment) -> ir.Segment:
    """Extend a segment for one residual stream to several. It takes all streams and passes them on.

    `plain` has the stream as its first input and first output. It gets the weighted sum that the part reads."""
    if place.is_tensor_shard or place.model.hyper_connections is None:
        return plain
    stream, *other_inputs = plain.inputs
    settings = streams_of(place)
    return replace(
        plain,
        function=partial(_around, plain.function, streams=settings["streams"]),
        params=(*mixers(place), *plain.params),
        inputs=(replace(stream, shape=(place.T, place.N)), *other_inputs),
        outputs=(*plain.outputs, *(ir.Output(name) for name in following(place))),
        constants=(*plain.constants, *settings.items()),
    )


def _around(function: Any, ops: Any, p: Any, h_TN: Any, *arguments: Any, streams: Streams) -> tuple[Any, ...]:
    x_TD, post_Tn, comb_TC = mix_streams(ops, p, h_TN, streams)
    _, *outputs = function(ops, p, x_TD, *arguments)
    return h_TN, *outputs, post_Tn, comb_TC


def _streams_block(place: Place) -> Any:
    assert place.model.hyper_connections, "a model of several streams"
    return place.model.hyper_connections
