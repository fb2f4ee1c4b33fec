"""The exchange of an expert group that lies on several nodes: over the network a token goes to a node once.

A rank sends one copy of a token to each node that has experts of it: to the rank of the same index there, its column.
That rank forwards the copy inside its node to the ranks of the experts, a row for each expert. On the way back it adds
the rows of a token that come from its node, and sends one sum. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024,
section 3.2.2.

N nodes of M ranks · E experts of the layer · T tokens · S rows of a rank, one for each choice of a token, by expert
P copies that a rank forwards · X rows that it forwards
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
)
from runtime.contract.names import ExchangeName


def by_node(members: Sequence[int], on_node: int) -> tuple[tuple[int, ...], ...]:
    """The members of an expert group, ascending world ranks, on each of their nodes, of so many each."""
    return tuple(tuple(members[at : at + on_node]) for at in range(0, len(members), on_node))


@dataclass(frozen=True)
class NodeRoute(Route):
    """Who sends how much to whom in one layer and micro-batch."""

    sent: tuple[int, ...]  # rows of this rank, to each node
    received: RowLayout  # of its experts, and where they lie here
    copies_sent: tuple[int, ...]  # to each node
    copies: tuple[int, ...]  # that came from each rank of the column, to be forwarded
    rows: tuple[tuple[int, ...], ...]  # to be forwarded, [rank of the node][rank of the column that they come from]

    @property
    def forwarded(self) -> int:
        """X."""
        return sum(map(sum, self.rows))


@dataclass
class TwoHops:
    """A tensor on its way: what is under way, and what starts the second hop from what the first one brings."""

    first: Pending
    then: Callable[[Tensor], Pending]


Moved = tuple[TwoHops, Tensor]  # and what is to come


@dataclass(frozen=True)
class Hops:
    """The swaps of a rank with its column and inside its node; None where it is alone there."""

    column: Swap | None
    node: Swap | None

    def swap(self, at: Literal["column", "node"], name: ExchangeName, given: Rows, taken: Rows) -> Pending:
        """Start to move rows."""
        swap, works = getattr(self, at), list[Work]()
        if swap is None:
            taken.fill(given)
        else:
            works = swap.start(name, given, taken)
        return Pending(works, taken.tensor, keep=(given.tensor,))


@dataclass(frozen=True)
class NodePlace:
    """Where a rank stands in its expert group: on which of `nodes` nodes. `tokens`: T, those of a micro-batch."""

    size: int  # ranks of the group
    nodes: int
    node: int
    tokens: int

    @property
    def on_node(self) -> int:
        """Ranks of the group on each node."""
        return self.size // self.nodes


@dataclass
class Counts:
    """The counts of a layer and micro-batch on their way, and the tables that are made of them."""

    name: ExchangeName
    hops: Hops
    place: NodePlace
    num_experts: int
    words: Pending
    made: tuple[Tensor, ...] = ()  # of each local expert the rows, copies_S, forwards_2X with more columns behind

    def wait(self) -> Tensor:
        """All numbers that the host must know, in one tensor, as `route` reads them."""
        place, words = self.place, self.words.wait()
        counts_NE, tokens_NS = words[:, 1 : 1 + self.num_experts], words[:, 1 + self.num_experts :]
        counts = counts_NE.unflatten(1, (place.nodes, place.on_node, -1))  # of each source: [node, rank, expert]
        mine = counts[:, place.node].transpose(0, 1).flatten(1)
        stamps = words[:1, :1].expand(place.on_node, 1)
        mine = torch.cat([stamps, mine], 1)
        pending = self.hops.swap("node", self.name, _each(mine), _each(torch.empty_like(mine)))
        copies_S, sent = copies_of(place, counts[place.node].sum((1, 2)), tokens_NS[place.node])
        forwards, forwarded = forwards_of(place, counts.sum(3), tokens_NS)
        theirs = pending.wait()
        counts_RE = theirs[:, 1:].unflatten(1, (place.nodes, -1)).transpose(0, 1).flatten(0, 1)
        self.made = counts_RE.sum(0), copies_S, forwards
        stamps = torch.cat([words[:, 0], theirs[:, 0]])
        return torch.cat([stamps, counts_RE.flatten(), *sent, *forwarded])

    def route(self, numbers: Sequence[int], alignment: int) -> NodeRoute:
        """The route of `numbers`. ChannelError: members of the group are in different exchanges."""
        place, left = self.place, iter(numbers)

        def take(count: int) -> tuple[int, ...]:
            return tuple(islice(left, count))

        stamps = take(place.nodes + place.on_node)
        if len({*stamps}) > 1:
            raise ChannelError(f"{self.name}: members of the expert group are in different exchanges: {stamps}")
        layout = RowLayout(tuple(take(self.num_experts // place.size) for _ in range(place.size)), alignment)
        sent, copies_sent, copies = (take(place.nodes) for _ in range(3))
        rows = tuple(take(place.nodes) for _ in range(place.on_node))
        return NodeRoute(layout.num_rows, sent, layout, copies_sent, copies, rows)


def copies_of(place: NodePlace, rows_N: Tensor, tokens_S: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """rows_N (to each node), tokens_S -> copies_S, and of each node the rows and the copies that are sent to it.

    Of the rows of a token on a node the first is copied; copies are in the order of nodes, then of tokens, and 0 fills
    the rest.
    """
    row_S = torch.arange(tokens_S.shape[0], device=tokens_S.device)
    node_S = torch.searchsorted(rows_N.cumsum(0), row_S, right=True)
    first = torch.full((place.nodes * place.tokens,), row_S.shape[0], device=row_S.device)
    first.scatter_reduce_(0, node_S * place.tokens + tokens_S, row_S, "amin")
    sent = first < row_S.shape[0]
    at = torch.where(sent, sent.cumsum(0) - 1, row_S.shape[0])  # behind the end: not sent
    copies_S = row_S.new_zeros(row_S.shape[0] + 1).scatter_(0, at, first)[:-1].clone()
    return copies_S, (rows_N, sent.view(place.nodes, -1).sum(1))


def forwards_of(place: NodePlace, rows: Tensor, tokens_NS: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """rows (of each source of the column, [node, rank]), tokens_NS -> forwards_2X with more columns behind, and the
    copies of each source and the rows [rank, source].

    A source's copies are in the order of tokens, its rows in that of experts.
    """
    here_NM = rows[:, place.node]
    at_NS = torch.arange(tokens_NS.shape[1], device=rows.device) - rows[:, : place.node].sum((1, 2))[:, None]
    is_here = (at_NS >= 0) & (at_NS < here_NM.sum(1)[:, None])
    token_NS = torch.where(is_here, tokens_NS, place.tokens)
    number_NT = rows.new_zeros(place.nodes, place.tokens + 1).scatter_(1, token_NS, 1)[:, :-1].cumsum(1)
    copies_N = number_NT[:, -1]
    copy_NS = number_NT.gather(1, token_NS.clamp(max=place.tokens - 1)) - 1 + _before(copies_N)[:, None]
    rank_NS = torch.searchsorted(here_NM.cumsum(1), at_NS, right=True).clamp(max=place.on_node - 1)
    first_NM = _before(here_NM.t().flatten()).view(place.on_node, place.nodes).t()
    in_source_NM = here_NM.cumsum(1) - here_NM
    place_NS = at_NS + (first_NM - in_source_NM).gather(1, rank_NS)
    arrival_NS = at_NS + _before(here_NM.sum(1))[:, None]
    at = torch.where(is_here, place_NS, is_here.numel()).flatten()
    forwards = rows.new_zeros(2, is_here.numel() + 1)
    forwards.scatter_(1, at.expand(2, -1), torch.stack([copy_NS.flatten(), arrival_NS.flatten()]))
    return forwards, (copies_N, here_NM.t().flatten())


@dataclass
class NodeExchange:
    """The exchanges of one expert group, each in two hops. The second one starts when the exchange is waited for.

    Rows lie with their experts as those of `RankExchange`. Sums are over the experts of a node in their order, made in
    FP32 if the rows are narrower, and rounded to the rows' dtype once.
    """

    rows: Hops
    counts: Hops
    place: NodePlace
    reads: HostReads
    alignment: int = 1
    sequence: int = 0
    pending: dict[ExchangeName, tuple[Pending, ...]] = field(default_factory=dict)
    counted: dict[ExchangeName, Counts] = field(default_factory=dict)  # under way
    hops: dict[str, tuple[TwoHops, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.place.size

    def start_counts(self, name: ExchangeName, counts_E: Tensor, *more: Tensor) -> None:
        """Tell the column how many rows each expert gets, and of which token each row is. `more`: order_S."""
        (order_S,) = more
        num_experts, num_rows = counts_E.shape[0], order_S.shape[0]
        words = counts_E.new_empty(1 + num_experts + num_rows)
        words[0] = self.sequence << 32 | digest(name)
        words[1 : 1 + num_experts] = counts_E
        words[1 + num_experts :] = order_S // (num_rows // self.place.tokens)
        given = words.expand(self.place.nodes, -1)
        pending = self.counts.swap("column", name, _each(given), _each(torch.empty_like(given)))
        self.sequence += 1
        self.counted[name] = Counts(name, self.counts, self.place, num_experts, pending)
        self.pending[name] = (pending,)

    def wait_counts(self, name: ExchangeName) -> tuple[NodeRoute, Tensor, Tensor, Tensor]:
        """The route, and offsets_L: where the rows of each local expert end among those received (int32).

        copies_S: which row is that of each copy that is sent, the rest 0. forwards_2X: of each row that is forwarded,
        rank of the node after rank, which copy it is, and where its gate weight is among those that came.
        """
        del self.pending[name]
        counted = self.counted.pop(name)
        numbers = self.reads.read(counted)
        route = counted.route(numbers, self.alignment)
        for table in counted.made:
            if table.is_cuda:  # made on the stream of reads
                table.record_stream(torch.cuda.current_stream())
        loads_L, copies_S, forwards = counted.made
        offsets_L = ends_of(loads_L, self.alignment).to(torch.int32)
        return route, offsets_L, copies_S, forwards[:, : route.forwarded].clone()

    # ---- rows

    def start(self, name: ExchangeName, tensors: Sequence[Tensor], route: Route, forward: bool) -> None:
        """Start moving the rows of each tensor; a tensor of one dimension has a value for each row, the rows of others
        are alike for the experts of a token, or are to be added. The last two: copies_S and forwards_2X."""
        *moved, copies_S, forwards_2X = tensors
        assert isinstance(route, NodeRoute)
        copies = copies_S[: sum(route.copies_sent)]
        go = self._to_experts if forward else self._back
        hops, results = zip(*(go(name, tensor, route, copies, forwards_2X) for tensor in moved), strict=True)
        self.hops[name] = hops
        self.sequence += 1
        self.pending[name] = tuple(Pending([], held) for held in (*results, *(hop.first.result for hop in hops)))

    def wait(self, name: ExchangeName) -> tuple[Tensor, ...]:
        """What came, and what was forwarded on the way, tensor after tensor."""
        seconds = [hop.then(hop.first.wait()) for hop in self.hops.pop(name)]
        for second in seconds:
            second.wait()
        return tuple(held.result for held in self.pending.pop(name))

    def _to_experts(
        self, name: ExchangeName, tensor: Tensor, route: NodeRoute, copies: Tensor, forwards: Tensor
    ) -> Moved:
        if tensor.dim() == 1:
            given, counts, source = tensor, [sum(column) for column in zip(*route.rows, strict=True)], forwards[1]
            first = self.rows.swap("column", name, Rows(given, route.sent), _room(tensor, counts))
        else:
            given, source = _select(tensor, copies), forwards[0]
            first = self.rows.swap("column", name, Rows(given, route.copies_sent), _room(tensor, route.copies))
        result = route.received.empty(tensor)

        def then(forwarded: Tensor) -> Pending:
            rows = Rows(_select(forwarded, source), tuple(map(sum, route.rows)))
            return self.rows.swap("node", name, rows, self._with_experts(result, route))

        return TwoHops(first, then), result

    def _back(self, name: ExchangeName, tensor: Tensor, route: NodeRoute, copies: Tensor, forwards: Tensor) -> Moved:
        rows = _room(tensor, [sum(of_rank) for of_rank in route.rows])
        first = self.rows.swap("node", name, self._with_experts(tensor, route), rows)
        result = tensor.new_empty(sum(route.sent), *tensor.shape[1:])

        def then(forwarded: Tensor) -> Pending:
            if tensor.dim() == 1:
                values = torch.empty_like(forwarded).scatter_(0, forwards[1], forwarded)
                counts = tuple(sum(column) for column in zip(*route.rows, strict=True))
                return self.rows.swap("column", name, Rows(values, counts), Rows(result, route.sent))
            sums = sums_of(forwarded, forwards[0], sum(route.copies))
            came = self.rows.swap("column", name, Rows(sums, route.copies), _room(tensor, route.copies_sent))
            return Pending([_PlacedSums(came, copies, result)], result)

        return TwoHops(first, then), result

    def _with_experts(self, tensor: Tensor, route: NodeRoute) -> Rows:
        """The rows that lie by expert, of which those of a column go through its rank of this node."""
        layout = route.received
        on_node = self.place.on_node
        columns = tuple(tuple(range(rank, self.size, on_node)) for rank in range(on_node))
        counts = tuple(sum(layout.of_sources[source] for source in column) for column in columns)
        return Rows(tensor, counts, layout, columns)


@dataclass(frozen=True)
class _PlacedSums:
    """Sums that come, one for each copy that was sent. They go to the row that was copied; the token's other rows on
    that node are zero, so that adding a token's rows adds its nodes."""

    came: Pending
    copies: Tensor
    result: Tensor

    def wait(self) -> None:
        self.result.zero_().index_copy_(0, self.copies, self.came.wait())


