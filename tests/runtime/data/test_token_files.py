"""Files of token ids as a source: read in place, split as Megatron does, and refused if they are damaged."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.contract import BlendSource, ChatRecipe, DataRecipe, DataRequest, TrainedTokenizer
from runtime.data import corpus, store
from runtime.data.blended import prepare_data
from runtime.data.files import DataError
from runtime.data.prepare import PreparedFolder
from runtime.data.samples import Samples
from runtime.data.shards import ShardReader
from runtime.data.token_files import open_split
from tests.runtime.data.megatron import CODES, write

DATA = DataRecipe("corpus_text_document", None, 0.25, end_id=0)


def documents(count: int, seed: int = 1, top: int = 100) -> list[list[list[int]]]:
    drawn = random.Random(seed)
    return [[[drawn.randrange(1, top) for _ in range(drawn.randrange(1, 30))] + [0]] for _ in range(count)]


def flat(found: list[list[list[int]]]) -> list[int]:
    return [id for document in found for sequence in document for id in sequence]


def prepare(folder: Path, data: DataRecipe = DATA, vocab: int = 100, **more: Any) -> PreparedFolder:
    return prepare_data(DataRequest(data, vocab, 7), folder, folder / "run", lambda *_: None, **more)


@pytest.mark.parametrize("dtype", CODES)
def test_every_dtype_of_megatron(tmp_path: Path, dtype: str) -> None:
    text = [[[1, 2], [3]], [[0]], [], [[], [99, 5]]]
    write(tmp_path / "a", text, dtype)
    if dtype.startswith("float"):
        with pytest.raises(DataError, match=r"a\.idx: version 1 with dtype code"):
            ShardReader(tmp_path / "a")
        return
    reader = ShardReader(tmp_path / "a")
    assert reader.tokens(0, reader.num_tokens).tolist() == flat(text)
    assert [reader.document(i).tolist() for i in range(4)] == [[1, 2, 3], [0], [], [99, 5]]


@pytest.mark.parametrize("source", ["corpus_text_document", "corpus_text_document.bin", "corpus_text_document.idx"])
def test_a_file_is_read_in_place(tmp_path: Path, source: str) -> None:
    """The last documents are held out; the run's folder has no copy of the tokens; samples equal the file."""
    text = documents(40)
    write(tmp_path / "corpus_text_document", text)
    prepared = prepare(tmp_path, replace(DATA, source=source))
    assert [path.name for path in prepared.folder.iterdir()] == ["meta.json"]
    train, validation = (open_split(prepared.folder, split) for split in ("train", "validation"))
    assert train.tokens(0, train.num_tokens).tolist() == flat(text[:30])
    assert validation.tokens(0, validation.num_tokens).tolist() == flat(text[30:])
    assert prepared.meta["splits"]["train"]["tokens"] == train.num_tokens
    samples = Samples(prepared.folder, "train", 16, seed=1)
    assert samples.tokens(3).tolist() == flat(text[:30])[samples.window(3) * 16 :][:18]
    assert prepare(tmp_path, replace(DATA, source=source)).reused


def test_several_files_are_one_stream(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    parts = [documents(5, 1), documents(1, 2), documents(10, 3)]
    for name, part in zip("abd", parts, strict=True):
        write(tmp_path / "c" / name, part, "uint16")
    text = [document for part in parts for document in part]
    prepared = prepare(tmp_path, replace(DATA, source="c/*.idx", validation=0.7))
    train, validation = (open_split(prepared.folder, split) for split in ("train", "validation"))
    assert train.tokens(0, train.num_tokens).tolist() == flat(text[:5])
    expected = flat(text[5:])
    assert validation.tokens(0, len(expected)).tolist() == expected
    for first in range(0, len(expected), 7):
        assert validation.tokens(first, min(len(expected), first + 40)).tolist() == expected[first : first + 40]
    assert [validation.document(i).tolist() for i in range(11)] == [flat([document]) for document in text[5:]]


def test_starts_mark_documents_and_not_sequences(tmp_path: Path) -> None:
    write(tmp_path / "corpus_text_document", [[[1, 2], [3, 0]], [[4], [5], [0]], [[6] * 9 + [0]]])
    prepared = prepare(tmp_path, replace(DATA, validation=0.0))
    assert Samples(prepared.folder, "train", 8, 2, seed=1).starts(0).tolist() == [0, 0, 0, 0, 4, 4, 4, 7, 7, 7]


def test_ids_outside_of_the_vocabulary_are_named(tmp_path: Path) -> None:
    text = documents(10)
    text[7][0][2:2] = [100]
    place = flat(text).index(100)
    write(tmp_path / "corpus_text_document", text)
    with pytest.raises(
        DataError, match=rf"document\.bin: token {place} has the id 100, and those of the model's vocab"
    ):
        prepare(tmp_path)
    text[7][0][2] = -3
    write(tmp_path / "corpus_text_document", text, "int8")
    with pytest.raises(DataError, match=rf"token {place} has the id -3"):
        prepare(tmp_path)


def test_an_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    """Each size, pointer and document index is set to another number; none of these is used to read."""
    write(tmp_path / "corpus_text_document", documents(6))
    path = tmp_path / "corpus_text_document.idx"
    good = path.read_bytes()
    places = [(34 + 4 * i, 4) for i in range(6)] + [(34 + 24 + 8 * i, 8) for i in range(6)]
    places += [(34 + 24 + 48 + 8 * i, 8) for i in (0, 6)]
    for offset, width in places:
        for value in (-1, 1 << 20, (1 << 8 * width - 1) - 1, -(1 << 8 * width - 1)):
            path.write_bytes(good[:offset] + value.to_bytes(width, "little", signed=True) + good[offset + width :])
            with pytest.raises(DataError, match=r"corpus_text_document\.(idx|bin)"):
                prepare(tmp_path)
    middle = 34 + 24 + 48 + 8 * 3
    for value in (-1, 7, 1 << 62):
        path.write_bytes(good[:middle] + value.to_bytes(8, "little", signed=True) + good[middle + 8 :])
        with pytest.raises(DataError, match="disagree"):
            prepare(tmp_path)


def test_an_index_of_images_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "corpus_text_document", documents(3), modes=bytes(3))
    with pytest.raises(DataError, match="an index with modes, as of images"):
        prepare(tmp_path)


