"""The plan of a spec: which stage runs which layers, who holds what, which replicas are summed.

Placement is a graph, tensor → stage → pipeline rank: a tensor is held by the ranks reached from it. The second copy of
a mirrored stage, and the embedding and head that MTP shares with the main model, need no rule of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import networkx as nx

from compiler.ir import Bucket, Mesh, Plan, Replica, Stage, Use
from compiler.layers.parameters import Parameter, parameters
from compiler.layers.stages import build_stages
from compiler.schedules import DEFAULT_CHUNKS, placement_of
from compiler.schedules.placement import num_stages, stages_of
from compiler.schedules.schedule import Schedule
from dsl.schema import Spec


def make_plan(spec: Spec, own: Schedule | None = None) -> Plan:
    """Pure and torch-free. The spec has passed its checks; what they promise is asserted here.

    `own`: the schedule of the file that the spec names, whose placement the ranks then store.
    """
    parallel = spec.parallel
    mesh = Mesh(pp=parallel.pipeline, dp=parallel.data, ep=parallel.expert, tp=parallel.tensor, cp=parallel.context)
    placement = own.placement if own else storage_of(spec)
    stages = build_stages(spec, num_stages(placement, mesh.pp))
    graph = placement_graph(stages, placement, mesh.pp)
    rows = parameters(spec)
    replicas = tuple(_replica(row, graph, mesh) for row in rows)
    return Plan(
        mesh=mesh,
        placement=placement,
        stages=stages,
        replicas=replicas,
        buckets=buckets(replicas),
        assumptions=(
            "layers are on the stages that the layout says"
            if parallel.layout is not None
            else "layers are split over stages so that the most expensive stage costs least, in forward FLOPs",
            *(
                ("expert e of E lives on expert rank e // (E / expert)",)
                if any(row.num_experts for row in rows)
                else ()
            ),
        ),
    )


def storage_of(spec: Spec) -> str:
    """The placement of a spec's schedule: what each pipeline rank stores."""
    name, chunks = spec.schedule.name, spec.schedule.chunks
    assert name is not None
    return placement_of(name, spec.parallel.pipeline, chunks or DEFAULT_CHUNKS)


def placement_graph(stages: Sequence[Stage], placement: str, num_ranks: int) -> nx.DiGraph:
    """Nodes ("tensor", name), ("stage", s), ("rank", r); edges from what is held to its holder."""
    graph: nx.DiGraph = nx.DiGraph()
    for stage in stages:
        tensors = {tensor for step in stage.steps if isinstance(step, Use) for _, tensor in step.params}
        graph.add_edges_from((("tensor", t), ("stage", stage.index)) for t in sorted(tensors))
    for rank in range(num_ranks):
        graph.add_edges_from((("stage", s), ("rank", rank)) for s in stages_of(placement, num_ranks, rank))
    assert nx.is_directed_acyclic_graph(graph)
    return graph


def _replica(row: Parameter, graph: nx.DiGraph, mesh: Mesh) -> Replica:
    pipeline_ranks = sorted(index for kind, index in nx.descendants(graph, ("tensor", row.tensor)) if kind == "rank")
    data_ranks: Iterable[int] = range(mesh.dp)
    if row.expert is not None and row.num_experts is not None:
        owner = row.expert // (row.num_experts // mesh.ep)
        data_ranks = range(owner, mesh.dp, mesh.ep)
    return Replica(
        name=row.name,
        tensor=row.tensor,
        shape=row.shape,
        role=row.role,
        init=row.init,
        decay=row.decay,
        holders=tuple(mesh.rank(p, d) for p in pipeline_ranks for d in data_ranks),
    )


def buckets(replicas: Sequence[Replica]) -> tuple[Bucket, ...]:
    """Trained parameters grouped by holders, decayed ones first, in model order otherwise."""
    grouped: dict[tuple[int, ...], list[Replica]] = defaultdict(list)
    for replica in replicas:
        if replica.role == "parameter":
            grouped[replica.holders].append(replica)
    return tuple(
        Bucket(name=members[0].name, holders=holders, replicas=tuple(r.name for r in members))
        for holders, group in grouped.items()
        for members in [sorted(group, key=lambda r: not r.decay)]
    )
