"""Samples of a prepared corpus. Sample i is a pure function of (seed, i), independent of the number of ranks
(runtime/data/order.py).

The concatenated documents of a split are cut into windows of `sequence` tokens. A sample is a window and the first
`extra` tokens of the next one, for its targets. For conversations a sample is a row, or several packed rows. Every
epoch of training visits each window, row or pack once, in its own order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from runtime.contract import ChatRecipe
from runtime.data import store
from runtime.data.blend import Blend
from runtime.data.files import DataError
from runtime.data.order import PADDING, Order
from runtime.data.packing import Packs, pack_rows, runs, sums
from runtime.data.permutation import Numbers
from runtime.data.shards import Notices, RowReader
from runtime.data.token_files import open_split

SPLITS = ("train", "validation")
Fate = Literal["sample", "cut", "dropped", "without_loss"]  # of a row
_KEPT = {"train": "to train on", "validation": "held out"}


class _WindowSamples:
    """Base class of samples of a text and of conversations: windows, which training draws in an order."""

    split: str
    num_windows: int
    order: Order

    def window(self, index: int) -> int:
        """Return the window of a sample, below `num_windows`. For conversations: the index of a usable row, or of a
        pack."""
        assert index >= 0, "samples count from 0"
        if self.split == "train":
            return self.order.window(index)
        assert index < self.num_windows, "the validation split is read once"
        return index

    def windows(self, indices: Numbers) -> Numbers:
        """Return the windows of several samples."""
        return self.order.windows_of(indices) if self.split == "train" else indices


class Samples(_WindowSamples):
    """The samples of one split of a prepared folder. Training is permuted in each epoch, validation is in order.

    `order`: the order of training in a phase, or None; `source`: the source to read, in a blend. Raises DataError if
    the split is shorter than one sample.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        sequence: int,
        extra: int = 2,
        *,
        seed: int,
        order: Order | None = None,
        source: str = "",
    ) -> None:
        assert split in SPLITS and sequence > 0 and extra >= 0
        self.split, self.sequence, self.extra, self.seed = split, sequence, extra, seed
        self.reader = open_split(folder, split, source)
        self.num_windows = order.windows if order else max(0, self.reader.num_tokens - extra) // sequence
        self.order = order or Order(sequence, self.num_windows, seed)
        if self.num_windows == 0:
            raise DataError(
                f"{self.reader.data_path}: {self.reader.num_tokens} {split} tokens, fewer than one sample of "
                f"{sequence + extra}; shorten the sequence or give more text"
            )

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        """Return the token ids of sample `index`: [sequence + extra]."""
        first = self.window(index) * self.sequence
        return self.reader.tokens(first, first + self.sequence + self.extra)

    def starts(self, index: int) -> npt.NDArray[np.int64]:
        """Return the start of each token's document in the sample, 0 if it is before the sample: [sequence + extra]."""
        first = self.window(index) * self.sequence
        tokens = np.arange(first, first + self.sequence + self.extra)
        documents = np.searchsorted(self.reader.starts, tokens, "right") - 1
        return np.maximum(self.reader.starts[documents] - first, 0)

    def causal_pairs(self, indices: Numbers) -> Numbers:
        """Return the number of causal pairs of tokens in each of these samples: its cost in attention."""
        starts, first = self.reader.starts, self.windows(indices) * self.sequence
        end = first + self.sequence
        a, b = np.searchsorted(starts, (first + 1, end))
        parts = b - a + 1
        documents = runs(a, parts)
        begins = np.maximum(starts[documents - 1], np.repeat(first, parts))
        ends = np.minimum(starts[documents], np.repeat(end, parts))
        return sums(_pairs(ends - begins), parts)


