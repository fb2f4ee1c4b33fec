"""The module of a segment: its graph judged by a trace of torch, printed as plain Python, and its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compiler.emit.kernels import KernelFile, emit_kernel, reason
from compiler.emit.kernels.calls import call_of
from compiler.ir import Emitted, Segment, SegmentCode
from compiler.model.segments.joint import ADD_TO, COLUMNS, Joint, Node


def emit(segment: Segment, num_sms: int) -> SegmentCode:
    """The module of a segment, printed from the graph that it was planned by.

    The base graph is compared with what torch traces, and the text, parsed back, with the graph. On CUDA, ops take
    their emitted kernels, which use `num_sms` SMs. Imports torch.
    """
    from compiler.model.segments import check, printer
    from compiler.model.segments.interpret import base_graph, rewritten
    from compiler.model.segments.node_costs import bytes_saved
    from compiler.model.segments.split import split
    from compiler.model.segments.torch_ops import ops
    from compiler.model.segments.trace import trace
    from compiler.model.segments.unpack import unpacked

    base = base_graph(segment)
    check.base_graph(trace(segment, ops()), base)
    priced = rewritten(base)
    joint = unpacked(priced)
    parts = split(joint)
    kernels = {node: kernel(joint, node, num_sms) for nodes in parts.functions.values() for node in nodes}

    def kernel_of(node: Node) -> str | None:
        file = kernels[node]
        return file.name if file else None

    source = printer.module(joint, parts, kernel_of)
    check.text(source, joint, parts, kernel_of)
    files = {file.name: file.source for file in kernels.values() if file}
    saved = {node: each for (node, _), each in zip(joint.parts, bytes_saved(priced).values(), strict=True)}
    calls = tuple(
        _emitted(function, node, kernel_of(node), joint, saved)
        for function, nodes in parts.functions.items()
        for node in nodes
        if node.op != COLUMNS
    )
    called = printer.runtime_ops(parts)
    return SegmentCode(printer.module_name(segment), source, called, tuple(sorted(files.items())), calls)


def _emitted(
    function: str, node: Node, file: str | None, joint: Joint, saved: Mapping[Node, tuple[int, int]]
) -> Emitted:
    call = Emitted(
        function, node.op, file or "", reason="" if file else reason(node.op, call_of(joint, node).arguments)
    )
    for fused, parts in joint.parts:
        adds = node.op == f"{fused.op}_" and node.reads[1:] == fused.reads  # to the gradient of a weight
        if node == fused or adds:
            saved_bytes, saved_row = saved[fused]
            return replace(call, parts=tuple(part.op for part in parts), saved=saved_bytes, saved_row=saved_row)
    return call


def kernel(joint: Joint, node: Node, num_sms: int) -> KernelFile | None:
    """The kernel file of a node's op at its sizes, or None where the reference op runs on every device.

    `joint` is unpacked.
    """
    if node.call or node.op == ADD_TO:
        return None
    call = call_of(joint, node)
    return emit_kernel(call.op, call.arguments, num_sms)
