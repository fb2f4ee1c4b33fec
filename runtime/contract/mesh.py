"""The ranks of a world, and the order in which their channels are opened.

A channel is opened by its first use, and on GPUs that holds the host of each of its ranks until all have come: NCCL
makes a communicator when it is first used. So every rank opens its channels before the first step, all of them in the
order of one list. The list is by pipeline ranks: some dozens of rows for thousands of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from runtime.system.strict_json import MAX_INT, NumberRange, Pattern

MAX_RANKS = 1 << 20
Rank = Annotated[int, NumberRange(0, MAX_RANKS - 1)]
Columns = Literal[
    "each", "block", "node", "across", "member", "experts", "tensor", "context", "sequence", "slice", "all"
]  # fmt: skip
Degree = Annotated[int, NumberRange(1, MAX_RANKS)]


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism. World ranks are pp-major, tp is innermost, cp is around it, and ep·etp divides dp·cp·tp.

    A column is what one rank of each pipeline rank has in common: its place in dp·cp·tp.

    `node`: ranks of an expert group on each of its nodes, where a token goes to a node once; 0: rows go by themselves.
    `etp`: neighbouring ranks of an expert group that have the slices of the same experts.
    `sq`: ranks that have parts of the same sequences and put together how often each expert is chosen in them: those of
    a context group, and of neighbouring tensor ranks.
    """

    pp: Degree
    dp: Degree
    ep: Degree
    tp: Degree
    cp: Degree
    node: Annotated[int, NumberRange(0, MAX_RANKS)] = 0
    etp: Degree = 1
    sq: Degree = 1

    @property
    def world(self) -> int:
        return self.pp * self.columns

    @property
    def columns(self) -> int:
        """Ranks of a pipeline rank."""
        return self.dp * self.tp * self.cp

    @property
    def expert_group(self) -> int:
        """Ranks that have all experts of a layer once."""
        return self.ep * self.etp

    def rank(self, pipeline_rank: int, column: int) -> int:
        """The world rank of a pipeline rank and a column."""
        return pipeline_rank * self.columns + column

    def coordinates(self, rank: int) -> tuple[int, int]:
        """The pipeline rank and the column of a world rank."""
        return divmod(rank, self.columns)


class Opening(NamedTuple):
    """Channels that are opened together: none has a rank in common with another, and every rank of `ranks` is in one.

    edge: messages of the pipeline, from the first of `ranks` to the second; expert: exchanges between expert ranks;
    counts: of how many rows these have; tensor: rows that tensor ranks put together and take apart; context: parts of
    sequences that context ranks put together and take apart; choices: how often each expert is chosen in sequences
    that several ranks have parts of; reduce: gradients and weights of buckets with the same holders; world: sums over
    all ranks.

    | columns | which of them a channel has |
    |---|---|
    | each | one of them |
    | block | those of one expert group |
    | node | those of one expert group on one node |
    | across | those of one expert group at one place of its nodes |
    | member | those at one place of their expert groups |
    | experts | those that have the same experts, whichever slice of them |
    | tensor | those of one tensor group |
    | context | those of one context group |
    | sequence | those that have parts of the same sequences |
    | slice | those at one place of their tensor groups |
    | all | all of them |
    """

    kind: Literal["edge", "expert", "counts", "tensor", "context", "choices", "reduce", "world"]
    ranks: tuple[Rank, ...]  # pipeline ranks
    columns: Columns

    def channels(self, mesh: Mesh) -> Iterator[tuple[int, ...]]:
        """The world ranks of each channel."""
        found = (self._with(mesh, column) for column in range(mesh.columns))
        yield from dict.fromkeys(found)

    def channel_of(self, mesh: Mesh, rank: int) -> tuple[int, ...] | None:
        """The world ranks of the channel that a rank is in; None: it is in none."""
        pipeline_rank, column = mesh.coordinates(rank)
        return self._with(mesh, column) if pipeline_rank in self.ranks else None

    def _with(self, mesh: Mesh, column: int) -> tuple[int, ...]:
        """The channel that has a column."""
        columns = columns_with(column, self.columns, mesh)
        return tuple(rank * mesh.columns + each for rank in self.ranks for each in columns)


def columns_with(column: int, kind: Columns, mesh: Mesh) -> Sequence[int]:
    """The columns of a channel that has a column; kinds as in Opening."""
    width, group, tp, node = mesh.columns, mesh.expert_group, mesh.tp, mesh.node or mesh.expert_group
    first = column - column % group
    of_node, of_data = column - column % node, column - column % (mesh.cp * tp)
    sharing = max(1, mesh.sq // mesh.cp)  # tensor ranks that have parts of one sequence
    lowest = of_data + column % tp - column % sharing
    same = column % group - column % mesh.etp
    sharers = [each + at for each in range(lowest, of_data + mesh.cp * tp, tp) for at in range(sharing)]
    found: Mapping[Columns, Sequence[int]] = {
        "each": range(column, column + 1),
        "block": range(first, first + group),
        "node": range(of_node, of_node + node),
        "across": range(first + column % node, first + group, node),
        "member": range(column % group, width, group),
        "experts": [at + each for at in range(same, width, group) for each in range(mesh.etp)],
        "tensor": range(column - column % tp, column - column % tp + tp),
        "context": range(of_data + column % tp, of_data + mesh.cp * tp, tp),
        "sequence": sharers if mesh.sq > 1 else [column],
        "slice": range(column % tp, width, tp),
        "all": range(width),
    }
    return found[kind]


# --- The nodes that a plan is for, as plan.json lists them

MAX_NODES = 1 << 20
MAX_SMS = 4096
Several = Annotated[int, NumberRange(1, MAX_NODES)]


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one kind, in the order in which ranks are laid on them: how many, and the devices of each.

    `sms`: streaming multiprocessors of a device; None: it is a CPU. `memory`: bytes of a device.
    """

    nodes: Several
    devices: Several
    device: Annotated[str, Pattern(".{1,200}")]
    sms: Annotated[int, NumberRange(1, MAX_SMS)] | None
    memory: Annotated[int, NumberRange(1, MAX_INT)]


def node_kind(cluster: Sequence[NodeKind], rank: int) -> NodeKind:
    """The kind of node that a world rank is laid on. IndexError where the cluster has no such rank."""
    for kind in cluster:
        rank -= kind.nodes * kind.devices
        if rank < 0:
            return kind
    raise IndexError("the cluster has no such rank")