class ChatSurvey:
    """The rows of one split of conversations, and the fate of each for a sequence length: it is a sample or part of a
    pack, perhaps with its end cut off; or it is left out, because it is too long (under `drop`) or has no target.
    """

    def __init__(
        self, folder: Path, split: str, sequence: int, long: Literal["cut", "drop"], *, pack: bool = False
    ) -> None:
        assert split in SPLITS and sequence > 0
        self.split, self.sequence = split, sequence
        self.reader = RowReader(folder / split)
        self._notices = Notices.of((store.meta_of(folder) or {}).get("chat", {}))
        self.is_long = self.reader.sizes > sequence
        self.is_dropped = self.is_long & (long == "drop")
        self.has_target = self.reader.first_targets() < np.minimum(self.reader.sizes, sequence)
        self.rows = np.flatnonzero(~self.is_dropped & self.has_target)  # used for training
        sizes = np.minimum(self.reader.sizes[self.rows], sequence)
        self.packs: Packs | None = pack_rows(self.rows, sizes, sequence) if pack else None
        num_samples = len(self.rows) if self.packs is None else len(self.packs)
        self.facts = {
            "rows": self.reader.num_rows,
            "samples": num_samples,
            "padding": num_samples * sequence - int(sizes.sum()),
            "cut": int(self.is_long[self.rows].sum()),
            "dropped": int(self.is_dropped.sum()),
            "without_loss": int((~self.is_dropped & ~self.has_target).sum()),
        }

    def fate(self, row: int) -> Fate:
        if self.is_dropped[row]:
            return "dropped"
        if not self.has_target[row]:
            return "without_loss"
        return "cut" if self.is_long[row] else "sample"

    def notes(self) -> list[str]:
        """Return a note on each kind of rows that are cut, left out or packed, and notes on unexpected tokens."""
        kinds = (
            ("cut", f"longer than {self.sequence:,} tokens, and cut there"),
            ("dropped", f"longer than {self.sequence:,} tokens, and left out"),
            ("without_loss", f"without a token in the first {self.sequence:,} that the loss is on, and left out"),
        )
        total = f"of {self.facts['rows']:,} {self.split} rows"
        notes = [f"{self.facts[name]:,} {total} are {fate}" for name, fate in kinds if self.facts[name]]
        if self.packs:
            samples, padding = self.facts["samples"], self.facts["padding"]
            share = f"{padding / (samples * self.sequence):.1%} of their tokens are padding"
            notes.append(f"{len(self.rows):,} {self.split} rows are packed into {samples:,} sequences; {share}")
        return notes + self._notices.notes()


class RowSamples(_WindowSamples):
    """The samples of one split of conversations: a row, or with `pack_rows` several rows, padded to `sequence + extra`
    tokens.

    A token without loss is ~id; the last one is followed by PADDING. The end of a row longer than `sequence` tokens is
    cut off, or under `drop` the row is left out. Rows without a target are left out, too. Raises DataError if no row is
    left.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        sequence: int,
        extra: int = 2,
        *,
        seed: int,
        long: Literal["cut", "drop"],
        pack: bool = False,
    ) -> None:
        assert extra >= 0
        self.split, self.sequence, self.extra, self.seed = split, sequence, extra, seed
        self.survey = ChatSurvey(folder, split, sequence, long, pack=pack)
        self.num_windows = self.survey.facts["samples"]
        self.order = Order(sequence, self.num_windows, seed)
        if self.num_windows == 0:
            reasons = "".join(f"; {note}" for note in self.survey.notes())
            raise DataError(f"{folder / split}: no row is left to be a sample{reasons}")

    def rows(self, window: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows in a window."""
        packs = self.survey.packs
        return self.survey.rows[window : window + 1] if packs is None else packs.rows(window)

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        """Return the token ids of sample `index`: [sequence + extra]."""
        sample = np.full(self.sequence + self.extra, PADDING)
        ids = np.concatenate([self.survey.reader.row(int(row), self.sequence) for row in self.rows(self.window(index))])
        sample[: len(ids)] = ids
        return sample

    def starts(self, index: int) -> npt.NDArray[np.int64]:
        """Return the start of each token's row in the sample: [sequence + extra]. Padding counts as a row."""
        rows = self.rows(self.window(index))
        sizes = np.minimum(self.survey.reader.sizes[rows], self.sequence)
        ends = np.cumsum(sizes)
        sizes = np.append(sizes, self.sequence + self.extra - ends[-1])
        return np.repeat(np.insert(ends, 0, 0), sizes)

    def causal_pairs(self, indices: Numbers) -> Numbers:
        """Return the number of causal pairs of tokens in each of these samples: its cost in attention. Padding is a
        row."""
        windows, packs = self.windows(indices), self.survey.packs
        rows, counts = (self.survey.rows[windows], np.ones_like(windows)) if packs is None else packs.rows_of(windows)
        sizes = np.minimum(self.survey.reader.sizes[rows], self.sequence, dtype=np.int64)
        return sums(_pairs(sizes), counts) + _pairs(self.sequence - sums(sizes, counts))


