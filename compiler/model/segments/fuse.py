"""Fusion: neighbouring nodes of a joint graph that one kernel does, as passes. No torch.

A pass is a rewrite: nodes to find, and what stands for them. A fused op is by definition what it stands for, rounding
where that rounds, so a pass that is turned off (`unfused`, in a run) leaves the numbers as they are. Values that only
the found nodes read are gone: they never reach memory. What that saves is counted in
`compiler.model.segments.node_costs`.

Each pass says how often it must match in a segment, from the segment alone, and is held to it: a pattern that no longer
matches would cost speed in silence.
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


def fused(joint: Joint) -> Joint:
    """The joint graph with what its segment fuses as single nodes."""
    for name in joint.segment.fused:
        for each in PASSES[name]:
            if not each.applies(joint.segment):
                continue
            joint, count = _rewritten(joint, each)
            expected = each.matches(joint.segment)
            assert expected is None or count == expected, (
                f"{name}: {count} matches in {joint.segment.kind}, not {int(expected)}"
            )
    return joint


def _behind(result: OpNode, found: Sequence[OpNode]) -> tuple[OpNode, ...]:
    """The found nodes, in order, without which the outputs of `result` are not there."""
    needed: list[OpNode] = []
    todo = list(result.outputs)
    while todo:
        value = todo.pop()
        for node in found:
            if value in node.outputs and node not in needed and value not in result.args:
                needed.append(node)
                todo += node.reads
    return tuple(node for node in found if node in needed)


# ---------------------------------------------------------------- rewriting


def _rewritten(joint: Joint, each: Pass) -> tuple[Joint, int]:
    """All matches rewritten, and how many there were."""
    count = 0
    while bound := next(_matches(joint, each), None):
        joint, count = _applied(joint, each.find, each.make, bound), count + 1
    return joint, count


def _matches(joint: Joint, each: Pass) -> Iterator[dict[str, str | Constant]]:
    """Ways to find a pass in a graph, of whose values nobody else reads those that would be gone."""
    where = _phases(joint)
    given = {value for node in each.make for value in node.outputs}
    gone = {value for node in each.find for value in node.outputs} - given
    kept = {value for _, value in (*joint.outputs, *joint.gradients, *joint.weights)}
    for bound, found in _bindings(joint.nodes, each.find, {}, ()):
        lost = {bound[name] for name in gone}
        read = {value for node in joint.nodes if node not in found for value in node.reads}
        of = [[found[each.find.index(part)] for part in _behind(node, each.find)] for node in each.make]
        apart = any(len({where.get(node) for node in parts}) > 1 or between(joint, parts) for parts in of)
        if not lost & (read | kept) and (each.anew or not apart):
            yield bound


def between(joint: Joint, parts: Sequence[OpNode]) -> bool:
    """Whether some of the nodes need what other nodes make of their results: then they are not one call."""
    results = {value for node in parts for value in node.outputs}
    after: set[str] = set()
    for node in joint.nodes:  # in order
        if node not in parts and (results | after).intersection(node.reads):
            after |= {*node.outputs}
    return any(after.intersection(node.reads) for node in parts)


def _bindings(
    nodes: tuple[OpNode, ...], find: tuple[OpNode, ...], bound: dict[str, str | Constant], found: tuple[OpNode, ...]
) -> Iterator[tuple[dict[str, str | Constant], tuple[OpNode, ...]]]:
    if not find:
        yield bound, found
        return
    first, *rest = find
    for node in nodes:
        if node.op == first.op and node not in found:
            for args in permutations(node.args) if node.op in COMMUTATIVE else (node.args,):
                more = _bound(bound, (*first.args, *first.outputs), (*args, *node.outputs))
                if more is not None:
                    yield from _bindings(nodes, tuple(rest), more, (*found, node))


def _bound(
    bound: Bound, names: Sequence[str | Constant], values: Sequence[str | Constant]
) -> dict[str, str | Constant] | None:
    """`bound` with each name as its value, or None where a name would have two."""
    more = dict(bound)
    for name, value in zip(names, values, strict=True):
        assert isinstance(name, str), "patterns are made of names"
        if name in more and (more[name] != value or isinstance(more[name], str) != isinstance(value, str)):
            return None
        more[name] = value
    return more


def _applied(joint: Joint, find: tuple[OpNode, ...], make: tuple[OpNode, ...], bound: Bound) -> Joint:
    def actual(node: OpNode) -> OpNode:
        args = tuple(bound[arg] if isinstance(arg, str) else arg for arg in node.args)
        return OpNode(node.op, args, tuple(str(bound[value]) for value in node.outputs))

    found, fused = ([actual(node) for node in nodes] for nodes in (find, make))
    results = {value for node in found for value in node.outputs}
    others = [node for node in joint.nodes if not results & set(node.outputs)]
    parts_of = dict(joint.parts)
    parts = tuple(
        (node, tuple(each for part in _behind(pattern, find) for each in parts_of.get(actual(part), (actual(part),))))
        for node, pattern in zip(fused, make, strict=True)
    )
    left = tuple(row for row in joint.parts if row[0] not in found)
    lost = results - {value for node in fused for value in node.outputs}
    again = tuple(value for value in joint.again if value not in lost)
    after = replace(joint, nodes=_in_order([*others, *fused], joint), parts=(*left, *parts), again=again)
    before, now = _phases(joint), _phases(after)
    assert all(now[node] == before[node] for node in others if node in before), "a fusion moves no other node"
    return after


def _phases(joint: Joint) -> dict[OpNode, str]:
    return {joint.nodes[index]: phase for index, phase in phases(joint).items()}


def _in_order(nodes: Sequence[OpNode], joint: Joint) -> tuple[OpNode, ...]:
    """Every node behind those whose results it reads, else in the order in which the graph had its last result."""
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
