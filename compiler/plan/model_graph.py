"""The model as a graph: its segments and exchanges with what they take, and what flows between them."""

from __future__ import annotations

import networkx as nx

from compiler.actions.chains import Chains, Names
from compiler.ir import Buffer, Communication, Cut, Plan, Use
from compiler.rates import Rates


def model_graph(plan: Plan, rates: Rates) -> nx.DiGraph:
    """Nodes are the sites of a plan: "L3.attention", "L3 dispatch"; edges go from who makes a value to who reads it.

    Nodes have `kind`, `stage` and `F_s`, `I_s`, `W_s`, seconds of a micro-batch each way, experts evenly loaded. Edges
    have `values`, their names, `bytes`, and `crosses`: whether a message takes them to the next stage.
    """
    graph: nx.DiGraph = nx.DiGraph()
    makers: dict[str, tuple[str, int]] = {}  # value → (who makes it, bytes)
    for stage in plan.stages:
        chains = Chains(stage, plan.cuts, rates)
        times: dict[tuple[str, str], int] = {}
        for kind in "FIW":
            for node in (each for each in chains.of(kind) if each.ordered):
                name = node.instruction.site
                if node.exchanges:
                    name = f"{name} {'combine' if node.instruction.kind == 'combine' else 'dispatch'}"
                times[name, kind] = times.get((name, kind), 0) + node.time_ns
        for step in stage.steps:
            name = node_of(step)
            seconds = {f"{kind}_s": times.get((name, kind), 0) / 1e9 for kind in "FIW"}
            kind = step.segment.kind if isinstance(step, Use) else step.kind
            graph.add_node(name, kind=kind, stage=stage.index, **seconds)
            for value in step.inputs:
                if value in makers:
                    maker, size = makers[value]
                    _add(graph, maker, name, value, size)
            outputs = step.outputs if isinstance(step, Communication) else _outputs(step, plan.cuts[step.site])
            makers |= {buffer.name: (name, _bytes(buffer, chains.rows)) for buffer in outputs}
    return graph


def node_of(step: Use | Communication) -> str:
    """The name of a step's node."""
    return step.site if isinstance(step, Use) else f"{step.site} {step.kind}"


def _outputs(use: Use, cut: Cut) -> list[Buffer]:
    buffers = Names.of(use, cut).buffers
    return [buffers[output.name] for output in use.segment.outputs]


def _bytes(buffer: Buffer, rows: int) -> int:
    moved = Buffer(buffer.name, buffer.shape, buffer.dtype)  # a view moves as many bytes as what it views
    return moved.fixed_bytes + moved.row_bytes * rows


def _add(graph: nx.DiGraph, maker: str, reader: str, value: str, size: int) -> None:
    edge = graph.get_edge_data(maker, reader, {"values": (), "bytes": 0})
    crosses = graph.nodes[maker]["stage"] != graph.nodes[reader]["stage"]
    graph.add_edge(maker, reader, values=(*edge["values"], value), bytes=edge["bytes"] + size, crosses=crosses)
