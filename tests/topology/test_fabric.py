"""Prices of paths and collectives: the closed form against the explicit graph, and against sums by hand."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import networkx as nx
import pytest

from compiler.holders import Holders
from compiler.plan import make_plan
from compiler.schedules import schedule_of
from compiler.topology import Fabric, Links
from compiler.topology.fabric import Nodes, level_between
from compiler.topology.graph import MOST_DEVICES, graph_of
from compiler.topology.links import LEAF_S, NVLINK_S, SPINE_S
from compiler.topology.traffic import traffic
from dsl.load import load

H800 = Links.of(200e9, 50e9)
A100 = Links.of(300e9, 25e9)
SMALL = [
    Fabric((Nodes(1, 4, H800),)),
    Fabric((Nodes(3, 4, H800),)),
    Fabric((Nodes(40, 2, H800),)),
    Fabric((Nodes(2, 4, H800), Nodes(3, 2, A100))),
    Fabric((Nodes(2, 2, Links.of(None, 10e9)), Nodes(1, 3, H800))),
]


def best_path(graph: nx.Graph, a: int, b: int) -> tuple[float, float]:
    """(bandwidth, latency in seconds) between two devices: of the widest path, and of the shortest one."""
    ends = ("device", a), ("device", b)
    widest = nx.maximum_spanning_tree(graph, weight="bandwidth")  # has a widest path between any two
    bandwidth = min(widest.edges[edge]["bandwidth"] for edge in pairwise(nx.shortest_path(widest, *ends)))
    return bandwidth, nx.shortest_path_length(graph, *ends, weight="latency_s")


@pytest.mark.parametrize("fabric", SMALL)
def test_every_path_is_the_best_of_the_graph(fabric: Fabric) -> None:
    graph = graph_of(fabric)
    generator = random.Random(1)
    for _ in range(60):
        a, b = (generator.randrange(fabric.num_devices) for _ in range(2))
        link = fabric.link(a, b)
        if a == b:
            assert link is None and fabric.message_s(a, b, 1e9) == 0
            continue
        bandwidth, latency_s = best_path(graph, a, b)
        assert link is not None
        assert (link.bandwidth, link.latency_s) == (pytest.approx(bandwidth), pytest.approx(latency_s))
        assert fabric.link(b, a) == link


def test_levels() -> None:
    """8,192 nodes on rails of three levels; a message to another rail is forwarded inside a node."""
    fabric = Fabric((Nodes(8192, 8, H800),))
    assert fabric.path(0, 0) == () and fabric.path(0, 7) == ("nvlink",)
    assert fabric.path(0, 8) == ("leaf",) and fabric.path(0, 9) == ("leaf", "nvlink")
    assert fabric.path(0, 8 * 32) == ("spine",) and fabric.path(8 * 31, 8 * 32) == ("spine",)
    assert fabric.path(0, 8 * 2048) == ("core",)
    assert [level_between(0, node) for node in (31, 32, 2047, 2048)] == ["leaf", "spine", "spine", "core"]
    link = fabric.link(0, 9)
    assert link is not None and link.bandwidth == 40e9 and link.latency_s == pytest.approx(LEAF_S + NVLINK_S)
    assert fabric.message_s(0, 8 * 40, 40e9) == pytest.approx(1 + SPINE_S)


def test_an_explicit_graph_is_for_small_clusters() -> None:
    with pytest.raises(ValueError, match="at most 4,096"):
        graph_of(Fabric((Nodes(MOST_DEVICES, 2, H800),)))


# ---------------------------------------------------------------- groups


def by_hand(fabric: Fabric, members: list[int]) -> tuple[int, int, int]:
    counts = Counter(fabric.place(member)[0] for member in members)
    return len(counts), max(counts.values()), min(counts.values())


@pytest.mark.parametrize("devices", [1, 2, 4, 6, 8])
def test_how_holders_lie_is_as_counted(devices: int) -> None:
    """The closed form of `Holders` against counting them, in every shape of a small mesh."""
    for dp in (4, 8, 12, 24):
        fabric = Fabric((Nodes(4 * dp // devices + 1, devices, H800),))
        for step in (1, 2, 3, 4, 6, 8, 12):
            for first in range(step):
                for pipelines in ((0,), (1, 2), (0, 3)):
                    holders = Holders(pipelines, range(first, dp, step), dp)
                    if not len(holders):
                        continue
                    spread = fabric.spread(holders)
                    assert (spread.nodes, spread.most, spread.least) == by_hand(fabric, list(holders))


def test_a_reduction_by_hand() -> None:
    """Two nodes of four: 3/4 of the bytes inside, then half of a quarter over each NIC; a ring of two takes a step."""
    fabric = Fabric((Nodes(2, 4, H800),))
    inside = 2 * NVLINK_S + 0.75 * 8e9 / 160e9
    between = LEAF_S + 0.5 * 2e9 / 40e9
    assert fabric.reduce_s(8e9, range(8), "reduce_scatter") == pytest.approx(inside + between)
    assert fabric.reduce_s(8e9, range(8), "all_gather") == pytest.approx(inside + between)
    assert fabric.reduce_s(8e9, range(8)) == pytest.approx(2 * (inside + between))
    assert fabric.reduce_s(8e9, range(4), "all_gather") == pytest.approx(inside)
    assert fabric.reduce_s(8e9, (0, 4), "all_gather") == pytest.approx(LEAF_S + 0.5 * 8e9 / 40e9)
    assert fabric.reduce_s(8e9, (3,)) == 0


def test_the_slowest_kind_prices_a_reduction() -> None:
    mixed = Fabric((Nodes(2, 4, H800), Nodes(2, 4, A100)))
    fast, across = mixed.reduce_s(1e9, (0, 4)), mixed.reduce_s(1e9, (0, 8))
    assert across == pytest.approx(2 * (LEAF_S + 0.5e9 / 20e9)) and fast < across
    assert mixed.reduce_s(1e9, (8, 12)) == across


def test_more_bytes_and_slower_links_take_longer() -> None:
    for members in (range(2), range(8), range(0, 64, 8), range(64)):
        times = [Fabric((Nodes(8, 8, Links.of(200e9, nic)),)).reduce_s(1e9, members) for nic in (10e9, 50e9, 100e9)]
        assert all(slow >= fast for slow, fast in pairwise(times))
        fabric = Fabric((Nodes(8, 8, H800),))
        assert fabric.reduce_s(2e9, members) > fabric.reduce_s(1e9, members)
        assert fabric.all_to_all_s(2e9, members) > fabric.all_to_all_s(1e9, members)


def test_an_all_to_all_by_hand() -> None:
    """Of 16 members on two nodes, 7/16 stay in the node beside the own part, and 8/16 leave it."""
    fabric = Fabric((Nodes(2, 8, H800),))
    assert fabric.all_to_all_s(16e9, range(16)) == pytest.approx(LEAF_S + 8e9 / 40e9)
    assert fabric.all_to_all_s(16e9, range(8)) == pytest.approx(NVLINK_S + 14e9 / 160e9)
    assert fabric.all_to_all_s(16e9, range(16), 1e9) == pytest.approx(NVLINK_S + 16e9 / 160e9)
    assert fabric.all_to_all_s(16e9, (5,)) == 0


def test_levels_of_many_messages_are_as_counted() -> None:
    generator = random.Random(2)
    for fabric in (*SMALL, Fabric((Nodes(70, 4, H800),))):
        for _ in range(20):
            count = generator.randrange(1, fabric.num_devices // 2 + 1)
            a, b = (generator.randrange(fabric.num_devices - count + 1) for _ in range(2))
            counted = Counter(level for i in range(count) for level in fabric.path(a + i, b + i))
            assert fabric.levels(a, b, count) == counted


# ---------------------------------------------------------------- specs


def test_deepseek_v3s_cluster() -> None:
    fabric = Fabric.of(load("specs/deepseek-v3.dsc").cluster)
    assert (fabric.num_devices, fabric.num_nodes) == (2048, 256)
    link = fabric.link(0, 128)
    assert link is not None and link.bandwidth == 40e9
    assert fabric.path(0, 128) == ("leaf",) and fabric.path(128, 256) == ("spine",)


def test_processes_of_a_laptop() -> None:
    fabric = Fabric.of(load("specs/quickstart.dsc").cluster)
    assert fabric.message_s(0, 1, 7e8) == pytest.approx(1.0, rel=1e-3)


# ---------------------------------------------------------------- traffic


def test_traffic_of_a_step_by_hand() -> None:
    """Quickstart: one node, so everything is NVLink's; a message from every action but those at the ends."""
    spec = load("specs/quickstart.dsc")
    plan, schedule = make_plan(spec), schedule_of("dualpipe", 2, 4)
    found = traffic(Fabric.of(spec.cluster), plan, schedule)
    hidden = 2 * 128 * 192 * 4
    assert found["pipeline"] == {"nvlink": 2 * 4 * hidden * plan.mesh.dp}  # 4 micro-batches, forth and back
    rows = 2 * 128 * 4 * 192 * 4
    moe = 4  # three layers and the MTP block; half of the rows leave the rank
    assert found["experts"] == {"nvlink": moe * 4 * 2 * 2 * rows // 2 * plan.mesh.dp}
    trained = sum(r.num_elements * 2 * 4 * (len(r.holders) - 1) for r in plan.replicas if r.role == "parameter")
    assert found["gradients"] == {"nvlink": trained}


def test_traffic_between_nodes_is_on_rails() -> None:
    """DeepSeek-V3 on 256 nodes: neighbours are 16 nodes apart, every other one under another leaf."""
    spec = load("specs/deepseek-v3.dsc")
    found = traffic(Fabric.of(spec.cluster), make_plan(spec), schedule_of("dualpipe", 16, 32))
    assert found["pipeline"].keys() == {"leaf", "spine"} and "nvlink" not in found["pipeline"]
    assert found["experts"].keys() == {"nvlink", "leaf"}
    assert found["pipeline"]["leaf"] + found["pipeline"]["spine"] == 2 * 15 * 32 * 128 * 4096 * 7168 * 2