def exchange_of(
    rank: int, members: tuple[int, ...], on_node: int, links: Links, reads: HostReads, alignment: int, tokens: int
) -> NodeExchange:
    """The exchange of a rank's expert group, that has so many ranks on each node; `tokens`: of a micro-batch."""
    groups = by_node(members, on_node)
    node = next(index for index, group in enumerate(groups) if rank in group)
    column = tuple(group[groups[node].index(rank)] for group in groups)
    inside = groups[node]
    rows, counts = (
        Hops(*(links.swap(kind, group) if len(group) > 1 else None for group in (column, inside)))
        for kind in get_args(SwapKind)
    )
    return NodeExchange(rows, counts, NodePlace(len(members), len(groups), node, tokens), reads, alignment)


def sums_of(rows_XD: Tensor, copy_X: Tensor, num_copies: int) -> Tensor:
    """rows_XD, copy_X -> sums_PD of the rows of each copy, in their order: deterministic. A copy has a row at least."""
    if num_copies == 0:
        return rows_XD.new_empty(0, rows_XD.shape[1])
    rows_P = copy_X.new_zeros(num_copies).scatter_add_(0, copy_X, torch.ones_like(copy_X))
    first_P = _before(rows_P)
    return embedding_bag(torch.argsort(copy_X, stable=True), rows_XD, first_P, mode="sum")


def _before(counts: Tensor) -> Tensor:
    """The sum of all counts before each."""
    return counts.cumsum(0) - counts


def _each(words: Tensor) -> Rows:
    """A row for each member."""
    return Rows(words, (1,) * words.shape[0])


def _room(like: Tensor, counts: Sequence[int]) -> Rows:
    """Rows as those of `like` that are yet to come, so many from each member."""
    return Rows(empty_rows(like, sum(counts)), tuple(counts))


def _select(tensor: Tensor, index: Tensor) -> Tensor:
    """Some rows of a tensor, which lie column by column if its rows do."""
    if tensor.dim() == 2 and tensor.shape[1] > 1 and tensor.stride(0) == 1:
        return raw(tensor).t().index_select(1, index).t().view(tensor.dtype)
    return raw(tensor).index_select(0, index).view(tensor.dtype)
