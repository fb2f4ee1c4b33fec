"""The state of a rank: parameters, gradient accumulators, optimizer state, balancing biases.

Parameters with the same holders and stages share one flat buffer (a bucket): a reduction or an update is one call.
Segments read views: one tensor per name, with the experts of a rank stacked along dimension 0. The optimizer updates
master weights: slices of the same buffer if the dtype is the same, else separate tensors, which are then rounded for
segments.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from runtime import contract
from runtime.checkpoint.loading import cut
from runtime.comm.transport import Channel, Shares
from runtime.contract.names import BIAS, TABLE, StoredName

# --- Initial values of parameters and tables: a function of (seed, logical name) alone, for any number of ranks

TABLE_ROWS = 4096  # drawn at a time


def initial_value(
    seed: int, name: str, shape: Sequence[int], init: float | None, *, uniform: bool = False, mean: float = 0.0
) -> Tensor:
    """Draw the initial value of a parameter in float32, from a generator of (seed, name): normal, or with `uniform`
    uniform, with standard deviation `init` around `mean`. Ones if `init` is None."""
    if init is None:
        return torch.ones(tuple(shape))
    values, generator = torch.empty(tuple(shape)), _generator(seed, name)
    if uniform:
        bound = math.sqrt(3) * init
        return values.uniform_(mean - bound, mean + bound, generator=generator)
    return values.normal_(mean, init, generator=generator)


def initial_table(seed: int, name: str, shape: Sequence[int], below: int) -> Tensor:
    """Draw the initial value of a table (int32). Each row has the first numbers of a random permutation of
    range(below), from a generator of (seed, name)."""
    rows, columns = shape
    generator = _generator(seed, name)
    sizes = (min(TABLE_ROWS, rows - first) for first in range(0, rows, TABLE_ROWS))
    drawn = (torch.rand((size, below), generator=generator) for size in sizes)
    return torch.cat([numbers.argsort(dim=1, stable=True)[:, :columns].int() for numbers in drawn])


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


# --- state

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}


@dataclass(frozen=True)
class BucketEntry:
    """A logical parameter in a bucket, or a slice of it: elements [start, end) of the flat buffer."""

    parameter: contract.HeldParameter
    start: int
    end: int

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logical parameter."""
        return self.parameter.shape

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the held slice of the logical parameter."""
        return cut(tensor, self.parameter.slice)


@dataclass(frozen=True)
class OwnedPiece:
    """Elements of a bucket whose optimizer state is on this rank: a slice of it, or a whole parameter."""

    part: slice  # elements of the bucket's flat tensors
    # The shape of each update: of the parameter, of each of its matrices, or flat.
    shapes: tuple[tuple[int, ...], ...]
    master: Tensor  # flat, as are the tensors of state; offloaded tensors are on the CPU
    state: Mapping[str, Tensor]  # by name, in the order of the optimizer's arguments
    average: Tensor | None = None  # moving average of the weights, on the CPU


@dataclass
class FlatBucket:
    """Parameters with the same holders and stages. `owned`: the pieces whose optimizer state and master weights are on
    this rank. `shares`: the parts that each holder owns, empty if each of them owns all.

    If it has `sites`, gradients are sharded over the `dividers`, the holders in one group of columns on one pipeline
    rank, and so are weights if `is_gathered`: whole flat tensors exist for one segment at a time
    (runtime/step/sharding.py). The `peers` keep the same shard, one in each such group, and each owns a share of it."""

    name: str
    holders: tuple[int, ...]
    stages: tuple[int, ...]  # that use the parameters
    entries: tuple[BucketEntry, ...]
    decayed: int  # elements [0, decayed) have weight decay
    owned: tuple[OwnedPiece, ...]
    shares: Shares
    parameters: Tensor  # as segments read them
    gradients: Tensor
    has_masters: bool  # whether master weights are separate from the weights that segments read
    padded: int  # elements of the whole bucket, with padding
    peers: tuple[int, ...]  # the holders that keep the same gradients
    kept_span: slice  # elements of the gradients, and of gathered weights, that this rank keeps
    sites: tuple[str, ...] = ()
    dividers: tuple[int, ...] = ()
    is_gathered: bool = False
    is_of_rest: bool = False  # whether the second kind of optimizer updates it
    is_still: bool = False  # whether it is not trained in this phase of the run: it has no gradients

    @property
    def size(self) -> int:
        return self.entries[-1].end

    @property
    def is_reduced(self) -> bool:
        """Whether several holders keep the same gradients, which are then summed once a step."""
        return len(self.peers) > 1 and not self.is_still

    @property
    def shares_of_peers(self) -> Shares:
        """The parts that each peer owns, relative to the shard that they keep."""
        shares = [self.shares[self.holders.index(peer)] for peer in self.peers if self.shares]
        return tuple(tuple(_relative_slice(self.kept_span, part) for part in share) for share in shares)

    def weights_of(self, part: slice) -> Tensor:
        """Return the weights that segments read, for elements that this rank keeps."""
        return self.parameters[_relative_slice(self.kept_span, part) if self.is_gathered else part]

    def gradients_of(self, part: slice) -> Tensor:
        """Return the gradients of elements that this rank keeps."""
        return self.gradients[_relative_slice(self.kept_span, part)]

    def owned_part(self, entry: BucketEntry) -> tuple[slice, OwnedPiece, slice] | None:
        """Return the part of a parameter that this rank owns: its elements, the piece, and the slice of the piece."""
        for piece in self.owned:
            start, end = max(entry.start, piece.part.start), min(entry.end, piece.part.stop)
            if start < end:
                of_entry = slice(start - entry.start, end - entry.start)
                return of_entry, piece, slice(start - piece.part.start, end - piece.part.start)
        return None

    def set_weight(self, entry: BucketEntry, value: Tensor) -> None:
        """Set a parameter to the value of the logical one: exact in the master weights, rounded in the weights that
        segments read. A moving average starts with this value."""
        flat = entry.cut(value).reshape(-1)
        span = self.kept_span if self.is_gathered else slice(entry.start, entry.end)
        start, end = max(entry.start, span.start), min(entry.end, span.stop)
        if start < end:
            self.weights_of(slice(start, end)).copy_(flat[start - entry.start : end - entry.start])
        if owned := self.owned_part(entry):
            of_entry, piece, of_piece = owned
            piece.master[of_piece].copy_(flat[of_entry])
            if piece.average is not None:
                piece.average[of_piece].copy_(flat[of_entry])

    @property
    def parameters_name(self) -> str:
        """Name of the flat tensor of parameters."""
        return f"parameters {self.name}"

    @property
    def gradients_name(self) -> str:
        """Name of the flat tensor of gradients."""
        return f"gradients {self.name}"


@dataclass
class State:
    """The state of one rank. `parameters` and `gradients` are namespaces of tensors: layers.3.ffn.up → layers_3_ffn_up.

    `frozen` weights do not change: they have neither gradients nor optimizer state.
    """

    buckets: tuple[FlatBucket, ...]
    frozen: tuple[FlatBucket, ...]
    biases: dict[str, Tensor]
    tables: dict[str, Tensor]
    parameters: SimpleNamespace
    gradients: SimpleNamespace

    @property
    def device(self) -> torch.device:
        return self.all_buckets[0].parameters.device

    @property
    def untrained(self) -> dict[StoredName, Tensor]:
        """Balancing biases and tables, by name in a checkpoint."""
        biases = {StoredName.of(BIAS, name): bias for name, bias in self.biases.items()}
        return biases | {StoredName.of(TABLE, name): table for name, table in self.tables.items()}

    @property
    def all_buckets(self) -> tuple[FlatBucket, ...]:
        """The buckets of all weights."""
        return (*self.buckets, *self.frozen)

    def entries(self) -> Iterator[tuple[FlatBucket, BucketEntry]]:
        """Return every trained logical parameter, with its bucket."""
        return ((bucket, entry) for bucket in self.buckets for entry in bucket.entries)

    def logical(self, flat: Callable[[FlatBucket], Tensor]) -> Iterator[tuple[FlatBucket, BucketEntry, Tensor]]:
        """Yield the held slice of every trained logical parameter, as a view of the flat tensor `flat(bucket)`."""
        for bucket in self.buckets:
            buffer = flat(bucket)
            for e in bucket.entries:
                yield bucket, e, buffer[e.start : e.end].view(e.parameter.held_shape)


Allocate = Callable[[str, int, torch.dtype], Tensor | None]  # (name, elements, dtype) → zeros; None: allocate anywhere


def build_state(plan: contract.RunPlan, rank: int, device: torch.device, allocate: Allocate = lambda *_: None) -> State:
    """Allocate and initialise the state of a rank. Values are a function of (seed, logical name) alone.

    `allocate`: allocates the flat tensors that are summed and gathered over several holders.
    """
    buckets = tuple(_bucket(b, rank, plan, device, allocate) for b in plan.buckets if rank in b.holders)
    frozen = tuple(_frozen_bucket(b, plan, device) for b in plan.frozen if rank in b.holders)
    biases = {
        b.name: torch.zeros(b.shape, dtype=DTYPES[plan.precision.gradients], device=device)
        for b in plan.biases
        if rank in b.holders
    }
    tables = {
        b.name: initial_table(plan.train.seed, b.name, b.shape, b.below).to(device)
        for b in plan.tables
        if rank in b.holders
    }
    slots = {
        f"{layer.name}.ffn.router.slots": torch.tensor(layer.slots, device=device)
        for layer in plan.moe_layers
        if layer.slots is not None
    }
    ungathered = [bucket for bucket in (*buckets, *frozen) if not bucket.is_gathered]
    parameters = {name: t for b in ungathered for name, t in views(b, b.parameters)} | biases | tables | slots
    gradients = {name: t for b in buckets if not (b.sites or b.is_still) for name, t in views(b, b.gradients)}
    state = State(buckets, frozen, biases, tables, namespace(parameters), namespace(gradients))
    for bucket, entry in state.entries():
        p = entry.parameter
        bucket.set_weight(
            entry, initial_value(plan.train.seed, p.name, p.shape, p.init, uniform=p.uniform, mean=p.mean)
        )
    return state


def shared_flats(plan: contract.RunPlan, rank: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return name → (holders, bytes) of the flat tensors of a rank that are summed or gathered after the backward."""
    flats = {}
    for bucket in (bucket for bucket in plan.buckets if rank in bucket.holders and not bucket.still):
        elements, peers = padded_size(bucket, plan.zero), plan.peers(bucket, rank)
        of_peers = peers, elements * len(peers) // len(bucket.holders) if bucket.sites else elements
        of_weights = of_peers if plan.gathers(bucket) else (bucket.holders, elements)
        for name, dtype, (ranks, size), is_shared in (
            ("parameters", plan.precision.parameter, of_weights, plan.zero),
            ("gradients", plan.precision.gradients, of_peers, True),
        ):
            if len(ranks) > 1 and is_shared:
                flats[f"{name} {bucket.name}"] = (ranks, size * DTYPES[dtype].itemsize)
    return flats