def _pairs(lengths: Numbers) -> Numbers:
    """Return the number of causal pairs of tokens in documents of these lengths."""
    return lengths * (lengths + 1) // 2


class BlendSamples:
    """The samples of one split of a blend. `parts`: samples by source.

    Training draws them in the order of the blend. Validation reads each source separately.
    """

    def __init__(self, parts: Mapping[str, Samples], order: Blend) -> None:
        self.parts, self.order = parts, order
        self._parts = tuple(parts.values())

    def place(self, index: int) -> tuple[Samples, int]:
        """Return the samples of the source of sample `index`, and its index there."""
        number, of_source = self.order.place(index)
        return self._parts[number], of_source

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        """Return the token ids of sample `index`: [sequence + extra]."""
        part, of_source = self.place(index)
        return part.tokens(of_source)

    def starts(self, index: int) -> npt.NDArray[np.int64]:
        """Return the start of each token's document in the sample, 0 if it is before the sample: [sequence + extra]."""
        part, of_source = self.place(index)
        return part.starts(of_source)

    def causal_pairs(self, indices: Numbers) -> Numbers:
        """Return the number of causal pairs of tokens in each of these samples: its cost in attention."""
        placed = [self.order.place(index) for index in indices.tolist()]
        sources, of_source = np.array(placed, np.int64).reshape(-1, 2).T
        pairs = np.zeros(len(placed), np.int64)
        for number, part in enumerate(self._parts):
            in_part = sources == number
            if in_part.any():
                pairs[in_part] = part.causal_pairs(of_source[in_part])
        return pairs

    def mean(self, losses: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return losses by kind: the weighted means over sources, and under KIND_SOURCE those of each source."""
        weights = {share.name: share.weight for share in self.order.shares}
        total = sum(weights.values())
        means = {
            kind: math.fsum(weights[name] * by_kind[kind] for name, by_kind in losses.items()) / total
            for kind in next(iter(losses.values()))
        }
        return means | {f"{kind}_{name}": loss for name, by_kind in losses.items() for kind, loss in by_kind.items()}


AnySamples = Samples | RowSamples | BlendSamples


def samples_of(
    folder: Path,
    split: str,
    sequence: int,
    extra: int,
    *,
    seed: int,
    chat: ChatRecipe | None,
    order: Order | Blend | None = None,
) -> AnySamples:
    """Open the samples of one split of a prepared folder: windows of one source or several in this order, or rows of
    conversations."""
    if isinstance(order, Blend):
        is_train = split == "train"
        parts = {
            share.name: Samples(
                folder, split, sequence, extra, seed=seed, order=share.order if is_train else None, source=share.name
            )
            for share in order.shares
        }
        return BlendSamples(parts, order)
    if chat is None:
        return Samples(folder, split, sequence, extra, seed=seed, order=order)
    return RowSamples(folder, split, sequence, extra, seed=seed, long=chat.long, pack=chat.pack)


def short_split_error(meta: Mapping[str, Any], needed: Mapping[str, int]) -> str:
    """Return an error message on sources whose splits are shorter than one sample; "" if there are none.

    meta: the meta.json of the text. needed: tokens of a sample, by split.
    """
    sources = meta.get("sources") or {"": meta["splits"]}
    problems = [
        f"{name or 'it'} has {splits[split]['tokens']:,} tokens {_KEPT[split]}, and a sample takes {tokens:,}"
        for name, splits in sources.items()
        for split, tokens in needed.items()
        if splits[split]["tokens"] < tokens
    ]
    if not problems:
        return ""
    edits = "give more text, change the share of `data.validation`, or shorten `train.sequence`"
    return f"the text is too short: {'; '.join(problems)}: {edits}"
