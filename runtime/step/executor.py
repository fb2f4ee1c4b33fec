"""Executes the bodies of a program on one rank: what an emitted stage calls `c`.

A body is straight-line Python over three namespaces: `p` parameters, `g` gradient accumulators, and per (stage,
micro-batch) values `v`. Everything that is not a segment goes through the executor: data, pipeline messages, exchanges
between experts, the records of a step, and what it tells of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from types import MappingProxyType, SimpleNamespace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.comm import nodes
from runtime.comm.exchange import Exchange, HostReads, LocalExchange, RankExchange, Route
from runtime.comm.transport import Edge, Links, Pending
from runtime.contract import Call, RunPlan, StageMessage
from runtime.contract.mesh import Columns, columns_with
from runtime.contract.names import ActionName, ExchangeName, MessageName, ProgramName
from runtime.state.state import DTYPES, State
from runtime.step import records
from runtime.step.host_copies import HostCopies
from runtime.step.micro_batches import Indices
from runtime.step.sharding import ChoiceCounts, Sequences, Sharding, SplitRows, WholeTensors
from runtime.step.step_time import StepTime, takes
from runtime.step.trace import Span


class ActionBoard(Protocol):
    """Where a rank says what it is doing, so that a failure can be named from outside."""

    def set_action(self, text: str) -> None: ...


@dataclass
class StepBatch:
    """The micro-batches of one rank that a program runs on, and what the program makes of them.

    data: what bodies load by name, [micro-batch, token]. constants: gradients of the objective with respect to the
    losses. rows: of each message between pipeline ranks, if not those of a micro-batch of training. program: its name.
    samples: their indices. records: sums over the micro-batches. reported: values by name and micro-batch. spans: the
    label, start and end of each call.
    """

    data: Mapping[str, Tensor] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    rows: int | None = None
    program: ProgramName = field(default_factory=ProgramName)
    samples: Indices = field(default_factory=lambda: np.arange(0))
    records: dict[str, Tensor] = field(default_factory=dict)
    reported: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


@dataclass
class Executor:
    """State of one rank while a program runs. `edges_in`/`edges_out` are by pipeline rank of the other end. `batch` is
    the last one that was executed.

    A message to the own `rank` (the next stage is here too) stays here: nothing is copied.
    """

    rank: int  # pipeline rank
    parameters: SimpleNamespace
    gradients: SimpleNamespace
    edges_in: Mapping[int, Edge]
    edges_out: Mapping[int, Edge]
    exchange: Exchange
    sharding: Sharding
    tensor_rows: SplitRows
    sequences: Sequences
    choices: ChoiceCounts
    message: tuple[tuple[int, ...], torch.dtype]
    device: torch.device
    board: ActionBoard
    time: StepTime = field(default_factory=StepTime)
    batch: StepBatch = field(default_factory=StepBatch)
    _values: dict[tuple[int, int], SimpleNamespace] = field(default_factory=dict)
    _posted: dict[tuple[int, MessageName], Pending] = field(default_factory=dict)
    _sent: dict[tuple[int, MessageName], Pending] = field(default_factory=dict)
    _kept: dict[MessageName, Tensor] = field(default_factory=dict)  # messages to the own rank
    _arrived_us: int = 0  # when the first message of the call that runs was there

    def __post_init__(self) -> None:
        self.host = HostCopies(self.device)

    def execute(
        self,
        bodies: Mapping[str, Callable[..., None]],
        calls: Sequence[Call],
        batch: StepBatch,
        behind: Mapping[int, Callable[[], None]] = MappingProxyType({}),
    ) -> None:
        """Run one program on a batch to its end, by when every value must have been freed and every message taken. The
        batch then has the records, the reported values and the spans of the calls, which start when the first message
        that they await is there.

        `behind`: what to do once a call has ended, by its number. It waits for nobody.
        """
        self.batch = batch
        (rows, *extents), dtype = self.message
        shape = (rows if batch.rows is None else batch.rows, *extents)
        going = {
            (action.stage, micro_batch)
            for call in calls
            for action, micro_batch in zip(call.body.actions, call.micro_batches, strict=True)
            if action.kind == "O"
        }
        for number, call in enumerate(calls):
            self.board.set_action(call.label)
            for source, message in call.posts:
                buffer = torch.empty(shape, dtype=dtype, device=self.device)
                self._posted[source, message] = self.edges_in[source].post(message, buffer)
            start_us, self._arrived_us = _now_us(), 0
            bodies[call.body](self, self.parameters, self.gradients, *call.micro_batches)
            batch.spans.append((call.label, self._arrived_us or start_us, _now_us()))
            for action, micro_batch in zip(call.body.actions, call.micro_batches, strict=True) if going else ():
                if action.kind == "F" and (action.stage, micro_batch) in going:
                    self.host.forward_ended((action.stage, micro_batch))
            for key in call.releases:
                self._wait_sent(key)
            if number in behind:
                behind[number]()
        for key in list(self._sent):
            self.board.set_action(f"send {key[1]}")
            self._wait_sent(key)
        left = {k: sorted(vars(v)) for k, v in self._values.items() if vars(v)}
        assert not left and not self._posted and not self._kept, (left, list(self._posted), list(self._kept))
        assert self.host.is_empty
        self._values.clear()

    @takes("message")
    def _wait_sent(self, key: tuple[int, MessageName]) -> None:
        self._sent.pop(key).wait()

    # ---- what bodies call

    def values(self, stage: int, micro_batch: int) -> SimpleNamespace:
        """The values of a stage and micro-batch. What is on its way back from the host is there for what runs next."""
        if self.host.coming:
            self.host.wait((stage, micro_batch))
        return self._values.setdefault((stage, micro_batch), SimpleNamespace())

    def load(self, name: str, micro_batch: int) -> Tensor:
        return self.batch.data[name][micro_batch]

    def constant(self, name: str) -> Tensor:
        return self.batch.constants[name]

    def to_host(self, stage: int, micro_batch: int, *values: Tensor) -> None:
        """What a forward saved, until `from_host`; the body frees it on the device."""
        self.host.take((stage, micro_batch), values)

    def from_host(self, stage: int, micro_batch: int) -> Tensor | list[Tensor]:
        """Give the same values in their order; they are there when `values` is next asked for."""
        found = self.host.bring((stage, micro_batch))
        return found[0] if len(found) == 1 else found

    def record(self, name: str, value: Tensor) -> None:
        found = self.batch.records
        found[name] = records.joined(name, found[name], value) if name in found else value

    def tell(self, name: str, micro_batch: int, value: Tensor) -> None:
        """A value of a micro-batch that the trainer reads behind the program."""
        self.batch.reported.setdefault(name, {})[micro_batch] = value

    @takes("message")
    def receive(self, peer: int, producer: str, micro_batch: int) -> Tensor:
        message = MessageName.of(producer, micro_batch)
        if peer == self.rank:
            return self._kept.pop(message)
        self.board.set_action(f"recv {message}")
        value = self._posted.pop((peer, message)).wait()
        self._arrived_us = self._arrived_us or _now_us()
        return value

    @takes("message")
    def send(self, peer: int, producer: str, micro_batch: int, value: Tensor) -> None:
        message = MessageName.of(producer, micro_batch)
        if peer == self.rank:
            assert message not in self._kept, message
            self._kept[message] = value
            return
        self._sent[peer, message] = self.edges_out[peer].send(message, value)

    @takes("exchange")
    def counts(self, action: str, micro_batch: int, site: str, *operands: Tensor) -> None:
        """How many rows go to each expert, and where a token goes to a node once, the order of the rows."""
        self.exchange.start_counts(ExchangeName.of("counts", action, micro_batch, site), *operands)

    @takes("exchange")
    def wait_counts(self, action: str, micro_batch: int, site: str) -> tuple[Route, Tensor, *tuple[Tensor, ...]]:
        name = ExchangeName.of("counts", action, micro_batch, site)
        self.board.set_action(name)
        return self.exchange.wait_counts(name)

    @takes("exchange")
    def dispatch(self, action: str, micro_batch: int, site: str, *operands: Tensor | Route) -> None:
        """Rows and their gate weights to their experts' ranks, in a forward or where a backward runs that again (action
        B); in the backward (action I) the gradients back."""
        self._start("dispatch", action, micro_batch, site, operands, forward=ActionName(action).kind in ("F", "B"))

    @takes("exchange")
    def wait_dispatch(self, action: str, micro_batch: int, site: str) -> tuple[Tensor, ...]:
        return self._wait("dispatch", action, micro_batch, site)

    @takes("exchange")
    def combine(self, action: str, micro_batch: int, site: str, *operands: Tensor | Route) -> None:
        """Expert outputs back to their tokens' ranks; in the backward (action I) their gradients to the experts."""
        self._start("combine", action, micro_batch, site, operands, forward=ActionName(action).kind == "I")

    @takes("exchange")
    def wait_combine(self, action: str, micro_batch: int, site: str) -> Tensor | tuple[Tensor, ...]:
        """Rows, or of eight bits their data and their scales; behind them what was forwarded."""
        results = self._wait("combine", action, micro_batch, site)
        return results if len(results) > 1 else results[0]

    @takes("exchange")
    def gather_rows(self, action: str, micro_batch: int, site: str, rows: Tensor) -> None:
        """Rows, or gradients of them, to all tensor ranks."""
        self.tensor_rows.gather(ExchangeName.of("gather_rows", action, micro_batch, site), rows)

    @takes("exchange")
    def wait_gather_rows(self, action: str, micro_batch: int, site: str) -> Tensor:
        return self._wait_rows(self.tensor_rows, "gather_rows", action, micro_batch, site)

    @takes("exchange")
    def scatter_rows(self, action: str, micro_batch: int, site: str, rows: Tensor) -> None:
        """Sums of rows, or of gradients, over the tensor ranks, of which each gets its part."""
        self.tensor_rows.scatter(ExchangeName.of("scatter_rows", action, micro_batch, site), rows)

    @takes("exchange")
    def wait_scatter_rows(self, action: str, micro_batch: int, site: str) -> Tensor:
        return self._wait_rows(self.tensor_rows, "scatter_rows", action, micro_batch, site)

    @takes("exchange")
    def gather_sequences(self, action: str, micro_batch: int, site: str, rows: Tensor) -> None:
        """The rows of whole sequences, such as keys, to all context ranks, each of which has a part of them."""
        self.sequences.gather(ExchangeName.of("gather_sequences", action, micro_batch, site), rows)

    @takes("exchange")
    def wait_gather_sequences(self, action: str, micro_batch: int, site: str) -> Tensor:
        return self._wait_rows(self.sequences, "gather_sequences", action, micro_batch, site)

    @takes("exchange")
    def scatter_sequences(self, action: str, micro_batch: int, site: str, rows: Tensor) -> None:
        """Sums of the gradients of these rows over the context ranks, of which each gets its part."""
        self.sequences.scatter(ExchangeName.of("scatter_sequences", action, micro_batch, site), rows)

    @takes("exchange")
    def wait_scatter_sequences(self, action: str, micro_batch: int, site: str) -> Tensor:
        return self._wait_rows(self.sequences, "scatter_sequences", action, micro_batch, site)

    @takes("exchange")
    def gather(self, action: str, micro_batch: int, site: str) -> None:
        """The weights of a segment that data ranks divide."""
        self.sharding.gather(ExchangeName.of("gather", action, micro_batch, site), site)

    @takes("exchange")
    def wait_gather(self, action: str, micro_batch: int, site: str) -> WholeTensors:
        name = ExchangeName.of("gather", action, micro_batch, site)
        self.board.set_action(name)
        return self.sharding.wait_gather(name)

    def zeros(self, site: str) -> WholeTensors:
        """Accumulators of a segment whose gradients data ranks divide."""
        return self.sharding.zeros(site)

    @takes("exchange")
    def scatter(self, action: str, micro_batch: int, site: str, gradients: WholeTensors) -> None:
        """Sums of these gradients, of which each data rank adds its part to what it keeps."""
        self.sharding.scatter(ExchangeName.of("scatter", action, micro_batch, site), site, gradients)

    @takes("exchange")
    def wait_scatter(self, action: str, micro_batch: int, site: str) -> None:
        name = ExchangeName.of("scatter", action, micro_batch, site)
        self.board.set_action(name)
        self.sharding.wait_scatter(name, site)

    @takes("exchange")
    def gather_choices(self, action: str, micro_batch: int, site: str, counts: Tensor) -> None:
        """How often each expert is chosen in parts of sequences, to all ranks that have parts of the same."""
        self.choices.gather(ExchangeName.of("gather_choices", action, micro_batch, site), counts)

    @takes("exchange")
    def wait_gather_choices(self, action: str, micro_batch: int, site: str) -> Tensor:
        return self._wait_rows(self.choices, "gather_choices", action, micro_batch, site)

    def _wait_rows(self, of: SplitRows, kind: str, action: str, micro_batch: int, site: str) -> Tensor:
        name = ExchangeName.of(kind, action, micro_batch, site)
        self.board.set_action(name)
        return of.wait(name)

    def _start(
        self, kind: str, action: str, micro_batch: int, site: str, operands: Sequence[Tensor | Route], forward: bool
    ) -> None:
        *tensors, route = operands
        assert isinstance(route, Route)
        self.exchange.start(ExchangeName.of(kind, action, micro_batch, site), tensors, route, forward)  # type: ignore[arg-type]

    def _wait(self, kind: str, action: str, micro_batch: int, site: str) -> tuple[Tensor, ...]:
        name = ExchangeName.of(kind, action, micro_batch, site)
        self.board.set_action(name)
        return self.exchange.wait(name)


def _now_us() -> int:
    return monotonic_ns() // 1000


# --- The executor of a rank: how it reaches the others, as its plan says


def executor_of(plan: RunPlan, rank: int, state: State, links: Links, board: ActionBoard, time: StepTime) -> Executor:
    """The executor of rank `rank`, on the device of its `state`."""
    mesh, edges = plan.mesh, plan.edges
    here, column = mesh.coordinates(rank)
    world = {r: mesh.rank(r, column) for r in range(mesh.pp)}

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
        choices=ChoiceCounts(links, rank, group("sequence")),
        message=_message(plan.message),
        device=state.device,
        board=board,
        time=time,
    )


def _exchange(plan: RunPlan, rank: int, members: tuple[int, ...], links: Links, device: torch.device) -> Exchange:
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


def _message(message: StageMessage | None) -> tuple[tuple[int, ...], torch.dtype]:
    return (message.shape, DTYPES[message.dtype]) if message else ((0,), torch.float32)