def largest_parts(plan: contract.RunPlan) -> dict[Channel, int]:
    """Return channel → bytes of the largest message: for channels over which buckets are sharded, a shard of gradients
    or weights; for tensor and context groups, the rows of one rank."""
    size = max(DTYPES[dtype].itemsize for dtype in (plan.precision.parameter, plan.precision.gradients))
    largest: dict[Channel, int] = {}
    for bucket in plan.buckets:
        of_rank = itertools.groupby(
            bucket.holders if bucket.sites else (), lambda rank: rank // plan.mesh.shard_columns
        )
        for dividers in (tuple(ranks) for _, ranks in of_rank):
            part = padded_size(bucket, plan.zero) // len(dividers) * size
            channel = Channel("reduce", dividers)
            largest[channel] = max(largest.get(channel, 0), part)
    rows = plan.train.micro_batch * plan.train.sequence // (plan.mesh.cp * plan.mesh.tp)
    row = plan.model.hidden * DTYPES[plan.precision.compute].itemsize
    sizes = {"tensor": rows * row, "context": plan.sequence_part, "choices": plan.choices_part}
    return largest | {
        Channel(opening.kind, ranks): sizes[opening.kind]
        for opening in plan.openings
        if opening.kind in sizes
        for ranks in opening.channels(plan.mesh)
    }


