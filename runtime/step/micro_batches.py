"""The micro-batches of a step for one column of the mesh: tokens, targets, and starts of documents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime import contract
from runtime.contract import EXTRA_TOKENS, zigzag
from runtime.data.order import PADDING, put_by_cost

NO_TARGET = -1
REAL = {"real": 0, "mtp_real": 1}  # names of the masks of tokens that are not padding
AHEAD = {"tokens": 0, "targets": 1, "mtp_tokens": 1, "mtp_targets": 2}
TARGETS = ("targets", "mtp_targets")
PLACES = ("starts", "positions")
Indices = npt.NDArray[np.int64]


class SampleSource(Protocol):
    """Samples by index, the same for every rank count."""

    def tokens(self, index: int) -> np.ndarray:
        """Return the token ids of a sample: [sequence + extra]."""


@runtime_checkable
class HeldOutSource(SampleSource, Protocol):
    """Validation samples, each used once."""

    @property
    def num_windows(self) -> int:
        """Number of samples."""
        ...


@runtime_checkable
class DocumentSource(SampleSource, Protocol):
    """Samples that know the start of the document of each token."""

    def starts(self, index: int) -> np.ndarray:
        """Return the start of each token's document in the sample, 0 if it is before the sample: [sequence + extra]."""


@runtime_checkable
class WeighedSource(DocumentSource, Protocol):
    """Samples that know their cost in attention: the number of causal pairs of tokens in a document."""

    def causal_pairs(self, indices: Indices) -> Indices:
        """Return the number of causal pairs of tokens in each sample."""


