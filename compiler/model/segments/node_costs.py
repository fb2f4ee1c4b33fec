"""What the nodes of a joint graph cost: FLOPs, and bytes read and written, from the op rules. No torch.

A fused op costs what it stands for: a CPU calls that, and rates are measured on that, or come from programs that did
not fuse it. What it saves where one kernel does it, the bytes of `bytes_saved`, is told beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from types import SimpleNamespace

from compiler import ir
from compiler.ir.dtypes import ITEMSIZE, is_packed, packed_of, tensor_bytes
from compiler.model.ops import CASTS, GRADIENTS, RULES, Gradient, Rule, Shape, Tensor
from compiler.model.ops.rule import statistics_dtype
from compiler.model.ops.torch_calls import torch_flops, torch_kernel
from compiler.model.segments.joint import Joint, OpNode
from compiler.model.segments.split import base_of, phases, taken_nodes, view_nodes, with_taken


def costs(joint: Joint) -> tuple[tuple[str, ir.Cost], ...]:
    """FLOPs and bytes of F, I and W. They are affine in R: two values of R give both coefficients."""
    ops: dict[str, list[tuple[str, ir.Cost]]] = {phase: [] for phase in "FIW"}
    for phase, _, works in works_of(joint):
        ops[phase] += works
    return tuple((phase, _total(tuple(works))) for phase, works in ops.items())


def works_of(joint: Joint) -> Iterator[tuple[str, OpNode, list[tuple[str, ir.Cost]]]]:
    """(function, node, the ops it stands for and what each costs) for each node, in the order of the functions."""
    none, one = _SizedNodes(joint, 0), _SizedNodes(joint, 1)
    for index, phase in phases(joint).items():
        works = []
        for node in none.parts.get(joint.nodes[index], (joint.nodes[index],)):
            flops, moved = none.flops(node), none.moved(node)
            more = one.flops(node) - flops, one.moved(node) - moved
            shape, dtype = none.kernel(node)
            works.append((node.op, ir.Cost(flops, moved, *more, shape=shape, dtype=dtype)))
        yield phase, joint.nodes[index], works
    for phase, node in _made_of_no_tensor(joint):
        shape, dtype = none.kernel(node)
        yield phase, node, [(node.op, ir.Cost(none.flops(node), none.moved(node), shape=shape, dtype=dtype))]


def _made_of_no_tensor(joint: Joint) -> Iterator[tuple[str, OpNode]]:
    """(function, node) of what functions make where they read it, once each."""
    where, apart = phases(joint), taken_nodes(joint)
    constants = apart.keys() - view_nodes(joint).keys()
    for phase in "FIW" if constants else "":
        nodes = [joint.nodes[index] for index, of in where.items() if of == phase]
        yield from ((phase, node) for node in with_taken(nodes, apart) if constants.intersection(node.outputs))


def bytes_saved(joint: Joint) -> dict[OpNode, tuple[int, int]]:
    """Bytes, and bytes per received row, that each fused node moves less than the nodes that it stands for."""
    saved = []
    for rows in (0, 1):
        at = _SizedNodes(joint, rows)
        saved.append([sum(at.moved(part) for part in parts) - at.moved(node) for node, parts in joint.parts])
    return {node: (none, one - none) for (node, _), none, one in zip(joint.parts, *saved, strict=True)}


def _total(ops: tuple[tuple[str, ir.Cost], ...]) -> ir.Cost:
    works = [work for _, work in ops]
    return ir.Cost(
        flops=sum(work.flops for work in works),
        bytes=sum(work.bytes for work in works),
        flops_row=sum(work.flops_row for work in works),
        bytes_row=sum(work.bytes_row for work in works),
        ops=ops,
    )


class _SizedNodes:
    """The nodes of a joint graph with a number for R."""

    def __init__(self, joint: Joint, rows: int) -> None:
        self.tensors = joint.tensors
        self.sized = {
            name: Tensor(tuple(rows if extent == "R" else extent for extent in tensor.shape), tensor.dtype)
            for name, tensor in joint.tensors.items()
        }
        self.rows = rows
        self.parts = dict(joint.parts)
        self.views = view_nodes(joint)
        self.ends = [value for _, value in joint.weights]

    def flops(self, node: OpNode) -> int:
        if node.call:
            reads, gives = ([self.sized[value].shape for value in values] for values in (node.reads, node.outputs))
            return torch_flops(node.op, reads, gives)
        return _rule(node).flops(_extents(node, self.sized))

    def moved(self, node: OpNode) -> int:
        """Bytes; a fused op moves its own arguments and results alone."""
        if node.call:
            return sum(self._bytes(self.tensors[name]) for name in (*node.reads, *node.outputs)) + self._added(node)
        if node not in self.parts and (touched := _rule(node).touched):
            return touched(_extents(node, self.sized)) * ITEMSIZE[self.sized[node.outputs[0]].dtype]
        twice = node.outputs if node.is_weight_gradient else ()  # the accumulator is read too
        twice = node.reads if self._seeks_a_scale(node) else twice
        return sum(self._bytes(self.tensors[name]) for name in (*node.reads, *node.outputs, *twice))

    def _seeks_a_scale(self, node: OpNode) -> bool:
        """Whether a cast first reads its operand once more: one scale for all of it is that of its largest number."""
        dtype = self.tensors[node.outputs[0]].dtype
        return node.op in ("quantise", "quantise_both") and is_packed(dtype) and packed_of(dtype).is_whole

    def _added(self, node: OpNode) -> int:
        """Bytes that adding its results to accumulators of weight gradients moves: both are read, one is written."""
        added = [self.tensors[name] for name in self.ends if base_of(self.views, name) in node.outputs]
        wide = sum(2 * prod(tensor.shape) * ITEMSIZE[statistics_dtype(tensor.dtype)] for tensor in added)
        return wide + sum(map(self._bytes, added))

    def kernel(self, node: OpNode) -> tuple[Shape, str]:
        """Shape and dtype that its rate depends on."""
        if node.call:
            product = torch_kernel(node.op, [self.tensors[value].shape for value in node.reads])
            dtype = self.tensors[node.outputs[0]].dtype
            return (product, dtype) if product else _largest([self.tensors[n] for n in (*node.reads, *node.outputs)])
        if shape := _rule(node).kernel:
            return shape(_extents(node, self.tensors)), self.tensors[node.reads[0]].dtype
        return _largest([self.tensors[name] for name in (*node.reads, *node.outputs)])

    def _bytes(self, tensor: Tensor) -> int:
        return tensor_bytes(tensor.shape, tensor.dtype) * (self.rows if "R" in tensor.shape else 1)


def _rule(node: OpNode) -> Rule | Gradient:
    return RULES.get(node.op) or CASTS.get(node.op) or GRADIENTS[node.op]


def _extents(node: OpNode, tensors: Mapping[str, Tensor]) -> SimpleNamespace:
    """Shapes by the names that a node's rule has for its arguments and results."""
    rule = _rule(node)
    reads, gives = (rule.args, rule.outputs) if isinstance(rule, Rule) else (rule.reads, rule.gives)
    found = SimpleNamespace()
    reads = reads[: len(node.args)]  # optional ones may be left out
    for name, arg in (*zip(reads, node.args, strict=True), *zip(gives, node.outputs, strict=True)):
        if isinstance(name, str):
            setattr(found, name, tensors[arg].shape if isinstance(arg, str) else arg)
    return found


def _largest(tensors: list[Tensor]) -> tuple[Shape, str]:
    """(rows, columns) and dtype of the largest tensor that a kernel reads or writes; R counts as more than any number
    of rows."""
    largest = max(tensors, key=lambda tensor: ("R" in tensor.shape, prod(e for e in tensor.shape if e != "R")))
    rows, *columns = largest.shape or (1,)
    return (rows, prod(columns)), largest.dtype
