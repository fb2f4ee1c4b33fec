"""Packed rows: which rows share a sequence, against a plain best fit, and the tokens and starts of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data import packing
from runtime.data.packing import pack_rows
from runtime.data.samples import PADDING, ChatSurvey, RowSamples, Samples
from runtime.data.shards import RowWriter, ShardWriter


def packs_of(sizes: Sequence[int], room: int, first: int = 0) -> list[list[int]]:
    rows = np.arange(first, first + len(sizes))
    packs = pack_rows(rows, np.array(sizes, np.int64), room)
    return [packs.rows(pack).tolist() for pack in range(len(packs))]


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """The longest row first, each into the sequence with the least sufficient room; of equal ones, the oldest."""
    packs: list[list[int]] = []
    free: list[int] = []
    since: list[int] = []  # when the room of a sequence last changed
    for moment, row in enumerate(sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))):
        fitting = [pack for pack, space in enumerate(free) if space >= sizes[row]]
        if fitting:
            pack = min(fitting, key=lambda pack: (free[pack], since[pack]))
        else:
            pack = len(packs)
            packs.append([])
            free.append(room)
            since.append(0)
        packs[pack].append(row)
        free[pack] -= sizes[row]
        since[pack] = moment
    return packs


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_rows_are_packed_by_best_fit(sizes: list[int], room: int) -> None:
    assert packs_of(sizes, room) == best_fit(sizes, room)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=50), st.integers(1, 7))
def test_windows_are_packed_by_themselves(sizes: list[int], window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW", window)
        packs = packs_of(sizes, 9)
    parts = [sizes[first : first + window] for first in range(0, len(sizes), window)]
    expected = [[window * k + row for row in pack] for k, part in enumerate(parts) for pack in best_fit(part, 9)]
    assert packs == expected


def test_half_of_the_padding_and_more_is_gone() -> None:
    """With row lengths typical of conversations, 99% of tokens belong to rows, and no row is lost or repeated."""
    sizes = np.clip(np.random.default_rng(1).lognormal(5.5, 0.8, 20_000), 1, 2048).astype(np.int64)
    packs = pack_rows(np.arange(len(sizes)), sizes, 2048)
    assert sorted(row for pack in range(len(packs)) for row in packs.rows(pack).tolist()) == list(range(len(sizes)))
    assert sizes.sum() / (len(packs) * 2048) > 0.99
    assert all(sizes[packs.rows(pack)].sum() <= 2048 for pack in range(len(packs)))


# ---------------------------------------------------------------- samples


def random_rows(seed: int, count: int, longest: int) -> list[list[int]]:
    source = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ids = source.integers(0, 1000, source.integers(1, longest + 1))
        loss = source.random(len(ids)) < source.choice([0.0, 0.3, 0.9])
        rows.append(np.where(loss, ids, ~ids).tolist())
    return rows


@pytest.mark.parametrize("long", ["cut", "drop"])
@pytest.mark.parametrize("sequence", [4, 9, 30])
def test_every_row_is_whole_in_one_sequence(tmp_path: Path, sequence: int, long: str) -> None:
    rows = random_rows(2, 80, 12)
    with RowWriter(tmp_path / "train", 1000) as writer:
        for row in rows:
            writer.add(np.array(row))
    samples = RowSamples(tmp_path, "train", sequence, seed=1, long=long, pack=True)  # type: ignore[arg-type]
    alone = RowSamples(tmp_path, "train", sequence, seed=1, long=long)  # type: ignore[arg-type]
    packed_rows: list[list[int]] = []
    padding = 0
    for index in range(samples.num_windows):
        tokens, starts = samples.tokens(index).tolist(), samples.starts(index).tolist()
        assert len(tokens) == len(starts) == sequence + 2
        assert samples.causal_pairs(np.array([index])) == sum(
            position - start + 1 for position, start in enumerate(starts[:sequence])
        )
        begins = sorted({*starts})
        assert all(starts[a:b] == [a] * (b - a) for a, b in zip(begins, [*begins[1:], sequence + 2], strict=True))
        *parts, filling = [tokens[a:b] for a, b in zip(begins, [*begins[1:], sequence + 2], strict=True)]
        assert {*filling} == {PADDING} and len(filling) >= 2
        padding += len(filling) - 2
        packed_rows += parts
    unpacked = [alone.tokens(index).tolist() for index in range(alone.num_windows)]
    trimmed = [row[: int(alone.survey.reader.sizes[alone.rows(alone.window(i))[0]])] for i, row in enumerate(unpacked)]
    assert sorted(packed_rows) == sorted(row[:sequence] for row in trimmed)
    assert samples.survey.facts | {"samples": 0, "padding": 0} == alone.survey.facts | {"samples": 0, "padding": 0}
    assert samples.survey.facts["padding"] == padding < alone.survey.facts["padding"] or sequence == 4
    assert f"are packed into {samples.num_windows:,} sequences" in samples.survey.notes()[-1]
    assert ChatSurvey(tmp_path, "train", sequence, long, pack=True).packs is not None  # type: ignore[arg-type]


def test_every_epoch_has_the_same_sequences_in_another_order(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "train", 1000) as writer:
        for row in random_rows(4, 200, 12):
            writer.add(np.array(row))
    samples = RowSamples(tmp_path, "train", 24, seed=1, long="cut", pack=True)
    epochs = [
        [samples.tokens(i + k * samples.num_windows).tolist() for i in range(samples.num_windows)] for k in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]


@given(st.lists(st.integers(1, 15), min_size=3, max_size=30), st.integers(1, 20))
@settings(max_examples=40)
def test_a_window_of_text_says_where_its_documents_begin(sizes: list[int], sequence: int) -> None:
    """For each token: the position of the first token of its document in the window."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as name:
        with ShardWriter(Path(name) / "train", 1000) as writer:
            for document, size in enumerate(sizes):
                writer.add([document] * size)
        if sum(sizes) < sequence + 2:
            return
        samples = Samples(Path(name), "train", sequence, 2, seed=3)
        for index in range(samples.num_windows):
            documents = samples.tokens(index).tolist()
            starts = samples.starts(index).tolist()
            assert starts == [documents.index(document) for document in documents]
            assert samples.causal_pairs(np.array([index])) == sum(
                position - start + 1 for position, start in enumerate(starts[:sequence])
            )