@dataclass(frozen=True)
class FilledHeldOut:
    """Held-out samples, followed by samples without targets that fill the last batch.

    `length`: tokens of a sample.
    """

    source: HeldOutSource
    length: int

    def tokens(self, index: int) -> np.ndarray:
        """[length] token ids."""
        return self.source.tokens(index) if self._is_held_out(index) else np.full(self.length, PADDING)

    def starts(self, index: int) -> np.ndarray:
        """[length]: start of the document of each token."""
        if not self._is_held_out(index):
            return np.zeros(self.length, np.int64)
        assert isinstance(self.source, DocumentSource), self.source
        return self.source.starts(index)

    def causal_pairs(self, indices: Indices) -> Indices:
        """Return the number of causal pairs of tokens in each sample. A filling sample is one document."""
        assert isinstance(self.source, WeighedSource), self.source
        sequence = self.length - EXTRA_TOKENS
        pairs = np.full(len(indices), sequence * (sequence + 1) // 2)
        is_held_out = indices < self.source.num_windows
        pairs[is_held_out] = self.source.causal_pairs(indices[is_held_out])
        return pairs

    def _is_held_out(self, index: int) -> bool:
        return index < self.source.num_windows


def order_by_cost(source: SampleSource, samples: Indices, order: Sequence[int]) -> Indices:
    """Order the samples of a step with `put_by_cost`. The cost of a sample is its number of causal pairs of tokens.

    The order depends on the samples alone, so all ranks of a run get the same.
    """
    assert isinstance(source, WeighedSource), source
    return put_by_cost(samples, source.causal_pairs(samples), order)


def unravel(column: int, mesh: contract.Mesh) -> tuple[int, int, int]:
    """Return the data rank, context rank and tensor rank of a column."""
    return column // (mesh.cp * mesh.tp), column // mesh.tp % mesh.cp, column % mesh.tp


class MicroBatches(dict[str, Tensor]):
    """The inputs of a column for the samples of a step, by name: [micro-batch, token]. With context or tensor ranks
    these are the rows of this column's ranks. Samples are read on the first access of a name that needs them.

    A token below 0 is ~id of an input, and no target. PADDING is read as token 0, and `real` and `mtp_real` are 0
    there, for routers that leave padding out. If documents are masked from each other, a token is no target of another
    document, and `starts` has the position in its sequence at which the document of each token starts. A context rank
    also has `positions`, the positions of its rows in their sequences. `starts` and `positions` are not divided over
    tensor ranks, because attention sees all rows of a context rank.

    If the vocabulary is sharded over tensor ranks, `tokens` and `part_targets` have all rows, as offsets into the
    vocabulary shard of the rank; they are negative for words of other ranks. `targets` and `row_tokens` have the rows
    of this rank alone.
    """

    def __init__(
        self,
        plan: contract.RunPlan,
        source: SampleSource,
        samples: Indices,
        sequence: int,
        column: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        mesh, size = plan.mesh, plan.train.micro_batch
        data_rank, self._context_rank, self._tensor_rank = unravel(column, mesh)
        self._plan, self._source, self._sequence, self._device = plan, source, sequence, device
        self._shape = len(samples) // (mesh.dp * size), size
        self._indices = samples.reshape(-1, mesh.dp, size)[:, data_rank].reshape(-1)

    def read(self, names: Collection[str]) -> None:
        """Read the samples for these names into host memory. Any thread may call this."""
        if any(name not in PLACES for name in names):
            _ = self._tokens
        if names and self._plan.data.masks_documents:
            _ = self._begins

    def __missing__(self, name: str) -> Tensor:
        inputs = self._places() if name in PLACES else self._words()
        self |= inputs
        return inputs[name]

    def _places(self) -> dict[str, Tensor]:
        """Return `starts` and `positions`. No tokens are read."""
        (count, size), sequence = self._shape, self._sequence
        places: dict[str, Tensor] = {}
        if self._plan.data.masks_documents:
            places["starts"] = self._slice_from(self._starts, 0).to(torch.int32)
        if self._plan.mesh.cp > 1:
            positions = torch.arange(sequence, dtype=torch.int32, device=self._device)
            places["positions"] = positions.repeat(count, size)
        return self._select_context_rows(places)

    def _words(self) -> dict[str, Tensor]:
        """Tokens and targets."""
        mesh, vocab = self._plan.mesh, self._plan.model.vocab
        z = self._to_device(self._tokens)
        views = {name: self._slice_from(z, skip) for name, skip in AHEAD.items()}
        data = {name: v if name in TARGETS else v ^ (v >> 63) for name, v in views.items()}
        if self._plan.data.masks_documents:
            position = torch.arange(self._sequence, device=self._device).repeat(self._shape[1])
            for name in TARGETS:
                outside = self._slice_from(self._starts, AHEAD[name]) > position
                data[name] = data[name].masked_fill(outside, NO_TARGET)
        data = self._select_context_rows(data)
        marks: dict[str, Tensor] = {}
        if self._plan.data.pads_rows:
            real = self._to_device(self._real)
            marks = self._select_context_rows({name: self._slice_from(real, skip) for name, skip in REAL.items()})
        if mesh.tp == 1:
            return data | marks
        rows = {name: v.chunk(mesh.tp, dim=1)[self._tensor_rank].contiguous() for name, v in (data | marks).items()}
        if vocab % mesh.tp:
            return rows
        unsharded = {f"row_{name}": rows[name] for name in ("tokens", "mtp_tokens")}
        return rows | unsharded | _of_part(data, vocab, self._tensor_rank, mesh.tp)

    @cached_property
    def _samples(self) -> np.ndarray:
        return self._stack_samples(self._source.tokens)

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.where(self._samples == PADDING, NO_TARGET, self._samples)

    @cached_property
    def _real(self) -> np.ndarray:
        return (self._samples != PADDING).astype(np.int32)

    @cached_property
    def _begins(self) -> np.ndarray:
        assert isinstance(self._source, DocumentSource), self._source
        return self._stack_samples(self._source.starts)

    @cached_property
    def _starts(self) -> Tensor:
        return self._to_device(self._begins)

    def _stack_samples(self, read_sample: Callable[[int], np.ndarray]) -> np.ndarray:
        return np.stack([read_sample(int(i)) for i in self._indices]).astype(np.int64)

    def _to_device(self, rows: np.ndarray) -> Tensor:
        """Copy rows of the samples to the device."""
        return torch.from_numpy(rows).to(self._device).view(*self._shape, self._sequence + EXTRA_TOKENS)

    def _slice_from(self, z: Tensor, skip: int) -> Tensor:
        return z[:, :, skip : skip + self._sequence].reshape(self._shape[0], -1)

    def _select_context_rows(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Select the rows of this context rank."""
        if (ranks := self._plan.mesh.cp) == 1:
            return data
        count, size = self._shape
        return {
            name: zigzag.rows_of_rank(rows.flatten(), count * size, ranks, self._context_rank).view(count, -1)
            for name, rows in data.items()
        }


def _of_part(data: dict[str, Tensor], vocab: int, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return the inputs of an embedding and a head that have a shard of the vocabulary."""
    first, size = rank * vocab // ranks, vocab // ranks
    elsewhere = {name: (v < first) | (v >= first + size) & (v < vocab) for name, v in data.items()}
    local = {name: (v - first).masked_fill_(elsewhere[name], NO_TARGET) for name, v in data.items()}
    inputs = {f"part_{name}" if name in TARGETS else name: v for name, v in local.items()}
    tokens = data["tokens"]
    return inputs | {"tensor_rank": tokens.new_full((tokens.shape[0], 1), rank)}


# --- Prefetch: a thread reads the samples of a step during the step before, so only the first step waits for them
#
# A rank prefetches the names that its first step read: a pipeline rank without embedding and head reads no tokens.

Find = Callable[[], MicroBatches]


class _PrefetchedBatch(NamedTuple):
    samples: bytes
    future: Future[MicroBatches]


class Feed:
    """Prefetches the micro-batches of a rank. `names`: the names that a step reads, None until one has been executed.
    `waits`: number of steps that had to wait for their samples."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "samples")
        self._prefetched: _PrefetchedBatch | None = None
        self.names: tuple[str, ...] | None = None
        self.waits = 0

    def take(self, samples: Indices, find: Find) -> MicroBatches:
        """Return the prefetched micro-batches if they have these samples, else those of `find`. The names that a step
        reads are on the device then."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched.samples == samples.tobytes():
            self.waits += not prefetched.future.done()
            micro_batches = prefetched.future.result()
        else:
            self.waits += 1
            micro_batches = find()
        for name in self.names or ():
            _ = micro_batches[name]
        return micro_batches

    def read_ahead(self, samples: Indices, find: Find) -> None:
        """Start to prefetch these samples for the next step."""
        self._prefetched = _PrefetchedBatch(samples.tobytes(), self._thread.submit(_read, find, self.names or ()))


def _read(find: Find, names: Collection[str]) -> MicroBatches:
    micro_batches = find()
    micro_batches.read(names)
    return micro_batches
