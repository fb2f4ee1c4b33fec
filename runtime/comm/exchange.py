"""The exchanges of an expert group in a MoE layer: counts of rows, dispatch of the rows, and combine.

`RankExchange` moves rows between ranks. The host needs the number of rows: it reads the counts of a layer and
micro-batch once, which is its only wait. `LocalExchange` is for a group of one rank, where rows move only to make room
for padding; the host reads nothing from a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.comm.transport import ChannelError, Pending, RowLayout, Rows, Swap, Work, as_words, digest, empty_rows
from runtime.contract import MoeLayer
from runtime.contract.names import ExchangeName

# --- Reading small device tensors on the host: the counts of rows, by which it allocates memory and starts exchanges


class AwaitedTensor(Protocol):
    """A tensor that is available after `wait`."""

    def wait(self) -> torch.Tensor: ...


class HostReads:
    """Reads small device tensors on the host.

    The host waits on a separate stream for the tensor alone, not for compute that was queued later.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type != "cpu" else None

    def read(self, pending: AwaitedTensor) -> Any:
        """Wait for a tensor and return its numbers."""
        if self._stream is None:
            return pending.wait().tolist()
        with torch.cuda.stream(self._stream):
            tensor = pending.wait()
            numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            numbers.copy_(tensor, non_blocking=True)
        self._stream.synchronize()
        return numbers.tolist()


# --- exchange


@dataclass(frozen=True)
class Route:
    """The numbers of rows sent between ranks in one layer and micro-batch. All exchanges of the layer use it."""

    num_rows: int  # R: rows of this rank's experts, including padding


class Exchange(Protocol):
    """The exchanges of one expert group. Each is started with a name, and waited for once by that name."""

    pending: dict[ExchangeName, tuple[Pending, ...]]

    @property
    def size(self) -> int:
        """Ranks of the group."""
        ...

    def start_counts(self, name: ExchangeName, counts_E: Tensor, *inputs: Tensor) -> None:
        """Send every rank of the group the number of rows that each of its experts gets. E: experts of a layer.

        `inputs`: further inputs of an exchange through nodes (nodes.py).
        """
        ...

    def wait_counts(self, name: ExchangeName) -> tuple[Route, Tensor, *tuple[Tensor, ...]]:
        """Return the route and offsets_L (int32): the end of each local expert's received rows, including padding. The
        last one is R. Tables that `start` takes after the tensors follow, if there are any."""
        ...

    def start(self, name: ExchangeName, tensors: Sequence[Tensor], route: Route, forward: bool) -> None:
        """Start moving the rows of each tensor.

        `forward`: from the tokens' rank to the experts' rank (dispatch, and the gradient of combine).
        """
        ...

    def wait(self, name: ExchangeName) -> tuple[Tensor, ...]: ...


