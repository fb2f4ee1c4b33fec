"""The op calls of a spec's emitted segments, with the shapes and dtypes of their arguments. No torch.

They include the calls that quantise weights (`compiler.model.segments.unpack`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compiler.ir import Buffer
from compiler.ir.names import parameter_of
from compiler.model.ops.rule import statistics_dtype
from runtime.contract.launches import KernelUse, TensorArgument
from runtime.contract.names import KernelExtent

if TYPE_CHECKING:
    from compiler.ir import Segment
    from compiler.model.segments.joint import Joint, OpNode
    from dsl.schema import Optimizer, Spec

Constant = int | float | bool | None


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The strides and offset of a tensor in memory, in elements; "R" is the number of rows."""

    strides: tuple[int | str, ...]
    offset: int = 0  # of its first element


Argument = tuple[Buffer | Constant, TensorLayout | None]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """`op(*arguments)`. Extents of tensors are numbers, "R" received rows, or "R/128" tiles of them, rounded up."""

    op: str
    arguments: tuple[Buffer | Constant, ...]
    layouts: tuple[TensorLayout | None, ...]  # of each argument; None for constants and contiguous tensors

    def __str__(self) -> str:
        parts = [
            f"{part.dtype}[{', '.join(map(str, part.shape))}]" if isinstance(part, Buffer) else repr(part)
            for part in self.arguments
        ]
        return f"{self.op}({', '.join(parts)})"


def calls(spec: Spec, segments: Iterable[Segment]) -> tuple[KernelCall, ...]:
    """The distinct calls of a spec's segments, including those that quantise weights, in order, then those of its
    optimizer."""
    distinct = {segment.key: segment for segment in segments}
    segment_calls = [call for segment in distinct.values() for call in calls_of(segment)]
    return tuple(dict.fromkeys([*segment_calls, *updates(spec)]))


def updates(spec: Spec) -> tuple[KernelCall, ...]:
    """The calls of the rows of a spec's optimizer, on flat tensors with any number of elements
    (runtime/state/optimizers)."""
    return tuple(_update(spec, row) for row in spec.train.optimizer.rows)


def _update(spec: Spec, optimizer: Optimizer) -> KernelCall:
    from compiler.ir.dtypes import TORCH_DTYPE

    p = spec.precision
    parameter = (p.parameter,) if p.parameter != p.master else ()
    dtypes = (p.master, p.gradients, *(getattr(p, tensor.role) for tensor in optimizer.state), *parameter)
    flat: list[Argument] = [(Buffer("flat", ("R",), TORCH_DTYPE[dtype]), None) for dtype in dtypes]
    rounded: list[Argument] = [] if parameter else [(None, None)]
    settings = optimizer.settings().values()
    numbers: list[Argument] = [(number, None) for number in (1.0, 1e-3, *settings, 0.1, 1)]
    return _call(optimizer.kind, [*flat, *rounded, *numbers])


def calls_of(segment: Segment) -> Iterator[KernelCall]:
    """The calls of one segment: those that quantise its weights, and those of F, I and W as emitted."""
    from compiler.model.segments.interpret import interpret
    from compiler.model.segments.joint import ADD_TO
    from compiler.model.segments.split import split
    from compiler.model.segments.unpack import unpack_tensors

    joint = unpack_tensors(interpret(segment))
    yield from (call for _, call in quantising_calls(segment))
    for nodes in split(joint).functions.values():
        yield from (call_of(joint, node) for node in nodes if not node.call and node.op != ADD_TO)


def quantising_calls(segment: Segment) -> Iterator[tuple[str, KernelCall]]:
    """(parameter, the call that quantises it) for each parameter that products of a segment read quantised."""
    from compiler.ir.dtypes import parse_packed
    from compiler.model.segments.interpret import interpret
    from compiler.model.segments.storage import operand_weights

    weights = dict(segment.stored).get("weights")
    if weights is None:
        return
    form = parse_packed(weights).form
    params = {param.name: Buffer(param.name, param.shape, param.dtype) for param in segment.params}
    for name in operand_weights(interpret(segment)):
        if form is None:
            yield name, _call("quantise_blocks", [(params[name], None), (False, None)])
        else:
            yield name, _call(f"quantise_blocks_{form.name}", [(params[name], None)])


def call_of(joint: Joint, node: OpNode) -> KernelCall:
    """The call of a node of a split and unpacked joint graph."""
    arguments: list[Argument] = []
    for arg in node.args:
        if not isinstance(arg, str):
            arguments.append((arg, None))
        elif arg not in joint.tensors:  # the accumulator of a weight's gradient
            tensor = joint.tensors[parameter_of(arg)]
            arguments.append((Buffer(arg, tensor.shape, statistics_dtype(tensor.dtype)), None))
        else:
            tensor = joint.tensors[arg]
            by_column = TensorLayout((1, tensor.shape[0])) if arg in joint.columns else None
            arguments.append((Buffer(arg, tensor.shape, tensor.dtype), by_column or _view(joint, arg)))
    return _call(node.op, arguments)


def use_of(kernel: str, call: KernelCall, segments: tuple[str, ...] = ()) -> KernelUse:
    """The call of a kernel file, as launches.json lists it."""

    def tensor(buffer: Buffer, layout: TensorLayout | None) -> TensorArgument:
        strides = tuple(map(_extent, layout.strides)) if layout else ()
        return TensorArgument(buffer.dtype, tuple(map(_extent, buffer.shape)), strides, layout.offset if layout else 0)

    arguments = zip(call.arguments, call.layouts, strict=True)
    listed = tuple(tensor(part, layout) if isinstance(part, Buffer) else part for part, layout in arguments)
    return KernelUse(kernel, call.op, listed, segments)


def _extent(extent: int | str) -> KernelExtent:
    return KernelExtent(str(extent))


def _view(joint: Joint, value: str) -> TensorLayout | None:
    """The layout of a view of columns in the tensor that owns the storage; None if the value owns its storage."""
    from compiler.model.segments.joint import COLUMNS
    from compiler.model.segments.split import view_nodes

    views, first, base = view_nodes(joint), 0, value
    while base in views and views[base].op == COLUMNS:  # other views that our ops read are contiguous
        base, low, _ = views[base].args  # type: ignore[assignment]
        assert isinstance(low, int)
        first += low
    return TensorLayout((joint.tensors[base].shape[1], 1), first) if base != value else None


def _call(op: str, arguments: list[Argument]) -> KernelCall:
    """A call whose arguments are named by position, so that calls with the same shapes are equal."""
    named = tuple(
        replace(part, name=f"a{index}") if isinstance(part, Buffer) else part
        for index, (part, _) in enumerate(arguments)
    )
    return KernelCall(op, named, tuple(layout for _, layout in arguments))
