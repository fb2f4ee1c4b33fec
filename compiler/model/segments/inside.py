"""What a function of a segment needs inside: values that are made and gone within one call. No torch.

A program, its proof and a run's ledger see what a call takes and what it returns. Between the two a device holds more:
in the order of the nodes, each value from the node that makes it to the last that reads it.
"""

from __future__ import annotations

from compiler.ir import Buffer, Inside
from compiler.model.segments.joint import Joint, Node
from compiler.model.segments.split import Split, base_of, view_nodes


def inside(joint: Joint, parts: Split) -> Inside:
    """For F, I and W: (bytes, bytes per received row) beside the returned values, at the nodes where they are most."""
    return tuple((name, _most(joint, nodes, _returned(joint, parts, name))) for name, nodes in parts.functions.items())


def _returned(joint: Joint, parts: Split, name: str) -> set[str]:
    """The values a function returns, each by its own name."""
    values = dict(joint.outputs) if name == "F" else {f"d_{given}": value for given, value in joint.gradients}
    return {values.get(returned, returned) for returned in getattr(parts.cut, name).returns}


def _most(joint: Joint, nodes: tuple[Node, ...], returned: set[str]) -> tuple[tuple[int, int], ...]:
    views = view_nodes(joint)

    first = {value: index for index, node in enumerate(nodes) for value in node.outputs if value not in views}
    last = dict(first)
    for index, node in enumerate(nodes):
        read = {base_of(views, value) for value in node.reads}
        last |= dict.fromkeys(read & first.keys(), index)
    changes: list[list[int]] = [[0, 0] for _ in range(len(nodes) + 1)]
    live = [0, 0]  # beside what is returned, all of which counts as there from the beginning
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
    return _undominated(points)


def _undominated(points: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The pairs (bytes, bytes a row) that can be the most for some number of rows."""
    kept: list[tuple[int, int]] = []
    for point in sorted(set(points), reverse=True):
        if max(point) > 0 and all(point[1] > other[1] for other in kept):
            kept.append(point)
    return tuple(kept)
