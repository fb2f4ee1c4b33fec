"""The executor of a rank: runs the bodies of a program. Emitted stages call it `c`.

A body is straight-line Python over three namespaces: `p` parameters, `g` gradient accumulators, and per (stage,
micro-batch) values `v`. Everything but the segments goes through the executor: data, pipeline messages, collectives
between expert, tensor, context and data ranks, the records of a step, and values reported per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from types import MappingProxyType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.comm import nodes
from runtime.comm.exchange import Exchange, HostReads, LocalExchange, RankExchange, Route
from runtime.comm.transport import Edge, Links, Pending
from runtime.contract import Call, RunPlan, StageMessage
from runtime.contract.mesh import Columns, columns_of_channel
from runtime.contract.names import ActionName, ExchangeName, MessageName, ProgramName
from runtime.state.state import DTYPES, State
from runtime.step import records
from runtime.step.graphs import Graphs, Segment
from runtime.step.host_copies import HostCopies
from runtime.step.micro_batches import Indices
from runtime.step.sharding import ChoiceCounts, Sequences, Sharding, SplitRows, WholeTensors
from runtime.step.step_time import StepTime, count_as
from runtime.step.trace import Span


class ActionBoard(Protocol):
    """Where a rank publishes its current action, so that the supervisor can name it in a failure."""

    def set_action(self, text: str) -> None: ...


@dataclass
class StepBatch:
    """The micro-batches of one rank that a program runs on, and the results of the program.

    data: inputs of the bodies by name, [micro-batch, token]. constants: gradients of the objective with respect to the
    losses. rows: rows of a pipeline message; None for those of a training micro-batch. program: name of the program.
    samples: indices of the samples. records: sums over the micro-batches. reported: values by name and micro-batch.
    spans: label, start and end of each call.
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
    """State of one rank while a program runs. `edges_in` and `edges_out` have the pipeline rank of the other end as
    key. `batch` is the last executed batch.

    A message to the same rank (it holds the next stage too) is passed on without a copy.
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
    _own_messages: dict[MessageName, Tensor] = field(default_factory=dict)  # messages of this rank to itself
    _arrived_us: int = 0  # arrival of the first message of the current call

    def __post_init__(self) -> None:
        self.host = HostCopies(self.device)
        self.graphs = Graphs(self.device, (self.parameters, self.gradients))

    def execute(
        self,
        bodies: Mapping[str, Callable[..., None]],
        calls: Sequence[Call],
        batch: StepBatch,
        behind: Mapping[int, Callable[[], None]] = MappingProxyType({}),
    ) -> None:
        """Run one program on a batch. It fills the batch's records, reported values and spans. The span of a call
        starts when the first message that it awaits has arrived. At the end every value must have been freed and every
        message received.

        `behind`: functions to call after a call, by the number of the call. They must not block.
        """
        self.batch = batch
        self.graphs.begin(batch.program)
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
                    self.host.mark_forward_end((action.stage, micro_batch))
            for key in call.releases:
                self._wait_sent(key)
            if number in behind:
                behind[number]()
        for key in list(self._sent):
            self.board.set_action(f"send {key[1]}")
            self._wait_sent(key)
        unfreed = {k: sorted(vars(v)) for k, v in self._values.items() if vars(v)}
        assert not unfreed and not self._posted and not self._own_messages, (
            unfreed,
            list(self._posted),
            list(self._own_messages),
        )
        assert self.host.is_empty
        self._values.clear()

    @count_as("message")
    def _wait_sent(self, key: tuple[int, MessageName]) -> None:
        self._sent.pop(key).wait()

    # ---- what bodies call

    def values(self, stage: int, micro_batch: int) -> SimpleNamespace:
        """Return the values of a stage and micro-batch. Kernels that run next wait for its copies from the host."""
        if self.host.coming:
            self.host.wait((stage, micro_batch))
        return self._values.setdefault((stage, micro_batch), SimpleNamespace())

    def graph(self, segment: Segment, *tensors: Tensor) -> Any:
        """Call a function of a segment. On a device its launches are captured in a CUDA graph, which later runs of the
        program replay."""
        return self.graphs.call(segment, tensors)

    def load(self, name: str, micro_batch: int) -> Tensor:
        """Return an input of a micro-batch, such as its tokens or targets: [token]."""
        return self.batch.data[name][micro_batch]

    def constant(self, name: str) -> Tensor:
        """Return the gradient of the objective with respect to a loss, which is known before any forward."""
        return self.batch.constants[name]

    def to_host(self, stage: int, micro_batch: int, *values: Tensor) -> None:
        """Copy activations to the host until `from_host`. The body frees them on the device."""
        self.host.take((stage, micro_batch), values)

    def from_host(self, stage: int, micro_batch: int) -> Tensor | list[Tensor]:
        """Return the same values in the same order. They may be read after the next call of `values`."""
        values = self.host.bring((stage, micro_batch))
        return values[0] if len(values) == 1 else values

    def record(self, name: str, value: Tensor) -> None:
        """Add a value of a micro-batch to the step's record of this name."""
        totals = self.batch.records
        totals[name] = records.combine_records(name, totals[name], value) if name in totals else value

    def tell(self, name: str, micro_batch: int, value: Tensor) -> None:
        """Report a value of a micro-batch, which the trainer reads after the program."""
        self.batch.reported.setdefault(name, {})[micro_batch] = value

    @count_as("message")
    def receive(self, peer: int, producer: str, micro_batch: int) -> Tensor:
        """Wait for a message of another stage, whose receive was posted before."""
        message = MessageName.of(producer, micro_batch)
        if peer == self.rank:
            return self._own_messages.pop(message)
        self.board.set_action(f"recv {message}")
        value = self._posted.pop((peer, message)).wait()
        self._arrived_us = self._arrived_us or _now_us()
        return value

    @count_as("message")
    def send(self, peer: int, producer: str, micro_batch: int, value: Tensor) -> None:
        """Start to send a value to another stage, or keep it if that stage is on this rank."""
        message = MessageName.of(producer, micro_batch)
        if peer == self.rank:
            assert message not in self._own_messages, message
            self._own_messages[message] = value
            return
        self._sent[peer, message] = self.edges_out[peer].send(message, value)

    @count_as("exchange")
    def counts(self, action: str, micro_batch: int, site: str, *operands: Tensor) -> None:
        """Send the number of rows for each expert and, if a token is sent once per node, the order of the rows."""
        self.exchange.start_counts(ExchangeName.of("counts", action, micro_batch, site), *operands)

    @count_as("exchange")
    def wait_counts(self, action: str, micro_batch: int, site: str) -> tuple[Route, Tensor, *tuple[Tensor, ...]]:
        """Wait for the number of rows from each rank. Return the route, the offsets of the experts' rows, and what
        nodes need to forward rows."""
        name = ExchangeName.of("counts", action, micro_batch, site)
        self.board.set_action(name)
        counts = self.exchange.wait_counts(name)
        self.time.count_expert_rows(counts[0].num_rows)
        return counts

    @count_as("exchange")
    def dispatch(self, action: str, micro_batch: int, site: str, *operands: Tensor | Route) -> None:
        """Send rows and their gate weights to the ranks of their experts, in a forward or in its recomputation (action
        B). In the backward (action I), send the gradients of the expert outputs."""
        self._start("dispatch", action, micro_batch, site, operands, forward=ActionName(action).kind in ("F", "B"))

    @count_as("exchange")
    def wait_dispatch(self, action: str, micro_batch: int, site: str) -> tuple[Tensor, ...]:
        return self._wait("dispatch", action, micro_batch, site)

    @count_as("exchange")
    def combine(self, action: str, micro_batch: int, site: str, *operands: Tensor | Route) -> None:
        """Send expert outputs back to the ranks of their tokens. In the backward (action I), send gradients."""
        self._start("combine", action, micro_batch, site, operands, forward=ActionName(action).kind == "I")

    @count_as("exchange")
    def wait_combine(self, action: str, micro_batch: int, site: str) -> Tensor | tuple[Tensor, ...]:
        """Return the rows (for FP8 their data and scales), then the forwarded tensors."""
        results = self._wait("combine", action, micro_batch, site)
        return results if len(results) > 1 else results[0]

    @count_as("exchange")
    def gather_rows(self, action: str, micro_batch: int, site: str, rows: Tensor) -> None:
        """All-gather rows, or their gradients, over the tensor ranks."""
        self.tensor_rows.gather(ExchangeName.of("gather_rows", action, micro_batch, site), rows)

    @count_as("exchange")
    def wait_gather_rows(self, action: str, micro_batch: int, site: str) -> Tensor:
        return self._wait_rows(self.tensor_rows, "gather_rows", action, micro_batch, site)

    @count_as("exchange")
    def scatter_rows(self, action: str, micro_batch: int, site: str, rows: Tensor) -> None:
        """Reduce-scatter rows, or their gradients, over the tensor ranks."""
        self.tensor_rows.scatter(ExchangeName.of("scatter_rows", action, micro_batch, site), rows)

    @count_as("exchange")
    def wait_scatter_rows(self, action: str, micro_batch: int, site: str) -> Tensor:
        return self._wait_rows(self.tensor_rows, "scatter_rows", action, micro_batch, site)

    @count_as("exchange")
    def gather_sequences(self, action: str, micro_batch: int, site: str, rows: Tensor) -> None:
        """All-gather the rows of whole sequences, such as keys, over the context ranks."""
        self.sequences.gather(ExchangeName.of("gather_sequences", action, micro_batch, site), rows)

    @count_as("exchange")
    def wait_gather_sequences(self, action: str, micro_batch: int, site: str) -> Tensor:
        return self._wait_rows(self.sequences, "gather_sequences", action, micro_batch, site)

    @count_as("exchange")
    def scatter_sequences(self, action: str, micro_batch: int, site: str, rows: Tensor) -> None:
        """Reduce-scatter the gradients of these rows over the context ranks."""
        self.sequences.scatter(ExchangeName.of("scatter_sequences", action, micro_batch, site), rows)

    @count_as("exchange")
    def wait_scatter_sequences(self, action: str, micro_batch: int, site: str) -> Tensor:
        return self._wait_rows(self.sequences, "scatter_sequences", action, micro_batch, site)

    @count_as("exchange")
    def gather(self, action: str, micro_batch: int, site: str) -> None:
        """All-gather the weights of a segment that are sharded over data ranks."""
        self.sharding.gather(ExchangeName.of("gather", action, micro_batch, site), site)

    @count_as("exchange")
    def wait_gather(self, action: str, micro_batch: int, site: str) -> WholeTensors:
        name = ExchangeName.of("gather", action, micro_batch, site)
        self.board.set_action(name)
        return self.sharding.wait_gather(name)

    def zeros(self, site: str) -> WholeTensors:
        """Return gradient accumulators for a segment whose gradients are sharded over data ranks."""
        return self.sharding.zeros(site)

    @count_as("exchange")
    def scatter(self, action: str, micro_batch: int, site: str, gradients: WholeTensors) -> None:
        """Reduce-scatter these gradients over the data ranks, each of which adds its shard to its accumulator."""
        self.sharding.scatter(ExchangeName.of("scatter", action, micro_batch, site), site, gradients)

    @count_as("exchange")
    def wait_scatter(self, action: str, micro_batch: int, site: str) -> None:
        name = ExchangeName.of("scatter", action, micro_batch, site)
        self.board.set_action(name)
        self.sharding.wait_scatter(name, site)

    @count_as("exchange")
    def gather_choices(self, action: str, micro_batch: int, site: str, counts: Tensor) -> None:
        """All-gather the counts of chosen experts over the ranks that share the same sequences."""
        self.choices.gather(ExchangeName.of("gather_choices", action, micro_batch, site), counts)

    @count_as("exchange")
    def wait_gather_choices(self, action: str, micro_batch: int, site: str) -> Tensor:
        return self._wait_rows(self.choices, "gather_choices", action, micro_batch, site)

    def _wait_rows(self, rows: SplitRows, kind: str, action: str, micro_batch: int, site: str) -> Tensor:
        name = ExchangeName.of(kind, action, micro_batch, site)
        self.board.set_action(name)
        return rows.wait(name)

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


