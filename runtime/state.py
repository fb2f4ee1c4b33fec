"""What a rank holds: parameters, gradient accumulators, optimizer moments, balancing biases.

Parameters with the same holders lie in one flat buffer (a bucket), so a reduction or an optimizer update is one call.
Segments see views: one tensor per name, the experts of a rank stacked along dimension 0. The optimizer updates master
weights: a slice of what segments see where the dtype is the same, else a buffer beside it, and segments see it rounded.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from runtime import contract

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}


@dataclass(frozen=True)
class Entry:
    """A logical parameter in a bucket: elements [start, end) of the flat buffer."""

    name: str
    tensor: str
    shape: tuple[int, ...]
    init: float | None  # standard deviation; None: ones
    decay: bool
    start: int
    end: int


@dataclass
class Bucket:
    """Parameters with the same holders. `owned` is the part whose optimizer state, master weights among it, lives on
    this rank."""

    name: str
    holders: tuple[int, ...]
    entries: tuple[Entry, ...]
    decayed: int  # elements [0, decayed) are decayed
    owned: slice
    parameters: Tensor  # as segments read them
    gradients: Tensor
    master: Tensor  # of the owned part, and so are the moments
    moment1: Tensor
    moment2: Tensor

    @property
    def size(self) -> int:
        return self.entries[-1].end

    @property
    def mixed(self) -> bool:
        """Whether master weights are others than those that segments read."""
        return self.master.dtype != self.parameters.dtype

    def owned_of(self, entry: Entry) -> tuple[slice, slice]:
        """The part of a parameter that is owned here: as a slice of its elements, and of the owned buffers'."""
        start = max(entry.start, self.owned.start)
        end = max(start, min(entry.end, self.owned.stop))
        first = start - entry.start if end > start else 0
        return slice(first, first + end - start), slice(start - self.owned.start, end - self.owned.start)

    def set_weight(self, entry: Entry, value: Tensor) -> None:
        """Give a parameter its value: the master weights whole, what segments read rounded."""
        flat, (of_entry, of_owned) = value.reshape(-1), self.owned_of(entry)
        self.parameters[entry.start : entry.end].copy_(flat)
        self.master[of_owned].copy_(flat[of_entry])

    @property
    def parameters_name(self) -> str:
        """Of its flat tensor of parameters."""
        return f"parameters {self.name}"

    @property
    def gradients_name(self) -> str:
        """Of its flat tensor of gradients."""
        return f"gradients {self.name}"


@dataclass
class State:
    """All of one rank. `parameters` and `gradients` are namespaces of tensors: layers.3.ffn.up → layers_3_ffn_up."""

    buckets: tuple[Bucket, ...]
    biases: dict[str, Tensor]
    parameters: SimpleNamespace
    gradients: SimpleNamespace

    @property
    def device(self) -> torch.device:
        return self.buckets[0].parameters.device

    def logical(self, flat: Callable[[Bucket], Tensor]) -> Iterator[tuple[Bucket, Entry, Tensor]]:
        """Every logical parameter as a view of what `flat` gives for its bucket."""
        for bucket in self.buckets:
            buffer = flat(bucket)
            for e in bucket.entries:
                yield bucket, e, buffer[e.start : e.end].view(e.shape)


Allocate = Callable[[str, int, torch.dtype], Tensor | None]  # name, elements → zeros; None: anywhere


