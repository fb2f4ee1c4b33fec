"""Joint graphs: a segment traced with its backward, split into F, I and W, and printed as plain Python."""

from __future__ import annotations

from compiler.graph.joint import Joint, Node
from compiler.ir import Buffer, Segment, SegmentCode
from compiler.kernels import KernelFile, emit_kernel


def emit(segment: Segment, num_sms: int) -> SegmentCode:
    """The module of a segment. It is printed from the graph that autograd gives; the graph of the op rules, which the
    plan was made from, must have the same cut, and the text, parsed back, the same nodes. Its ops take their emitted
    kernels on CUDA, which use `num_sms` SMs. Imports torch.
    """
    from compiler.graph import check, printer
    from compiler.graph.split import split
    from compiler.graph.trace import trace
    from compiler.shapes import interpret
    from runtime.ops.library import ops

    traced, planned = trace(segment, ops()), interpret(segment)
    parts = split(traced)
    check.cuts(parts.cut, split(planned).cut)
    check.work(traced, planned)
    kernels = {node: kernel(traced, node, num_sms) for nodes in parts.functions.values() for node in nodes}

    def kernel_of(node: Node) -> str | None:
        file = kernels[node]
        return file.name if file else None

    source = printer.module(traced, parts, kernel_of)
    check.text(source, traced, parts, kernel_of)
    files = {file.name: file.source for file in kernels.values() if file}
    return SegmentCode(printer.module_name(segment), source, printer.runtime_ops(parts), tuple(sorted(files.items())))


def kernel(joint: Joint, node: Node, num_sms: int) -> KernelFile | None:
    """The kernel file of a node's op at its sizes, or None where the reference op runs on every device."""

    def argument(arg: object) -> object:
        if not isinstance(arg, str):
            return arg
        tensor = joint.tensors[arg if arg in joint.tensors else arg.removeprefix("g_")]
        return Buffer(arg, tensor.shape, tensor.dtype)

    return emit_kernel(node.op, tuple(argument(arg) for arg in node.args), num_sms)
