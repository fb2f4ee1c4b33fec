"""The calls of ops that a spec's emitted segments make, with the tensors they are given. No torch.

Graphs name a product of eight-bit operands as they name any other, `linear` of values whose dtype says their tiles. Its
op is `linear_fp8`, which takes for each such operand two tensors, the data and their scales; the rule is `_unpacked`,
and there is no other. `x ≈ data · scale`, R rows · C columns · N out, K in:

- by rows (1x128): data [R, C], scales [R, C/128], column-major so that the scales of neighbouring rows are neighbours;
- by columns (128x1), turned so that the contraction over rows is contiguous: data [C, R], scales [C, R/128], the same;
- weights (128x128): data [N, K], scales [N/128, K/128]; for the input's gradient both are of the transposed weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from compiler.dtypes import is_packed
from compiler.ir import Buffer
from compiler.ops.rule import Shape, Tensor, statistics_dtype

if TYPE_CHECKING:
    from compiler.ir import Segment
    from compiler.segments.joint import Joint, Node
    from dsl.schema import Spec

Constant = int | float | bool | None

POW2 = False  # scales as they come, not rounded up to powers of two
_GRADIENT = re.compile(r"(?P<base>\w+?)(?P<suffix>(_dgrad|_wgrad|_quantise)\w*|)")  # linear, _dgrad


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory, in elements; "R" is the number of rows."""

    strides: tuple[int | str, ...]
    offset: int = 0  # of its first element


Argument = tuple[Buffer | Constant, Layout | None]


@dataclass(frozen=True, slots=True)
class Call:
    """`op(*arguments)`. Extents of tensors are numbers, "R" received rows, or "R/128" tiles of them, rounded up."""

    op: str
    arguments: tuple[Buffer | Constant, ...]
    layouts: tuple[Layout | None, ...]  # of each argument; None for constants and what lies row by row

    def __str__(self) -> str:
        parts = [
            f"{part.dtype}[{', '.join(map(str, part.shape))}]" if isinstance(part, Buffer) else repr(part)
            for part in self.arguments
        ]
        return f"{self.op}({', '.join(parts)})"


def calls(spec: Spec, segments: Iterable[Segment]) -> tuple[Call, ...]:
    """Every distinct call of a spec's segments, in their order; of what makes weights of eight bits; and of its
    optimizer."""
    different = {segment.key: segment for segment in segments}
    found = [call for segment in different.values() for call in calls_of(segment)]
    return tuple(dict.fromkeys([*found, update(spec)]))


def update(spec: Spec) -> Call:
    """The call of a spec's optimizer on flat tensors of any number of elements (runtime/optimizers)."""
    from compiler.dtypes import TORCH_DTYPE

    p, optimizer = spec.precision, spec.train.optimizer
    apart = (p.parameter,) if p.parameter != p.master else ()
    dtypes = (p.master, p.gradients, *(getattr(p, tensor.role) for tensor in optimizer.state), *apart)
    flat: list[Argument] = [(Buffer("flat", ("R",), TORCH_DTYPE[dtype]), None) for dtype in dtypes]
    rounded: list[Argument] = [] if apart else [(None, None)]
    settings = optimizer.settings().values()
    numbers: list[Argument] = [(each, None) for each in (1.0, 1e-3, *settings, 0.1, 1)]
    return _call(optimizer.kind, [*flat, *rounded, *numbers])


def calls_of(segment: Segment) -> Iterator[Call]:
    """Calls of one segment: those of F, I and W as they are emitted, with weight gradients added to FP32."""
    from compiler.segments.interpret import interpret
    from compiler.segments.split import split
    from compiler.segments.storage import operand_weights

    joint = interpret(segment)
    params = {param.name: Buffer(param.name, param.shape, param.dtype) for param in segment.params}
    for name in operand_weights(joint):
        yield _call("quantise_blocks", [(params[name], None), (POW2, None)])
    for nodes in split(joint).functions.values():
        for node in nodes:
            yield call_of(joint, node)


def call_of(joint: Joint, node: Node) -> Call:
    """The call that a node of a split joint graph is."""
    base, suffix = _GRADIENT.fullmatch(node.op).group("base", "suffix")  # type: ignore[union-attr]
    arguments: list[Argument] = []
    eight_bits = False
    for arg in node.args:
        if not isinstance(arg, str):
            arguments.append((arg, None))
        elif arg not in joint.tensors:  # the accumulator of a weight's gradient
            tensor = joint.tensors[arg.removeprefix("g_")]
            dtype = "float32" if is_packed(tensor.dtype) else statistics_dtype(tensor.dtype)
            arguments.append((Buffer(arg, tensor.shape, dtype), None))
        elif is_packed(joint.tensors[arg].dtype):
            eight_bits = True
            arguments += _unpacked(joint.tensors[arg], transposed=suffix.startswith("_dgrad"))
        else:
            tensor = joint.tensors[arg]
            arguments.append((Buffer(arg, tensor.shape, tensor.dtype), _view(joint, arg)))
    op = f"{base}_fp8{suffix}" if eight_bits and base != "requantise" else node.op
    return _call(op, [*arguments, (POW2, None)] if "quantise" in op else arguments)


def _unpacked(tensor: Tensor, transposed: bool) -> list[Argument]:
    """Data and scales of an operand; `transposed`: of the weight, for the input's gradient."""
    element, _, extents = tensor.dtype.removesuffix("]").partition("[")
    rows, columns = map(int, extents.split("x"))
    *experts, down, across = tensor.shape
    data: Shape
    scales: Shape
    if rows > 1 and columns > 1:  # a weight
        data, scales, layout = (down, across), (_tiles(down, rows), _tiles(across, columns)), None
        if transposed:
            data, scales = data[::-1], scales[::-1]
    else:
        data = (across, down) if columns == 1 else (down, across)
        scales, layout = (data[0], _tiles(data[1], rows * columns)), Layout((1, data[0]))
    return [
        (Buffer("data", (*experts, *data), element), None),
        (Buffer("scales", (*experts, *scales), "float32"), layout),
    ]


def _tiles(extent: int | str, tile: int) -> int | str:
    return f"{extent}/{tile}" if isinstance(extent, str) else -(-extent // tile)


def _view(joint: Joint, value: str) -> Layout | None:
    """Where a view of some columns lies in the tensor that has them; None for a tensor of its own."""
    from compiler.segments.split import view_nodes

    views, first, of = view_nodes(joint), 0, value
    while of in views:
        of, low, _ = views[of].args  # type: ignore[assignment]
        assert isinstance(low, int)
        first += low
    return Layout((joint.tensors[of].shape[1], 1), first) if of != value else None


def _call(op: str, arguments: list[Argument]) -> Call:
    """Arguments named by their places, so that equal calls are equal."""
    named = tuple(
        replace(part, name=f"a{index}") if isinstance(part, Buffer) else part
        for index, (part, _) in enumerate(arguments)
    )
    return Call(op, named, tuple(layout for _, layout in arguments))