# --- Constructing the executor of a rank from its plan


def executor_of(plan: RunPlan, rank: int, state: State, links: Links, board: ActionBoard, time: StepTime) -> Executor:
    """Return the executor of a rank, on the device of `state`."""
    mesh, edges = plan.mesh, plan.edges
    pp_rank, column = mesh.coordinates(rank)
    world = {r: mesh.rank(r, column) for r in range(mesh.pp)}

    def group(kind: Columns) -> tuple[int, ...]:
        return tuple(pp_rank * mesh.columns + member for member in columns_of_channel(column, kind, mesh))

    return Executor(
        rank=pp_rank,
        parameters=state.parameters,
        gradients=state.gradients,
        edges_in={a: links.edge(world[a], rank) for a, b in edges if b == pp_rank},
        edges_out={b: links.edge(rank, world[b]) for a, b in edges if a == pp_rank},
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
    if plan.mesh.node:
        tokens = plan.train.micro_batch * plan.train.sequence // (plan.mesh.cp * plan.mesh.tp)
        return nodes.exchange_of(rank, members, plan.mesh.node, links, device, alignment, tokens)
    rows, counts = links.swap("expert", members), links.swap("counts", members)
    assert rows and counts, "a group of several ranks has both"
    return RankExchange(rows, counts, len(members), HostReads(device), alignment)


def _message(message: StageMessage | None) -> tuple[tuple[int, ...], torch.dtype]:
    return (message.shape, DTYPES[message.dtype]) if message else ((0,), torch.float32)
