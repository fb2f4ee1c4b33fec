"""Rows go to their experts' ranks and back: contents and order over every transport."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiler.ir.expert_placement import even_rows, most_rows
from runtime.comm.exchange import HostReads, LocalExchange
from runtime.comm.nodes import Hops, NodeExchange, NodePlace, NodeRoute, sums_of
from runtime.comm.transport import RowLayout, Rows, Work
from runtime.contract import MoeLayer
from runtime.ops.routing import permute, unpermute
from tests.gpu.pretend import DEVICE, SEEN, Pretend, pretended
from tests.gpu.pretend_nccl import Waited
from tests.runtime import exchanges, node_exchanges
from tests.runtime.exchanges import COMBINE, COUNTS, DISPATCH
from tests.runtime.step.processes import run_module

counts = st.integers(1, 4).flatmap(
    lambda experts: st.lists(st.lists(st.integers(0, 20), min_size=experts, max_size=experts), min_size=1, max_size=4)
)


@pytest.mark.parametrize("world", [3])
def test_every_transport(tmp_path: Path, world: int) -> None:
    run_module("tests.runtime.exchanges", tmp_path, world)


@pytest.mark.parametrize(("world", "nodes"), [(4, 2), (3, 3), (2, 1)])
def test_every_transport_by_nodes(tmp_path: Path, world: int, nodes: int) -> None:
    """Rows are bit-identical to the flat exchange, and each link carries the bytes that follow from the choices."""
    run_module("tests.runtime.node_exchanges", tmp_path, world, str(nodes))


@pytest.mark.parametrize("alignment", exchanges.ALIGNMENTS)
@pytest.mark.parametrize("seed", range(4))
def test_one_rank(alignment: int, seed: int) -> None:
    exchanges.check(LocalExchange(layers(seed, alignment), alignment), alignment, seed, 1, 0)


@pytest.mark.parametrize("alignment", exchanges.ALIGNMENTS)
@pytest.mark.parametrize("seed", range(4))
def test_one_rank_with_a_device(alignment: int, seed: int) -> None:
    """The number of rows is the maximum: rows as on the CPU, then rows of zeros, which belong to the last expert."""
    with pretended():
        exchange = LocalExchange(layers(seed, alignment), alignment)
        tensors = [Pretend(tensor) for tensor in exchanges.given(seed, 1, 0)]
        exchange.start_counts(COUNTS, Pretend(exchanges.counts_of(seed, 1)[0]))
        route, offsets_L = exchange.wait_counts(COUNTS)
        exchange.start(DISPATCH, tensors, route, forward=True)
        received = exchange.wait(DISPATCH)
        wanted, ends = exchanges.expected(seed, 1, 0, alignment)
        num_rows = exchange.layers["L1"].held_rows
        assert route.num_rows == num_rows >= ends[-1] and offsets_L.cpu().tolist() == [*ends[:-1], num_rows]
        for tensor, output, rows in zip(tensors, received, wanted, strict=True):
            assert output.dtype == tensor.dtype and len(output) == num_rows
            assert torch.equal(output.cpu()[: len(rows)].float(), rows) and not output.cpu()[len(rows) :].float().any()
        exchange.start(COMBINE, received, route, forward=False)
        for tensor, back in zip(tensors, exchange.wait(COMBINE), strict=True):
            assert torch.equal(back.cpu().float(), tensor.cpu().float())


def test_the_host_reads_once_by_nodes() -> None:
    """The sizes of both hops are read at once. Nothing else waits for a device, and nothing is copied to it."""
    expert_TK = node_exchanges.choices(0, 1, 0)
    calls: list[tuple[str, str]] = []
    with pretended(lambda kind, text, _: calls.append((kind, text))):
        x_TD, gate_TK = torch.randn(len(expert_TK), 4), torch.rand(expert_TK.shape)
        rows, gate, order, counts = map(Pretend, permute(x_TD, gate_TK, expert_TK, node_exchanges.TOP_K))
        place = NodePlace(size=1, nodes=1, node=0, tokens=len(expert_TK))
        exchange = NodeExchange(Hops(None, None), Hops(None, None), place, HostReads(DEVICE), 8)
        calls.clear()
        exchange.start_counts(COUNTS, counts, order)
        route, _, *maps = exchange.wait_counts(COUNTS)
        came: tuple[Tensor, ...] = rows, gate
        for forward in (True, False):
            exchange.start(DISPATCH, [*came, *maps], route, forward)
            came = exchange.wait(DISPATCH)[:2]
    assert [call for call in calls if call[0] == "host waits"] == [("host waits", "for stream side 1")]
    assert not any(kind == "blocking copy" for kind, _ in calls)
    assert torch.equal(unpermute(came[0].cpu(), order.cpu(), 3), unpermute(rows.cpu(), order.cpu(), 3))


class Called:
    """A swap that fills nothing, and records when it is called on the device."""

    def __init__(self, of: str) -> None:
        self.of = of

    def start(self, name: str, outgoing: Rows, incoming: Rows) -> list[Work]:
        SEEN.say("group call", self.of)
        return [Waited(SimpleNamespace(wait=lambda: None), self.of)]


@pytest.mark.parametrize("forward", [True, False])
def test_both_hops_run_beside_compute(forward: bool) -> None:
    """`start` enqueues both hops of each tensor, on a stream that waits for the first hop. Later compute is before
    the only wait of the compute stream. The other direction has a separate stream."""
    records: list[str] = []
    with pretended(lambda kind, text, stream: records.append(f"{stream}: {kind} {text}")):
        place = NodePlace(size=2, nodes=2, node=0, tokens=2)
        streams = {way: torch.cuda.Stream(DEVICE) for way in (True, False)}
        hops = Hops(Called("column"), Called("node"))  # type: ignore[arg-type]
        exchange = NodeExchange(hops, hops, place, HostReads(DEVICE), 1, streams)
        layout = RowLayout(((2,), (0,)), 1, place.columns)
        route = NodeRoute(2, (2, 0), layout, (2, 0), (2, 0), ((2, 0),))
        tables = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
        rows = torch.ones(2, 4, device=DEVICE)
        records.clear()
        exchange.start(DISPATCH, [rows, *tables], route, forward)
        rows.mul(2)
        exchange.wait(DISPATCH)
    first, second = ("column", "node") if forward else ("node", "column")
    side = f"side {1 if forward else 2}"
    calls = [line for line in records if "group call" in line or "waits" in line or line == "compute: launch mul"]
    assert calls == [
        f"compute: group call {first}",
        f"{side}: stream waits for stream compute",
        f"{side}: stream waits {first}",
        f"{side}: group call {second}",
        "compute: launch mul",
        f"compute: stream waits for stream {side} up to an event",
        f"compute: stream waits {second}",
    ]


class Packed:
    """A swap that packs and fills rows as one over a network does, but sends nothing."""

    def start(self, name: str, outgoing: Rows, incoming: Rows) -> list[Work]:
        outgoing.to_contiguous()
        incoming.fill(Rows(incoming.room(), incoming.counts))
        return []


def calls_of_a_dispatch_and_its_combine(nodes: int, on_node: int) -> int:
    """Calls of Python in runtime/comm for rows, scales by columns and gate weights: 4 experts of 2 rows per source."""
    experts, num_rows, num_calls = 4, 2, 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call") and "/runtime/comm/" in frame.f_code.co_filename

    with pretended():
        place = NodePlace(size=nodes * on_node, nodes=nodes, node=0, tokens=nodes * on_node * experts * num_rows)
        hops, streams = Hops(Packed(), Packed()), {way: torch.cuda.Stream(DEVICE) for way in (True, False)}
        exchange = NodeExchange(hops, hops, place, HostReads(DEVICE), 128, streams)
        layout = RowLayout(((num_rows,) * experts,) * place.size, 128, place.columns)
        to_nodes = (place.tokens // nodes,) * nodes
        to_ranks = ((place.tokens // place.size,) * nodes,) * on_node
        route = NodeRoute(layout.num_rows, to_nodes, layout, to_nodes, to_nodes, to_ranks)
        index = torch.zeros(place.tokens, dtype=torch.int64, device=DEVICE)
        tables = index, torch.stack([index, index])
        rows, gate = torch.ones(place.tokens, 16, device=DEVICE), torch.ones(place.tokens, device=DEVICE)
        scales = torch.ones(2, place.tokens, device=DEVICE).t()

        def move() -> None:
            exchange.start(DISPATCH, [rows, scales, gate, *tables], route, forward=True)
            received = exchange.wait(DISPATCH)
            exchange.start(DISPATCH, [received[0], received[2], *tables], route, forward=False)
            exchange.wait(DISPATCH)

        move()  # makes the tables of the layout
        sys.setprofile(count)
        move()
        sys.setprofile(None)
    return num_calls


def test_a_device_moves_rows_in_as_many_calls_for_64_ranks_as_for_4() -> None:
    """One gather moves all rows of a tensor; moved piece by piece, the rows of 64 ranks took 5,306 calls."""
    few_calls, many_calls = calls_of_a_dispatch_and_its_combine(2, 2), calls_of_a_dispatch_and_its_combine(8, 8)
    assert few_calls <= many_calls < few_calls + 40 < 500


def test_sums_of_narrow_rows_are_rounded_once() -> None:
    """1 and four times 2⁻⁸: in BF16 each sum of two would be 1 again."""
    rows = torch.tensor([[2.0**-8] * 3, [1.0] * 3, *[[2.0**-8] * 3] * 3], dtype=torch.bfloat16)
    sums = sums_of(torch.cat([rows, rows[:1]]), torch.tensor([1, 1, 1, 1, 1, 0]), 2)
    assert sums.dtype == torch.bfloat16 and sums.tolist() == [[2.0**-8] * 3, [1 + 2.0**-6] * 3]


def layers(seed: int, alignment: int) -> dict[str, MoeLayer]:
    """The only layer of one rank that sends what `exchanges.given` says."""
    sent, experts = int(exchanges.counts_of(seed, 1).sum()), exchanges.LOCAL
    held_rows = most_rows(sent, experts, alignment)
    return {"L1": MoeLayer("L1", "layers.1", experts, sent, held_rows, sequence_loss=0.0, bias=None, bias_rate=None)}


def test_one_rank_without_padding_keeps_its_tensors() -> None:
    layer = MoeLayer("L1", "layers.1", 3, 3, 3, sequence_loss=0.0, bias=None, bias_rate=None)
    exchange = LocalExchange({"L1": layer})
    exchange.start_counts(COUNTS, torch.tensor([2, 0, 1]))
    route, _ = exchange.wait_counts(COUNTS)
    rows = torch.randn(3, 2)
    exchange.start(DISPATCH, [rows], route, forward=True)
    assert exchange.wait(DISPATCH)[0] is rows


@settings(deadline=None)
@given(counts, st.sampled_from([1, 2, 8]))
def test_layout(counts: list[list[int]], alignment: int) -> None:
    """Rows by expert, then by source, each expert padded; and back again, gather(scatter(x)) = x."""
    layout = RowLayout(tuple(map(tuple, counts)), alignment)
    sent = [
        [f"{source} {expert}"] * n for source, expert_rows in enumerate(counts) for expert, n in enumerate(expert_rows)
    ]
    numbered = {name: number for number, name in enumerate(sorted({name for rows in sent for name in rows}), 1)}
    packed = torch.tensor([numbered[name] for rows in sent for name in rows], dtype=torch.float64)
    placed = Rows(layout.empty(packed), layout.of_members, layout)
    placed.fill(Rows(packed, layout.of_members))
    rows, ends = list[int](), list[int]()
    for expert in range(len(counts[0])):
        for source in range(len(counts)):
            rows += [numbered[f"{source} {expert}"]] * counts[source][expert] if counts[source][expert] else []
        rows += [0] * (-len(rows) % alignment)
        ends.append(len(rows))
    assert placed.tensor.tolist() == rows and layout.ends == ends and layout.num_rows == len(rows)
    assert torch.equal(placed.to_contiguous(), packed)


@settings(deadline=None, max_examples=30)
@given(
    counts,
    st.sampled_from([1, 8]),
    st.sampled_from([torch.float64, torch.bfloat16, torch.uint8]),
    st.sampled_from([(), (3,), (8,), (2, 4)]),
    st.sampled_from([1, 2]),
)
def test_a_device_places_rows_as_a_cpu_does(
    counts: list[list[int]], alignment: int, dtype: torch.dtype, shape: tuple[int, ...], columns: int
) -> None:
    """With rows of whole words or not, and members that pass on the rows of several sources."""
    sources = [*range(len(counts))]
    members = tuple(tuple(sources[column::columns]) for column in range(columns))
    layout = RowLayout(tuple(map(tuple, counts)), alignment, members)
    sent = torch.arange(1, 1 + sum(layout.of_members))
    packed = sent.view(-1, *[1] * len(shape)).expand(-1, *shape).to(dtype)
    on_cpu = Rows(layout.empty(packed), layout.of_members, layout)
    on_cpu.fill(Rows(packed, layout.of_members))
    with pretended():
        pretended_rows = Pretend(packed)
        on_device = Rows(layout.empty(pretended_rows), layout.of_members, layout)
        on_device.fill(Rows(pretended_rows, layout.of_members))
        assert torch.equal(on_device.tensor.cpu(), on_cpu.tensor)
        assert torch.equal(on_device.to_contiguous().cpu(), packed)


@given(st.integers(0, 300), st.integers(1, 6), st.sampled_from([1, 2, 8, 128]), st.randoms(use_true_random=False))
def test_planned_rows_bound_padded_rows(rows: int, experts: int, alignment: int, random: object) -> None:
    """Even loads are padded to the rows planned for times, and no load exceeds the rows planned for memory."""

    def padded(loads: list[int]) -> int:
        return RowLayout((tuple(loads),), alignment).num_rows

    even = [rows // experts + (expert < rows % experts) for expert in range(experts)]
    assert even_rows(rows, experts, alignment) == padded(even)
    assert even_rows(rows, experts, 1) == most_rows(rows, experts, 1) == rows
    loads = [0] * experts
    for _ in range(rows):
        loads[random.randrange(experts)] += 1  # type: ignore[attr-defined]
    bound = most_rows(rows, experts, alignment)
    assert padded(loads) <= bound <= rows + (alignment - 1) * experts
    worst = [1 if rows >= experts else int(expert < rows) for expert in range(experts)]
    worst[0] += rows - sum(worst)
    assert padded(worst) == bound or worst[0] % alignment != 1 % alignment
