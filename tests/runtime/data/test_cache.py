"""Text is encoded once for each content and tokenizer; a run's folder is complete without the cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.contract import DataRequest, TrainedTokenizer
from runtime.data import encode, store
from runtime.data.document_encoder import DocumentEncoder
from runtime.data.files import DataError
from runtime.data.given import GivenTokenizer
from runtime.data.prepare import PreparedFolder, prepare
from tests.runtime.data.conftest import CORPUS


class Preparing:
    """Calls `prepare` for runs in one folder, counts the encoded texts, and keeps the messages."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "cache"
        self.encoded = 0
        self.trained = 0
        self.said: list[str] = []

    def __call__(
        self,
        run: str,
        *,
        seed: int = 7,
        spec: str = "spec",
        resumed: Sequence[str] = (),
        cached: bool = True,
        **data: Any,
    ) -> PreparedFolder:
        self.encoded, self.trained, self.said = 0, 0, []
        request = DataRequest(replace(CORPUS, **data), 400, seed)
        target, cache = self.folder / "runs" / run / "data", self.cache if cached else None
        return prepare(
            request,
            self.folder / spec,
            target,
            lambda *_: None,
            self.said.append,
            cache=cache,
            resumed=resumed,
        )

    def entries(self) -> list[Path]:
        return list(store.folders(self.cache))


@pytest.fixture
def preparing(spec_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Preparing]:
    counter = Preparing(tmp_path)
    by_library, by_process, train = DocumentEncoder.encode, GivenTokenizer.encode, encode.open_trained_tokenizer

    def library(self: DocumentEncoder, texts: Sequence[str]) -> Any:
        counter.encoded += len(texts)
        return by_library(self, texts)

    def process(self: GivenTokenizer, documents: Any) -> Any:
        counter.encoded += len(documents)
        return by_process(self, documents)

    def training(*arguments: Any) -> Any:
        counter.trained += 1
        return train(*arguments)

    monkeypatch.setattr(DocumentEncoder, "encode", library)
    monkeypatch.setattr(GivenTokenizer, "encode", process)
    monkeypatch.setattr(encode, "open_trained_tokenizer", training)
    yield counter


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != store.META}


def _given(preparing: Preparing) -> str:
    """Write a tokenizer.json beside the spec. Returns its name."""
    folder = preparing("tokenizer", cached=False).folder
    shutil.copy(folder / "tokenizer.json", preparing.folder / "spec" / "own.json")
    return "own.json"


# ---------------------------------------------------------------- one text, several runs


def test_runs_share_encoded_text(preparing: Preparing) -> None:
    first = preparing("first")
    assert preparing.encoded == 24 and preparing.trained == 1 and not first.reused
    second = preparing("second")
    assert preparing.encoded == preparing.trained == 0 and second.reused
    assert preparing.said == [f"from {preparing.cache}, where another run prepared it"]
    assert _bytes(first.folder) == _bytes(second.folder) and first.meta == second.meta
    for name in _bytes(first.folder):
        assert (first.folder / name).stat().st_ino == (second.folder / name).stat().st_ino


def test_the_cache_depends_on_content_and_not_on_paths(preparing: Preparing) -> None:
    """The same text in another folder, by another pattern, in touched files."""
    first = preparing("first")
    shutil.copytree(preparing.folder / "spec", preparing.folder / "copy")
    second = preparing("second", spec="copy", source="../copy/corpus/**/*[0-9].txt")
    assert preparing.encoded == 0 and second.meta["sha256"] == first.meta["sha256"]
    assert (first.meta["source"], second.meta["source"]) == ("corpus/**/*.txt", "../copy/corpus/**/*[0-9].txt")
    (preparing.folder / "copy/corpus/text00.txt").write_text("other words")
    assert preparing("third", spec="copy").meta["sha256"] != first.meta["sha256"]
    assert preparing.encoded == 24


def test_another_division_of_a_text_is_not_encoded_again(preparing: Preparing) -> None:
    """Another seed or share splits files and lines differently; with a tokenizer file nothing is encoded again."""
    tokenizer_file = _given(preparing)
    lines = (f'{{"text": "line {i} of a file"}}\n' for i in range(50))
    (preparing.folder / "spec/corpus/lines.jsonl").write_text("".join(lines))
    data: dict[str, Any] = {"source": "corpus/**/*", "tokenizer": tokenizer_file}
    preparing("first", **data)
    assert preparing.encoded == 74
    for number, changes in enumerate([{"seed": 8}, {"validation": 0.5}, {"validation": 0}]):
        divided = preparing(f"cut{number}", **data, **changes)
        assert preparing.encoded == 0 and not divided.reused
        alone = preparing(f"alone{number}", cached=False, **data, **changes)
        assert preparing.encoded == 74
        assert _bytes(divided.folder) == _bytes(alone.folder) and divided.meta == alone.meta
    preparing("seed", seed=9, validation=0, **data)
    assert preparing.said[0].endswith("where another run prepared it"), (
        "where all is trained on the seed decides nothing"
    )


def test_a_run_is_whole_without_the_cache(preparing: Preparing) -> None:
    first = preparing("first")
    shutil.rmtree(preparing.cache)
    again = preparing("first")
    assert again.reused and preparing.encoded == 0 and _bytes(again.folder) == _bytes(first.folder)


