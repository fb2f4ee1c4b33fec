"""The model as a graph: its segments and exchanges with what they take, and what flows between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from compiler.ir import Buffer, Communication, Cut, Plan, Use
from compiler.lower.chains import Chains, Names
from compiler.rates import Rates


@dataclass(frozen=True)
class Node:
    """A segment or exchange. `seconds` of a micro-batch each way, F, I and W, experts evenly loaded."""

    kind: str
    stage: int
    seconds: tuple[float, float, float]


@dataclass(frozen=True)
class Edge:
    """What one makes for another. `crosses`: whether a message takes it to the next stage."""

    values: tuple[str, ...]
    bytes: int
    crosses: bool


@dataclass(frozen=True)
class ModelGraph:
    """Nodes by name, the sites of a plan: "L3.attention", "L3 dispatch"; edges go from who makes a value to readers."""

    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[tuple[str, str], Edge] = field(default_factory=dict)


def model_graph(plan: Plan, cuts: Mapping[str, Cut], rates: Rates) -> ModelGraph:
    """Of a plan, in the order of its stages. `cuts` by site."""
    graph = ModelGraph()
    made: dict[str, tuple[str, int]] = {}  # value → (who makes it, bytes)
    for stage in plan.stages:
        chains = Chains(stage, cuts, rates, -1, -1)
        times: dict[tuple[str, str], int] = {}
        for kind in "FIW":
            for node in (each for each in chains.of(kind) if each.ordered):
                name = node.instruction.site
                if node.exchanges:
                    name = f"{name} {'combine' if node.instruction.kind == 'combine' else 'dispatch'}"
                times[name, kind] = times.get((name, kind), 0) + node.time_ns
        for step in stage.steps:
            name = node_of(step)
            forward, back, weights = (times.get((name, kind), 0) / 1e9 for kind in "FIW")
            kind = step.segment.kind if isinstance(step, Use) else step.kind
            graph.nodes[name] = Node(kind, stage.index, (forward, back, weights))
            for value in step.inputs:
                if value in made:
                    maker, size = made[value]
                    _add(graph, maker, name, value, size)
            outputs = step.outputs if isinstance(step, Communication) else _outputs(step, cuts[step.site])
            made |= {buffer.name: (name, _bytes(buffer, chains.rows)) for buffer in outputs}
    return graph


def node_of(step: Use | Communication) -> str:
    """The name of a step's node."""
    return step.site if isinstance(step, Use) else f"{step.site} {step.kind}"


def _outputs(use: Use, cut: Cut) -> list[Buffer]:
    buffers = Names.of(use, cut).buffers
    return [buffers[output.name] for output in use.segment.outputs]


def _bytes(buffer: Buffer, rows: int) -> int:
    own = Buffer(buffer.name, buffer.shape, buffer.dtype)  # a view moves as many bytes as what it views
    return own.fixed_bytes + own.row_bytes * rows


def _add(graph: ModelGraph, maker: str, reader: str, value: str, size: int) -> None:
    crosses = graph.nodes[maker].stage != graph.nodes[reader].stage
    known = graph.edges.get((maker, reader), Edge((), 0, crosses))
    graph.edges[maker, reader] = replace(known, values=(*known.values, value), bytes=known.bytes + size)
