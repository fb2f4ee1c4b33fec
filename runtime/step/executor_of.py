"""The executor of a rank: how it reaches the others, as its plan says."""

from __future__ import annotations

import torch

from runtime.comm import nodes
from runtime.comm.exchange import Exchange, LocalExchange, RankExchange
from runtime.comm.host_reads import HostReads
from runtime.comm.transport import Links
from runtime.contract import Message, Plan
from runtime.contract.mesh import Columns, columns_with
from runtime.state.state import DTYPES, State
from runtime.step.executor import Board, Executor
from runtime.step.sharding import Sharding
from runtime.step.split_rows import Choices, Sequences, SplitRows
from runtime.step.step_time import StepTime


def executor_of(plan: Plan, rank: int, state: State, links: Links, board: Board, time: StepTime) -> Executor:
    """The executor of rank `rank`, on the device of its `state`."""
    mesh, edges = plan.mesh, plan.edges
    here, column = divmod(rank, mesh.columns)
    world = {r: r * mesh.columns + column for r in range(mesh.pp)}

    def group(kind: Columns) -> tuple[int, ...]:
        return tuple(here * mesh.columns + each for each in columns_with(column, kind, mesh))

    return Executor(
        rank=here,
        parameters=state.parameters,
        gradients=state.gradients,
        edges_in={a: links.edge(world[a], rank) for a, b in edges if b == here},
        edges_out={b: links.edge(rank, world[b]) for a, b in edges if a == here},
        exchange=_exchange(plan, rank, group("block"), links, state.device),
        sharding=Sharding(state, links),
        tensor_rows=SplitRows(links, rank, group("tensor")),
        sequences=Sequences(links, rank, group("context"), plan.train.micro_batch),
        choices=Choices(links, rank, group("sequence")),
        message=_message(plan.message),
        device=state.device,
        board=board,
        time=time,
    )


def _exchange(plan: Plan, rank: int, members: tuple[int, ...], links: Links, device: torch.device) -> Exchange:
    alignment = plan.row_alignment
    if len(members) == 1:
        return LocalExchange({layer.site: layer for layer in plan.moe_layers}, alignment)
    reads = HostReads(device)
    if plan.mesh.node:
        tokens = plan.train.micro_batch * plan.train.sequence // (plan.mesh.cp * plan.mesh.tp)
        return nodes.exchange_of(rank, members, plan.mesh.node, links, reads, alignment, tokens)
    rows, counts = links.swap("expert", members), links.swap("counts", members)
    assert rows and counts, "a group of several ranks has both"
    return RankExchange(rows, counts, len(members), reads, alignment)


def _message(message: Message | None) -> tuple[tuple[int, ...], torch.dtype]:
    return (message.shape, DTYPES[message.dtype]) if message else ((0,), torch.float32)
