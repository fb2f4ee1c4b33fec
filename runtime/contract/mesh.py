"""The mesh of ranks, and the order in which their channels are opened.

NCCL creates a communicator at its first use, and blocks the host of each rank until all have arrived. So every rank
opens its channels before the first step, in the order of one list. The list is by pipeline ranks: some dozens of rows
for thousands of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Annotated, Literal, NamedTuple

from runtime.system.strict_json import MAX_INT, NumberRange, Pattern

MAX_RANKS = 1 << 20
Rank = Annotated[int, NumberRange(0, MAX_RANKS - 1)]
Columns = Literal[
    "each", "block", "node", "across", "member", "experts", "tensor", "context", "sequence", "slice", "all",
    "shard_all", "shard_member", "shard_experts", "shard_slice", "copies",
]  # fmt: skip
Degree = Annotated[int, NumberRange(1, MAX_RANKS)]


IN_COPY: Mapping[Columns, Columns] = {  # word in a group of columns that shares a copy → the word among all columns
    "shard_all": "all",
    "shard_slice": "slice",
    "shard_member": "member",
    "shard_experts": "experts",
}
OF_HOLDERS: tuple[Columns, ...] = ("all", "each", "slice", "member", "experts", "copies", *IN_COPY)


class Coordinates(NamedTuple):
    """The place of a rank in the mesh."""

    pp_rank: int
    column: int


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism. World ranks are pp-major, tp is innermost, then cp, and ep·etp divides dp·cp·tp.

    A column is a position in dp·cp·tp; it has one rank on each pipeline rank.

    `node`: ranks of an expert group per node, if a token is sent to each node once; 0 if rows are sent separately.
    `etp`: number of neighbouring ranks of an expert group that hold slices of the same experts.
    `sq`: number of ranks that share sequences and sum their counts of chosen experts: those of a context group, and of
    neighbouring tensor ranks.
    `copies`: number of groups of adjacent columns that each keep a copy of what is sharded during a step (zero = 2
    and 3).
    """

    pp: Degree
    dp: Degree
    ep: Degree
    tp: Degree
    cp: Degree
    node: Annotated[int, NumberRange(0, MAX_RANKS)] = 0
    etp: Degree = 1
    sq: Degree = 1
    copies: Degree = 1

    @property
    def world(self) -> int:
        return self.pp * self.columns

    @property
    def columns(self) -> int:
        """Number of ranks per pipeline rank."""
        return self.dp * self.tp * self.cp

    @property
    def shard_columns(self) -> int:
        """Number of adjacent columns that share one copy of what is sharded during a step."""
        return self.columns // self.copies

    @property
    def expert_group(self) -> int:
        """Number of ranks that together hold all experts of a layer once."""
        return self.ep * self.etp

    def rank(self, pipeline_rank: int, column: int) -> int:
        """Return the world rank of a pipeline rank and a column."""
        return pipeline_rank * self.columns + column

    def coordinates(self, rank: int) -> Coordinates:
        """Return the pipeline rank and the column of a world rank."""
        return Coordinates(*divmod(rank, self.columns))


class Opening(NamedTuple):
    """Channels that are opened together. They are disjoint, and every rank of `ranks` is in one.

    edge: pipeline messages from the first of `ranks` to the second; expert: exchanges of rows between expert ranks;
    counts: exchanges of their numbers of rows; tensor: all-gather and reduce-scatter of rows between tensor ranks;
    context: the same for parts of sequences between context ranks; choices: counts of chosen experts between ranks that
    share sequences; reduce: gradients and weights of buckets with the same holders; world: sums over all ranks.

    | columns | the columns of one channel |
    |---|---|
    | each | a single column |
    | block | one expert group |
    | node | one expert group on one node |
    | across | ranks of one expert group with the same index on its nodes |
    | member | ranks with the same index in their expert groups |
    | experts | ranks with the same experts, with any slice of them |
    | tensor | one tensor group |
    | context | one context group |
    | sequence | ranks that share sequences |
    | slice | ranks with the same index in their tensor groups |
    | all | all columns |
    | shard_all, shard_member, shard_experts, shard_slice | the columns of `all`, … in a group that shares a copy |
    | copies | columns with the same place in these groups |
    """

    kind: Literal["edge", "expert", "counts", "tensor", "context", "choices", "reduce", "world"]
    ranks: tuple[Rank, ...]  # pipeline ranks
    columns: Columns

    def channels(self, mesh: Mesh) -> Iterator[tuple[int, ...]]:
        """Yield the world ranks of each channel."""
        members = (self._channel_of_column(mesh, column) for column in range(mesh.columns))
        yield from dict.fromkeys(members)

    def channel_of(self, mesh: Mesh, rank: int) -> tuple[int, ...] | None:
        """Return the world ranks of the channel of a rank; None if it is in none."""
        pipeline_rank, column = mesh.coordinates(rank)
        return self._channel_of_column(mesh, column) if pipeline_rank in self.ranks else None

    def _channel_of_column(self, mesh: Mesh, column: int) -> tuple[int, ...]:
        """Return the channel that contains a column."""
        width, columns = mesh.columns, columns_of_channel(column, self.columns, mesh)
        return tuple(rank * width + member for rank in self.ranks for member in columns)