def padded_size(bucket: contract.PlannedBucket, zero: int) -> int:
    """Return the elements of a bucket's flat tensors, padded to equal shards if ZeRO may cut anywhere."""
    elements = sum(parameter.held_elements for parameter in bucket.parameters)
    shards = len(bucket.holders) if zero and not bucket.owners else 1
    return -(-elements // shards) * shards


def _bucket(
    planned: contract.PlannedBucket, rank: int, plan: contract.RunPlan, device: torch.device, allocate: Allocate
) -> FlatBucket:
    entries = _entries(planned)
    holders, precision, padded = planned.holders, plan.precision, padded_size(planned, plan.zero)
    peers, dividers = plan.peers(planned, rank), plan.dividers(planned, rank)
    num_shares = len(peers) if planned.sites else 1  # shares of each shard
    shares = _shares(planned, entries, padded, num_shares) if plan.zero and len(holders) > 1 else ()

    def zeros(extent: int, dtype: str, name: str = "") -> Tensor:
        placed = allocate(f"{name} {planned.name}", extent, DTYPES[dtype]) if name else None
        return torch.zeros(extent, dtype=DTYPES[dtype], device=device) if placed is None else placed

    gathered, kept_span = plan.gathers(planned), slice(0, padded)
    if planned.sites:
        extent, index = padded // len(dividers), dividers.index(rank)
        kept_span = slice(index * extent, (index + 1) * extent)
    weight_span = kept_span if gathered else slice(0, padded)
    parameters = zeros(weight_span.stop - weight_span.start, precision.parameter, "parameters")
    mixed = precision.master != precision.parameter

    def stored_zeros(kind: str, extent: int, dtype: str) -> Tensor:
        return host_zeros(extent, DTYPES[dtype], device) if kind in plan.host.offload else zeros(extent, dtype)

    def piece(part: slice, shapes: tuple[tuple[int, ...], ...]) -> OwnedPiece:
        extent = part.stop - part.start
        of_weights = parameters[_relative_slice(weight_span, part)]
        master = stored_zeros("master", extent, precision.master) if mixed else of_weights
        state = {
            moment.name: stored_zeros("moments", extent, moment.dtype) for moment in plan.optimizer.state_of(planned)
        }
        average = torch.zeros(extent, dtype=DTYPES[plan.train.ema.dtype]) if plan.train.ema else None
        return OwnedPiece(part, shapes, master, state, average)

    if plan.optimizer.is_whole(planned):
        mine = [e for i, e in enumerate(entries) if not shares or holders[planned.owners[i]] == rank]
        owned = tuple(piece(slice(e.start, e.end), e.parameter.updated_shapes) for e in mine)
    else:
        (part,) = shares[holders.index(rank)] if shares else (slice(0, padded),)
        owned = (piece(part, ((part.stop - part.start,),)),)
    return FlatBucket(
        name=planned.name,
        holders=holders,
        stages=planned.stages,
        entries=tuple(entries),
        decayed=max((e.end for e in entries if e.parameter.decay), default=0),
        owned=owned,
        shares=shares,
        parameters=parameters,
        gradients=zeros(0 if planned.still else kept_span.stop - kept_span.start, precision.gradients, "gradients"),
        has_masters=mixed,
        padded=padded,
        peers=peers,
        kept_span=kept_span,
        sites=planned.sites,
        dividers=dividers,
        is_gathered=gathered,
        is_of_rest=planned.rest,
        is_still=planned.still,
    )


def _entries(planned: contract.PlannedBucket) -> list[BucketEntry]:
    entries, start = [], 0
    for p in planned.parameters:
        end = start + p.held_elements
        entries.append(BucketEntry(p, start, end))
        start = end
    return entries


def _frozen_bucket(planned: contract.PlannedBucket, plan: contract.RunPlan, device: torch.device) -> FlatBucket:
    """Allocate a bucket of frozen weights, whose values are read from a checkpoint."""
    entries = _entries(planned)
    parameters = torch.zeros(entries[-1].end, dtype=DTYPES[plan.precision.parameter], device=device)
    return FlatBucket(
        name=planned.name,
        holders=planned.holders,
        stages=planned.stages,
        entries=tuple(entries),
        decayed=0,
        owned=(),
        shares=(),
        parameters=parameters,
        gradients=parameters.new_empty(0),
        has_masters=False,
        padded=entries[-1].end,
        peers=planned.holders,
        kept_span=slice(0, 0),
    )


def _relative_slice(span: slice, part: slice) -> slice:
    """Return the slice `part` of a bucket relative to the slice `span`."""
    return slice(part.start - span.start, part.stop - span.start)


def host_zeros(extent: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros on the host, pinned for asynchronous copies if the device is a GPU."""
    return torch.zeros(extent, dtype=dtype, pin_memory=device.type == "cuda")


def _shares(planned: contract.PlannedBucket, entries: Sequence[BucketEntry], padded: int, peers: int = 1) -> Shares:
    """Return the parts of a bucket that each holder owns: whole parameters if the plan has owners, else equal parts.

    If the bucket is sharded, an equal part of the shard that a holder keeps. `peers`: number of holders with the same
    shard, one in each group of columns that shards a copy."""
    count = len(planned.holders)
    if not planned.owners:
        shard, dividers = padded // count, count // peers
        places = (i % dividers * peers + i // dividers for i in range(count))
        return tuple((slice(place * shard, (place + 1) * shard),) for place in places)
    parts: list[list[slice]] = [[] for _ in range(count)]
    for entry, owner in zip(entries, planned.owners, strict=True):
        parts[owner].append(slice(entry.start, entry.end))
    return tuple(map(tuple, parts))


def views(bucket: FlatBucket, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (tensor name, view) of a whole flat tensor of a bucket. The experts of one tensor are adjacent and have one
    shape, so they are one stacked view."""
    for tensor, group in itertools.groupby(bucket.entries, key=lambda e: e.parameter.tensor):
        members = list(group)
        values = flat[members[0].start : members[-1].end]
        shape = members[0].parameter.held_shape
        yield tensor, values.view(shape) if members[0].name == tensor else values.view(len(members), *shape)


def namespace(tensors: Mapping[str, Tensor]) -> SimpleNamespace:
    """Return tensors as attributes: layers.3.ffn.up → layers_3_ffn_up."""
    return SimpleNamespace(**{name.replace(".", "_"): t for name, t in tensors.items()})
