"""Prints a split joint graph as a Python module with the plain functions F, I and W. No torch."""

from __future__ import annotations

import ast
import hashlib
import inspect
import keyword
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap

from compiler import ir
from compiler.ir import Buffer, Inside
from compiler.ir.module import DEVICE, TENSOR, Atom, TorchCall
from compiler.ir.names import gradient_of, parameter_of
from compiler.model.ops import Tensor
from compiler.model.ops.rule import statistics_dtype
from compiler.model.segments.joint import ADD_TO, COLUMNS, Joint, OpNode
from compiler.model.segments.split import CutFunctions, base_of, view_nodes

# --- Memory inside a call: values that are created and freed within one function of a segment
#
# A program, its proof and a run's ledger see the arguments and results of a call. During the call a device holds more:
# in the order of the nodes, each value from the node that makes it to the last that reads it.


def inner_peaks(joint: Joint, parts: CutFunctions) -> Inside:
    """For F, I and W: the peaks of (bytes, bytes per received row) that are live besides the returned values."""
    return tuple(
        (name, _peaks(joint, nodes, _returned_names(joint, parts, name))) for name, nodes in parts.functions.items()
    )


def _returned_names(joint: Joint, parts: CutFunctions, name: str) -> set[str]:
    """The values a function returns, each by its own name."""
    values = dict(joint.outputs) if name == "F" else {gradient_of(source): value for source, value in joint.gradients}
    return {values.get(returned, returned) for returned in getattr(parts.cut, name).returns}


def _peaks(joint: Joint, nodes: tuple[OpNode, ...], returned: set[str]) -> tuple[tuple[int, int], ...]:
    views = view_nodes(joint)

    first = {value: index for index, node in enumerate(nodes) for value in node.outputs if value not in views}
    last = dict(first)
    for index, node in enumerate(nodes):
        read = {base_of(views, value) for value in node.reads}
        last |= dict.fromkeys(read & first.keys(), index)
    changes: list[list[int]] = [[0, 0] for _ in range(len(nodes) + 1)]
    live = [0, 0]  # besides the returned values, which all count as live from the beginning
    for value, index in first.items():
        tensor = joint.tensors[value]
        buffer = Buffer(value, tensor.shape, tensor.dtype)
        size = (buffer.fixed_bytes, buffer.row_bytes)
        for k in (0, 1):
            if value in returned:
                live[k] -= size[k]
            changes[index][k] += size[k]
            if value not in returned:
                changes[last[value] + 1][k] -= size[k]
    points = []
    for change in changes[:-1]:
        live = [live[k] + change[k] for k in (0, 1)]
        points.append((live[0], live[1]))
    return _pareto_points(points)


