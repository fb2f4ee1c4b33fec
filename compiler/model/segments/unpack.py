"""Unpacking: the graph that is printed, where each value of eight bits is the tensors that it is stored as. No torch.

A graph says `linear` of values whose dtypes say their tiles. Its functions take tensors: x ≈ data · scale, R rows ·
C columns · N out, K in:

- by rows (1x128): data `x` [R, C], scales `x_scales` [R, C/128], column-major: those of neighbouring rows are
  neighbours;
- by columns (128x1), transposed so that the contraction over rows is contiguous: data [C, R], scales [C, R/128],
  column-major too;
- a weight `w` (128x128): `w_fp8` [N, K], `w_scales` [N/128, K/128]; for the input's gradient `w_fp8_t` and
  `w_scales_t`, both transposed. A device makes them of its parameters after each step of the optimizer.

The op of `linear` is `linear_fp8` then, which takes data and scales for each such operand. What quantises is told
whether scales are powers of two. Of another format (dsl/facts/formats.py) the name of an op has the format's, and a
value may be more than two tensors: `runtime.ops.formats` says which. A weight whose gradient is rounded stochastically
has a key `w_key` beside its tensors. This is the last pass: signatures, buffers, text and calls are of what it leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from compiler.ir import Buffer, Quantised
from compiler.ir.dtypes import SCALES, Packed, flat_tensors, is_packed, packed_of, tiles_of
from compiler.model.ops import Tensor
from compiler.model.segments.joint import Constant, GivenTensors, Joint, OpNode
from compiler.model.segments.storage import operand_weights

_OP = re.compile(r"(?P<base>\w+?)(?P<suffix>(_dgrad|_wgrad|_quantise)\w*|)")  # linear, _dgrad


def unpacked(joint: Joint) -> Joint:
    """The joint graph of tensors alone. Nodes have the order, and belong to the functions, that they had before."""
    weights = {each.param: each for each in quantised(joint)}
    flat = {name: flat_tensors(t.shape, t.dtype) for name, t in joint.tensors.items() if name not in weights}
    masters = {param.name: Tensor(param.shape, param.dtype) for param in joint.segment.params if param.name in weights}
    tensors = {f"{name}{each.suffix}": Tensor(each.shape, each.dtype) for name, of in flat.items() for each in of}
    copies = {each.name: Tensor(each.shape, each.dtype) for of in weights.values() for each in of.tensors}
    assert len(tensors) == sum(map(len, flat.values())) and not tensors.keys() & copies.keys(), "a name twice"

    def parts(value: str) -> tuple[str, ...]:
        return tuple(f"{value}{each.suffix}" for each in flat[value])

    def all_parts(values: Iterable[str]) -> tuple[str, ...]:
        return tuple(part for value in values for part in parts(value))

    def pairs(rows: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        return tuple((f"{name}{each.suffix}", f"{value}{each.suffix}") for name, value in rows for each in flat[value])

    def unpack(node: OpNode) -> OpNode:
        if node.call:
            return node
        base, suffix = _OP.fullmatch(node.op).group("base", "suffix")  # type: ignore[union-attr]
        args: list[str | Constant] = []
        for arg in node.args:
            if not isinstance(arg, str):
                args.append(arg)
            elif arg in weights:
                names = [each.name for each in weights[arg].tensors]
                count = len(names) // 2  # the key may follow
                args += names[count : 2 * count] if suffix == "_dgrad" else names[:count]
            else:
                args += parts(arg)
        packed = [packed_of(dtype) for v in (*node.reads, *node.outputs) if is_packed(dtype := joint.tensors[v].dtype)]
        form = next((of.form for of in packed if of.form), None)
        if form is not None:
            op = f"{node.op}_{form.name}" if "quantise" in node.op else f"{base}_{form.name}{suffix}"
            return OpNode(op, (*args, *_manner(joint, node), *_exactness(joint, node)), all_parts(node.outputs))
        eight_bits = any(is_packed(joint.tensors[value].dtype) for value in node.reads)
        op = f"{base}_fp8{suffix}" if eight_bits and base != "requantise" else node.op
        return OpNode(op, (*args, *_exactness(joint, node)), all_parts(node.outputs))

    return replace(
        joint,
        nodes=tuple(map(unpack, joint.nodes)),
        tensors=tensors | masters | copies,
        outputs=pairs(joint.outputs),
        gradients=pairs(joint.gradients),
        again=all_parts(joint.again),
        early=all_parts(joint.early),
        parts=tuple((unpack(node), of) for node, of in joint.parts),
        given=GivenTensors(
            params=tuple(
                name
                for param in joint.params
                for name in ([each.name for each in weights[param].tensors] if param in weights else [param])
            ),
            inputs=all_parts(joint.inputs),
            tangents=all_parts(joint.tangents),
        ),
        columns=frozenset(
            f"{name}{SCALES}"
            for name in flat
            if is_packed(dtype := joint.tensors[name].dtype) and packed_of(dtype).form is None
        ),
    )


def _exactness(joint: Joint, node: OpNode) -> tuple[bool, ...]:
    """What a node that quantises is told: whether FP32 scales of its results, if they have some, are powers of two."""
    if "quantise" not in node.op:
        return ()
    packed = [packed_of(dtype) for value in node.outputs if is_packed(dtype := joint.tensors[value].dtype)]
    found = {of.pow2 for of in packed if of.form is None}
    assert len(found) < 2, f"{node} quantises to scales of two kinds"
    return tuple(found)


def _manner(joint: Joint, node: OpNode) -> tuple[bool | str, ...]:
    """What a node that quantises to a format is told: whether columns are transformed, and the key of its weight."""
    if node.op not in ("quantise_columns", "quantise_both"):
        return ()
    how = packed_of(joint.tensors[node.outputs[-1]].dtype).how
    if "stochastic" not in how:
        return ("hadamard" in how,)
    (rows, _), reads = node.outputs, (each for each in joint.nodes if each.is_input_gradient)
    found = [each.reads[1] for each in reads if each.reads[0] == rows]
    assert found, f"{rows} is read by no gradient of an input"  # next() would end the caller's map, without a word
    return "hadamard" in how, f"{found[0]}_key"


def quantised(joint: Joint) -> tuple[Quantised, ...]:
    """The parameters that products read in few bits, and the tensors that hold them so."""
    keyed = ("columns", "stochastic") in joint.segment.stored
    return tuple(
        Quantised(
            name, _tensors(name, joint.tensors[name]) + ((Buffer(f"{name}_key", (3,), "int64"),) if keyed else ())
        )
        for name in operand_weights(joint)
    )


def _tensors(name: str, weight: Tensor) -> tuple[Buffer, ...]:
    of, (*experts, N, K) = packed_of(weight.dtype), weight.shape
    if of.form is not None:
        return _tensors_in(of, name, weight)
    rows, columns = tiles_of(N, of.rows), tiles_of(K, of.columns)
    return (
        Buffer(f"{name}_fp8", (*experts, N, K), of.element),
        Buffer(f"{name}_scales", (*experts, rows, columns), "float32"),
        Buffer(f"{name}_fp8_t", (*experts, K, N), of.element),
        Buffer(f"{name}_scales_t", (*experts, columns, rows), "float32"),
    )


def _tensors_in(of: Packed, name: str, weight: Tensor) -> tuple[Buffer, ...]:
    """A weight in a format, and the transposed weight, which is quantised by itself: `up_mxfp8`, `up_scales`."""
    *experts, N, K = weight.shape
    return tuple(
        Buffer(f"{name}{each.suffix or f'_{of.element}'}{end}", each.shape, each.dtype)
        for extents, end in (((N, K), ""), ((K, N), "_t"))
        for each in flat_tensors((*experts, *extents), weight.dtype)
    )
