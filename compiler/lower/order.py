"""Chains → one instruction list over a compute lane and a communication lane.

List scheduling: among the instructions whose operands are known, the one that can start first goes first; ties go to
communication, then to the chain with more work left, then to base order. So a lone backward fills the time of an
all-to-all with weight gradients and the shared expert, and a pair hides one micro-batch's exchanges under the other's
compute. Exchanges are started as soon as their operands exist and waited for right before their first reader.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from compiler.ir import Instruction
from compiler.lower.chains import Node

Placed = tuple[int, Node]  # (slot, node)


class _Chain:
    """What is left of one chain: of each instruction how many operands are not made yet, and what can be issued now."""

    def __init__(self, slot: int, nodes: Sequence[Node]) -> None:
        self.slot, self.nodes = slot, nodes
        self.left_s = sum(node.cost_s for node in nodes)
        self.known_s = [0.0] * len(nodes)  # when the operands made so far are known
        self.readers: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(nodes):
            for value in node.instruction.reads:
                self.readers[value].append(index)
        made = [reader for node in nodes for b in node.writes for reader in self.readers.get(b.name, ())]
        self.unmade = Counter(made)
        self.ready = {index for index in range(len(nodes)) if not self.unmade[index]}

    def issue(self, index: int, end_s: float) -> Node:
        """Takes an instruction off, whose values are known at `end_s`."""
        node = self.nodes[index]
        self.ready.remove(index)
        self.left_s -= node.cost_s
        for reader in (reader for b in node.writes for reader in self.readers.get(b.name, ())):
            self.known_s[reader] = max(self.known_s[reader], end_s)
            self.unmade[reader] -= 1
            if not self.unmade[reader]:
                self.ready.add(reader)
        return node


def interleave(chains: Sequence[Sequence[Node]]) -> list[Placed]:
    """One order of all instructions, the slot beside each. Deterministic; the order depends on nodes alone."""
    states = [_Chain(slot, nodes) for slot, nodes in enumerate(chains)]
    free_s = {"compute": 0.0, "communication": 0.0}
    order: list[Placed] = []
    while any(state.ready for state in states):
        start_s, _, _, index, slot = min(
            (
                max(state.known_s[index], free_s[node.lane]),
                node.lane == "compute" and node.cost_s > 0,
                -state.left_s,
                index,
                state.slot,
            )
            for state in states
            for index in state.ready
            for node in [state.nodes[index]]
        )
        end_s = start_s + states[slot].nodes[index].cost_s
        node = states[slot].issue(index, end_s)
        if node.cost_s > 0:
            free_s[node.lane] = end_s
        order.append((slot, node))
    assert len(order) == sum(map(len, chains)), "an instruction reads what is never made"
    return order


def finish(order: Sequence[Placed], actions: Sequence[str], kept: Sequence[frozenset[str]]) -> tuple[Instruction, ...]:
    """Insert waits and frees. `kept[slot]`: values that a later action of the slot's stage and micro-batch reads."""
    waited = _with_waits(order, actions)
    last: dict[tuple[int, str], int] = {}
    for index, instruction in enumerate(waited):
        names = (*instruction.reads, *(b.name for b in instruction.writes))
        last |= {(instruction.slot, name): index for name in names if name not in kept[instruction.slot]}
    result: list[Instruction] = []
    for index, instruction in enumerate(waited):
        result.append(instruction)
        names = (*instruction.reads, *(b.name for b in instruction.writes))
        dead = tuple(dict.fromkeys(n for n in names if last.get((instruction.slot, n)) == index))
        if dead:
            free = Instruction("free", instruction.slot, instruction.action, instruction.phase, reads=dead)
            result.append(free)
    return tuple(result)


def _with_waits(order: Sequence[Placed], actions: Sequence[str]) -> list[Instruction]:
    result: list[Instruction] = []
    pending: dict[tuple[int, str], tuple[Instruction, Node]] = {}  # (slot, awaited value) → its exchange

    def wait(start: Instruction, node: Node) -> None:
        for buffer in node.writes:
            del pending[start.slot, buffer.name]
        result.append(replace(start, kind="wait", wait=start.kind, writes=node.writes))

    for slot, node in order:
        for name in node.instruction.reads:
            if (slot, name) in pending:
                wait(*pending[slot, name])
        instruction = replace(node.instruction, slot=slot, action=actions[slot])
        result.append(instruction)
        if node.lane == "communication":
            pending |= {(slot, b.name): (instruction, node) for b in node.writes}
    while pending:
        wait(*next(iter(pending.values())))
    return result
