"""Norms, factors and sums over tensor ranks between the residual stream and the parts of a layer."""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.model.layers import hyper
from compiler.model.layers.builder import Constant, Place, segment
from dsl.schema import Dense, Gqa

# --- What is between the residual stream and a part of a block: norms in front of it and behind it, and a factor
#
# Norms in front alone (Llama), behind alone (OLMo 2, arXiv 2501.00656), or both (Gemma 2, arXiv 2408.00118).
#
# With hyper-connections the stream is several (compiler/model/layers/hyper.py). A part then reads one that is made of
# all, and `mixing` are the two tensors by which what it gives is added to all of them. Segments name the stream h_TD in
# any case: of several it has the columns of all.


def arriving(
    ops: Any, p: Any, h_TN: Any, y_TD: Any, mixing: tuple[Any, ...], streams: hyper.Streams
) -> tuple[Any, Any, tuple[Any, ...]]:
    """The residual stream behind a part that gave y, what the next part reads of it, and the mixing of that."""
    residual_TN = summed(ops, h_TN, y_TD, mixing)
    if not streams:
        return residual_TN, residual_TN, ()
    x_TD, *following = hyper.mixed(ops, p, residual_TN, streams)
    return residual_TN, x_TD, tuple(following)


def summed(ops: Any, h_TN: Any, y_TD: Any, mixing: tuple[Any, ...]) -> Any:
    """The residual stream h and what a part gave."""
    return ops.hyper_add(h_TN, y_TD, *mixing) if mixing else ops.add(h_TN, y_TD)


def entering(ops: Any, p: Any, h_TD: Any, eps: float, pre: bool) -> Any:
    """What a part reads of the residual stream."""
    return ops.rmsnorm(h_TD, p.norm, eps) if pre else h_TD


def leaving(ops: Any, p: Any, y_TD: Any, eps: float, post: bool, factor: float) -> Any:
    """What a part adds to the residual stream."""
    y_TD = ops.rmsnorm(y_TD, p.post_norm, eps) if post else y_TD
    return y_TD if factor == 1 else ops.scale(y_TD, factor)


def has_pre(place: Place) -> bool:
    """Whether parts read a normed residual stream, and norm it themselves."""
    return place.model.norm != "post" and not place.part


def has_post(place: Place) -> bool:
    """Whether what parts add is normed, by themselves."""
    return place.model.norm != "pre" and not place.part


def pre_gain(place: Place) -> tuple[ir.Param, ...]:
    """The gain of the norm in front of a part, if there is one."""
    return (place.gain("norm", place.D),) if has_pre(place) else ()


def post_gain(place: Place) -> tuple[ir.Param, ...]:
    """The gain of the norm behind a part, if there is one."""
    return (place.gain("post_norm", place.D),) if has_post(place) else ()


def sum_of(place: Place) -> tuple[ir.Input, ...]:
    """What a segment adds up first: the residual stream, what a part gave, and the mixing of it."""
    return place.input("h", place.T, place.N), place.input("y", place.T, place.D), *hyper.mixing(place)


def entrance(place: Place) -> dict[str, Constant]:
    """What a segment says of the norm in front of it; nothing where there is one."""
    return {} if has_pre(place) else {"pre": False}


def exit_of(place: Place) -> dict[str, Constant]:
    """What a segment says of how it ends; nothing where the stream gets what it computes."""
    factor = 1.0 if place.part else place.model.residual_scale
    return {**({"post": True} if has_post(place) else {}), **({"factor": factor} if factor != 1 else {})}


# --- What is between the parts of a layer that tensor ranks split: norms and sums, on rows of the residual stream
#
# T tokens of a tensor rank · D hidden. The rows that attention and the feed-forward part read are put together behind
# these segments, and what they give is summed and taken apart in front of them.

ENTER_PARAMETERS = {"norm": "attention.norm"} | hyper.paths("attention")
ADDED_PARAMETERS = {"post_norm": "attention.post_norm", "out_bias": "attention.out_bias"}
BETWEEN_PARAMETERS = {**ADDED_PARAMETERS, "norm": "ffn.norm"} | hyper.paths("ffn")
LEAVE_PARAMETERS = {"post_norm": "ffn.post_norm", "down_bias": "ffn.down_bias"}


