"""Joint graphs: a segment traced with its backward, split into F, I and W, and printed as plain Python."""

from __future__ import annotations

from compiler.ir import Segment, SegmentCode


def emit(segment: Segment) -> SegmentCode:
    """The module of a segment. It is printed from the graph that autograd gives; the graph of the op rules, which the
    plan was made from, must have the same cut, and the text, parsed back, the same nodes. Imports torch.
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
    source = printer.module(traced, parts)
    check.text(source, traced, parts)
    return SegmentCode(printer.module_name(segment), source, printer.runtime_ops(parts))
