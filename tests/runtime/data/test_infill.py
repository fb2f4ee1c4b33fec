"""Fill-in-the-middle: the share of documents, and that each can be restored by any reader at any time."""

from __future__ import annotations

import hashlib
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.contract import BlendSource, DataRecipe, DataRequest, TrainedTokenizer
from runtime.data import infill
from runtime.data.blended import prepare_data
from runtime.data.files import DataError
from runtime.data.infill import ADDED, SENTINELS, InfilledStream, is_infilled, sentinels
from runtime.data.prepare import PreparedFolder
from runtime.data.samples import Samples
from runtime.data.shards import ShardReader, ShardWriter
from runtime.data.token_files import open_split

BEGIN, HOLE, END = 90, 91, 92
LAST = 0
TEXT = st.lists(st.lists(st.integers(1, 89), max_size=12), min_size=1, max_size=12)


def shard(folder: Path, documents: list[list[int]]) -> ShardReader:
    with ShardWriter(folder / "train", 100) as writer:
        for ids in documents:
            writer.add([*ids, LAST])
    return ShardReader(folder / "train")


def restored(ids: list[int]) -> list[int]:
    """The original document of a rearranged one."""
    if ids[:1] != [BEGIN]:
        return ids
    hole, end = ids.index(HOLE), ids.index(END)
    tail = [LAST] if ids[-1] == LAST else []
    middle = ids[end + 1 : len(ids) - len(tail)]
    return ids[1:hole] + middle + ids[hole + 1 : end] + tail


def test_random_numbers_of_a_document_never_change() -> None:
    """SplitMix64 (Steele, Lea and Flood, 2014): a resumed run rearranges the same documents in the same way."""

    def splitmix64(state: int) -> int:
        z = state % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    for seed, draw in ((0, 0), (7, 1), (2**60, 2)):
        key = int.from_bytes(hashlib.blake2b(f"infill\0{seed}\0{draw}".encode(), digest_size=8).digest(), "little")
        wanted = [splitmix64((document + 1) * 0x9E3779B97F4A7C15 + key) for document in (0, 1, 5, 10**9)]
        assert infill._draws(np.array([0, 1, 5, 10**9], np.uint64), seed, draw).tolist() == wanted
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF, "the first number of seed 0 that others publish"


@given(documents=TEXT, seed=st.integers(0, 2**60), rate=st.sampled_from([0.0, 0.3, 1.0]))
def test_every_document_can_be_restored(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], seed: int, rate: float
) -> None:
    """Any range of tokens equals that range of the whole stream, so lengths and positions agree."""
    reader = shard(tmp_path_factory.mktemp("shard"), documents)
    infilled = InfilledStream(reader, rate, seed, (BEGIN, HOLE, END), LAST)
    rearranged = [infilled.document(i).tolist() for i in range(infilled.num_documents)]
    assert [restored(ids) for ids in rearranged] == [[*document, LAST] for document in documents]
    moved = [len(ids) - len(plain) - 1 for ids, plain in zip(rearranged, documents, strict=True)]
    assert set(moved) <= ({ADDED} if rate == 1 else {0} if rate == 0 else {0, ADDED})
    flat = [id for ids in rearranged for id in ids]
    assert infilled.num_tokens == len(flat) and infilled.tokens(0, len(flat)).tolist() == flat
    for first in range(len(flat)):
        for last in range(first, min(first + 8, len(flat)) + 1):
            assert infilled.tokens(first, last).tolist() == flat[first:last]


def test_a_document_without_an_end_is_restored(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "train", 100) as writer:
        writer.add([5, 6, 7])
    for seed in range(20):
        infilled = InfilledStream(ShardReader(tmp_path / "train"), 1.0, seed, (BEGIN, HOLE, END), LAST)
        assert restored(infilled.document(0).tolist()) == [5, 6, 7]


def test_the_share_of_infilled_documents_is_the_rate() -> None:
    """Within 5σ of a binomial, for 200,000 documents, and in every tenth of them."""
    for seed in range(5):
        for rate in (0.1, 0.5, 0.9):
            moved = is_infilled(200_000, rate, seed)
            for part in (moved, *np.split(moved, 10)):
                assert abs(part.sum() - rate * part.size) < 5 * math.sqrt(part.size * rate * (1 - rate))
    agree = (is_infilled(200_000, 0.5, 1) == is_infilled(200_000, 0.5, 2)).mean()
    assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(200_000), "another seed chooses others, independently"


def test_cuts_are_uniform(tmp_path: Path) -> None:
    """Each of 16 pairs of cuts has 1/16 of 4,000 documents of 3 tokens: χ² with 15 degrees of freedom, within 5σ."""
    reader = shard(tmp_path, [[1, 2, 3]] * 4000)
    infilled = InfilledStream(reader, 1.0, 3, (BEGIN, HOLE, END), LAST)
    pairs = np.array([[infilled._cut(i, draw, 3) for draw in (1, 2)] for i in range(4000)])
    counts = np.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16)
    assert ((counts - 250) ** 2 / 250).sum() < 15 + 5 * math.sqrt(30)


def test_chosen_documents_and_cuts_are_pinned() -> None:
    """A change would silently train on another arrangement. A higher rate includes the documents of a lower one."""
    assert np.flatnonzero(is_infilled(60, 0.1, 7)).tolist() == PINNED
    for low, high in ((0.1, 0.2), (0.2, 0.9)):
        assert not (is_infilled(5000, low, 7) & ~is_infilled(5000, high, 7)).any()
    assert is_infilled(60, 0.1, 7).tolist() == is_infilled(5000, 0.1, 7)[:60].tolist(), "more text changes none"


