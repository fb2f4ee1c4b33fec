"""Prices of paths and collectives: the closed form against the explicit graph, and against sums by hand."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import networkx as nx
import pytest

from compiler.ir import Buffer
from compiler.ir.holders import Holders, columns_of
from compiler.machine.topology import ExpertTraffic, Fabric, NodeLinks, NodeRun
from compiler.machine.topology.device_graph import MOST_DEVICES, graph_of
from compiler.machine.topology.fabric import LARGE, LAYER_S, LEVELS, level_between, link_rate_at
from compiler.machine.topology.traffic import traffic
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rates_of
from compiler.schedule import schedule_of
from dsl.load import load

NVLINK_S, LEAF_S = 3.3e-6, 2.8e-6
TRANSFERS = ("message", "all_reduce", "dispatch", "combine")


def links_of(nvlink: float, nic: float, nvlink_s: float = NVLINK_S, leaf_s: float = LEAF_S) -> NodeLinks:
    points = {
        f"{transfer}_{place}": (((), rate),)
        for transfer in TRANSFERS
        for place, rate in (("node", nvlink), ("network", nic))
    }
    seconds = {"latency_node": nvlink_s, "latency_network": leaf_s, "exchange_node": 3e-6, "exchange_network": 7e-6}
    return NodeLinks(points, seconds)


H800 = links_of(160e9, 40e9)
A100 = links_of(240e9, 20e9)
SMALL = [
    Fabric((NodeRun(1, 4, H800),)),
    Fabric((NodeRun(3, 4, H800),)),
    Fabric((NodeRun(40, 2, H800),)),
    Fabric((NodeRun(2, 4, H800), NodeRun(3, 2, A100))),
    Fabric((NodeRun(2, 2, links_of(8e9, 8e9)), NodeRun(1, 3, H800))),
]


# ---------------------------------------------------------------- paths


def best_path(graph: nx.Graph, a: int, b: int, num_bytes: float) -> tuple[float, list[tuple[object, ...]]]:
    """(seconds, nodes) of the soonest of all paths: for each bandwidth, the shortest over edges that have it."""
    timed_paths = []
    for least in {bandwidth for _, _, bandwidth in graph.edges(data="bandwidth")}:
        wide = nx.subgraph_view(graph, filter_edge=lambda x, y, least=least: graph.edges[x, y]["bandwidth"] >= least)
        if nx.has_path(wide, ("device", a), ("device", b)):
            latency_s, path = nx.single_source_dijkstra(wide, ("device", a), ("device", b), weight="latency_s")
            narrowest = min(graph.edges[edge]["bandwidth"] for edge in pairwise(path))
            timed_paths.append((latency_s + num_bytes / narrowest, path))
    return min(timed_paths, key=lambda timed_path: timed_path[0])


def random_links(generator: random.Random) -> NodeLinks:
    """Links with rates that grow with bytes; NVLink is wider than any NIC."""
    points = {}
    for scope, low, high in (("node", 50e9, 200e9), ("network", 5e9, 40e9)):
        rate = generator.uniform(low, high)
        points[f"message_{scope}"] = tuple(((2, size), rate * share) for size, share in ((4096, 0.5), (LARGE, 1.0)))
    return NodeLinks(
        points, {"latency_node": generator.uniform(3e-6, 4e-6), "latency_network": generator.uniform(2e-6, 3e-6)}
    )


def random_fabric(generator: random.Random) -> Fabric:
    """A fabric of one or two kinds of nodes; some have several leaves."""
    kinds = range(generator.choice((1, 2)))
    return Fabric(
        tuple(
            NodeRun(generator.choice((1, 2, 3, 20, 40)), generator.randint(1, 4), random_links(generator))
            for _ in kinds
        )
    )


@pytest.mark.parametrize("seed", range(12))
def test_prices_equal_the_best_path_in_the_graph(seed: int) -> None:
    """Prices on random clusters equal the best path: its seconds, and the levels that it crosses."""
    generator = random.Random(seed)
    fabric = random_fabric(generator)
    for num_bytes in (1e3, 1e6, 1e9):
        graph = graph_of(fabric, num_bytes)
        for _ in range(8):
            a, b = (generator.randrange(fabric.num_devices) for _ in range(2))
            if a == b:
                assert fabric.link(a, b) is None and fabric.message_s(a, b, num_bytes) == 0
                continue
            seconds, path = best_path(graph, a, b, num_bytes)
            assert fabric.message_s(a, b, num_bytes) == pytest.approx(seconds)
            assert fabric.message_s(b, a, num_bytes) == fabric.message_s(a, b, num_bytes)
            crossed = {str(kind) for kind, *_ in path} & {*LEVELS}
            highest = max(crossed, key=LEVELS.index)
            assert {*fabric.path(a, b)} == {highest} | (crossed & {"nvlink"})


def test_many_messages_take_as_long_as_the_slowest() -> None:
    generator = random.Random(7)
    for fabric in (random_fabric(generator) for _ in range(12)):
        if fabric.num_devices < 2:
            continue
        count = generator.randrange(1, fabric.num_devices // 2 + 1)
        a, b = (generator.randrange(fabric.num_devices - count + 1) for _ in range(2))
        seconds = [fabric.message_s(a + i, b + i, 1e7) for i in range(count)]
        assert fabric.message_s(a, b, 1e7, count) == max(seconds)


def test_levels() -> None:
    """8,192 nodes on rails of three levels; a message to another rail is forwarded inside a node."""
    fabric = Fabric((NodeRun(8192, 8, H800),))
    assert fabric.path(0, 0) == () and fabric.path(0, 7) == ("nvlink",)
    assert fabric.path(0, 8) == ("leaf",) and fabric.path(0, 9) == ("leaf", "nvlink")
    assert fabric.path(0, 8 * 32) == ("spine",) and fabric.path(8 * 31, 8 * 32) == ("spine",)
    assert fabric.path(0, 8 * 2048) == ("core",)
    assert [level_between(0, node) for node in (31, 32, 2047, 2048)] == ["leaf", "spine", "spine", "core"]
    link = fabric.link(0, 9)
    assert link is not None and link.bandwidth == 40e9 and link.latency_s == pytest.approx(LEAF_S + NVLINK_S)
    assert fabric.message_s(0, 8 * 40, 40e9) == pytest.approx(1 + LEAF_S + LAYER_S)
    assert H800.latency_of("core") == pytest.approx(LEAF_S + 2 * LAYER_S)


def test_an_explicit_graph_is_for_small_clusters() -> None:
    with pytest.raises(ValueError, match="at most 4,096"):
        graph_of(Fabric((NodeRun(MOST_DEVICES, 2, H800),)))


# ---------------------------------------------------------------- groups


def by_hand(fabric: Fabric, members: list[int]) -> tuple[int, int, int]:
    counts = Counter(fabric.place(member)[0] for member in members)
    return len(counts), max(counts.values()), min(counts.values())


@pytest.mark.parametrize("devices", [1, 2, 4, 6, 8])
def test_spread_of_holders_equals_counting(devices: int) -> None:
    """The closed form of `Holders` against counting them, in every shape of a small mesh."""
    for dp in (4, 8, 12, 24):
        fabric = Fabric((NodeRun(4 * dp // devices + 1, devices, H800),))
        for step in (1, 2, 3, 4, 6, 8, 12):
            for first in range(step):
                for pipelines, length in product(((0,), (1, 2), (0, 3)), (1, 2, 3)):
                    if length > 1 and (first % length or step % length or dp % step):
                        continue
                    holders = Holders(pipelines, columns_of(first, dp, step, length), dp)
                    if not len(holders):
                        continue
                    spread = fabric.spread(holders)
                    assert (spread.nodes, spread.max_members, spread.min_members) == by_hand(fabric, list(holders))


def test_a_reduction_by_hand() -> None:
    """Two nodes of four: 3/4 of the bytes inside, then half of a quarter over each NIC; a ring of two has one step."""
    fabric = Fabric((NodeRun(2, 4, H800),))
    inside = 2 * NVLINK_S + 0.75 * 8e9 / 160e9
    between = LEAF_S + 0.5 * 2e9 / 40e9
    assert fabric.reduce_s(8e9, range(8), "reduce_scatter") == pytest.approx(inside + between)
    assert fabric.reduce_s(8e9, range(8), "all_gather") == pytest.approx(inside + between)
    assert fabric.reduce_s(8e9, range(8)) == pytest.approx(2 * (inside + between))
    assert fabric.reduce_s(8e9, range(4), "all_gather") == pytest.approx(inside)
    assert fabric.reduce_s(8e9, (0, 4), "all_gather") == pytest.approx(LEAF_S + 0.5 * 8e9 / 40e9)
    assert fabric.reduce_s(8e9, (3,)) == 0


def test_the_slowest_kind_prices_a_reduction() -> None:
    mixed = Fabric((NodeRun(2, 4, H800), NodeRun(2, 4, A100)))
    fast, across = mixed.reduce_s(1e9, (0, 4)), mixed.reduce_s(1e9, (0, 8))
    assert across == pytest.approx(2 * (LEAF_S + 0.5e9 / 20e9)) and fast < across
    assert mixed.reduce_s(1e9, (8, 12)) == across
    late = Fabric((NodeRun(2, 4, H800), NodeRun(2, 4, links_of(160e9, 40e9, leaf_s=5 * LEAF_S))))
    assert late.reduce_s(1e9, (0, 8)) == late.reduce_s(1e9, (8, 12)) > late.reduce_s(1e9, (0, 4))
    assert late.reduce_s(0, (0, 8)) == pytest.approx(2 * 5 * LEAF_S)


def test_a_sum_of_two_ranks_holds_for_many() -> None:
    """Rows of two ranks by bytes: of n, a link carries 2 (n - 1) / n of the buffer at the rate of so many bytes."""
    rows = (((2, 1000), 1e8), ((2, 1_000_000), 4e8))
    links = NodeLinks({"all_reduce_node": rows}, {"latency_node": 1e-4})
    fabric = Fabric((NodeRun(1, 8, links),))
    assert fabric.reduce_s(1e6, range(2)) == pytest.approx(2e-4 + 1e6 / 4e8)
    assert fabric.reduce_s(1e6, range(4)) == pytest.approx(4e-4 + 1.5e6 / 4e8)
    assert fabric.reduce_s(1e3, range(2)) == pytest.approx(2e-4 + 1e3 / 1e8)
    sent = 2 * 7 / 8 * 20_000
    assert fabric.reduce_s(20_000, range(8)) == pytest.approx(6e-4 + sent / link_rate_at(rows, 8, sent))


def exchange_s(fabric: Fabric, members: range, rows: int = 1000, copies: float = 0.5) -> float:
    spread = fabric.spread(members)
    experts = ExpertTraffic(members, spread, copies if spread.nodes > 1 else 0.0, 2.0, 2.0)
    return fabric.exchange_s(experts, True, (Buffer("rows", ("R", 100), "bfloat16"),), rows)


@pytest.mark.parametrize("members", [range(2), range(8), range(0, 64, 8), range(64)])
def test_more_bytes_and_slower_links_take_longer(members: range) -> None:
    fabrics = [Fabric((NodeRun(8, 8, links_of(200e9, nic)),)) for nic in (10e9, 50e9, 100e9)]
    for times in (
        [fabric.reduce_s(1e9, members) for fabric in fabrics],
        [exchange_s(fabric, members) for fabric in fabrics],
        [fabric.message_s(0, members[-1], 1e6) for fabric in fabrics],
    ):
        assert all(slow >= fast for slow, fast in pairwise(times))
    fabric = Fabric((NodeRun(8, 8, H800),))
    assert fabric.reduce_s(2e9, members) > fabric.reduce_s(1e9, members)
    assert exchange_s(fabric, members, 2000) > exchange_s(fabric, members, 1000)


def test_an_exchange_by_hand() -> None:
    """1000 rows of 200 bytes over NVLink, half as much over the network where members are on two nodes."""
    fabric = Fabric((NodeRun(2, 8, H800),))
    assert exchange_s(fabric, range(8)) == pytest.approx(3e-6 + 200_000 / 160e9)
    assert exchange_s(fabric, range(16)) == pytest.approx(7e-6 + 100_000 / 40e9)
    assert exchange_s(fabric, range(16), copies=0.1) == pytest.approx(7e-6 + 200_000 / 160e9), "the slower of both"
    assert exchange_s(fabric, range(0, 16, 8), copies=0.1) == pytest.approx(7e-6 + 20_000 / 40e9), "one per node"
    assert exchange_s(fabric, range(5, 6)) == 0


def test_transfers_are_interpolated_by_ranks_and_by_bytes() -> None:
    points = [((8, 100), 10.0), ((8, 400), 30.0), ((32, 100), 20.0)]
    assert link_rate_at(points, 8, 100) == 10 and link_rate_at(points, 8, 200) == pytest.approx(20)
    assert link_rate_at(points, 16, 100) == pytest.approx(15)
    assert link_rate_at(points, 16, 400) == pytest.approx(25), "a row's rate holds for all bytes beyond it"
    assert link_rate_at(points, 1000, 1) == 20 and link_rate_at(points, 2, 10**9) == 30
    assert link_rate_at([((), 7.0)], 64, 5) == 7


def test_levels_of_many_messages_equal_counting() -> None:
    generator = random.Random(2)
    for fabric in (*SMALL, Fabric((NodeRun(70, 4, H800),))):
        for _ in range(20):
            count = generator.randrange(1, fabric.num_devices // 2 + 1)
            a, b = (generator.randrange(fabric.num_devices - count + 1) for _ in range(2))
            counted = Counter(level for i in range(count) for level in fabric.path(a + i, b + i))
            assert fabric.levels(a, b, count) == counted


# ---------------------------------------------------------------- specs


def test_deepseek_v3s_cluster() -> None:
    fabric = rates_of(load("specs/deepseek-v3.dsc")).fabric
    assert (fabric.num_devices, fabric.num_nodes) == (2048, 256)
    link = fabric.link(0, 128)
    assert link is not None and link.bandwidth == 40e9
    assert fabric.path(0, 128) == ("leaf",) and fabric.path(128, 256) == ("spine",)


def test_processes_of_a_laptop() -> None:
    fabric = rates_of(load("specs/quickstart.dsc")).fabric
    assert fabric.message_s(0, 1, 7e8) == pytest.approx(1.0, rel=1e-3)
    assert fabric.link(0, 1) == fabric.link(2, 3)


# ---------------------------------------------------------------- traffic


def test_traffic_of_a_step_by_hand() -> None:
    """Quickstart: one node, so everything is NVLink's; a message from every action but those at the ends."""
    spec = load("specs/quickstart.dsc")
    plan, schedule = make_plan(spec), schedule_of("dualpipe", 2, 4)
    sent = traffic(rates_of(spec).fabric, plan, schedule)
    hidden = 2 * 128 * 192 * 4
    assert sent["pipeline"] == {"nvlink": 2 * 4 * hidden * plan.mesh.dp}  # 4 micro-batches, forth and back
    rows = 2 * 128 * 4 * 192 * 4
    moe = 4  # three layers and the MTP block; half of the rows leave the rank
    assert sent["experts"] == {"nvlink": moe * 4 * 2 * 2 * rows // 2 * plan.mesh.dp}
    trained = sum(r.num_elements * 2 * 4 * (len(r.holders) - 1) for r in plan.replicas if r.role == "parameter")
    assert sent["gradients"] == {"nvlink": trained}


def test_traffic_between_nodes_is_on_rails() -> None:
    """DeepSeek-V3 on 256 nodes: neighbours are 16 nodes apart, and every second one is under another leaf."""
    spec = load("specs/deepseek-v3.dsc")
    sent = traffic(rates_of(spec).fabric, make_plan(spec), schedule_of("dualpipe", 16, 32))
    assert sent["pipeline"].keys() == {"leaf", "spine"} and "nvlink" not in sent["pipeline"]
    assert sent["experts"].keys() == {"nvlink", "leaf"}
    assert sent["pipeline"]["leaf"] + sent["pipeline"]["spine"] == 2 * 15 * 32 * 128 * 4096 * 7168 * 2


def test_a_token_crosses_once_to_each_node() -> None:
    """DeepSeek-V3: a token has 8 rows, or 4 copies, one in 8 of which stays; inside nodes 7 of 8 rows move."""
    by_nodes = load("specs/deepseek-v3.dsc")
    parallel = by_nodes.parallel.model_copy(update={"route": "flat"})
    moved = []
    for spec in (by_nodes, by_nodes.model_copy(update={"parallel": parallel})):
        plan, schedule = make_plan(spec), schedule_of("dualpipe", 16, 32)
        moved.append(traffic(rates_of(spec).fabric, plan, schedule)["experts"])
    rows = 2 * 2 * 32 * 59 * 128 * 4096 * 8 * 7168  # there and back, forward and backward, 58 layers and the MTP block
    assert moved[0] == {"leaf": rows // 2 * 7 // 8, "nvlink": rows * 7 // 8}
    assert moved[1] == {"leaf": rows * 7 // 8, "nvlink": rows * 7 // 8}


def test_links_above_the_leaf_are_crowded() -> None:
    free, crowded = (Fabric((NodeRun(4096, 2, replace(H800, congestion=share)),)) for share in (0.0, 0.1))
    for other, layers in ((2, 0), (2 * 40, 1), (2 * 3000, 2)):
        link, slower = free.link(0, other), crowded.link(0, other)
        assert link is not None and slower is not None
        assert slower.bandwidth == pytest.approx(link.bandwidth * 0.9**layers)
        assert slower.latency_s == link.latency_s
    inside, across = range(0, 16), range(0, 8192, 64)
    assert crowded.reduce_s(1e9, inside) == free.reduce_s(1e9, inside)
    assert crowded.reduce_s(1e9, across) > 1.15 * free.reduce_s(1e9, across)
