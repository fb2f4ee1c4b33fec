"""Hyper-connections: several residual streams, which a part of a layer reads as one, mixes, and adds to.

Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880; DeepSeek-V4, arXiv 2606.19348, section 2.2.

T tokens · D hidden · n streams · N = n·D numbers of a token, stream after stream. Of a norm of all streams come, by one
product for each part: `pre`, by which the part reads a sum of them; `post`, by which each gets what the part gives; and
`comb`, by which they are mixed, an n × n matrix whose rows and columns sum to 1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from compiler import ir
from compiler.model.layers.builder import Place, segment

Streams = tuple[int | float, ...]  # rounds, their epsilon, and that of norms; () where there is one stream


def paths(part: str) -> dict[str, str]:
    """The logical names of the parameters of the mixing in front of a part."""
    return {f"hyper_{name}": f"{part}_hyper.{name}" for name in ("fn", "base", "scale")}


def mixed(ops: Any, p: Any, h_TN: Any, streams: Streams) -> tuple[Any, Any, Any]:
    """What a part reads of the streams h, and `post` and `comb`, by which what it gives is added."""
    rounds, eps, norm_eps = streams
    return ops.hyper_mix(h_TN, _logits(ops, p, h_TN, norm_eps), rounds, eps)


def collapsed(ops: Any, p: Any, h_TN: Any, streams: Streams) -> Any:
    """What the end of a model reads of the streams h."""
    _, eps, norm_eps = streams
    return ops.hyper_collapse(h_TN, _logits(ops, p, h_TN, norm_eps), eps)


def _logits(ops: Any, p: Any, h_TN: Any, norm_eps: float) -> Any:
    products_TM = ops.hyper_products(h_TN, p.hyper_fn, norm_eps)
    return ops.add_bias(ops.scale_parts(products_TM, p.hyper_scale), p.hyper_base)


def copy(ops: Any, p: Any, h_TD: Any, *, streams: int) -> tuple[Any, ...]:
    """So many streams, all of them h."""
    return (ops.hyper_copy(h_TD, streams),)


def build_copy(place: Place) -> ir.Segment:
    return segment("streams", copy, (), (place.input("h", place.T, place.D),), ("y",), streams=_of(place).streams)


def streams_of(place: Place) -> dict[str, Streams]:
    """What a segment says of the streams that it reads; nothing where there is one."""
    hyper = place.model.hyper_connections
    return {"streams": (hyper.rounds, hyper.eps, place.model.norm_eps)} if hyper else {}


def mixers(place: Place) -> tuple[ir.Param, ...]:
    """The parameters of a mixing: those of pre, of post and of comb, if there are several streams."""
    hyper = place.model.hyper_connections
    if hyper is None:
        return ()
    n = hyper.streams
    return _params(place, n, n, n * n)


def collapsers(place: Place) -> tuple[ir.Param, ...]:
    """The parameters of what the end of a model reads, if there are several streams. The matrix is one of the head, and
    no matrix of a layer."""
    hyper = place.model.hyper_connections
    return tuple(replace(each, matrices=()) for each in _params(place, hyper.streams)) if hyper else ()


def _params(place: Place, *parts: int) -> tuple[ir.Param, ...]:
    """A matrix with a row for each logit, a bias of each, and a scale of each part, which is 1 at first."""
    fn = place.weight("hyper_fn", sum(parts), place.N)
    return replace(fn, matrices=parts), place.vector("hyper_base", sum(parts)), place.gain("hyper_scale", len(parts))


def mixing(place: Place) -> tuple[ir.Input, ...]:
    """`post` and `comb` of a part, as what adds its results takes them; nothing where there is one stream."""
    hyper = place.model.hyper_connections
    if hyper is None:
        return ()
    n, dtype = hyper.streams, place.wide_dtype
    return ir.Input("post", (place.T, n), dtype), ir.Input("comb", (place.T, n * n), dtype)


def following(place: Place) -> tuple[str, ...]:
    """Outputs of a segment that begins a part: `post` and `comb` of what the part will give."""
    return tuple(f"next_{each.name}" for each in mixing(place))


def around(place: Place, plain: ir.Segment) -> ir.Segment:
    """A segment that begins at the residual stream and hands it through, of several streams.

    `plain` is of one: its first input is the stream, and its first output. It gets what the part reads of all."""
    if place.part or place.model.hyper_connections is None:
        return plain
    stream, *others = plain.inputs
    how = streams_of(place)
    return replace(
        plain,
        function=partial(_around, plain.function, streams=how["streams"]),
        params=(*mixers(place), *plain.params),
        inputs=(replace(stream, shape=(place.T, place.N)), *others),
        outputs=(*plain.outputs, *(ir.Output(name) for name in following(place))),
        constants=(*plain.constants, *how.items()),
    )


def _around(function: Any, ops: Any, p: Any, h_TN: Any, *rest: Any, streams: Streams) -> tuple[Any, ...]:
    x_TD, post_Tn, comb_TC = mixed(ops, p, h_TN, streams)
    _, *given = function(ops, p, x_TD, *rest)
    return h_TN, *given, post_Tn, comb_TC


def _of(place: Place) -> Any:
    assert place.model.hyper_connections, "a model of several streams"
    return place.model.hyper_connections
