"""A feed-forward part or an attention of a user's own: a traced torch module between norms and the residual stream.

T tokens of a micro-batch · D hidden. The module is a graph with its backward (compiler/ir/module.py), whose nodes stand
in the segment. Its parameters are the segment's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from compiler import ir
from compiler.ir.dtypes import TORCH_DTYPE
from compiler.ir.module import Module, ModuleParameter, Modules, Wanted
from compiler.model.layers import hyper
from compiler.model.layers.builder import Constant, Place, segment
from compiler.model.layers.residual import (
    arriving,
    entering,
    entrance,
    exit_of,
    leaving,
    post_gain,
    pre_gain,
    sum_of,
    summed,
)
from dsl.schema import Custom, CustomAttention, Spec


def ffn(
    ops: Any,
    p: Any,
    h_TD: Any,
    y_TD: Any,
    *mixing: Any,
    eps: float,
    module: Module,
    pre: bool = True,
    post: bool = False,
    factor: float = 1.0,
    streams: hyper.Streams = (),
) -> tuple[Any, ...]:
    """residual + module(rmsnorm(residual)), the residual being h + y, of which attention gave y."""
    residual_TD, x_TD, following = arriving(ops, p, h_TD, y_TD, mixing, streams)
    out_TD = _through(ops, p, module, entering(ops, p, x_TD, eps, pre))
    return (summed(ops, residual_TD, leaving(ops, p, out_TD, eps, post, factor), following),)


def attention(
    ops: Any,
    p: Any,
    h_TD: Any,
    *,
    eps: float,
    module: Module,
    pre: bool = True,
    post: bool = False,
    factor: float = 1.0,
) -> tuple[Any, ...]:
    """h, handed through, and module(rmsnorm(h))."""
    return h_TD, leaving(ops, p, _through(ops, p, module, entering(ops, p, h_TD, eps, pre)), eps, post, factor)


def _through(ops: Any, p: Any, module: Module, x_TD: Any) -> Any:
    return ops.module(module, x_TD, *(getattr(p, name) for name in module.locals))


def build_ffn(place: Place, block: Custom) -> ir.Segment:
    plain = _build(place, "dense", "ffn", ffn, block.module, sum_of(place), ("out",), **hyper.streams_of(place))
    return replace(plain, params=(*hyper.mixers(place), *plain.params))


def build_attention(place: Place, block: CustomAttention) -> ir.Segment:
    inputs = (place.input("h", place.T, place.D),)
    return _build(place, "attention", "attention", attention, block.module, inputs, ("entered", "y"))


def _build(
    place: Place,
    kind: str,
    role: str,
    function: Callable[..., tuple[Any, ...]],
    text: str,
    inputs: tuple[ir.Input, ...],
    outputs: tuple[str, ...],
    **how: Constant,
) -> ir.Segment:
    """The segment around a module. Its constants have the digest of the graph: another graph is another segment."""
    modules: Modules | None = getattr(place.spec.files, "modules", None)
    assert modules is not None, "a spec that names a module is read with it: compiler/plan/read_files.py"
    module = modules.module(wanted(place.spec, role, text))
    named = zip(module.locals, module.parameters, strict=True)
    plain = segment(
        kind,
        partial(function, module=module),
        (*pre_gain(place), *(_param(place, role, name, each) for name, each in named), *post_gain(place)),
        inputs,
        outputs,
        eps=place.model.norm_eps,
        **how,
        **entrance(place),
        **exit_of(place),
    )
    return replace(plain, constants=(*plain.constants, ("module", text), ("graph", module.digest)))


def _param(place: Place, role: str, name: str, each: ModuleParameter) -> ir.Param:
    """A parameter of a module: random ones have the model's deviation, and those of two dimensions or more decay."""
    constant = each.constant
    init, mean = (place.model.init_std, 0.0) if constant is None else (0.0, constant)
    first = {"init": None} if constant == 1 else {"init": init, "mean": mean}
    decay = len(each.shape) > 1 and each.constant is None
    dtype = TORCH_DTYPE[place.spec.precision.parameter]
    matrices = each.shape[:1] if decay and len(each.shape) == 2 else ()
    path = f"{role}.module.{each.name}"
    return ir.Param(name, each.shape, dtype, **first, decay=decay, path=path, matrices=matrices)


def wanted(spec: Spec, role: str, text: str) -> Wanted:
    """A module at the sizes and in the dtypes of a run."""
    precision = spec.precision
    return Wanted(
        text=text,
        role=role,
        sequences=spec.train.micro_batch,
        sequence=spec.train.sequence,
        hidden=spec.model.hidden,
        dtype=TORCH_DTYPE[precision.compute],
        parameter=TORCH_DTYPE[precision.parameter],
    )


def all_wanted(spec: Spec) -> dict[str, Wanted]:
    """The modules of a spec, by the path of the key that names each."""
    parts = ((path, "ffn" if isinstance(part, Custom) else "attention", part) for path, part in spec.model.customs)
    return {f"{path}.module": wanted(spec, role, part.module) for path, role, part in parts}
