"""What is between the residual stream and a part of a block: norms in front of it and behind it, and a factor.

Norms in front alone (Llama), behind alone (OLMo 2, arXiv 2501.00656), or both (Gemma 2, arXiv 2408.00118).
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.layers.builder import Constant, Place


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


def entrance(place: Place) -> dict[str, Constant]:
    """What a segment says of the norm in front of it; nothing where there is one."""
    return {} if has_pre(place) else {"pre": False}


def exit_of(place: Place) -> dict[str, Constant]:
    """What a segment says of how it ends; nothing where the stream gets what it computes."""
    factor = 1.0 if place.part else place.model.residual_scale
    return {**({"post": True} if has_post(place) else {}), **({"factor": factor} if factor != 1 else {})}