def _pareto_points(points: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The pairs (bytes, bytes per row) that are the largest for some number of rows."""
    largest: list[tuple[int, int]] = []
    for point in sorted(set(points), reverse=True):
        if max(point) > 0 and all(point[1] > larger[1] for larger in largest):
            largest.append(point)
    return tuple(largest)


# --- Calls of torch ops as Python text, and back


def text_of(node: OpNode) -> str:
    """Print a torch call: `aten.sum.dim_IntList(x, [0], dtype=torch.float32)`."""
    assert node.call is not None
    tensors = iter(node.reads)
    args = [_atom(atom, tensors) for atom in node.call.args]
    options = [f"{name}={_atom(atom, tensors)}" for name, atom in node.call.options]
    text = f"{node.op}({', '.join([*args, *options])})"
    assert next(tensors, None) is None, f"{node} has more tensors than its call"
    return text


def _atom(atom: Atom, tensors: Iterator[str]) -> str:
    if isinstance(atom, tuple):
        return f"[{', '.join(_atom(item, tensors) for item in atom)}]"
    if atom == TENSOR:
        return next(tensors)
    if isinstance(atom, float) and not math.isfinite(atom):
        return f'float("{atom}")'
    return atom if isinstance(atom, str) else repr(atom)


def node_of(call: ast.Call, outputs: tuple[str, ...]) -> OpNode:
    """Parse a printed torch call into its node; the inverse of `text_of`."""
    tensors: list[str] = []
    args = tuple(_read(arg, tensors) for arg in call.args)
    options = tuple((str(keyword.arg), _read(keyword.value, tensors)) for keyword in call.keywords)
    return OpNode(ast.unparse(call.func), tuple(tensors), outputs, TorchCall(args, options))


def _read(value: ast.expr, tensors: list[str]) -> Atom:
    if isinstance(value, ast.List):
        return tuple(_read(item, tensors) for item in value.elts)
    if isinstance(value, ast.Name) and value.id != "device":
        tensors.append(value.id)
        return TENSOR
    if isinstance(value, ast.Call):  # float("inf")
        return float(value.args[0].value)  # type: ignore[attr-defined]
    if isinstance(value, (ast.Name, ast.Attribute)):
        return ast.unparse(value)
    literal = ast.literal_eval(value)
    return repr(literal) if isinstance(literal, str) else literal


# --- printer

WIDTH = 120
PURPOSE = {
    "F": "Forward: the outputs, then what the backward will read.",
    "I": "Backward for the inputs: their gradients, then what W will read.",
    "W": "Backward for the weights: adds to the gradients in the g_ buffers.",
}
AGAIN = "_again: what F had, computed again."
OF_TORCH = ("add", ADD_TO, "cat2")  # ops printed as torch calls
ATEN = "aten = torch.ops.aten"


@dataclass(frozen=True, slots=True)
class Alias:
    """A binding of an op to an emitted kernel for some sizes: `name = on_cuda(__file__, file, op)`."""

    name: str
    file: str
    op: str


KernelOf = Callable[[OpNode], str | None]  # the kernel file of a node, or None if it always runs the reference op


def aliases(parts: CutFunctions, kernel_of: KernelOf) -> dict[tuple[str, str], Alias]:
    """Aliases by (op, kernel file). An op with one file keeps its name; else its sizes are appended: rmsnorm_d192."""
    pairs = {(node.op, kernel_of(node)) for nodes in parts.functions.values() for node in nodes}
    several = {op for op, file in pairs if any(op == other_op and file != other_file for other_op, other_file in pairs)}
    with_file = sorted((op, file) for op, file in pairs if file is not None)
    return {(op, file): Alias(_name_with_sizes(op, file) if op in several else op, file, op) for op, file in with_file}


def _name_with_sizes(op: str, file: str) -> str:
    """`rmsnorm_wgrad_` in file `rmsnorm_d192_float32` → `rmsnorm_wgrad_d192_`."""
    sizes = [word for word in file.split("_") if word[:1].isalpha() and word[1:].isdecimal()]
    return "_".join([op.rstrip("_"), *sizes]) + "_" * op.endswith("_")


def runtime_ops(parts: CutFunctions) -> tuple[str, ...]:
    """Names the module imports from `runtime.ops`, sorted."""
    used = {node.op for nodes in parts.functions.values() for node in nodes if not node.call}
    return tuple(sorted(used - {*OF_TORCH, COLUMNS}))


def letters(segment: ir.Segment) -> dict[str, int]:
    """Static extents of the inputs by the letters of the layer's argument names: T=512, D=256 for `h_TD`."""
    names = [name for name in inspect.signature(segment.function).parameters if name not in ("ops", "p")]
    extents: dict[str, int] = {}
    for name, argument in zip(names, segment.inputs, strict=False):
        suffix = name.rpartition("_")[2]
        if suffix.isupper() and len(suffix) == len(argument.shape):
            extents |= {k: n for k, n in zip(suffix, argument.shape, strict=True) if isinstance(n, int)}
    return extents


def module_name(segment: ir.Segment) -> str:
    """`attention_T512_D256_1f3a5c`. The digest tells apart segments that differ in anything else."""
    digest = hashlib.sha256(repr(segment.emitted_key).encode()).hexdigest()[:6]
    return "_".join([segment.kind, *(f"{letter}{extent}" for letter, extent in letters(segment).items()), digest])


def module(joint: Joint, parts: CutFunctions, kernel_of: KernelOf) -> str:
    """Return the text of the module."""
    segment, ops, table = joint.segment, runtime_ops(parts), aliases(parts, kernel_of)
    reserved = {*ops, *(alias.name for alias in table.values()), "torch", "on_cuda", "aten", DEVICE}
    clashes = {name for name in joint.tensors if name in reserved or keyword.iskeyword(name)}
    assert not clashes and all(name.isidentifier() and name.isascii() for name in joint.tensors), clashes
    sizes = [f"{letter}={extent}" for letter, extent in letters(segment).items()]
    constants = " ".join(f"{name}={value!r}" for name, value in segment.constants)
    lines = [f"# constructed by dsc: segment {segment.kind}, {' '.join(sizes)}, {dtype_of(segment, parts)}"]
    if any("R" in argument.shape for argument in segment.inputs):
        lines.append("# R: rows received, any number")
    lines += [f"# {line}" for line in wrap(constants, WIDTH - 2)]
    if joint.recomputed:
        lines.append(f"# recompute: {', '.join(segment.recompute)}")
    all_nodes = [node for nodes in parts.functions.values() for node in nodes]
    if any(node.call or node.op in OF_TORCH for node in all_nodes):
        lines += ["", "import torch"]
    lines += [""] if ops else []
    lines += ["from runtime.build.kernels import on_cuda"] if table else []
    lines += _imports(ops) if ops else []
    lines += ["", *(line for alias in table.values() for line in _binding(alias))] if table else []
    lines += ["", ATEN] if any(node.call for node in all_nodes) else []
    for name, nodes in parts.functions.items():
        lines += ["", "", *function(joint, parts, name, nodes, kernel_of)]
    return "\n".join(lines) + "\n"


def _binding(alias: Alias) -> list[str]:
    args = ("__file__", repr(alias.file), alias.op)
    line = f"{alias.name} = on_cuda({', '.join(args)})"
    if len(line) <= WIDTH:
        return [line]
    inner = [f"    {', '.join(args)}"]
    if len(inner[0]) > WIDTH:
        inner = [f"    {arg}," for arg in args]
    return [f"{alias.name} = on_cuda(", *inner, ")"]


def _imports(ops: tuple[str, ...]) -> list[str]:
    line = f"from runtime.ops import {', '.join(ops)}"
    if len(line) <= WIDTH:
        return [line]
    return ["from runtime.ops import (", *(f"    {op}," for op in ops), ")"]


def function(joint: Joint, parts: CutFunctions, name: str, nodes: tuple[OpNode, ...], kernel_of: KernelOf) -> list[str]:
    """Print one of F, I and W, with the shape of each argument and value in a comment."""
    signature: ir.Signature = getattr(parts.cut, name)
    table = aliases(parts, kernel_of)

    def callee(node: OpNode) -> str:
        file = kernel_of(node)
        return node.op if file is None else table[node.op, file].name

    dtype = dtype_of(joint.segment, parts)

    def shape(value: str) -> str:
        if value in joint.tensors:
            return describe(joint.tensors[value], dtype)
        parameter = joint.tensors[parameter_of(value)]
        return describe(Tensor(parameter.shape, statistics_dtype(parameter.dtype)), dtype)

    if not signature.args:
        return [f"def {name}():", f'    """{PURPOSE[name]} There are none."""']
    lines = [f"def {name}("]
    lines += [f"    {arg},  # {shape(arg)}" for arg in signature.args]
    recomputes = any(value in joint.recomputed for node in nodes for value in node.outputs)
    lines += ["):", f'    """{PURPOSE[name]}{recomputes * f" {AGAIN}"}"""']
    lines += [f"    {line}" for line in device_of(signature, nodes)]
    for node in nodes:
        lines += wrap_statement(print_node(node, callee(node)), [shape(value) for value in node.outputs])
    returned = returned_values(joint, parts, name)
    if returned:
        lines += _return_lines(returned)
    return lines


def wrap_statement(statement: str, shapes: list[str]) -> list[str]:
    """A statement of a function, with the shapes of its results. Arguments of a long call get lines of their own; if
    that is not enough, so does each result."""
    comment = f"  # {', '.join(shapes)}" if shapes else ""
    line = f"    {statement}{comment}"
    if len(line) <= WIDTH:
        return [line]
    head, _, args = statement.partition("(")
    first, last = f"    {head}(", f"    ){comment}"
    inner = [f"        {line}" for line in wrap(args[:-1], WIDTH - 8)]
    if max(len(first), len(last)) <= WIDTH or len(shapes) < 2:
        return [first, *inner, last]
    results, _, call = head.partition(" = ")
    listed = [f"        {value},  # {shape}" for value, shape in zip(results.split(", "), shapes, strict=True)]
    return ["    (", *listed, f"    ) = {call}(", *inner, "    )"]


def _return_lines(values: tuple[str, ...]) -> list[str]:
    line = f"    return {', '.join(values)}"
    if len(line) <= WIDTH:
        return [line]
    return ["    return (", *(f"        {value}," for value in values), "    )"]


def returned_values(joint: Joint, parts: CutFunctions, name: str) -> tuple[str, ...]:
    """The values that a function returns, in the order of its signature. An alias returns the value that it names."""
    values = dict(joint.outputs) if name == "F" else {gradient_of(source): value for source, value in joint.gradients}
    return tuple(values.get(returned, returned) for returned in getattr(parts.cut, name).returns)


def device_of(signature: ir.Signature, nodes: Sequence[OpNode]) -> tuple[str, ...]:
    """The statement that assigns `device`, if a torch call uses it."""
    uses_device = any(DEVICE in (value for _, value in node.call.options) for node in nodes if node.call)
    return (f"{DEVICE} = {signature.args[0]}.device",) if uses_device else ()


def print_node(node: OpNode, callee: str) -> str:
    """Print a node as a statement. `callee`: its op, or the alias of its kernel; not used for torch's ops."""
    if node.call:
        return f"{', '.join(node.outputs)} = {text_of(node)}"
    args = [arg if isinstance(arg, str) else repr(arg) for arg in node.args]
    call = f"{callee}({', '.join(args)})"
    if node.op == "add":
        call = f"torch.add({', '.join(args)})"
    elif node.op == ADD_TO:
        call = f"{args[0]}.add_({args[1]})"
    elif node.op == "cat2":
        call = f"torch.cat(({', '.join(args)}), dim=-1)"
    elif node.op == COLUMNS:
        call = f"{args[0]}[:, {args[1]}:{args[2]}]"
    return f"{', '.join(node.outputs)} = {call}" if node.outputs else call


def dtype_of(segment: ir.Segment, parts: CutFunctions) -> str:
    """The dtype of activations: that of the first input with a gradient, else that of the first output."""
    return next((i.dtype for i in segment.inputs if i.grad), parts.cut.outputs[0].dtype)


def describe(tensor: Tensor, usual: str) -> str:
    """`[512, 256]`, followed by the dtype if it is not the usual one."""
    shape = f"[{', '.join(map(str, tensor.shape))}]"
    return shape if tensor.dtype == usual else f"{shape} {tensor.dtype}"
