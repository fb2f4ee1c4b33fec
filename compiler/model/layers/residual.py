"""Norms, factors and sums between the residual stream and the parts of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compiler import ir
from compiler.model.layers import hyper
from compiler.model.layers.builder import Constant, Place, segment, segment_of
from dsl.schema import Dense, Gqa

# --- Between the residual stream and a part of a block (attention or feed-forward): norms before and after it, a factor
#
# Pre-norm only (Llama), post-norm only (OLMo 2, arXiv 2501.00656), or both (Gemma 2, arXiv 2408.00118).
#
# With hyper-connections there are several streams (compiler/model/layers/hyper.py). A part then reads a weighted sum of
# them, and `mixing` holds the two tensors by which its output is added to all of them. Segments name the stream h_TD in
# any case; with several streams it has the columns of all.


@dataclass(frozen=True)
class StreamEntry:
    """Adds the output y of the previous part to the residual stream. Returns the stream, the input of the next part
    (normed if `pre`), and the mixing of that part."""

    eps: float
    pre: bool
    streams: hyper.Streams = ()

    def __call__(
        self, ops: Any, p: Any, h_TN: Any, y_TD: Any, mixing: tuple[Any, ...]
    ) -> tuple[Any, Any, tuple[Any, ...]]:
        residual_TN, following = add_to_stream(ops, h_TN, y_TD, mixing), tuple[Any, ...]()
        x_TD = residual_TN
        if self.streams:
            x_TD, *mixed = hyper.mix_streams(ops, p, residual_TN, self.streams)
            following = tuple(mixed)
        return residual_TN, entering(ops, p, x_TD, self.eps, self.pre), following


def stream_entry(place: Place) -> StreamEntry:
    """The first step of a segment that adds the output of the previous part."""
    return StreamEntry(place.model.norm_eps, has_pre(place), hyper.streams_of(place).get("streams", ()))


def add_to_stream(ops: Any, h_TN: Any, y_TD: Any, mixing: tuple[Any, ...]) -> Any:
    """The residual stream h plus the output y of a part."""
    return ops.hyper_add(h_TN, y_TD, *mixing) if mixing else ops.add(h_TN, y_TD)


def entering(ops: Any, p: Any, h_TD: Any, eps: float, pre: bool) -> Any:
    """The input of a part from the residual stream."""
    return ops.rmsnorm(h_TD, p.norm, eps) if pre else h_TD


@dataclass(frozen=True)
class StreamExit:
    """Prepares the output y of a part for the residual stream: normed if `post`, and scaled."""

    eps: float
    post: bool
    factor: float

    def __call__(self, ops: Any, p: Any, y_TD: Any) -> Any:
        y_TD = ops.rmsnorm(y_TD, p.post_norm, self.eps) if self.post else y_TD
        return y_TD if self.factor == 1 else ops.scale(y_TD, self.factor)


def stream_exit(place: Place) -> StreamExit:
    """The last step of a part at a place in the model. On a tensor-parallel shard it does not scale."""
    post = has_post(place)
    return StreamExit(
        place.model.norm_eps if post else 0.0, post, 1.0 if place.is_tensor_shard else place.model.residual_scale
    )


@dataclass(frozen=True)
class _PreNormPart:
    """Calls a part on the normed residual stream. Returns the stream, then the outputs of the part."""

    part: Callable[..., tuple[Any, ...]]
    eps: float
    pre: bool

    def __call__(self, ops: Any, p: Any, h_TD: Any, *places_T: Any) -> tuple[Any, ...]:
        return h_TD, *self.part(ops, p, entering(ops, p, h_TD, self.eps, self.pre), *places_T)


@dataclass(frozen=True)
class _PostNormPart:
    """Calls a part, and norms and scales its first output for the residual stream."""

    part: Callable[..., tuple[Any, ...]]
    leave: StreamExit

    def __call__(self, ops: Any, p: Any, *inputs: Any) -> tuple[Any, ...]:
        y_TD, *extras = self.part(ops, p, *inputs)
        return self.leave(ops, p, y_TD), *extras


@dataclass(frozen=True)
class _SumPart:
    """Adds the previous part's output y to the residual stream, calls a part on the sum, and adds its output, too."""

    arrive: StreamEntry
    part: Callable[..., tuple[Any, ...]]

    def __call__(self, ops: Any, p: Any, h_TD: Any, y_TD: Any, *mixing: Any) -> tuple[Any, ...]:
        residual_TD, x_TD, following = self.arrive(ops, p, h_TD, y_TD, mixing)
        (y_TD,) = self.part(ops, p, x_TD)
        return (add_to_stream(ops, residual_TD, y_TD, following),)


