"""A user's feed-forward part or attention: a traced torch module between norms and the residual stream.

T tokens of a micro-batch · D hidden. The module is a graph with its backward (compiler/ir/module.py), whose nodes are
inlined into the segment. Its parameters are the segment's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from compiler import ir
from compiler.ir.dtypes import TORCH_DTYPE
from compiler.ir.module import Module, ModuleParameter, SpecModules, WantedModule
from compiler.model.layers import hyper
from compiler.model.layers.builder import Constant, Place, segment_of
from compiler.model.layers.residual import entrance, exit_of, of_sum, post_gain, pre_gain, sum_of, through_stream
from dsl.schema import Custom, CustomAttention, Spec


@dataclass(frozen=True)
class ModuleStep:
    """Applies a module to x, with the parameters of the segment."""

    module: Module

    def __call__(self, ops: Any, p: Any, x_TD: Any) -> tuple[Any, ...]:
        return (ops.module(self.module, x_TD, *(getattr(p, name) for name in self.module.locals)),)


def build_ffn(place: Place, block: Custom) -> ir.Segment:
    """The segment of a user's feed-forward module: the residual stream (T·N) and attention's output (T·D) -> the stream
    after the layer (T·N)."""
    names = "dense", "ffn", block.module
    plain = _build(place, names, of_sum, sum_of(place), ("out",), hyper.streams_of(place))
    return replace(plain, params=(*hyper.mixers(place), *plain.params))


def build_attention(place: Place, block: CustomAttention) -> ir.Segment:
    """The segment of a user's attention module: h (T·D) -> the residual stream and the value to add to it, both T·D."""
    names, inputs = ("attention", "attention", block.module), (place.input("h", place.T, place.D),)
    return _build(place, names, through_stream, inputs, ("entered", "y"), {})


def _build(
    place: Place,
    names: tuple[str, str, str],
    around: Callable[[Place, Callable[..., tuple[Any, ...]]], Callable[..., tuple[Any, ...]]],
    inputs: tuple[ir.Input, ...],
    outputs: tuple[str, ...],
    extra_constants: Mapping[str, Constant],
) -> ir.Segment:
    """The segment around a module. Its constants include the digest of the graph, so another graph is another segment.

    `names`: the kind of the segment, the role of the module, and its text in the spec. `around`: connects the module to
    the residual stream.
    """
    kind, role, text = names
    modules: SpecModules | None = getattr(place.spec.files, "modules", None)
    assert modules is not None, "the modules of a spec are read first: compiler/plan/read_files.py"
    module = modules.module(wanted_module(place.spec, role, text))
    named = zip(module.locals, module.parameters, strict=True)
    plain = segment_of(
        kind,
        around(place, ModuleStep(module)),
        (*pre_gain(place), *(_param(place, role, name, param) for name, param in named), *post_gain(place)),
        inputs,
        outputs,
        {"eps": place.model.norm_eps, **extra_constants, **entrance(place), **exit_of(place)},
    )
    return replace(plain, constants=(*plain.constants, ("module", text), ("graph", module.digest)))


def _param(place: Place, role: str, name: str, parameter: ModuleParameter) -> ir.Param:
    """A parameter of a module. Random ones get the model's `init_std`, and weight decay if they have two dimensions or
    more."""
    constant = parameter.constant
    init, mean = (place.model.init_std, 0.0) if constant is None else (0.0, constant)
    first = {"init": None} if constant == 1 else {"init": init, "mean": mean}
    decay = len(parameter.shape) > 1 and parameter.constant is None
    dtype = TORCH_DTYPE[place.spec.precision.parameter]
    matrices = parameter.shape[:1] if decay and len(parameter.shape) == 2 else ()
    path = f"{role}.module.{parameter.name}"
    return ir.Param(name, parameter.shape, dtype, **first, decay=decay, path=path, matrices=matrices)


def wanted_module(spec: Spec, role: str, text: str) -> WantedModule:
    """A module with the sizes and dtypes of a run."""
    precision = spec.precision
    return WantedModule(
        text=text,
        role=role,
        sequences=spec.train.micro_batch,
        sequence=spec.train.sequence,
        hidden=spec.model.hidden,
        dtype=TORCH_DTYPE[precision.compute],
        parameter=TORCH_DTYPE[precision.parameter],
    )


def wanted_modules(spec: Spec) -> dict[str, WantedModule]:
    """The modules of a spec, by the path of the key that names them."""
    parts = ((path, "ffn" if isinstance(part, Custom) else "attention", part) for path, part in spec.model.customs)
    return {f"{path}.module": wanted_module(spec, role, part.module) for path, role, part in parts}
