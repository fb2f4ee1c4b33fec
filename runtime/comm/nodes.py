"""The exchange of an expert group over several nodes: a token crosses the network to each node at most once.

A rank sends one copy of a token to each node that has chosen experts, to the rank with the same index on that node.
These ranks form a column. The receiver forwards the copy inside its node to the ranks of the experts, a row for each
expert. On the way back it adds the rows of a token from its node, and sends one sum. DeepSeek-AI, "DeepSeek-V3
Technical Report", 2024, section 3.2.2.

N nodes of M ranks · E experts of the layer · T tokens · S rows of a rank, one for each choice of a token, by expert
P copies that a rank forwards · X rows that it forwards
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from runtime.comm.exchange import HostReads, Route, ends_of
from runtime.comm.transport import (
    ChannelError,
    Links,
    Pending,
    RowLayout,
    Rows,
    Swap,
    SwapKind,
    Work,
    digest,
    empty_rows,
    raw,
    select_rows,
)
from runtime.contract.names import ExchangeName
from runtime.ops.native import ops as native
from runtime.ops.native.library import runs_natively
from runtime.ops.product import wide


def split_by_node(members: Sequence[int], on_node: int) -> tuple[tuple[int, ...], ...]:
    """Split the members of an expert group (ascending world ranks) by node, `on_node` ranks each."""
    return tuple(tuple(members[start : start + on_node]) for start in range(0, len(members), on_node))


@dataclass(frozen=True)
class NodeRoute(Route):
    """The numbers of rows and copies sent between ranks in one layer and micro-batch."""

    sent: tuple[int, ...]  # rows of this rank, to each node
    received: RowLayout  # rows of its experts
    copies_sent: tuple[int, ...]  # to each node
    copies: tuple[int, ...]  # received from each rank of the column, to be forwarded
    rows: tuple[tuple[int, ...], ...]  # to be forwarded, [rank of the node][source rank of the column]

    @property
    def forwarded(self) -> int:
        """X: number of forwarded rows."""
        return sum(map(sum, self.rows))


@dataclass
class TwoHops:
    """A tensor in flight: the first hop, and a function that starts the second hop with its result."""

    first: Pending
    second_hop: Callable[[Tensor], Pending]

    def start_second(self) -> Pending:
        """Wait for the first hop and start the second."""
        return self.second_hop(self.first.wait())


Moved = tuple[TwoHops, Tensor]  # and the result


@dataclass
class SecondHops:
    """The second hops of an exchange on a device, started on a stream that waits for the first hops in place of the
    compute stream. So both hops run while the compute stream goes on; `wait` makes it wait for both."""

    pending: list[Pending]
    started: torch.cuda.Event  # after all that the stream does for them

    @classmethod
    def start(cls, hops: Sequence[TwoHops], stream: torch.cuda.Stream) -> SecondHops:
        # The stream reads what the compute stream wrote. Memory that it allocates is freed once the compute stream has
        # waited, and it waits for that stream before it allocates again.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return cls([hop.start_second() for hop in hops], stream.record_event())

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.started)
        for second in self.pending:
            second.wait()


@dataclass(frozen=True)
class Hops:
    """The swaps of a rank with its column and inside its node; None if it is alone there."""

    column: Swap | None
    node: Swap | None

    def swap(self, hop: Literal["column", "node"], name: ExchangeName, outgoing: Rows, incoming: Rows) -> Pending:
        """Start to exchange rows."""
        swap, works = getattr(self, hop), list[Work]()
        if swap is None:
            incoming.fill(outgoing)
        else:
            works = swap.start(name, outgoing, incoming)
        return Pending(works, incoming.tensor, keep=(outgoing.tensor,))


@dataclass(frozen=True)
class NodePlace:
    """The position of a rank in its expert group: its `node` of `nodes`. `tokens`: T, tokens of a micro-batch."""

    size: int  # ranks of the group
    nodes: int
    node: int
    tokens: int

    @property
    def on_node(self) -> int:
        """Ranks of the group on each node."""
        return self.size // self.nodes

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The members of the group in the column of each rank of a node, which passes on their rows."""
        return tuple(tuple(range(rank, self.size, self.on_node)) for rank in range(self.on_node))