def of_sum(place: Place, part: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The part, which first adds the previous part's output to the residual stream, and then its own."""
    return _SumPart(stream_entry(place), out_of_stream(place, part))


def in_stream(place: Place, part: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The part, reading the residual stream through its pre-norm."""
    return _PreNormPart(part, place.model.norm_eps, has_pre(place))


def out_of_stream(place: Place, part: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The part, with its output normed and scaled for the residual stream."""
    return _PostNormPart(part, stream_exit(place))


def through_stream(place: Place, part: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The part on the normed residual stream. Returns the stream and the value to add to it."""
    return in_stream(place, out_of_stream(place, part))


def has_pre(place: Place) -> bool:
    """Whether segments norm the residual stream before a part."""
    return place.model.norm != "post" and not place.is_tensor_shard


def has_post(place: Place) -> bool:
    """Whether segments norm the output of a part."""
    return place.model.norm != "pre" and not place.is_tensor_shard


def pre_gain(place: Place) -> tuple[ir.Param, ...]:
    """The gain of the norm before a part, if there is one."""
    return (place.gain("norm", place.D),) if has_pre(place) else ()


def post_gain(place: Place) -> tuple[ir.Param, ...]:
    """The gain of the norm after a part, if there is one."""
    return (place.gain("post_norm", place.D),) if has_post(place) else ()


def sum_of(place: Place) -> tuple[ir.Input, ...]:
    """The inputs that a segment first adds up: the residual stream, the previous part's output, and its mixing."""
    return place.input("h", place.T, place.N), place.input("y", place.T, place.D), *hyper.mixing(place)


def entrance(place: Place) -> dict[str, Constant]:
    """The constant for a missing pre-norm; none if there is a norm."""
    return {} if has_pre(place) else {"pre": False}


def exit_of(place: Place) -> dict[str, Constant]:
    """The constants for the post-norm and the factor; none if the output is added unchanged."""
    factor = 1.0 if place.is_tensor_shard else place.model.residual_scale
    return {**({"post": True} if has_post(place) else {}), **({"factor": factor} if factor != 1 else {})}


# --- Between the parts of a layer under tensor parallelism: norms and sums on a rank's rows of the residual stream
#
# T tokens of a tensor rank · D hidden. After these segments the inputs of attention and of the feed-forward part are
# all-gathered; before them the outputs are reduce-scattered.

ENTER_PARAMETERS = {"norm": "attention.norm"} | hyper.paths("attention")
ADDED_PARAMETERS = {"post_norm": "attention.post_norm", "out_bias": "attention.out_bias"}
BETWEEN_PARAMETERS = {**ADDED_PARAMETERS, "norm": "ffn.norm"} | hyper.paths("ffn")
LEAVE_PARAMETERS = {"post_norm": "ffn.post_norm", "down_bias": "ffn.down_bias"}


def enter(ops: Any, p: Any, h_TD: Any, *, eps: float, pre: bool = True) -> tuple[Any, ...]:
    """Return h, and the input of attention."""
    return h_TD, entering(ops, p, h_TD, eps, pre)


@dataclass(frozen=True)
class StreamAddend:
    """From the sum y over tensor ranks to the value that is added to the residual stream: plus the bias of this name,
    if any, normed and scaled."""

    bias: str
    leave: StreamExit

    def __call__(self, ops: Any, p: Any, y_TD: Any) -> tuple[Any, ...]:
        return (self.leave(ops, p, ops.add_bias(y_TD, getattr(p, self.bias)) if self.bias else y_TD),)


@dataclass(frozen=True)
class MidLayerSum:
    """Adds the output y of attention to the residual stream. Returns the stream and the input of the feed-forward
    part."""

    add: StreamAddend
    arrive: StreamEntry

    def __call__(self, ops: Any, p: Any, h_TD: Any, y_TD: Any, *mixing: Any) -> tuple[Any, ...]:
        (y_TD,) = self.add(ops, p, y_TD)
        residual_TD, x_TD, following = self.arrive(ops, p, h_TD, y_TD, mixing)
        return residual_TD, x_TD, *following


@dataclass(frozen=True)
class FeedForwardExit:
    """Adds the output y of the feed-forward part to the residual stream."""

    add: StreamAddend

    def __call__(self, ops: Any, p: Any, h_TD: Any, y_TD: Any, *mixing: Any) -> tuple[Any, ...]:
        (y_TD,) = self.add(ops, p, y_TD)
        return (add_to_stream(ops, h_TD, y_TD, mixing),)


def build_enter(place: Place) -> ir.Segment:
    """The segment before tensor-parallel attention: h (T·D) -> the residual stream and the normed input of
    attention."""
    h = (place.input("h", place.T, place.D),)
    plain = segment("enter", enter, pre_gain(place), h, ("entered", "x"), eps=place.model.norm_eps, **entrance(place))
    return hyper.around(place, plain)


def is_changed(place: Place) -> bool:
    """Whether the sum of attention over tensor ranks is changed before it is added to the residual stream."""
    return bool(_out_bias(place) or exit_of(place))


def build_added(place: Place) -> ir.Segment:
    """The segment after the sum of attention over tensor ranks: y (T·D), with the output bias added, normed and
    scaled."""
    bias = _out_bias(place)
    y = (place.input("y", place.T, place.D),)
    constants = {"eps": place.model.norm_eps} | _bias_constants(bias) | exit_of(place)
    return segment_of("added", _addition_of(place, bias), (*bias, *post_gain(place)), y, ("out",), constants)


def build_between(place: Place) -> ir.Segment:
    """The segment between tensor-parallel attention and the feed-forward part: residual stream and attention's sum ->
    the new stream and the normed input of the feed-forward part."""
    bias = _out_bias(place)
    return segment_of(
        "between",
        MidLayerSum(_addition_of(place, bias), stream_entry(place)),
        (*bias, *post_gain(place), *hyper.mixers(place), *pre_gain(place)),
        sum_of(place),
        ("residual", "x", *hyper.following(place)),
        {"eps": place.model.norm_eps}
        | _bias_constants(bias)
        | hyper.streams_of(place)
        | entrance(place)
        | exit_of(place),
    )


def build_leave(place: Place) -> ir.Segment:
    """The segment after a tensor-parallel feed-forward part: residual stream and the part's sum -> the stream after the
    layer."""
    biased = isinstance(place.ffn, Dense) and place.ffn.bias
    bias = (place.vector("down_bias", place.D),) if biased else ()
    constants = {"eps": place.model.norm_eps} | _bias_constants(bias) | exit_of(place)
    return segment_of(
        "leave",
        FeedForwardExit(_addition_of(place, bias)),
        (*bias, *post_gain(place)),
        sum_of(place),
        ("out",),
        constants,
    )


def _addition_of(place: Place, bias: tuple[ir.Param, ...]) -> StreamAddend:
    return StreamAddend(bias[0].name if bias else "", stream_exit(place))


def _out_bias(place: Place) -> tuple[ir.Param, ...]:
    """The bias of attention's output projection, which is added after the sum over tensor ranks."""
    sizes = place.attention or place.model.attention
    return (place.vector("out_bias", place.D),) if isinstance(sizes, Gqa) and sizes.bias == "all" else ()


def _bias_constants(bias: tuple[ir.Param, ...]) -> dict[str, Constant]:
    return {"biased": True} if bias else {}