def test_files_are_copied_where_they_cannot_be_linked(preparing: Preparing, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    first = preparing("first")
    monkeypatch.setattr(os, "link", refuse)
    second = preparing("second")
    assert preparing.encoded == 0 and _bytes(first.folder) == _bytes(second.folder)
    assert all((second.folder / name).stat().st_nlink == 1 for name in _bytes(second.folder))


@pytest.mark.parametrize("name", ["train.bin", "validation.idx", "tokenizer.json", "meta.json"])
def test_a_damaged_entry_is_found_and_made_again(preparing: Preparing, name: str) -> None:
    first = preparing("first")
    wanted = _bytes(first.folder)
    (entry,) = preparing.entries()
    path = entry / name
    content = path.read_bytes()
    path.unlink()  # the run's file is unaffected
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    second = preparing("second")
    assert preparing.encoded == 24 and _bytes(second.folder) == _bytes(first.folder) == wanted
    assert store.verified_meta(entry) is not None
    preparing("third")
    assert preparing.encoded == 0


def test_a_pipe_in_an_entry_is_not_waited_for(preparing: Preparing) -> None:
    folder = preparing("first").folder
    for damaged in (preparing.entries()[0], folder):
        for name in ("train.bin", "meta.json", "tokenizer.json"):
            (damaged / name).unlink()
            os.mkfifo(damaged / name)
            assert not (damaged == folder and preparing("first", cached=False).reused)
            preparing("second")
            assert store.verified_meta(preparing.entries()[0]) is not None
            shutil.rmtree(preparing.folder / "runs/second")


def test_leftovers_of_a_killed_process_are_removed(preparing: Preparing) -> None:
    preparing.cache.mkdir()
    for name in (".building-0123-4567", ".building-89ab-0000"):
        (preparing.cache / name).mkdir()
        (preparing.cache / name / "train.bin").write_bytes(b"half")
    preparing("first")
    assert not list(preparing.cache.glob(".building-*"))


def test_a_run_continues_without_an_unusable_cache(preparing: Preparing) -> None:
    preparing.cache.write_text("a file")
    assert preparing("first").meta["splits"]["train"]["documents"] > 0
    (message,) = preparing.said
    assert message.startswith(f"not shared, because the folder {preparing.cache} cannot be made: ")


def test_the_vocabulary_bounds_an_entry_too(preparing: Preparing, spec_folder: Path) -> None:
    tokenizer_file = _given(preparing)
    preparing("first", tokenizer=tokenizer_file)
    request = DataRequest(replace(CORPUS, tokenizer=tokenizer_file), 319, 7)
    for seed in (7, 8):
        with pytest.raises(DataError, match=r"own\.json: 320 tokens, more than the model's 319"):
            prepare(
                replace(request, seed=seed),
                spec_folder,
                preparing.folder / "out",
                lambda *_: None,
                cache=preparing.cache,
            )


# ---------------------------------------------------------------- the data of a resumed run


def test_the_text_is_not_opened(preparing: Preparing) -> None:
    """A resume does not open the text or the tokenizer file, which may have been changed or deleted."""
    tokenizer_file = _given(preparing)
    first = preparing("run", tokenizer=tokenizer_file)
    (preparing.folder / "spec/corpus/text00.txt").write_text("changed")
    for _ in range(2):
        again = preparing("run", tokenizer=tokenizer_file, resumed=[first.meta["sha256"]])
        assert (again.folder, again.meta["sha256"], preparing.encoded) == (first.folder, first.meta["sha256"], 0)
        assert preparing.said == [f"from {first.folder.parent}, verified; the text is not read again"]
        shutil.rmtree(preparing.folder / "spec", ignore_errors=True)
        shutil.rmtree(preparing.cache, ignore_errors=True)


def test_another_data_block_is_prepared_anew(preparing: Preparing) -> None:
    first = preparing("run")
    for changes in ({"seed": 8}, {"validation": 0.3}, {"tokenizer": TrainedTokenizer(321)}, {"source": "corpus/*.txt"}):
        data = preparing("run", resumed=[first.meta["sha256"]], **changes)
        assert data.folder != first.folder and preparing.encoded > 0
        shutil.rmtree(data.folder)


def test_the_data_that_the_newest_checkpoint_names_is_taken(preparing: Preparing) -> None:
    """One data block gave two data folders, because the text changed in between."""
    first = preparing("run")
    (preparing.folder / "spec/corpus/text00.txt").write_text("changed")
    second = preparing("run")
    shutil.rmtree(preparing.folder / "spec")
    names = [data.meta["sha256"] for data in (first, second)]
    assert preparing("run", resumed=names).folder == first.folder
    assert preparing("run", resumed=names[::-1]).folder == second.folder
    assert preparing("run", resumed=["0" * 64, *names]).folder == first.folder
    with pytest.raises(DataError, match="file found in"):
        preparing("run", resumed=["0" * 64])


def test_damaged_data_of_a_run_comes_from_the_cache_or_the_text(preparing: Preparing) -> None:
    first = preparing("run")
    wanted = _bytes(first.folder)
    path = first.folder / "train.bin"

    def damage() -> None:
        path.unlink()
        path.write_bytes(b"\0" * len(wanted["train.bin"]))

    damage()
    (preparing.folder / "spec/corpus").rename(preparing.folder / "spec/gone")
    preparing("run", resumed=[first.meta["sha256"]])
    assert _bytes(first.folder) == wanted and preparing.encoded == 0
    damage()
    shutil.rmtree(preparing.cache)
    with pytest.raises(
        DataError, match=rf"file found in .*; and {first.folder}, which this run was trained on, is dama"
    ):
        preparing("run", resumed=[first.meta["sha256"]])
    (preparing.folder / "spec/gone").rename(preparing.folder / "spec/corpus")
    preparing("run", resumed=[first.meta["sha256"]])
    assert _bytes(first.folder) == wanted and preparing.encoded == 24
