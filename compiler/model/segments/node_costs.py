"""Costs of the nodes of a joint graph: FLOPs, and bytes read and written, from the op rules. No torch.

A fused op costs what the ops that it replaces cost: a CPU runs those, and rates are measured on them or come from
programs that do not fuse them. `bytes_saved` gives the bytes that a fused kernel saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from types import SimpleNamespace

from compiler import ir
from compiler.ir.dtypes import ITEMSIZE, is_packed, parse_packed, tensor_bytes
from compiler.model.ops import CASTS, GRADIENTS, RULES, Gradient, Rule, Shape, Tensor
from compiler.model.ops.gpu_work import KERNEL_WORK, TORCH_WORK
from compiler.model.ops.kernel_shapes import TAKES
from compiler.model.ops.rule import statistics_dtype
from compiler.model.ops.torch_calls import torch_flops, torch_kernel
from compiler.model.segments.joint import Joint, OpNode
from compiler.model.segments.split import base_of, duplicated_nodes, insert_views, phases, view_nodes


def costs(joint: Joint) -> tuple[tuple[str, ir.Cost], ...]:
    """FLOPs and bytes of F, I and W. They are affine in R, so the values at R = 0 and R = 1 give both coefficients."""
    ops: dict[str, list[tuple[str, ir.Cost]]] = {phase: [] for phase in "FIW"}
    for phase, _, works in works_of(joint):
        ops[phase] += works
    return tuple((phase, _total(tuple(works))) for phase, works in ops.items())


def works_of(joint: Joint) -> Iterator[tuple[str, OpNode, list[tuple[str, ir.Cost]]]]:
    """(function, node, [(op, cost)]) for each node, in the order of the functions. The ops of a fused node are those
    that it replaces."""
    no_rows, one_row = _SizedNodes(joint, 0), _SizedNodes(joint, 1)
    for index, phase in phases(joint).items():
        works = []
        for node in no_rows.parts.get(joint.nodes[index], (joint.nodes[index],)):
            flops, moved = no_rows.flops(node), no_rows.moved_bytes(node)
            per_row = one_row.flops(node) - flops, one_row.moved_bytes(node) - moved
            shape, dtype = no_rows.kernel(node)
            cost = ir.Cost(flops, moved, *per_row, shape=shape, dtype=dtype)
            works.append((node.op, replace(cost, on_kernels=no_rows.on_kernels(node), on_torch=no_rows.on_torch(node))))
        yield phase, joint.nodes[index], works
    for phase, node in _made_of_no_tensor(joint):
        shape, dtype = no_rows.kernel(node)
        yield (
            phase,
            node,
            [(node.op, ir.Cost(no_rows.flops(node), no_rows.moved_bytes(node), shape=shape, dtype=dtype))],
        )


def _made_of_no_tensor(joint: Joint) -> Iterator[tuple[str, OpNode]]:
    """(function, node) of constants, nodes that depend on no tensor: once for each function that reads them."""
    phase_of, duplicated = phases(joint), duplicated_nodes(joint)
    constants = duplicated.keys() - view_nodes(joint).keys()
    for phase in "FIW" if constants else "":
        nodes = [joint.nodes[index] for index, node_phase in phase_of.items() if node_phase == phase]
        yield from ((phase, node) for node in insert_views(nodes, duplicated) if constants.intersection(node.outputs))


def bytes_saved(joint: Joint) -> dict[OpNode, tuple[int, int]]:
    """The bytes, and bytes per received row, that each fused node saves over the nodes that it replaces."""
    saved = []
    for rows in (0, 1):
        sized = _SizedNodes(joint, rows)
        saved.append(
            [sum(sized.moved_bytes(part) for part in parts) - sized.moved_bytes(node) for node, parts in joint.parts]
        )
    return {node: (no_rows, one_row - no_rows) for (node, _), no_rows, one_row in zip(joint.parts, *saved, strict=True)}


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

    def on_kernels(self, node: OpNode) -> ir.KernelWork | None:
        """The work of kernels that differs from what the op's rule counts; None if no kernel takes the shapes."""
        work = None if node.call else KERNEL_WORK.get(node.op)
        if work is None:
            return None
        extents, dtype = _extents(node, self.sized), self.tensors[node.reads[0]].dtype
        return work(extents) if TAKES[node.op](extents, dtype) else None

    def on_torch(self, node: OpNode) -> ir.TorchWork | None:
        """What torch does on a GPU for an op that needs a kernel of its own; None for other ops."""
        work = None if node.call else TORCH_WORK.get(node.op)
        return work(_extents(node, self.sized)) if work else None

    def moved_bytes(self, node: OpNode) -> int:
        """Bytes read and written. A fused op moves only its own arguments and results."""
        if node.call:
            return sum(
                self._bytes(self.tensors[name]) for name in (*node.reads, *node.outputs)
            ) + self._accumulated_bytes(node)
        if node not in self.parts and (touched := _rule(node).touched):
            return touched(_extents(node, self.sized)) * ITEMSIZE[self.sized[node.outputs[0]].dtype]
        twice = node.outputs if node.is_weight_gradient else ()  # the accumulator is read too
        twice = node.reads if self._seeks_a_scale(node) else twice
        return sum(self._bytes(self.tensors[name]) for name in (*node.reads, *node.outputs, *twice))

    def _seeks_a_scale(self, node: OpNode) -> bool:
        """Whether a cast reads its operand twice: a per-tensor scale depends on its largest element."""
        dtype = self.tensors[node.outputs[0]].dtype
        return node.op in ("quantise", "quantise_both") and is_packed(dtype) and parse_packed(dtype).is_whole

    def _accumulated_bytes(self, node: OpNode) -> int:
        """Bytes moved by adding its results to gradient accumulators: both are read, the accumulator is written."""
        added = [self.tensors[name] for name in self.ends if base_of(self.views, name) in node.outputs]
        wide = sum(2 * prod(tensor.shape) * ITEMSIZE[statistics_dtype(tensor.dtype)] for tensor in added)
        return wide + sum(map(self._bytes, added))

    def kernel(self, node: OpNode) -> tuple[Shape, str]:
        """The shape and dtype that the node's rate depends on."""
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
    """Shapes and constants by the rule's names for the node's arguments and results."""
    rule = _rule(node)
    reads, gives = (rule.args, rule.outputs) if isinstance(rule, Rule) else (rule.reads, rule.gives)
    extents = SimpleNamespace()
    reads = reads[: len(node.args)]  # a call may leave out optional ones
    for name, arg in (*zip(reads, node.args, strict=True), *zip(gives, node.outputs, strict=True)):
        if isinstance(name, str):
            setattr(extents, name, tensors[arg].shape if isinstance(arg, str) else arg)
    return extents


def _largest(tensors: list[Tensor]) -> tuple[Shape, str]:
    """(rows, columns) and dtype of the largest tensor that a kernel reads or writes. R counts as larger than any
    number."""
    largest = max(tensors, key=lambda tensor: ("R" in tensor.shape, prod(e for e in tensor.shape if e != "R")))
    rows, *columns = largest.shape or (1,)
    return (rows, prod(columns)), largest.dtype