def test_a_changed_file_is_read_again_and_is_other_data(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus_text_document"
    write(prefix, documents(10))
    first = prepare(tmp_path)
    assert store.verified_meta(first.folder) is not None
    os.utime(prefix.with_name("corpus_text_document.bin"), ns=(1, 1))
    assert store.verified_meta(first.folder) is None
    again = prepare(tmp_path, resumed=[first.meta["sha256"]])
    assert again.meta["sha256"] == first.meta["sha256"], "equal tokens are the same data, wherever and whenever"
    text = documents(10)
    text[0][0][0] ^= 1
    write(prefix, text)
    assert prepare(tmp_path).meta["sha256"] != first.meta["sha256"]


def test_a_moved_file_is_the_same_data(tmp_path: Path) -> None:
    write(tmp_path / "corpus_text_document", documents(10))
    first = prepare(tmp_path)
    (tmp_path / "else").mkdir()
    for suffix in (".idx", ".bin"):
        name = f"corpus_text_document{suffix}"
        (tmp_path / name).rename(tmp_path / "else" / name)
    moved = prepare(tmp_path, replace(DATA, source="else/corpus_text_document"), resumed=[first.meta["sha256"]])
    assert moved.meta["sha256"] == first.meta["sha256"]


def test_invalid_uses_of_token_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "corpus_text_document", documents(1))
    with pytest.raises(DataError, match="a single document cannot be divided"):
        prepare(tmp_path)
    assert prepare(tmp_path, replace(DATA, validation=0.0)).meta["splits"]["train"]["documents"] == 1
    with pytest.raises(DataError, match=r"which already belong to one: write `tokenizer = "):
        prepare(tmp_path, replace(DATA, tokenizer=TrainedTokenizer(300)), vocab=400)
    with pytest.raises(DataError, match="token ids are no conversations"):
        prepare(tmp_path, replace(DATA, chat=ChatRecipe(None, "cut")))
    with pytest.raises(DataError, match=r"no file of token ids, \.idx and \.bin"):
        prepare(tmp_path, replace(DATA, source="other.bin"))
    (tmp_path / "text.txt").write_text("words")
    with pytest.raises(DataError, match="these are no files of token ids"):
        prepare(tmp_path, replace(DATA, source="text.txt"))
    write(tmp_path / "corpus_text_document", [])
    with pytest.raises(DataError, match=r"document\.bin: no tokens"):
        prepare(tmp_path)


def test_text_beside_files_of_token_ids_is_read_as_text(tmp_path: Path) -> None:
    write(tmp_path / "corpus", documents(2))
    (tmp_path / "corpus.d").mkdir()
    (tmp_path / "corpus.d" / "a.txt").write_text("words")
    assert corpus.token_files("corpus.d", tmp_path) == corpus.token_files("corpus.d/*", tmp_path) == ()
    assert corpus.token_files("corpus", tmp_path) == (tmp_path / "corpus",)
    assert corpus.reason_for_no_files("corpus", tmp_path) == ""


def test_a_blend_of_text_and_token_ids(tmp_path: Path) -> None:
    """The text is encoded with the named tokenizer, whose vocabulary bounds the ids."""
    (tmp_path / "web").mkdir()
    for number in range(6):
        (tmp_path / "web" / f"{number}.txt").write_text("a cat sat here " * 20 + str(number))
    first = prepare(tmp_path, DataRecipe("web/*.txt", TrainedTokenizer(270), 0.0), vocab=400)
    (tmp_path / "tokenizer.json").write_bytes((first.folder / "tokenizer.json").read_bytes())
    text = documents(9, top=270)
    write(tmp_path / "code", text)
    sources = (BlendSource("web", "web/*.txt", 7), BlendSource("code", "code", 3))
    data = DataRecipe(None, "tokenizer.json", 0.2, sources=sources)
    prepared = prepare(tmp_path, data, vocab=400)
    assert {path.name for path in prepared.folder.iterdir()} >= {"web.train.bin", "tokenizer.json"}
    code = open_split(prepared.folder, "train", "code")
    assert code.tokens(0, code.num_tokens).tolist() == flat(text[:7])
    assert prepared.meta["sources"]["code"]["train"]["tokens"] == code.num_tokens
    web = open_split(prepared.folder, "train", "web")
    assert np.array_equal(web.tokens(0, 9), ShardReader(prepared.folder / "web.train").tokens(0, 9))
    assert prepare(tmp_path, data, vocab=400, resumed=[prepared.meta["sha256"]]).reused
    text[3][0][0] = 270
    write(tmp_path / "code", text)
    with pytest.raises(DataError, match=r"has the id 270, and those of the tokenizer tokenizer\.json are 0 to 269"):
        prepare(tmp_path, data, vocab=400)
