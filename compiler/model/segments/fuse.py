"""Fusion passes: replace neighbouring nodes of a joint graph that one kernel computes by one node. No torch.

A pass is a rewrite: a pattern of nodes to find, and the nodes that replace them. A fused op computes exactly what it
replaces and rounds where that rounds, so turning a pass off (`unfused` in a run) changes no result. Values that only
matched nodes read disappear: they never reach memory. `compiler.model.segments.node_costs` counts the bytes saved.

Each pass states, from the segment alone, how often it must match, and `fuse_ops` asserts it: a pattern that silently
stopped matching would cost speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from compiler.model.segments.joint import Constant, Joint, OpNode
from compiler.model.segments.passes import PASSES, Pass
from compiler.model.segments.split import phases

Bound = Mapping[str, str | Constant]  # names in a pattern → values or constants of a graph
COMMUTATIVE = ("add",)


def fuse_ops(joint: Joint) -> Joint:
    """Apply the passes that the segment names in `fused`."""
    for name in joint.segment.fused:
        for rewrite in PASSES[name]:
            if not rewrite.applies(joint.segment):
                continue
            joint, count = _rewrite_all(joint, rewrite)
            expected = rewrite.matches(joint.segment)
            assert expected is None or count == expected, (
                f"{name}: {count} matches in {joint.segment.kind}, not {int(expected)}"
            )
    return joint


def _behind(result: OpNode, matched: Sequence[OpNode]) -> tuple[OpNode, ...]:
    """The matched nodes, in order, that the outputs of `result` depend on."""
    needed: list[OpNode] = []
    todo = list(result.outputs)
    while todo:
        value = todo.pop()
        for node in matched:
            if value in node.outputs and node not in needed and value not in result.args:
                needed.append(node)
                todo += node.reads
    return tuple(node for node in matched if node in needed)


# ---------------------------------------------------------------- rewriting


def _rewrite_all(joint: Joint, rewrite: Pass) -> tuple[Joint, int]:
    """Rewrite all matches. Returns the graph and the number of matches."""
    count = 0
    while bound := next(_matches(joint, rewrite), None):
        joint, count = _apply_rewrite(joint, rewrite.find, rewrite.make, bound), count + 1
    return joint, count


def _matches(joint: Joint, rewrite: Pass) -> Iterator[dict[str, str | Constant]]:
    """Matches of a pass in a graph for which no other node reads a value that would disappear."""
    phase_of = _phases(joint)
    produced = {value for node in rewrite.make for value in node.outputs}
    gone = {value for node in rewrite.find for value in node.outputs} - produced
    results = {value for _, value in (*joint.outputs, *joint.gradients, *joint.weights)}
    for bound, matched in _bindings(joint.nodes, rewrite.find, {}, ()):
        lost = {bound[name] for name in gone}
        read = {value for node in joint.nodes if node not in matched for value in node.reads}
        replaced = [
            [matched[rewrite.find.index(part)] for part in _behind(node, rewrite.find)] for node in rewrite.make
        ]
        is_split = any(
            len({phase_of.get(node) for node in parts}) > 1 or depends_through_others(joint, parts)
            for parts in replaced
        )
        if not lost & (read | results) and (rewrite.may_recompute or not is_split):
            yield bound


def depends_through_others(joint: Joint, parts: Sequence[OpNode]) -> bool:
    """Whether one of the nodes depends on another through a node outside `parts`, so that they cannot be one call."""
    results = {value for node in parts for value in node.outputs}
    after: set[str] = set()
    for node in joint.nodes:  # in order
        if node not in parts and (results | after).intersection(node.reads):
            after |= {*node.outputs}
    return any(after.intersection(node.reads) for node in parts)


def _bindings(
    nodes: tuple[OpNode, ...], find: tuple[OpNode, ...], bound: dict[str, str | Constant], matched: tuple[OpNode, ...]
) -> Iterator[tuple[dict[str, str | Constant], tuple[OpNode, ...]]]:
    if not find:
        yield bound, matched
        return
    first, *rest = find
    for node in nodes:
        if node.op == first.op and node not in matched:
            for args in permutations(node.args) if node.op in COMMUTATIVE else (node.args,):
                extended = _bound(bound, (*first.args, *first.outputs), (*args, *node.outputs))
                if extended is not None:
                    yield from _bindings(nodes, tuple(rest), extended, (*matched, node))


def _bound(
    bound: Bound, names: Sequence[str | Constant], values: Sequence[str | Constant]
) -> dict[str, str | Constant] | None:
    """`bound` with these names bound to these values, or None if a name would have two values."""
    extended = dict(bound)
    for name, value in zip(names, values, strict=True):
        assert isinstance(name, str), "patterns are made of names"
        if name in extended and (extended[name] != value or isinstance(extended[name], str) != isinstance(value, str)):
            return None
        extended[name] = value
    return extended


def _apply_rewrite(joint: Joint, find: tuple[OpNode, ...], make: tuple[OpNode, ...], bound: Bound) -> Joint:
    def actual(node: OpNode) -> OpNode:
        args = tuple(bound[arg] if isinstance(arg, str) else arg for arg in node.args)
        return OpNode(node.op, args, tuple(str(bound[value]) for value in node.outputs))

    matched, fused = ([actual(node) for node in nodes] for nodes in (find, make))
    results = {value for node in matched for value in node.outputs}
    unfused = [node for node in joint.nodes if not results & set(node.outputs)]
    parts_of = dict(joint.parts)
    parts = tuple(
        (node, tuple(op for part in _behind(pattern, find) for op in parts_of.get(actual(part), (actual(part),))))
        for node, pattern in zip(fused, make, strict=True)
    )
    unmatched = tuple(row for row in joint.parts if row[0] not in matched)
    lost = results - {value for node in fused for value in node.outputs}
    recomputed = tuple(value for value in joint.recomputed if value not in lost)
    after = replace(
        joint, nodes=_sort_nodes([*unfused, *fused], joint), parts=(*unmatched, *parts), recomputed=recomputed
    )
    old, new = _phases(joint), _phases(after)
    assert all(new[node] == old[node] for node in unfused if node in old), "a fusion moves no other node"
    return after


def _phases(joint: Joint) -> dict[OpNode, str]:
    return {joint.nodes[index]: phase for index, phase in phases(joint).items()}


def _sort_nodes(nodes: Sequence[OpNode], joint: Joint) -> tuple[OpNode, ...]:
    """Sort topologically, and otherwise by where the graph had each node's last result."""
    place = {value: index for index, node in enumerate(joint.nodes) for value in node.outputs}
    waiting = sorted(nodes, key=lambda node: max(place[value] for value in node.outputs))
    results = {value for node in waiting for value in node.outputs}
    done: set[str] = set()
    ordered: list[OpNode] = []
    while waiting:
        node = next(node for node in waiting if results.intersection(node.reads) <= done)
        waiting.remove(node)
        ordered.append(node)
        done |= set(node.outputs)
    return tuple(ordered)
