"""Ranks of a test: `python -m tests.runtime.node_exchanges FOLDER WORLD NODES` sends random tokens to random experts,
by nodes and flat, over every transport. Received rows must be equal, and sums equal within rounding. The bytes sent
over each link must be those that follow from the choices of all ranks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from runtime.comm.connect import Endpoint, StagedSwap
from runtime.comm.exchange import Exchange, HostReads, RankExchange
from runtime.comm.nodes import Hops, NodeExchange, NodePlace, split_by_node
from runtime.comm.transport import Rows, Swap, SwapKind, WantedChannels, Work, raw
from runtime.contract import Mesh, Opening
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.ops.routing import permute, unpermute
from tests.runtime.exchanges import COMBINE, COUNTS, DISPATCH

TOKENS, LOCAL, TOP_K, COLUMNS = 23, 2, 3, 16  # LOCAL: experts of a rank
E4M3 = torch.float8_e4m3fn
ALIGNMENTS = (1, 8)
SEEDS = 4


def choices(seed: int, world: int, source: int) -> Tensor:
    """expert_TK of a source, distinct for each token; with seed 0 all on one rank, with seed 1 on the first half."""
    generator = torch.Generator().manual_seed(100 * seed + source)
    experts = world * LOCAL if seed > 1 else max(TOP_K, LOCAL * (world // 2 if seed else 1))
    weights = torch.rand(TOKENS, experts, generator=generator)
    return weights.topk(TOP_K, dim=1).indices


@dataclass
class Counting:
    """A swap that counts the bytes sent to each member."""

    inner: Swap
    members: Sequence[int]
    bytes: Counter[int] = field(default_factory=Counter)

    def start(self, name: str, given: Rows, taken: Rows) -> list[Work]:
        for member, pieces in zip(self.members, given.pieces(), strict=True):
            self.bytes[member] += sum(piece.nbytes for piece in pieces)
        return self.inner.start(name, given, taken)


def exchanged(exchange: Exchange, seed: int, world: int, rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The received rows of several dtypes, the received gate weights, and the combined rows, summed for each token."""
    expert_TK, generator = choices(seed, world, rank), torch.Generator().manual_seed(rank)
    x_TD = torch.randn(TOKENS, COLUMNS, generator=generator, dtype=torch.float64)
    gate_TK = torch.rand(TOKENS, TOP_K, generator=generator)
    rows_SD, gate_S, order_S, counts_E = permute(x_TD, gate_TK, expert_TK, world * LOCAL)
    scales_SB = rows_SD[:, :3].float().t().contiguous().t()
    exchange.start_counts(COUNTS, counts_E, order_S)
    route, offsets_E, *maps = exchange.wait_counts(COUNTS)
    sent = [rows_SD, rows_SD.to(torch.bfloat16), rows_SD.to(E4M3), scales_SB, gate_S]
    exchange.start(DISPATCH, [*sent, *maps], route, forward=True)
    received = [offsets_E, *exchange.wait(DISPATCH)[: len(sent)]]
    assert received[4].t().is_contiguous(), "scales lie column by column"
    outputs = [received[1] * received[5][:, None] + rank, received[1].to(torch.bfloat16), received[5] * 2]
    exchange.start(COMBINE, [*outputs, *maps], route, forward=False)
    rows, narrow, values = exchange.wait(COMBINE)[:3]
    back = [unpermute(rows, order_S, TOP_K), unpermute(narrow, order_S, TOP_K).float()]
    return received, back, [values]


