"""Chains → one instruction list over a compute lane and a communication lane.

List scheduling: among the instructions whose operands are known, the one that can start first goes first; ties go to
communication, then to the chain with more work left, then to base order. So a lone backward fills the time of an
all-to-all with weight gradients and the shared expert, and a pair hides one micro-batch's exchanges under the other's
compute. Exchanges are started as soon as their operands exist and waited for right before their first reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from compiler.ir import Instruction
from compiler.lower.chains import Node

Placed = tuple[int, Node]  # (slot, node)


@dataclass
class _Chain:
    slot: int
    pending: list[Node]
    finished_s: dict[str, float] = field(default_factory=dict)  # value → when it is known
    left_s: float = 0.0

    def ready(self) -> list[tuple[int, float]]:
        """(index, earliest time its operands are known) of every instruction that could be issued now."""
        unmade = {b.name for n in self.pending for b in n.writes}
        return [
            (i, max((self.finished_s.get(v, 0.0) for v in n.instruction.reads), default=0.0))
            for i, n in enumerate(self.pending)
            if not unmade.intersection(n.instruction.reads)
        ]


def interleave(chains: Sequence[Sequence[Node]]) -> list[Placed]:
    """One order of all instructions, the slot beside each. Deterministic; the order depends on nodes alone."""
    states = [_Chain(slot, list(c), left_s=sum(n.cost_s for n in c)) for slot, c in enumerate(chains)]
    free_s = {"compute": 0.0, "communication": 0.0}
    order: list[Placed] = []
    while any(s.pending for s in states):
        start_s, _, _, index, slot = min(
            (
                max(known_s, free_s[node.lane]),
                node.lane == "compute" and node.cost_s > 0,
                -state.left_s,
                index,
                state.slot,
            )
            for state in states
            for index, known_s in state.ready()
            for node in [state.pending[index]]
        )
        state = states[slot]
        node = state.pending.pop(index)
        end_s = start_s + node.cost_s
        if node.cost_s > 0:
            free_s[node.lane] = end_s
        state.finished_s |= dict.fromkeys((b.name for b in node.writes), end_s)
        state.left_s -= node.cost_s
        order.append((slot, node))
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
