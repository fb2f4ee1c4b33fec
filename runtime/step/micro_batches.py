"""The micro-batches of a step, as a column sees them: tokens, targets, and where documents begin."""

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
REAL = {"real": 0, "mtp_real": 1}  # which rows of routers are tokens, and not padding
AHEAD = {"tokens": 0, "targets": 1, "mtp_tokens": 1, "mtp_targets": 2}
TARGETS = ("targets", "mtp_targets")
PLACES = ("starts", "positions")
Indices = npt.NDArray[np.int64]


class SampleSource(Protocol):
    """Samples by index, the same for every rank count."""

    def tokens(self, index: int) -> np.ndarray: ...


@runtime_checkable
class HeldOut(SampleSource, Protocol):
    """Samples that are validated on, each once."""

    @property
    def num_windows(self) -> int:
        """How many there are."""
        ...


@runtime_checkable
class DocumentSource(SampleSource, Protocol):
    """Samples that say where in them the document of each token begins."""

    def starts(self, index: int) -> np.ndarray: ...


@runtime_checkable
class WeighedSource(DocumentSource, Protocol):
    """Samples that say how much attention computes for each of them: how many pairs of tokens see each other."""

    def seen(self, indices: Indices) -> Indices: ...


@dataclass(frozen=True)
class FilledUp:
    """Held-out samples, and behind the last of them samples without a target, which fill the last batch up.

    `length`: tokens of a sample.
    """

    source: HeldOut
    length: int

    def tokens(self, index: int) -> np.ndarray:
        """[length] token ids."""
        return self.source.tokens(index) if self._is_held_out(index) else np.full(self.length, PADDING)

    def starts(self, index: int) -> np.ndarray:
        """[length]: where the document of each token begins."""
        if not self._is_held_out(index):
            return np.zeros(self.length, np.int64)
        assert isinstance(self.source, DocumentSource), self.source
        return self.source.starts(index)

    def seen(self, indices: Indices) -> Indices:
        """By sample, how many pairs of tokens see each other. What fills up is one document."""
        assert isinstance(self.source, WeighedSource), self.source
        sequence = self.length - EXTRA_TOKENS
        found = np.full(len(indices), sequence * (sequence + 1) // 2)
        is_held_out = indices < self.source.num_windows
        found[is_held_out] = self.source.seen(indices[is_held_out])
        return found

    def _is_held_out(self, index: int) -> bool:
        return index < self.source.num_windows


def by_cost(source: SampleSource, samples: Indices, order: Sequence[int]) -> Indices:
    """The samples of a step as `put_by_cost` puts them, by the pairs of tokens that see each other.

    It is a function of the samples alone, so every rank of a run finds the same.
    """
    assert isinstance(source, WeighedSource), source
    return put_by_cost(samples, source.seen(samples), order)


def unravel(column: int, mesh: contract.Mesh) -> tuple[int, int, int]:
    """(data rank, context rank, tensor rank) of a column."""
    return column // (mesh.cp * mesh.tp), column // mesh.tp % mesh.cp, column % mesh.tp


class MicroBatches(dict[str, Tensor]):
    """A column's micro-batches of the samples of a step by name, [micro-batch, token]: its rows of them, where context
    ranks divide sequences and tensor ranks rows. Samples are read when a name is asked for that is of tokens.

    A token below 0 is ~id of an input, and no target. PADDING is read as token 0, and `real` and `mtp_real`, which
    routers of rows read, are 0 there. Where documents are kept apart, a token of another document than the one that is
    to predict it is no target either, and `starts` says where the document of each token begins in its sequence: of all
    rows that a context rank has, for attention sees all. Context ranks also have `positions`, those of their rows in
    their sequences.

    Where tensor ranks have parts of the vocabulary, a rank gets the tokens of all rows, and beside its targets those of
    all rows as `part_targets`, both less the first word that it has; below 0 are those that other ranks have. The
    tokens of its own rows are `row_tokens`.
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
        """Read the samples for these names, on the host alone: another thread may do it."""
        if any(name not in PLACES for name in names):
            _ = self._tokens
        if names and self._plan.data.masks_documents:
            _ = self._begins

    def __missing__(self, name: str) -> Tensor:
        found = self._places() if name in PLACES else self._words()
        self |= found
        return found[name]

    def _places(self) -> dict[str, Tensor]:
        """Where rows are in their documents and sequences. No sample is read for it."""
        (count, size), sequence = self._shape, self._sequence
        found: dict[str, Tensor] = {}
        if self._plan.data.masks_documents:
            found["starts"] = self._ahead(self._starts, 0).to(torch.int32)
        if self._plan.mesh.cp > 1:
            positions = torch.arange(sequence, dtype=torch.int32, device=self._device)
            found["positions"] = positions.repeat(count, size)
        return self._mine(found)

    def _words(self) -> dict[str, Tensor]:
        """Tokens and targets."""
        mesh, vocab = self._plan.mesh, self._plan.model.vocab
        z = self._there(self._tokens)
        views = {name: self._ahead(z, skip) for name, skip in AHEAD.items()}
        data = {name: v if name in TARGETS else v ^ (v >> 63) for name, v in views.items()}
        if self._plan.data.masks_documents:
            position = torch.arange(self._sequence, device=self._device).repeat(self._shape[1])
            for name in TARGETS:
                outside = self._ahead(self._starts, AHEAD[name]) > position
                data[name] = data[name].masked_fill(outside, NO_TARGET)
        data = self._mine(data)
        marks: dict[str, Tensor] = {}
        if self._plan.data.pads_rows:
            real = self._there(self._real)
            marks = self._mine({name: self._ahead(real, skip) for name, skip in REAL.items()})
        if mesh.tp == 1:
            return data | marks
        rows = {name: v.chunk(mesh.tp, dim=1)[self._tensor_rank].contiguous() for name, v in (data | marks).items()}
        if vocab % mesh.tp:
            return rows
        own = {f"row_{name}": rows[name] for name in ("tokens", "mtp_tokens")}
        return rows | own | _of_part(data, vocab, self._tensor_rank, mesh.tp)

    @cached_property
    def _samples(self) -> np.ndarray:
        return self._stacked(self._source.tokens)

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.where(self._samples == PADDING, NO_TARGET, self._samples)

    @cached_property
    def _real(self) -> np.ndarray:
        return (self._samples != PADDING).astype(np.int32)

    @cached_property
    def _begins(self) -> np.ndarray:
        assert isinstance(self._source, DocumentSource), self._source
        return self._stacked(self._source.starts)

    @cached_property
    def _starts(self) -> Tensor:
        return self._there(self._begins)

    def _stacked(self, of: Callable[[int], np.ndarray]) -> np.ndarray:
        return np.stack([of(int(i)) for i in self._indices]).astype(np.int64)

    def _there(self, rows: np.ndarray) -> Tensor:
        """Rows of the samples on the device."""
        return torch.from_numpy(rows).to(self._device).view(*self._shape, self._sequence + EXTRA_TOKENS)

    def _ahead(self, z: Tensor, skip: int) -> Tensor:
        return z[:, :, skip : skip + self._sequence].reshape(self._shape[0], -1)

    def _mine(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows of this context rank."""
        if (ranks := self._plan.mesh.cp) == 1:
            return data
        count, size = self._shape
        return {
            name: zigzag.of_rank(rows.flatten(), count * size, ranks, self._context_rank).view(count, -1)
            for name, rows in data.items()
        }


def _of_part(data: dict[str, Tensor], vocab: int, rank: int, ranks: int) -> dict[str, Tensor]:
    """What the ends of a model read that have a part of the vocabulary."""
    first, size = rank * vocab // ranks, vocab // ranks
    elsewhere = {name: (v < first) | (v >= first + size) & (v < vocab) for name, v in data.items()}
    local = {name: (v - first).masked_fill_(elsewhere[name], NO_TARGET) for name, v in data.items()}
    found = {f"part_{name}" if name in TARGETS else name: v for name, v in local.items()}
    like = data["tokens"]
    return found | {"tensor_rank": like.new_full((like.shape[0], 1), rank)}


# --- The samples of a step, read by a thread beside the step before: no step but the first waits for them
#
# What a rank reads is what it has asked for in the step before: a pipeline rank without embedding and head reads no
# tokens (runtime/step/micro_batches.py).

Find = Callable[[], MicroBatches]


class _Ahead(NamedTuple):
    samples: bytes
    found: Future[MicroBatches]


class Feed:
    """Micro-batches of the steps of a rank. `names`: what a step asks for, None until one has been executed; `waits`:
    how many steps began before their samples were read."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "samples")
        self._ahead: _Ahead | None = None
        self.names: tuple[str, ...] | None = None
        self.waits = 0

    def take(self, samples: Indices, find: Find) -> MicroBatches:
        """Micro-batches of these samples: those that were read ahead, if they are of these, else those of `find`. What
        a step asks for is on the device then."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.samples == samples.tobytes():
            self.waits += not ahead.found.done()
            found = ahead.found.result()
        else:
            self.waits += 1
            found = find()
        for name in self.names or ():
            _ = found[name]
        return found

    def read_ahead(self, samples: Indices, find: Find) -> None:
        """Begin to read what the next step asks for, of these samples."""
        self._ahead = _Ahead(samples.tobytes(), self._thread.submit(_read, find, self.names or ()))


def _read(find: Find, names: Collection[str]) -> MicroBatches:
    found = find()
    found.read(names)
    return found