def check(mine: Exchange, flat: Exchange, seed: int, world: int, rank: int) -> None:
    results, wanted = (exchanged(exchange, seed, world, rank) for exchange in (mine, flat))
    for ours, theirs in zip((*results[0], *results[2]), (*wanted[0], *wanted[2]), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(raw(ours), raw(theirs)), (seed, ours.dtype)
    torch.testing.assert_close(results[1][0], wanted[1][0], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(results[1][1], wanted[1][1], rtol=2**-7, atol=2**-7)


def bytes_asked_for(seed: int, world: int, groups: Sequence[Sequence[int]], rank: int) -> Counter[int]:
    """Bytes that a rank must send to each other rank in `exchanged`, from the choices of all ranks."""
    size, sent = len(groups[0]), Counter[int]()
    place = {member: (node, index) for node, group in enumerate(groups) for index, member in enumerate(group)}
    my_node, my_place = place[rank]
    column = [group[my_place] for group in groups]
    row = COLUMNS * (8 + 2 + 1) + 3 * 4  # of float64, bfloat16, e4m3 and scales
    back = COLUMNS * (8 + 2)
    rows_of = {source: choices(seed, world, source).tolist() for source in range(world)}

    def nodes_of(token: list[int]) -> set[int]:
        return {place[expert // LOCAL][0] for expert in token}

    for peer in column:
        peer_node = place[peer][0]
        sent[peer] += 8 * (1 + world * LOCAL + TOKENS * TOP_K)
        sent[peer] += row * sum(peer_node in nodes_of(token) for token in rows_of[rank])
        sent[peer] += 4 * sum(place[expert // LOCAL][0] == peer_node for token in rows_of[rank] for expert in token)
        sent[peer] += back * sum(my_node in nodes_of(token) for token in rows_of[peer])
        sent[peer] += 4 * sum(place[expert // LOCAL][0] == my_node for token in rows_of[peer] for expert in token)
    for peer in groups[my_node]:
        forwarded = sum(expert // LOCAL == peer for source in column for token in rows_of[source] for expert in token)
        returned = [group[place[peer][1]] for group in groups]
        sent[peer] += 8 * (1 + len(groups) * LOCAL) + (row + 4) * forwarded
        sent[peer] += (back + 4) * sum(
            expert // LOCAL == rank for source in returned for token in rows_of[source] for expert in token
        )
    assert size * len(groups) == world
    return sent


def ranks(swaps: dict[SwapKind, list[Swap | None]], world: int, num_nodes: int, rank: int) -> None:
    """`swaps`: with the column, within the node, and with all ranks."""
    groups = split_by_node(range(world), world // num_nodes)
    node, index = divmod(rank, world // num_nodes)
    column, reads = [group[index] for group in groups], HostReads(torch.device("cpu"))
    place, flat = NodePlace(world, num_nodes, node, TOKENS), (swaps["expert"][2], swaps["counts"][2])
    assert flat[0] and flat[1]
    for alignment in ALIGNMENTS:
        for seed in range(SEEDS):
            counting = {
                kind: [
                    swap and Counting(swap, members)
                    for swap, members in zip(of_kind, (column, groups[node]), strict=False)
                ]
                for kind, of_kind in swaps.items()
            }
            rows, counts = (Hops(*counting[kind]) for kind in ("expert", "counts"))
            mine = NodeExchange(rows, counts, place, reads, alignment)
            check(mine, RankExchange(flat[0], flat[1], world, reads, alignment), seed, world, rank)
            total = sum((swap.bytes for of_kind in counting.values() for swap in of_kind if swap), Counter[int]())
            wanted = bytes_asked_for(seed, world, groups, rank)
            for peer in set(range(world)) - {rank}:
                assert total[peer] == wanted[peer], (seed, rank, peer, total[peer], wanted[peer])


def main(folder: Path, world: int, num_nodes: int) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        members, on_node = tuple(range(world)), world // num_nodes
        kinds: tuple[SwapKind, ...] = get_args(SwapKind)
        mesh = Mesh(pp=1, dp=world, ep=world, tp=1, cp=1, node=on_node)
        hops = [Opening(kind, (0,), columns) for columns in ("across", "node") for kind in kinds]
        several = tuple(opening for opening in hops if len(next(opening.channels(mesh))) > 1)
        world_sums = Opening("world", (0,), "all")
        wanted = (
            WantedChannels(mesh, (*several, world_sums), {}),
            WantedChannels(mesh, (*(Opening(kind, (0,), "block") for kind in kinds), world_sums), {}),
        )
        mine = [opening.channel_of(mesh, rank) or () for opening in hops[:: len(kinds)]]  # my column, and my node
        for transport in ("memory", "gloo"):
            endpoint = Endpoint(transport=transport, timeout_s=60)  # type: ignore[arg-type]
            links, flat = (endpoint.connect(rank, channels) for channels in wanted)
            swaps = {
                kind: [*(links.swap(kind, g) if len(g) > 1 else None for g in mine), flat.swap(kind, members)]
                for kind in kinds
            }
            staged = {kind: [swap and StagedSwap(swap) for swap in kind_swaps] for kind, kind_swaps in swaps.items()}
            ranks(swaps, world, num_nodes, rank)
            ranks(staged, world, num_nodes, rank)  # type: ignore[arg-type]

    outcome = launch(target, world, folder=folder, backend="gloo" if world > 1 else None)
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