@dataclass
class Counts:
    """The pending counts of a layer and micro-batch, and the tables computed from them."""

    name: ExchangeName
    hops: Hops
    place: NodePlace
    num_experts: int
    words: Pending
    tables: tuple[Tensor, ...] = ()  # rows of each local expert, copies_S, forwards_2X with unused columns at the end

    def wait(self) -> Tensor:
        """Return all numbers that the host needs in one tensor, in the order in which `route` reads them."""
        place, words = self.place, self.words.wait()
        counts_NE, tokens_NS = words[:, 1 : 1 + self.num_experts], words[:, 1 + self.num_experts :]
        counts = counts_NE.unflatten(1, (place.nodes, place.on_node, -1))  # of each source: [node, rank, expert]
        mine = counts[:, place.node].transpose(0, 1).flatten(1)
        stamps = words[:1, :1].expand(place.on_node, 1)
        mine = torch.cat([stamps, mine], 1)
        pending = self.hops.swap("node", self.name, _rows_of_one(mine), _rows_of_one(torch.empty_like(mine)))
        copies_S, sent = copies_of(place, counts[place.node].sum((1, 2)), tokens_NS[place.node])
        forwards, forwarded = forwards_of(place, counts.sum(3), tokens_NS)
        theirs = pending.wait()
        counts_RE = theirs[:, 1:].unflatten(1, (place.nodes, -1)).transpose(0, 1).flatten(0, 1)
        self.tables = counts_RE.sum(0), copies_S, forwards
        stamps = torch.cat([words[:, 0], theirs[:, 0]])
        return torch.cat([stamps, counts_RE.flatten(), *sent, *forwarded])

    def route(self, numbers: Sequence[int], alignment: int) -> NodeRoute:
        """Build the route from `numbers`. ChannelError if members of the group are in different exchanges."""
        place, remaining = self.place, iter(numbers)

        def take(count: int) -> tuple[int, ...]:
            return tuple(islice(remaining, count))

        stamps = take(place.nodes + place.on_node)
        if len({*stamps}) > 1:
            raise ChannelError(f"{self.name}: members of the expert group are in different exchanges: {stamps}")
        counts = tuple(take(self.num_experts // place.size) for _ in range(place.size))
        layout = RowLayout(counts, alignment, place.columns)
        sent, copies_sent, copies = (take(place.nodes) for _ in range(3))
        rows = tuple(take(place.nodes) for _ in range(place.on_node))
        return NodeRoute(layout.num_rows, sent, layout, copies_sent, copies, rows)


def copies_of(place: NodePlace, rows_N: Tensor, tokens_S: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """rows_N (to each node), tokens_S -> copies_S, and for each node the number of rows and of copies sent to it.

    The first row of a token on a node is copied. copies_S has the row of each copy, ordered by node, then by token, and
    is filled with 0.
    """
    row_S = torch.arange(tokens_S.shape[0], device=tokens_S.device)
    node_S = torch.searchsorted(rows_N.cumsum(0), row_S, right=True)
    first = torch.full((place.nodes * place.tokens,), row_S.shape[0], device=row_S.device)
    first.scatter_reduce_(0, node_S * place.tokens + tokens_S, row_S, "amin")
    sent = first < row_S.shape[0]
    targets = torch.where(sent, sent.cumsum(0) - 1, row_S.shape[0])  # past the end: not sent
    copies_S = row_S.new_zeros(row_S.shape[0] + 1).scatter_(0, targets, first)[:-1].clone()
    return copies_S, (rows_N, sent.view(place.nodes, -1).sum(1))


def forwards_of(place: NodePlace, rows: Tensor, tokens_NS: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """rows (of each source of the column, [node, rank]), tokens_NS -> forwards_2X with unused columns at the end, and
    the numbers of copies of each source and of rows [rank, source].

    The copies of a source are in the order of tokens, its rows in the order of experts.
    """
    here_NM = rows[:, place.node]
    at_NS = torch.arange(tokens_NS.shape[1], device=rows.device) - rows[:, : place.node].sum((1, 2))[:, None]
    is_here = (at_NS >= 0) & (at_NS < here_NM.sum(1)[:, None])
    token_NS = torch.where(is_here, tokens_NS, place.tokens)
    number_NT = rows.new_zeros(place.nodes, place.tokens + 1).scatter_(1, token_NS, 1)[:, :-1].cumsum(1)
    copies_N = number_NT[:, -1]
    copy_NS = number_NT.gather(1, token_NS.clamp(max=place.tokens - 1)) - 1 + _exclusive_cumsum(copies_N)[:, None]
    rank_NS = torch.searchsorted(here_NM.cumsum(1), at_NS, right=True).clamp(max=place.on_node - 1)
    first_NM = _exclusive_cumsum(here_NM.t().flatten()).view(place.on_node, place.nodes).t()
    in_source_NM = here_NM.cumsum(1) - here_NM
    place_NS = at_NS + (first_NM - in_source_NM).gather(1, rank_NS)
    arrival_NS = at_NS + _exclusive_cumsum(here_NM.sum(1))[:, None]
    targets = torch.where(is_here, place_NS, is_here.numel()).flatten()
    forwards = rows.new_zeros(2, is_here.numel() + 1)
    forwards.scatter_(1, targets.expand(2, -1), torch.stack([copy_NS.flatten(), arrival_NS.flatten()]))
    return forwards, (copies_N, here_NM.t().flatten())


@dataclass
class NodeExchange:
    """The exchanges of one expert group, each in two hops.

    On a device, `start` starts both hops: the second one on a stream of its own, one for each direction, so that
    neither direction waits for the first hops of the other. On a CPU, `wait` starts the second hop.

    The layout of rows at their experts is that of `RankExchange`. Sums are over the experts of a node in their order,
    accumulated in FP32 if the rows are narrower, and rounded once to the dtype of the rows.
    """

    rows: Hops
    counts: Hops
    place: NodePlace
    reads: HostReads
    alignment: int = 1
    streams: Mapping[bool, torch.cuda.Stream] = field(default_factory=dict)  # of second hops, by `forward`; on devices
    sequence: int = 0
    pending: dict[ExchangeName, tuple[Pending, ...]] = field(default_factory=dict)
    counted: dict[ExchangeName, Counts] = field(default_factory=dict)  # pending
    hops: dict[ExchangeName, tuple[TwoHops, ...]] = field(default_factory=dict)  # whose second hops are not started
    second: dict[ExchangeName, SecondHops] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.place.size

    def start_counts(self, name: ExchangeName, counts_E: Tensor, *inputs: Tensor) -> None:
        """Send the column the number of rows of each expert, and the token of each row. `inputs`: order_S."""
        (order_S,) = inputs
        num_experts, num_rows = counts_E.shape[0], order_S.shape[0]
        words = counts_E.new_empty(1 + num_experts + num_rows)
        words[0] = self.sequence << 32 | digest(name)
        words[1 : 1 + num_experts] = counts_E
        words[1 + num_experts :] = order_S // (num_rows // self.place.tokens)
        words_N = words.expand(self.place.nodes, -1)
        pending = self.counts.swap("column", name, _rows_of_one(words_N), _rows_of_one(torch.empty_like(words_N)))
        self.sequence += 1
        self.counted[name] = Counts(name, self.counts, self.place, num_experts, pending)
        self.pending[name] = (pending,)

    def wait_counts(self, name: ExchangeName) -> tuple[NodeRoute, Tensor, Tensor, Tensor]:
        """Return the route, offsets_L (int32: the end of each local expert's received rows), copies_S and forwards_2X.

        copies_S: the row of each sent copy, the rest 0. forwards_2X: for each forwarded row, ordered by destination
        rank of the node, the index of its copy, and the index of its gate weight among those received.
        """
        del self.pending[name]
        counted = self.counted.pop(name)
        numbers = self.reads.read(counted)
        route = counted.route(numbers, self.alignment)
        for table in counted.tables:
            if table.is_cuda:  # computed on the stream of reads
                table.record_stream(torch.cuda.current_stream())
        loads_L, copies_S, forwards = counted.tables
        offsets_L = ends_of(loads_L, self.alignment).to(torch.int32)
        return route, offsets_L, copies_S, forwards[:, : route.forwarded].clone()

    # ---- rows

    def start(self, name: ExchangeName, tensors: Sequence[Tensor], route: Route, forward: bool) -> None:
        """Start to move the rows of each tensor. The last two tensors are copies_S and forwards_2X. A tensor with one
        dimension has a value for each row. Rows of other tensors are equal for all experts of a token (`forward`), or
        are summed."""
        *moved, copies_S, forwards_2X = tensors
        assert isinstance(route, NodeRoute)
        copies = copies_S[: sum(route.copies_sent)]
        go = self._move_to_experts if forward else self._move_back
        hops, results = zip(*(go(name, tensor, route, copies, forwards_2X) for tensor in moved), strict=True)
        if self.streams:
            self.second[name] = SecondHops.start(hops, self.streams[forward])
        else:
            self.hops[name] = hops
        self.sequence += 1
        self.pending[name] = tuple(Pending([], tensor) for tensor in (*results, *(hop.first.result for hop in hops)))

    def wait(self, name: ExchangeName) -> tuple[Tensor, ...]:
        """Return the received tensors, then the tensors that were forwarded."""
        if name in self.second:
            self.second.pop(name).wait()
        else:
            for second in [hop.start_second() for hop in self.hops.pop(name)]:
                second.wait()
        return tuple(pending.result for pending in self.pending.pop(name))

    def _move_to_experts(
        self, name: ExchangeName, tensor: Tensor, route: NodeRoute, copies: Tensor, forwards: Tensor
    ) -> Moved:
        if tensor.dim() == 1:
            outgoing, counts, source = tensor, [sum(column) for column in zip(*route.rows, strict=True)], forwards[1]
            first = self.rows.swap("column", name, Rows(outgoing, route.sent), _room(tensor, counts))
        else:
            outgoing, source = _select(tensor, copies), forwards[0]
            first = self.rows.swap("column", name, Rows(outgoing, route.copies_sent), _room(tensor, route.copies))
        result = route.received.empty(tensor)

        def second_hop(forwarded: Tensor) -> Pending:
            rows = Rows(_select(forwarded, source), tuple(map(sum, route.rows)))
            return self.rows.swap("node", name, rows, Rows(result, route.received.of_members, route.received))

        return TwoHops(first, second_hop), result

    def _move_back(
        self, name: ExchangeName, tensor: Tensor, route: NodeRoute, copies: Tensor, forwards: Tensor
    ) -> Moved:
        rows = _room(tensor, [sum(of_rank) for of_rank in route.rows])
        first = self.rows.swap("node", name, Rows(tensor, route.received.of_members, route.received), rows)
        result = tensor.new_empty(sum(route.sent), *tensor.shape[1:])

        def second_hop(forwarded: Tensor) -> Pending:
            if tensor.dim() == 1:
                values = torch.empty_like(forwarded).scatter_(0, forwards[1], forwarded)
                counts = tuple(sum(column) for column in zip(*route.rows, strict=True))
                return self.rows.swap("column", name, Rows(values, counts), Rows(result, route.sent))
            sums = sums_of(forwarded, forwards[0], sum(route.copies))
            work = self.rows.swap("column", name, Rows(sums, route.copies), _room(tensor, route.copies_sent))
            return Pending([_PlacedSums(work, copies, result)], result)

        return TwoHops(first, second_hop), result


@dataclass(frozen=True)
class _PlacedSums:
    """Pending sums, one for each copy that was sent. A sum is stored in the row that was copied; the other rows of the
    token on that node are zero, so that the sum of a token's rows is the sum over its nodes."""

    came: Pending
    copies: Tensor
    result: Tensor

    def wait(self) -> None:
        self.result.zero_().index_copy_(0, self.copies, self.came.wait())


def exchange_of(
    rank: int, members: tuple[int, ...], on_node: int, links: Links, device: torch.device, alignment: int, tokens: int
) -> NodeExchange:
    """Return the exchange of a rank's expert group with `on_node` ranks per node. `tokens`: of a micro-batch."""
    groups = split_by_node(members, on_node)
    node = next(index for index, group in enumerate(groups) if rank in group)
    column = tuple(group[groups[node].index(rank)] for group in groups)
    of_node = groups[node]
    rows, counts = (
        Hops(*(links.swap(kind, group) if len(group) > 1 else None for group in (column, of_node)))
        for kind in get_args(SwapKind)
    )
    streams = {forward: torch.cuda.Stream(device) for forward in (True, False) if device.type != "cpu"}
    place = NodePlace(len(members), len(groups), node, tokens)
    return NodeExchange(rows, counts, place, HostReads(device), alignment, streams)


def sums_of(rows_XD: Tensor, copy_X: Tensor, num_copies: int) -> Tensor:
    """rows_XD, copy_X -> sums_PD over the rows of each copy, in order: deterministic. Each copy has at least one
    row. On CPUs torch's `embedding_bag` rounds BF16 sums half away from zero, which adds up over tokens, so sums are
    rounded apart from it."""
    if num_copies == 0:
        return rows_XD.new_empty(0, rows_XD.shape[1])
    if runs_natively(rows_XD):
        return native.sums(rows_XD, copy_X, num_copies)
    rows_P = copy_X.new_zeros(num_copies).scatter_add_(0, copy_X, torch.ones_like(copy_X))
    first_P = _exclusive_cumsum(rows_P)
    added_XD = wide(rows_XD) if rows_XD.is_cpu else rows_XD
    return embedding_bag(torch.argsort(copy_X, stable=True), added_XD, first_P, mode="sum").to(rows_XD.dtype)


def _exclusive_cumsum(counts: Tensor) -> Tensor:
    """Return the exclusive cumulative sum of counts."""
    return counts.cumsum(0) - counts


def _rows_of_one(words: Tensor) -> Rows:
    """Return rows with one row for each member."""
    return Rows(words, (1,) * words.shape[0])


def _room(like: Tensor, counts: Sequence[int]) -> Rows:
    """Allocate rows like those of `like`, `counts` from each member."""
    return Rows(empty_rows(like, sum(counts)), tuple(counts))


def _select(tensor: Tensor, index: Tensor) -> Tensor:
    """Select rows of a tensor. The result is column-major if the tensor is."""
    if tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.stride(0) == 1:
        return raw(tensor).t().index_select(1, index).t().view(tensor.dtype)
    return select_rows(tensor, index)
