"""What is between the residual stream and a part of a block: norms in front of it and behind it, and a factor.

Norms in front alone (Llama), behind alone (OLMo 2, arXiv 2501.00656), or both (Gemma 2, arXiv 2408.00118).

With hyper-connections the stream is several (compiler/model/layers/hyper.py). A part then reads one that is made of
all, and `mixing` are the two tensors by which what it gives is added to all of them. Segments name the stream h_TD in
any case: of several it has the columns of all.
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.model.layers import hyper
from compiler.model.layers.builder import Constant, Place


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