def enter(ops: Any, p: Any, h_TD: Any, *, eps: float, pre: bool = True) -> tuple[Any, ...]:
    """h, handed through, and what attention reads of it."""
    return h_TD, entering(ops, p, h_TD, eps, pre)


def added(
    ops: Any,
    p: Any,
    y_TD: Any,
    *,
    eps: float,
    biased: bool = False,
    post: bool = False,
    factor: float = 1.0,
) -> tuple[Any, ...]:
    """What attention adds to the residual stream, for a router that makes the sum: y with its bias, normed, scaled."""
    return (leaving(ops, p, ops.add_bias(y_TD, p.out_bias) if biased else y_TD, eps, post, factor),)


def between(
    ops: Any,
    p: Any,
    h_TD: Any,
    y_TD: Any,
    *mixing: Any,
    eps: float,
    biased: bool = False,
    pre: bool = True,
    post: bool = False,
    factor: float = 1.0,
    streams: hyper.Streams = (),
) -> tuple[Any, ...]:
    """The residual h + y, of which attention gave y, and what the feed-forward part reads of it."""
    (y_TD,) = added(ops, p, y_TD, eps=eps, biased=biased, post=post, factor=factor)
    residual_TD, x_TD, following = arriving(ops, p, h_TD, y_TD, mixing, streams)
    return residual_TD, entering(ops, p, x_TD, eps, pre), *following


def leave(
    ops: Any,
    p: Any,
    h_TD: Any,
    y_TD: Any,
    *mixing: Any,
    eps: float,
    biased: bool = False,
    post: bool = False,
    factor: float = 1.0,
) -> tuple[Any, ...]:
    """The residual h + y, of which the feed-forward part gave y."""
    y_TD = ops.add_bias(y_TD, p.down_bias) if biased else y_TD
    return (summed(ops, h_TD, leaving(ops, p, y_TD, eps, post, factor), mixing),)


def build_enter(place: Place) -> ir.Segment:
    h = (place.input("h", place.T, place.D),)
    plain = segment("enter", enter, pre_gain(place), h, ("entered", "x"), eps=place.model.norm_eps, **entrance(place))
    return hyper.around(place, plain)


def is_changed(place: Place) -> bool:
    """Whether what attention adds to the residual stream is another thing than the sum over tensor ranks."""
    return bool(_out_bias(place)[0] or exit_of(place))


def build_added(place: Place) -> ir.Segment:
    bias, biased = _out_bias(place)
    y = (place.input("y", place.T, place.D),)
    params, how = (*bias, *post_gain(place)), {**biased, **exit_of(place)}
    return segment("added", added, params, y, ("out",), eps=place.model.norm_eps, **how)


def build_between(place: Place) -> ir.Segment:
    bias, biased = _out_bias(place)
    return segment(
        "between",
        between,
        (*bias, *post_gain(place), *hyper.mixers(place), *pre_gain(place)),
        sum_of(place),
        ("residual", "x", *hyper.following(place)),
        eps=place.model.norm_eps,
        **biased,
        **hyper.streams_of(place),
        **entrance(place),
        **exit_of(place),
    )


def build_leave(place: Place) -> ir.Segment:
    bias, biased = _bias(place, "down_bias", isinstance(place.ffn, Dense) and place.ffn.bias)
    return segment(
        "leave",
        leave,
        (*bias, *post_gain(place)),
        sum_of(place),
        ("out",),
        eps=place.model.norm_eps,
        **biased,
        **exit_of(place),
    )


def _out_bias(place: Place) -> tuple[tuple[ir.Param, ...], dict[str, Constant]]:
    sizes = place.attention or place.model.attention
    return _bias(place, "out_bias", isinstance(sizes, Gqa) and sizes.bias == "all")


def _bias(place: Place, name: str, biased: bool) -> tuple[tuple[ir.Param, ...], dict[str, Constant]]:
    """The bias of a sum over tensor ranks, if it has one, and what its segment says of it."""
    return ((place.vector(name, place.D),), {"biased": True}) if biased else ((), {})
