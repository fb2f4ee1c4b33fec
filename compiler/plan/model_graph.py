"""The model as a graph: its segments and exchanges with their times, and the values that flow between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from compiler.ir import Buffer, Communication, Cut, Use
from compiler.plan.actions.chains import Chains
from compiler.plan.actions.order import paces


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A segment or exchange. `seconds`: of a micro-batch, by F, I and W, with evenly loaded experts."""

    kind: str
    stage: int
    seconds: Mapping[str, float]


@dataclass(slots=True)
class GraphEdge:
    """The values that flow from one node to another, and their bytes. `is_message`: as a message to the next stage."""

    is_message: bool
    values: list[str] = field(default_factory=list)
    bytes: int = 0


@dataclass(frozen=True)
class ModelGraph:
    """Nodes by site ("L3.attention", "L3 dispatch"), and edges by (producer, reader)."""

    nodes: dict[str, GraphNode] = field(default_factory=dict)
    edges: dict[tuple[str, str], GraphEdge] = field(default_factory=dict)


def model_graph(stages: Iterable[Chains]) -> ModelGraph:
    """The graph of the given stages in order, each on the device of its chains."""
    graph = ModelGraph()
    makers: dict[str, tuple[str, int]] = {}  # value → (producer, bytes)
    for chains in stages:
        stage = chains.stage
        communications = [step for step in stage.steps if isinstance(step, Communication)]
        rows: dict[str, str] = {step.site: step.kind for step in communications if step.moves_rows}
        times: dict[tuple[str, str], int] = {}
        for action in "FB":
            nodes = [node for node in chains.chain(action) if node.uses_lane]
            for node, time_ns in zip(nodes, paces(nodes, 1)[1], strict=True):
                name, phase = node.instruction.site, node.instruction.phase
                if node.is_exchange:
                    is_combine = node.instruction.kind == "combine"
                    name = f"{name} {rows.get(name) or ('combine' if is_combine else 'dispatch')}"
                key = name, phase if action == "F" or phase == "W" else "I"  # I includes forwards that it recomputes
                times[key] = times.get(key, 0) + time_ns
        for step in stage.steps:
            name = node_of(step)
            kind = step.segment.kind if isinstance(step, Use) else step.kind
            graph.nodes[name] = GraphNode(
                kind, stage.index, {phase: times.get((name, phase), 0) / 1e9 for phase in "FIW"}
            )
            for value in step.inputs:
                if value in makers:
                    maker, size = makers[value]
                    crosses = graph.nodes[maker].stage != stage.index
                    edge = graph.edges.setdefault((maker, name), GraphEdge(crosses))
                    edge.values.append(value)
                    edge.bytes += size
            outputs = step.outputs if isinstance(step, Communication) else _outputs(step, chains.cuts[step.site])
            makers |= {buffer.name: (name, _bytes(buffer, chains.rows)) for buffer in outputs}
    return graph


def node_of(step: Use | Communication) -> str:
    """The name of the node of a step."""
    return step.site if isinstance(step, Use) else f"{step.site} {step.kind}"


def _outputs(use: Use, cut: Cut) -> list[Buffer]:
    buffers = {buffer.name: buffer for buffer in cut.outputs}
    return [buffers[local.name].with_name(value) for local, value in zip(use.segment.outputs, use.outputs, strict=True)]


def _bytes(buffer: Buffer, rows: int) -> int:
    moved = buffer.with_name(buffer.name)  # without its alias: a view moves as many bytes as its base
    return moved.fixed_bytes + moved.row_bytes * rows
