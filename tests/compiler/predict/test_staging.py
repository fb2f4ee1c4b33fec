"""Planned staging memory of exchanges, compared with the tensors that the exchanges of a run keep alive."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compiler.ir import Buffer, Instruction
from compiler.ir.expert_placement import ReceivedRows
from compiler.predict.memory import staging_of
from compiler.program.proof.effects import StagingBytes
from dsl.load import load
from dsl.schema import Spec
from runtime.comm.collective import CollectiveSwap, GlooParts
from runtime.comm.exchange import Exchange, HostReads, RankExchange, RankRoute, Route
from runtime.comm.nodes import Hops, NodeExchange, NodePlace, NodeRoute
from runtime.comm.transport import RowLayout
from runtime.contract.names import ActionName, ExchangeName
from tests.specs.shipped import SPECS

COLUMNS, ALIGNMENT = 16, 4
NODES, ON_NODE, TOKENS = 2, 2, 6
SIZE = NODES * ON_NODE
# two experts per rank; rows per source, and per forwarded copy and row
RECEIVED = RowLayout(((1, 2), (3, 1), (2, 2), (1, 4)), ALIGNMENT)
ROWS = ((3, 2), (1, 4))  # [rank of the node][rank of the column]
COPIES, SENT = (3, 4), (6, 6)


@dataclass
class Live(TorchDispatchMode):
    """The bytes of the storages that live, of those that were made in it, and the most there were."""

    holders: Counter[int] = field(default_factory=Counter)
    sizes: dict[int, int] = field(default_factory=dict)
    most: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (place := leaf.untyped_storage().data_ptr()):
                if place in inputs and place not in self.sizes:
                    continue  # a view of an existing tensor
                self.sizes[place] = leaf.untyped_storage().nbytes()
                self.holders[place] += 1
                weakref.finalize(leaf, self._drop, place)
        self.most = max(self.most, self.bytes)
        return result

    def _drop(self, place: int) -> None:
        self.holders[place] -= 1
        if not self.holders[place]:
            del self.holders[place], self.sizes[place]

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


@dataclass
class Nobody:
    """A communicator that moves nothing and, like NCCL, holds its tensors until the wait."""

    members: tuple[int, ...] = (0, 1)
    rank: int = 0

    def index_of(self, rank: int) -> int:
        return self.members.index(rank)

    def all_to_all(self, room: Tensor, sent: Tensor, taken: Sequence[int], given: Sequence[int]) -> Any:
        assert room.is_contiguous() and sent.is_contiguous()
        assert len(room) == sum(taken) and len(sent) == sum(given)
        return Held([room, sent])


@dataclass
class Held:
    tensors: list[Tensor]

    def wait(self) -> None:
        self.tensors.clear()


def spec_of(route: str) -> Spec:
    """Accelerators: the expert ranks of a node, or of two."""
    if route == "flat":
        return load(SPECS / "moe-8gpu.dsc", overrides=["parallel.data=8"])
    nodes = ["cluster.nodes=2", "cluster.node.nic=50GB/s", "parallel.data=16", "parallel.expert=16"]
    spec = load(SPECS / "moe-8gpu.dsc", overrides=nodes)
    assert spec.routes_by_nodes
    return spec


def exchange_of(route: str) -> tuple[Exchange, Route, list[Tensor]]:
    swap, reads = CollectiveSwap(Nobody()), HostReads(torch.device("cpu"))  # type: ignore[arg-type]
    if route == "flat":
        return RankExchange(swap, swap, SIZE, reads, ALIGNMENT), RankRoute(RECEIVED.num_rows, (3,) * SIZE, RECEIVED), []
    hops = Hops(swap, swap)
    copy_X = torch.arange(10) % sum(COPIES)
    maps = [torch.arange(sum(SENT)), torch.stack([copy_X, torch.arange(10)])]
    node_route = NodeRoute(RECEIVED.num_rows, SENT, RECEIVED, COPIES, COPIES, ROWS)
    return NodeExchange(hops, hops, NodePlace(SIZE, NODES, 0, TOKENS), reads, ALIGNMENT), node_route, maps


def tensors_of(forward: bool, gates: bool) -> list[Tensor]:
    """Rows in two dtypes, and a gate weight for each."""
    count = sum(SENT) if forward else RECEIVED.num_rows
    rows = [torch.ones(count, COLUMNS, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    return [*rows, torch.ones(count)] if gates else rows


def buffers_of(tensors: Sequence[Tensor], count: int | str) -> list[Buffer]:
    return [Buffer("rows", (count, *tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("route", ["flat", "nodes"])
def test_staging_memory_of_exchanges_equals_the_plan(route: str, forward: bool, gates: bool) -> None:
    """Tensors alive between start and wait, and at the peak of the wait, are values of the program or planned staging.

    Buffers of received rows have no padding here, which the plan counts; it does not count integer tables in a wait.
    """
    exchange, node_route, maps = exchange_of(route)
    tensors = tensors_of(forward, gates)
    staging = staging_of(spec_of(route))
    assert staging
    kind = "dispatch" if gates else "combine"
    phase = "F" if forward == (kind == "dispatch") else "I"
    name = ExchangeName.of(kind, f"{phase}0", 0, "L1")
    start = Instruction(kind, 0, ActionName(), phase, "L1")  # type: ignore[arg-type]
    read, written = buffers_of(tensors, 12 if forward else "R"), buffers_of(tensors, "R" if forward else 12)
    copies, forwarded = (sum(COPIES), 10) if maps else (0, 0)
    planned = staging(
        start, [*read, *buffers_of(maps, "X")], written, ReceivedRows(RECEIVED.num_rows, copies, forwarded)
    )

    with Live() as live:
        exchange.start(name, [*tensors, *maps], node_route, forward)
        values = sum(pending.result.nbytes for pending in exchange.pending[name])
        between = live.bytes
        live.most = between
        results = exchange.wait(name)
        peak = live.most
        assert sum(result.nbytes for result in results) == values
    row_bytes = sum(tensor.nbytes // len(tensor) for tensor in tensors)
    padding = (RECEIVED.num_rows - sum(RECEIVED.of_members)) * row_bytes
    tables = 3 * 8 * forwarded + 3 * 8 * (copies + 1) if not forward else 0
    at_start = 0 if maps and forward else padding  # copies of tokens have none
    assert planned.held_bytes - at_start == between - values
    assert -tables <= max(planned) - padding - (peak - values) <= 0
    assert planned.held_bytes or planned.wait_bytes


@pytest.mark.parametrize("expert", [1, 2])
@pytest.mark.parametrize("nodes", [1, 2])
def test_sums_over_gloo_stage_a_second_buffer(nodes: int, expert: int) -> None:
    """Gloo has no reduce-scatter. It is used if ranks are on several machines."""
    machines = [f"cluster.nodes={nodes}", f"cluster.node.devices={4 // nodes}"]
    degrees = ["parallel.zero=2", f"parallel.expert={expert}", "schedule.name=1f1b"]
    spec = load(SPECS / "quickstart.dsc", overrides=[*machines, *degrees])
    staging = staging_of(spec)
    assert staging
    flat = torch.ones(40)
    planned = staging(
        Instruction("scatter", 0, ActionName(), "W", "L1"), [Buffer("sums", (40,), "float32")], [], ReceivedRows(0)
    )
    with Live() as live:
        work = GlooParts(Nobody()).scatter("it", flat, flat)  # type: ignore[arg-type]
        assert planned == StagingBytes(live.bytes if nodes > 1 else 0)
        assert live.bytes == flat.nbytes
        del work
    room = torch.empty(40)
    with Live() as live:
        work = GlooParts(Nobody()).scatter("it", flat, room)  # type: ignore[arg-type]
        assert live.bytes == 0
        del work


def test_nothing_is_staged_by_ranks_that_share_memory() -> None:
    """Rows are copied from a pipe to their places."""
    spec = load(SPECS / "quickstart.dsc")
    staging = staging_of(spec)
    rows = buffers_of(tensors_of(True, True), "R")
    assert (
        staging
        and staging(Instruction("dispatch", 0, ActionName(), "F", "L1"), rows, rows, ReceivedRows(20)) == StagingBytes()
    )