PINNED = [6, 13, 15, 38, 50]


@pytest.mark.parametrize("names", SENTINELS)
def test_tokens_of_published_tokenizers(names: tuple[str, ...]) -> None:
    added = [{"id": 7 + i, "content": name} for i, name in enumerate(names)]
    assert sentinels(json.dumps({"added_tokens": added, "model": {"vocab": {"a": 0}}})) == (7, 8, 9)
    assert sentinels(json.dumps({"added_tokens": added[:2], "model": {"vocab": {}}})) is None
    assert sentinels(json.dumps({"model": {"vocab": [["a", 0.1]]}})) is None


# ---------------------------------------------------------------- prepared


def texts(folder: Path, name: str, count: int = 40) -> None:
    (folder / name).mkdir()
    drawn = random.Random(name)
    for number in range(count):
        words = (drawn.choice(("cat", "sat", "def", "return", "x", "y")) for _ in range(drawn.randrange(5, 60)))
        (folder / name / f"{number:02}.txt").write_text(f"{' '.join(words)} {number}")


def prepare(folder: Path, data: DataRecipe, out: str = "run") -> PreparedFolder:
    return prepare_data(DataRequest(data, 400, 7), folder, folder / out, lambda *_: None, cache=folder / "cache")


def ids_of(found: PreparedFolder) -> tuple[int, ...]:
    ids = sentinels((found.folder / "tokenizer.json").read_text("utf-8"))
    assert ids is not None
    return ids


def test_the_rate_changes_samples_and_not_stored_data(tmp_path: Path) -> None:
    texts(tmp_path, "code")
    data = DataRecipe("code/*.txt", TrainedTokenizer(300), 0.2, fim=0.5)
    half = prepare(tmp_path, data)
    quarter = prepare(tmp_path, replace(data, fim=0.25), "less")
    again = prepare(tmp_path, data, "again")
    assert again.reused and again.meta["sha256"] == half.meta["sha256"] != quarter.meta["sha256"]
    assert (
        ShardReader(half.folder / "train").tokens(0, 99).tolist()
        == ShardReader(quarter.folder / "train").tokens(0, 99).tolist()
    )
    begin, plain = ids_of(half)[0], ShardReader(half.folder / "train")
    infilled, fewer = open_split(half.folder, "train"), open_split(quarter.folder, "train")
    assert half.meta["splits"]["train"]["tokens"] == infilled.num_tokens > plain.num_tokens
    moved = 0
    for i in range(plain.num_documents):
        ids = infilled.document(i).tolist()
        moved += ids[0] == begin
        assert ids[0] == begin or ids == plain.document(i).tolist()
        if fewer.document(i)[0] == begin:
            assert fewer.document(i).tolist() == ids, "the same document is cut alike"
    assert infilled.num_tokens - plain.num_tokens == ADDED * moved and 0 < moved < plain.num_documents
    validation = open_split(half.folder, "validation")
    assert validation.num_tokens == ShardReader(half.folder / "validation").num_tokens, (
        "what is held out is read as it is"
    )


def test_samples_of_two_epochs_have_the_same_arrangement(tmp_path: Path) -> None:
    texts(tmp_path, "code")
    prepared = prepare(tmp_path, DataRecipe("code/*.txt", TrainedTokenizer(300), 0.0, fim=0.5))
    epochs = []
    for samples in (Samples(prepared.folder, "train", 16, seed=1), Samples(prepared.folder, "train", 16, seed=2)):
        num = samples.num_windows
        rows = {samples.window(i): samples.tokens(i).tolist() for i in range(num)}
        assert rows == {samples.window(i): samples.tokens(i).tolist() for i in range(num, 2 * num)}
        epochs.append(rows)
    assert epochs[0] == epochs[1]


def test_a_source_has_its_own_rate(tmp_path: Path) -> None:
    texts(tmp_path, "web")
    texts(tmp_path, "code")
    sources = (BlendSource("web", "web/*.txt", 7), BlendSource("code", "code/*.txt", 3, fim=1.0))
    prepared = prepare(tmp_path, DataRecipe(None, TrainedTokenizer(300), 0.2, sources=sources))
    begin = ids_of(prepared)[0]
    web, code = (open_split(prepared.folder, "train", name) for name in ("web", "code"))
    assert begin not in web.tokens(0, web.num_tokens)
    assert all(code.document(i)[0] == begin for i in range(code.num_documents))
    assert prepared.meta["sources"]["code"]["train"]["tokens"] == code.num_tokens


def test_a_tokenizer_without_tokens_for_it_is_refused(tmp_path: Path) -> None:
    texts(tmp_path, "code")
    plain = prepare(tmp_path, DataRecipe("code/*.txt", TrainedTokenizer(300), 0.0))
    (tmp_path / "tokenizer.json").write_bytes((plain.folder / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match=r"fim = 0\.1: the tokenizer has no tokens for it, such as <｜fim▁begin｜>"):
        prepare(tmp_path, DataRecipe("code/*.txt", "tokenizer.json", 0.0, fim=0.1))
    with pytest.raises(DataError, match=r"train\(259\): at least 260, the 256 bytes and <\|endoftext\|>, <\|fim_begin"):
        prepare(tmp_path, DataRecipe("code/*.txt", TrainedTokenizer(259), 0.0, fim=0.1))