def columns_of_channel(column: int, kind: Columns, mesh: Mesh) -> Sequence[int]:
    """Return the columns of the channel that contains a column. `kind`: as in Opening."""
    width, group, tp = mesh.columns, mesh.expert_group, mesh.tp
    begin, end = 0, width
    if kind in IN_COPY:
        begin = column - column % mesh.shard_columns
        end = begin + mesh.shard_columns
    match IN_COPY.get(kind, kind):
        case "all":
            return range(begin, end)
        case "slice":
            return range(begin + column % tp, end, tp)
        case "member":
            return range(begin + column % group, end, group)
        case "experts":
            first = begin + column % group - column % mesh.etp
            return [start + index for start in range(first, end, group) for index in range(mesh.etp)]
        case "copies":
            return range(column % mesh.shard_columns, width, mesh.shard_columns)
        case "block":
            return range(column - column % group, column - column % group + group)
        case "node":
            node = mesh.node or group
            return range(column - column % node, column - column % node + node)
        case "across":
            node, first = mesh.node or group, column - column % group
            return range(first + column % node, first + group, node)
        case "tensor":
            return range(column - column % tp, column - column % tp + tp)
        case "context":
            first = column - column % (mesh.cp * tp)
            return range(first + column % tp, first + mesh.cp * tp, tp)
        case "sequence" if mesh.sq > 1:
            first = column - column % (mesh.cp * tp)
            sharing = mesh.sq // mesh.cp  # tensor ranks that share a sequence
            lowest = first + column % tp - column % sharing
            return [start + index for start in range(lowest, first + mesh.cp * tp, tp) for index in range(sharing)]
        case _:
            return range(column, column + 1)


def word_of(columns: Sequence[int], mesh: Mesh) -> Columns | None:
    """Return the word for the columns of a channel between holders of parameters, ascending, or None if there is none.

    If several words name the same columns, this is the first of OF_HOLDERS, so that equal channels have one name.
    """
    for word in OF_HOLDERS:
        members = columns_of_channel(columns[0], word, mesh)
        if members == columns or (len(members) == len(columns) and all(map(eq, members, columns))):
            return word
    return None


def most_ctas(kind: str, sms: int, hops: int = 1) -> int:
    """Return the number of NCCL thread blocks (one SM each) for a kind of channel, so that all channels that may run
    at once use no more than `sms` SMs (for `sms` ≥ 7, or 9 with two hops): at most four directions of messages, counts,
    rows, and sums of gradients. The sums get a quarter of what messages and counts leave, the rows the rest.

    `hops`: channels of a rank for rows, and for counts: two if rows go through nodes. The two share the thread blocks
    that one would get. `sms` 0 limits only counts, a few numbers, whose all-to-all would otherwise take as much memory
    as that of rows; 0 leaves the number to NCCL.
    """
    if not sms:
        return 1 if kind == "counts" else 0
    available = sms - 4 - hops
    sums = max(1, available // 4)
    return {"edge": 1, "counts": 1, "reduce": sums}.get(kind, max(1, (available - sums) // hops))


# --- The nodes of a plan, in plan.json

MAX_NODES = 1 << 20
MAX_SMS = 4096
Several = Annotated[int, NumberRange(1, MAX_NODES)]


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one kind, in the order in which ranks are placed on them: their number, and the devices of each.

    `sms`: streaming multiprocessors of a device; None for a CPU. `memory`: bytes of a device, of which a plan leaves
    `reserve` free.
    """

    nodes: Several
    devices: Several
    device: Annotated[str, Pattern(".{1,200}")]
    sms: Annotated[int, NumberRange(1, MAX_SMS)] | None
    memory: Annotated[int, NumberRange(1, MAX_INT)]
    reserve: Annotated[int, NumberRange(0, MAX_INT)] = 0

    @property
    def room(self) -> int:
        """Bytes of a device that a plan may use."""
        return max(0, self.memory - self.reserve)


def node_kind(cluster: Sequence[NodeKind], rank: int) -> NodeKind:
    """Return the kind of node of a world rank. IndexError if the cluster has no such rank."""
    for kind in cluster:
        rank -= kind.nodes * kind.devices
        if rank < 0:
            return kind
    raise IndexError("the cluster has no such rank")
