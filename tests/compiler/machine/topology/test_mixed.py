"""Clusters of several kinds of nodes: reading them, the places of ranks, and the number of layers on each."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import networkx as nx
import pytest

from compiler.ir import Plan, Use
from compiler.plan.actions.chains import Chains
from compiler.plan.model_graph import model_graph
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import parts_of_ranks, rank_rates
from dsl.canonical import canonical
from dsl.load import load
from dsl.messages.diagnostics import SpecError
from dsl.schema import Spec

SPECS = Path(__file__).parents[4] / "specs"
RUN = """
import "{specs}/clusters/mixed.dsc"
import "{specs}/llama3-8b.dsc"
run mine extends pretrain {{
  cluster = h100_a100
  parallel {{ pipeline = {pipeline} }}
  schedule {{ name = {schedule} }}
}}
"""


@pytest.fixture
def mixed(tmp_path: Path):  # type: ignore[no-untyped-def]
    def make_spec(pipeline: int = 4, schedule: str = "1f1b", **overrides: str) -> Spec:
        (tmp_path / "specs").symlink_to(SPECS)
        file = tmp_path / "mine.dsc"
        file.write_text(RUN.format(specs="specs", pipeline=pipeline, schedule=schedule))
        return load(file, overrides=[f"{key}={value}" for key, value in overrides.items()])

    return make_spec


def layers_of(plan: Plan) -> list[int]:
    return [sum(s.site.endswith(".attention") for s in stage.steps if isinstance(s, Use)) for stage in plan.stages]


def test_reads_two_kinds_of_nodes(mixed) -> None:  # type: ignore[no-untyped-def]
    """Two kinds, in order; the data degree follows from the devices of both, and the text reads back."""
    spec = mixed()
    assert [(nodes, node.device.name) for nodes, node in spec.cluster.parts] == [(2, "h100"), (2, "a100")]
    assert (spec.cluster.world, spec.cluster.num_nodes, spec.parallel.data) == (32, 4, 8)
    assert [spec.cluster.part_of(rank) for rank in (0, 15, 16, 31)] == [0, 0, 1, 1]
    assert parts_of_ranks(spec) == (0, 0, 1, 1)
    assert "more {" in canonical(spec)


def test_the_text_of_a_mixed_cluster_reads_back(mixed, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    spec = mixed()
    again = tmp_path / "again.dsc"
    again.write_text(canonical(spec))
    assert load(again).cluster == spec.cluster


def test_an_override_of_the_other_nodes(tmp_path: Path, mixed) -> None:  # type: ignore[no-untyped-def]
    spec = mixed(**{"cluster.more.nodes": "6"})
    assert spec.cluster.world == 64 and parts_of_ranks(spec) == (0, 1, 1, 1)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved"])
def test_stages_are_sized_to_the_pace_of_their_ranks(mixed, schedule: str) -> None:  # type: ignore[no-untyped-def]
    """Every layer once, and on A100 about half of what H100 runs, or less: its BF16 peak is 0.32 of H100's."""
    spec = mixed(schedule=schedule)
    plan = make_plan(spec)
    layers = layers_of(plan)
    assert sum(layers) == 32
    layers_per_rank = [sum(layers[s] for s in plan.stage_placement.stages_of(4, rank)) for rank in range(4)]
    assert layers_per_rank[0] > 1.8 * layers_per_rank[2] and layers_per_rank[1] > 1.8 * layers_per_rank[3]
    fast, _, slow, _ = rank_rates(spec)
    assert (fast is not slow and rank_rates(spec)[0].table != slow.table) or fast.points != slow.points


def test_transfers_use_the_slower_of_two_nics(mixed) -> None:  # type: ignore[no-untyped-def]
    fabric = rank_rates(mixed())[0].fabric
    inside, across, slow = fabric.link(0, 8), fabric.link(8, 16), fabric.link(16, 24)
    assert inside is not None and across is not None and slow is not None
    assert (inside.bandwidth, across.bandwidth, slow.bandwidth) == (40e9, 20e9, 20e9)


def test_a_pipeline_rank_on_two_kinds_is_refused(mixed) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpecError, match="devices of two kinds"):
        mixed(pipeline=1)


# ---------------------------------------------------------------- the model as a graph


def test_the_model_as_a_graph() -> None:
    spec = load(SPECS / "deepseek-v3.dsc")
    plan = make_plan(spec)
    rates = rank_rates(spec)[0]
    model = model_graph(Chains(stage, plan.cuts, rates) for stage in plan.stages)
    graph = nx.DiGraph(model.edges.keys())
    assert nx.is_directed_acyclic_graph(graph)
    assert set(graph) == set(model.nodes) and len(graph) == sum(len(stage.steps) for stage in plan.stages)
    layers = {name.partition(".")[0] for name in graph if name.endswith(".attention")}
    assert layers == {*(f"L{i}" for i in range(61)), "M0"}
    assert all(nx.has_path(graph, f"L{a}.attention", f"L{b}.attention") for a, b in pairwise(range(61)))
    crossing = [edge for edge in model.edges.values() if edge.is_message]
    hidden = 4096 * 7168 * 2
    assert len(crossing) >= 15 and {edge.bytes for edge in crossing} == {hidden}
    first, second = model.nodes["L10.experts"], model.nodes["L20.experts"]
    assert all(value > 0 for value in first.seconds.values())
    assert replace(first, stage=0) == replace(second, stage=0)