def ends_of(loads_L: Tensor, alignment: int) -> Tensor:
    """loads_L (int64) -> the end of each local expert's rows, padded to a multiple of `alignment` (int64)."""
    return ((loads_L + (alignment - 1)) // alignment * alignment if alignment > 1 else loads_L).cumsum(0)


# ---------------------------------------------------------------- between ranks
@dataclass(frozen=True)
class RankRoute(Route):
    """The numbers of rows sent to each rank of a group, and the layout of those received from each."""

    sent: tuple[int, ...]
    received: RowLayout


@dataclass
class RankExchange:
    """The exchanges of a group of several ranks. `rows` and `counts`: the channels.

    `alignment`: the received rows of an expert are padded to a multiple of it.
    """

    rows: Swap
    counts: Swap
    size: int
    reads: HostReads
    alignment: int = 1
    sequence: int = 0
    pending: dict[ExchangeName, tuple[Pending, ...]] = field(default_factory=dict)

    def start_counts(self, name: ExchangeName, counts_E: Tensor, *inputs: Tensor) -> None:
        """Send the counts to each rank, followed by a stamp: the number of the exchange in the group, and its name."""
        counts = counts_E.new_empty(2, self.size, len(counts_E) // self.size + 1)  # outgoing and incoming counts
        counts[0, :, :-1] = counts_E.view(self.size, -1)
        counts[0, :, -1] = self.sequence << 32 | digest(name)
        row_counts = (1,) * self.size
        works = self._advance_sequence(
            self.counts.start(name, Rows(counts[0], row_counts), Rows(counts[1], row_counts))
        )
        self.pending[name] = (Pending(works, counts),)

    def wait_counts(self, name: ExchangeName) -> tuple[RankRoute, Tensor]:
        (pending,) = self.pending.pop(name)
        mine, theirs = self.reads.read(pending)
        stamps = [row[-1] for row in theirs]
        if stamps != [row[-1] for row in mine]:
            raise ChannelError(f"{name}: members of the expert group are in different exchanges: {stamps}")
        layout = RowLayout(tuple(tuple(row[:-1]) for row in theirs), self.alignment)
        route = RankRoute(layout.num_rows, sent=tuple(sum(row[:-1]) for row in mine), received=layout)
        return route, ends_of(pending.result[1, :, :-1].sum(0), self.alignment).to(torch.int32)

    def start(self, name: ExchangeName, tensors: Sequence[Tensor], route: Route, forward: bool) -> None:
        assert isinstance(route, RankRoute)
        self.pending[name] = tuple(self._start_rows(name, tensor, route, forward) for tensor in tensors)

    def wait(self, name: ExchangeName) -> tuple[Tensor, ...]:
        return tuple(p.wait() for p in self.pending.pop(name))

    def _start_rows(self, name: ExchangeName, tensor: Tensor, route: RankRoute, forward: bool) -> Pending:
        layout = route.received
        if forward:
            outgoing, incoming = Rows(tensor, route.sent), Rows(layout.empty(tensor), layout.of_members, layout)
        else:
            outgoing = Rows(tensor, layout.of_members, layout)
            incoming = Rows(empty_rows(tensor, sum(route.sent)), route.sent)
        return Pending(
            self._advance_sequence(self.rows.start(name, outgoing, incoming)), incoming.tensor, keep=(outgoing.tensor,)
        )

    def _advance_sequence(self, works: list[Work]) -> list[Work]:
        self.sequence += 1
        return works


# ---------------------------------------------------------------- within a rank
@dataclass(frozen=True)
class LocalRoute(Route):
    """The local rows of each expert: how many, and where they end after padding."""

    loads_L: Tensor
    ends_L: Tensor
    num_sent: int

    def places_S(self) -> Tensor:
        """Return the destination of each sent row, below `num_rows`. Rows are sent in the order of experts."""
        sent_L, rows_S = self.loads_L.cumsum(0), torch.arange(self.num_sent, device=self.loads_L.device)
        shifts_L = torch.nn.functional.pad((self.ends_L - sent_L)[:-1], (1, 0))  # the padding before each expert
        return rows_S + shifts_L.index_select(0, torch.searchsorted(sent_L, rows_S, right=True))

    def move_rows(self, tensors: Sequence[Tensor], forward: bool) -> list[Tensor]:
        """Move rows. `forward`: from sent rows to rows of experts with zeros as padding; else back."""
        places_S, results = self.places_S(), list[Tensor]()
        for tensor in tensors:
            result = empty_rows(tensor, self.num_rows if forward else self.num_sent)
            target, rows = as_words(result, tensor)
            if forward:
                target.zero_().index_copy_(0, places_S, rows)
            else:
                torch.index_select(rows, 0, places_S, out=target)
            results.append(result)
        return results


@dataclass
class LocalExchange:
    """The exchanges of a group of one rank. Rows without padding stay in place; others are moved immediately.

    `layers`: by site. On a device the host does not read the counts: it allocates the largest possible number of rows
    (`MoeLayer.held_rows`), and the rows after the last expert count as its padding. On a CPU the number is exact.
    """

    layers: Mapping[str, MoeLayer]
    alignment: int = 1
    size: int = 1
    pending: dict[ExchangeName, tuple[Pending, ...]] = field(default_factory=dict)

    def start_counts(self, name: ExchangeName, counts_E: Tensor, *inputs: Tensor) -> None:
        self.pending[name] = (Pending([], counts_E),)

    def wait_counts(self, name: ExchangeName) -> tuple[LocalRoute, Tensor]:
        (loads_L,) = self.wait(name)
        ends_L, layer = ends_of(loads_L, self.alignment), self.layers[name.site]
        num_rows = int(ends_L[-1]) if loads_L.is_cpu else layer.held_rows
        offsets_L = ends_L.to(torch.int32)
        offsets_L[-1] = num_rows
        return LocalRoute(num_rows, loads_L, ends_L, layer.sent_rows), offsets_L

    def start(self, name: ExchangeName, tensors: Sequence[Tensor], route: Route, forward: bool) -> None:
        assert isinstance(route, LocalRoute)
        moved = route.move_rows(tensors, forward) if self.alignment > 1 else tensors
        self.pending[name] = tuple(Pending([], tensor) for tensor in moved)

    def wait(self, name: ExchangeName) -> tuple[Tensor, ...]:
        return tuple(p.wait() for p in self.pending.pop(name))
