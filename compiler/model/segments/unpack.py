"""Unpacking pass: replaces each quantised value by the tensors that store it. This graph is printed. No torch.

Before, a graph has `linear` on values whose dtypes include tiles. After, its functions take tensors with x ≈ data ·
scale. With R rows · C columns · N out, K in:

- by rows (1x128): data `x` [R, C], scales `x_scales` [R, C/128], column-major, so that scales of neighbouring rows are
  adjacent;
- by columns (128x1), transposed so that the contraction over rows is contiguous: data [C, R], scales [C, R/128],
  column-major too;
- a weight `w` (128x128): `w_fp8` [N, K], `w_scales` [N/128, K/128]; for the input's gradient `w_fp8_t` and
  `w_scales_t`, both transposed. A device quantises them from its parameters after each optimizer step.

`linear` becomes `linear_fp8`, which takes data and scales for each such operand. Quantising ops take a flag whether
scales are powers of two. For other formats (dsl/facts/formats.py) the op's name includes the format, and a value may be
more than two tensors (`runtime.ops.formats`). A weight whose gradient is rounded stochastically also has a key,
`w_key`. This is the last pass: signatures, buffers, text and calls are those of its result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from compiler.ir import Buffer, QuantisedParameter
from compiler.ir.dtypes import SCALES, PackedDtype, flat_tensors, is_packed, parse_packed, tiles_of
from compiler.model.ops import Tensor
from compiler.model.segments.joint import Constant, GivenTensors, Joint, OpNode
from compiler.model.segments.storage import operand_weights

_OP = re.compile(r"(?P<base>\w+?)(?P<suffix>(_dgrad|_wgrad|_quantise)\w*|)")  # linear, _dgrad


def unpack_tensors(joint: Joint) -> Joint:
    """The joint graph with plain tensors only. Nodes keep their order and their functions."""
    weights = {weight.param: weight for weight in quantised_parameters(joint)}
    flat = {name: flat_tensors(t.shape, t.dtype) for name, t in joint.tensors.items() if name not in weights}
    masters = {param.name: Tensor(param.shape, param.dtype) for param in joint.segment.params if param.name in weights}
    tensors = {f"{name}{t.suffix}": Tensor(t.shape, t.dtype) for name, stored in flat.items() for t in stored}
    copies = {t.name: Tensor(t.shape, t.dtype) for weight in weights.values() for t in weight.tensors}
    assert len(tensors) == sum(map(len, flat.values())) and not tensors.keys() & copies.keys(), "a name twice"

    def parts(value: str) -> tuple[str, ...]:
        return tuple(f"{value}{tensor.suffix}" for tensor in flat[value])

    def all_parts(values: Iterable[str]) -> tuple[str, ...]:
        return tuple(part for value in values for part in parts(value))

    def pairs(rows: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        return tuple((f"{name}{t.suffix}", f"{value}{t.suffix}") for name, value in rows for t in flat[value])

    def unpack(node: OpNode) -> OpNode:
        if node.call:
            return node
        base, suffix = _OP.fullmatch(node.op).group("base", "suffix")  # type: ignore[union-attr]
        args: list[str | Constant] = []
        for arg in node.args:
            if not isinstance(arg, str):
                args.append(arg)
            elif arg in weights:
                names = [tensor.name for tensor in weights[arg].tensors]
                count = len(names) // 2  # rounds down if a key follows
                args += names[count : 2 * count] if suffix == "_dgrad" else names[:count]
            else:
                args += parts(arg)
        packed = [
            parse_packed(dtype) for v in (*node.reads, *node.outputs) if is_packed(dtype := joint.tensors[v].dtype)
        ]
        form = next((dtype.form for dtype in packed if dtype.form), None)
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
        recomputed=all_parts(joint.recomputed),
        early=all_parts(joint.early),
        parts=tuple((unpack(node), replaced) for node, replaced in joint.parts),
        arguments=GivenTensors(
            params=tuple(
                name
                for param in joint.params
                for name in ([tensor.name for tensor in weights[param].tensors] if param in weights else [param])
            ),
            inputs=all_parts(joint.inputs),
            tangents=all_parts(joint.tangents),
        ),
        columns=frozenset(
            f"{name}{SCALES}"
            for name in flat
            if is_packed(dtype := joint.tensors[name].dtype) and parse_packed(dtype).form is None
        ),
    )


def _exactness(joint: Joint, node: OpNode) -> tuple[bool, ...]:
    """The flag of a quantising node: whether FP32 scales of its results are powers of two. () if there are none."""
    if "quantise" not in node.op:
        return ()
    packed = [parse_packed(dtype) for value in node.outputs if is_packed(dtype := joint.tensors[value].dtype)]
    pow2 = {dtype.has_pow2_scales for dtype in packed if dtype.form is None}
    assert len(pow2) < 2, f"{node} quantises to scales of two kinds"
    return tuple(pow2)


def _manner(joint: Joint, node: OpNode) -> tuple[bool | str, ...]:
    """The flags of a node that quantises to a format: whether columns get a Hadamard transform, and the weight's key
    for stochastic rounding."""
    if node.op not in ("quantise_columns", "quantise_both"):
        return ()
    flags = parse_packed(joint.tensors[node.outputs[-1]].dtype).flags
    if "stochastic" not in flags:
        return ("hadamard" in flags,)
    (rows, _), dgrads = node.outputs, (dgrad for dgrad in joint.nodes if dgrad.is_input_gradient)
    weights = [dgrad.reads[1] for dgrad in dgrads if dgrad.reads[0] == rows]
    assert weights, f"no gradient of an input reads {rows}"  # not next(): StopIteration would silently end the map
    return "hadamard" in flags, f"{weights[0]}_key"


def quantised_parameters(joint: Joint) -> tuple[QuantisedParameter, ...]:
    """The parameters that products read quantised, and the tensors of their quantised copies."""
    keyed = ("columns", "stochastic") in joint.segment.stored
    return tuple(
        QuantisedParameter(
            name, _tensors(name, joint.tensors[name]) + ((Buffer(f"{name}_key", (3,), "int64"),) if keyed else ())
        )
        for name in operand_weights(joint)
    )


def _tensors(name: str, weight: Tensor) -> tuple[Buffer, ...]:
    packed, (*experts, N, K) = parse_packed(weight.dtype), weight.shape
    if packed.form is not None:
        return _tensors_in(packed, name, weight)
    rows, columns = tiles_of(N, packed.rows), tiles_of(K, packed.columns)
    return (
        Buffer(f"{name}_fp8", (*experts, N, K), packed.element),
        Buffer(f"{name}_scales", (*experts, rows, columns), "float32"),
        Buffer(f"{name}_fp8_t", (*experts, K, N), packed.element),
        Buffer(f"{name}_scales_t", (*experts, columns, rows), "float32"),
    )


def _tensors_in(packed: PackedDtype, name: str, weight: Tensor) -> tuple[Buffer, ...]:
    """The tensors of a weight in a format, `up_mxfp8` and `up_scales`, and of the separately quantised transpose."""
    *experts, N, K = weight.shape
    return tuple(
        Buffer(f"{name}{tensor.suffix or f'_{packed.element}'}{end}", tensor.shape, tensor.dtype)
        for extents, end in (((N, K), ""), ((K, N), "_t"))
        for tensor in flat_tensors((*experts, *extents), weight.dtype)
    )