def build_state(plan: contract.Plan, rank: int, device: torch.device, allocate: Allocate = lambda *_: None) -> State:
    """Allocate and initialise what `rank` holds. Values are a function of (seed, logical name) alone.

    `allocate`: where the flat tensors lie that are summed and gathered over several holders.
    """
    buckets = tuple(_bucket(b, rank, plan, device, allocate) for b in plan.buckets if rank in b.holders)
    biases = {
        b.name: torch.zeros(b.shape, dtype=DTYPES[plan.precision.master], device=device)
        for b in plan.biases
        if rank in b.holders
    }
    slots = {
        f"{layer.name}.ffn.router.slots": torch.tensor(layer.slots, device=device)
        for layer in plan.moe_layers
        if layer.slots is not None
    }
    parameters = {name: t for b in buckets for name, t in _views(b, b.parameters)} | biases | slots
    gradients = {name: t for b in buckets for name, t in _views(b, b.gradients)}
    state = State(buckets, biases, _namespace(parameters), _namespace(gradients))
    for bucket in buckets:
        for entry in bucket.entries:
            bucket.set_weight(entry, initial_value(plan.train.seed, entry.name, entry.shape, entry.init))
    return state


def initial_value(seed: int, name: str, shape: Sequence[int], init: float | None) -> Tensor:
    """Normal with standard deviation `init` (None: ones), drawn in float32 from a generator of (seed, name)."""
    if init is None:
        return torch.ones(tuple(shape))
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(tuple(shape)).normal_(0.0, init, generator=generator)


def shared_flats(plan: contract.Plan) -> dict[str, tuple[tuple[int, ...], int]]:
    """Name of every flat tensor that is summed or gathered → its holders and bytes."""
    flats = {}
    for bucket in plan.buckets:
        for name, dtype in (("parameters", plan.precision.parameter), ("gradients", plan.precision.gradients)):
            if len(bucket.holders) > 1 and (name == "gradients" or plan.zero):
                size = padded_size(bucket, plan.zero) * DTYPES[dtype].itemsize
                flats[f"{name} {bucket.name}"] = (bucket.holders, size)
    return flats


def padded_size(bucket: contract.Bucket, zero: int) -> int:
    """Elements of a bucket's flat tensors: of equal shards under ZeRO, so that they can be gathered."""
    elements = sum(torch.Size(parameter.shape).numel() for parameter in bucket.parameters)
    shards = len(bucket.holders) if zero else 1
    return -(-elements // shards) * shards


def _bucket(
    planned: contract.Bucket, rank: int, plan: contract.Plan, device: torch.device, allocate: Allocate
) -> Bucket:
    entries, start = [], 0
    for p in planned.parameters:
        end = start + torch.Size(p.shape).numel()
        entries.append(Entry(p.name, p.tensor, p.shape, p.init, p.decay, start, end))
        start = end
    holders, precision = planned.holders, plan.precision
    padded = padded_size(planned, plan.zero)
    shard = padded // (len(holders) if plan.zero else 1)
    first = holders.index(rank) * shard if plan.zero else 0
    owned = slice(first, first + shard)

    def zeros(extent: int, dtype: str, name: str = "") -> Tensor:
        placed = allocate(f"{name} {planned.name}", extent, DTYPES[dtype])
        return torch.zeros(extent, dtype=DTYPES[dtype], device=device) if placed is None else placed

    parameters = zeros(padded, precision.parameter, "parameters")
    mixed = precision.master != precision.parameter
    return Bucket(
        name=planned.name,
        holders=holders,
        entries=tuple(entries),
        decayed=max((e.end for e in entries if e.decay), default=0),
        owned=owned,
        parameters=parameters,
        gradients=zeros(padded, precision.gradients, "gradients"),
        master=zeros(shard, precision.master) if mixed else parameters[owned],
        moment1=zeros(shard, precision.moments),
        moment2=zeros(shard, precision.moments),
    )


def _views(bucket: Bucket, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(tensor name, view): experts of one tensor are adjacent and of one shape, hence one stacked view."""
    for tensor, group in itertools.groupby(bucket.entries, key=lambda e: e.tensor):
        members = list(group)
        whole = flat[members[0].start : members[-1].end]
        shape = members[0].shape
        yield tensor, whole.view(shape) if members[0].name == tensor else whole.view(len(members), *shape)


def _namespace(tensors: Mapping[str, Tensor]) -> SimpleNamespace:
    return SimpleNamespace(**{name.replace(".", "_"): t for name, t in tensors.items()})
