"""Documents in lines and tables that other programs write: gzip, zstd, pyarrow and the layout of `datasets`."""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from runtime.data import files, readers, tables
from runtime.data.corpus import SourceFile, digest, find
from runtime.data.files import DataError
from runtime.data.readers import documents

TEXTS = [f"text {i} 東京 {'x' * (i % 70)}" for i in range(300)]


def read(path: Path, column: str = "text") -> Iterator[str]:
    return documents(SourceFile(path.name, path, column))


def lines(texts: list[str], column: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, column: text}).encode() + b"\n" for text in texts)


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def write(path: Path, table: pa.Table, **settings: Any) -> Path:
    """Write a table in the format of the suffix. `.arrow` is a stream, as `datasets` writes it."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, **settings)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=100)
    return path


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_compressed_lines_are_the_lines(tmp_path: Path, suffix: str, members: int) -> None:
    """Files often have several consecutive members or frames, which need not end at the end of a line."""
    pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstd}[suffix]
    content = lines(TEXTS)
    cuts = np.linspace(0, len(content), members + 1).astype(int)
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"".join(pack(content[a:b]) for a, b in pairwise(cuts)))
    assert list(documents(find("*", tmp_path).files[0])) == TEXTS


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
def test_a_file_that_is_cut_off_or_damaged_is_refused(tmp_path: Path, suffix: str) -> None:
    """All returned texts are among those written; the end of the file is not taken for the end of a text."""
    intact = (gzip.compress if suffix == "jsonl.gz" else zstd)(lines(TEXTS))
    path = tmp_path / f"a.{suffix}"
    for cut in random.Random(0).sample(range(1, len(intact)), 12):
        path.write_bytes(intact[:cut])
        texts: list[str] = []
        with pytest.raises(DataError, match=rf"a\.{suffix}:\d+: (cannot be decompressed|not JSON)"):
            texts.extend(read(path))
        assert texts == TEXTS[: len(texts)]
    path.write_bytes(b"text")
    with pytest.raises(DataError, match=r":1: cannot be decompressed"):
        list(read(path))


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
def test_a_line_that_expands_without_end_is_bounded(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 1 << 20)
    path = tmp_path / f"a.{suffix}"
    path.write_bytes((gzip.compress if suffix == "jsonl.gz" else zstd)(b" " * (8 << 20)))
    assert path.stat().st_size < 1 << 14
    with pytest.raises(DataError, match=r":1: line longer than 1 MiB"):
        list(read(path))


def test_a_window_of_gigabytes_is_refused(tmp_path: Path) -> None:
    """A frame states the memory that its reader needs: here 2 GiB (RFC 8878, 3.1.1.1.2)."""
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(bytes.fromhex("28b52ffd") + bytes([0b00000100, 21 << 3]) + bytes.fromhex("010000"))
    with pytest.raises(DataError, match="cannot be decompressed"):
        list(read(path))


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [(".parquet", "string"), (".parquet", "dictionary"), (".arrow", "large_string"), (".arrow", "string_view")],
)
def test_a_column_gives_the_documents(tmp_path: Path, suffix: str, kind: str) -> None:
    types = {"string": pa.string(), "large_string": pa.large_string(), "string_view": pa.string_view()}
    values = pa.array([*TEXTS, None, ""])
    values = values.dictionary_encode() if kind == "dictionary" else values.cast(types[kind])
    table = pa.table({"id": range(len(values)), "content": values})
    path = write(tmp_path / f"a{suffix}", table)
    assert list(read(path, "content")) == TEXTS


def test_another_column_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"id": [1], "content": ["one"]}))
    with pytest.raises(DataError, match=r'no column "text"; of strings are content: write `column = "content"`'):
        list(read(path))
    with pytest.raises(DataError, match=r'column "id" is of int64, not of strings'):
        list(read(path, "id"))


def test_an_arrow_file_is_read_as_a_stream_is(tmp_path: Path) -> None:
    table = pa.table({"text": TEXTS})
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=70)
    assert list(read(tmp_path / "a.arrow")) == TEXTS


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_damaged_table_is_an_error_of_its_file(tmp_path: Path, suffix: str) -> None:
    """Whatever the C++ reader does, even if it ends its process."""
    intact = write(tmp_path / f"good{suffix}", pa.table({"text": TEXTS})).read_bytes()
    draw = random.Random(1)
    path = tmp_path / f"bad{suffix}"
    for content in (b"", intact[: len(intact) // 2], _scrambled(intact, draw)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"bad\{suffix}: "):
            list(read(path))


def _scrambled(content: bytes, draw: random.Random) -> bytes:
    middle = len(content) // 2
    return content[:200] + draw.randbytes(middle - 200) + content[middle:-300] + draw.randbytes(200) + content[-100:]


def test_a_table_of_a_few_bytes_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary-encoded column of one text and 100,000 indices: a terabyte as texts, kilobytes as a file."""
    text = pa.array(["y" * (20 << 20)])
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), text)
    path = write(tmp_path / "a.parquet", pa.table({"text": column}), compression="zstd")
    assert path.stat().st_size < 1 << 14
    with pytest.raises(DataError, match=r"a\.parquet: it needs more than 0\.5 GiB of memory"):
        list(_with_limit(path, monkeypatch))


def _with_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(tables, "DATA_BYTES", 1 << 29)
    return islice(read(path), 100)


def test_a_long_document_of_a_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 1 << 20)
    path = write(tmp_path / "a.parquet", pa.table({"text": ["short", "x" * (2 << 20)]}))
    with pytest.raises(DataError, match=r"a\.parquet: row 2 is longer than 1 MiB"):
        list(read(path))


def test_a_row_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    values = pa.Array.from_buffers(pa.string(), 2, pa.array([b"good", b"\xff\xfe"]).buffers())
    path = write(tmp_path / "a.parquet", pa.table({"text": values}))
    with pytest.raises(DataError, match=r"a\.parquet: row 2 is not UTF-8"):
        list(read(path))


# ---------------------------------------------------------------- folders


def saved(folder: Path, parts: list[list[str]], **state: Any) -> Path:
    """A folder as written by `Dataset.save_to_disk` (datasets/arrow_dataset.py)."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(parts):05}.arrow" for i in range(len(parts))]
    for name, texts in zip(names, parts, strict=True):
        write(folder / name, pa.table({"text": texts}))
    listed = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0" * 16, "_split": "train"}
    (folder / "state.json").write_text(json.dumps(listed | state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string"}}}))
    return folder


def test_a_data_set_on_disk_is_its_files_and_not_its_caches(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", [TEXTS[:100], TEXTS[100:]])
    write(folder / "cache-0123456789abcdef.arrow", pa.table({"text": ["of a map"]}))
    matches = find("saved", tmp_path)
    assert [text for file in matches.files for text in documents(file)] == TEXTS
    assert dict(matches.skipped) == {"not listed in the state.json beside it": 1}
    assert find("saved/*", tmp_path) == matches


def test_splits_are_not_mixed_silently(tmp_path: Path) -> None:
    saved(tmp_path / "saved" / "train", [TEXTS])
    saved(tmp_path / "saved" / "test", [["secret"]])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"the splits test, train: name one of them, as in saved/test"):
        find("saved", tmp_path)
    assert [file.name for file in find("saved/train", tmp_path).files] == ["data-00000-of-00001.arrow"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
        ({"_data_files": [3]}, "not a state.json of `datasets`"),
        ({"_data_files": None}, "not a state.json of `datasets`"),
    ],
)
def test_an_invalid_state_of_a_data_set_is_refused(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    saved(tmp_path / "saved", [TEXTS], **state)
    with pytest.raises(DataError, match=message):
        find("saved", tmp_path)


def test_a_folder_is_all_that_can_be_read_in_it(tmp_path: Path) -> None:
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    (tmp_path / "corpus" / "a.txt").write_text("one")
    (tmp_path / "corpus" / "deep" / "b.jsonl").write_bytes(lines(["two"]))
    for source in ("corpus", "corpus/"):
        assert find(source, tmp_path) == find("corpus/**/*", tmp_path)
    assert [file.name for file in find("corpus", tmp_path).files] == ["a.txt", "deep/b.jsonl"]


def test_a_digest_includes_the_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["one"], "content"))
    digests = {digest(find("*.jsonl", tmp_path, column=column).files) for column in ("text", "content", "body")}
    assert len(digests) == 3
    assert list(documents(find("*.jsonl", tmp_path, column="content").files[0])) == ["one"]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_a_missing_package_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"a\..*, pyarrow has to be installed: pip install \"dsc-trainer\[data\]\""):
        list(read(tmp_path / name))
    assert files.INSTALL in (Path(__file__).parents[3] / "docs" / "data.md").read_text("utf-8")


def test_a_reader_process_ends_when_reading_stops(tmp_path: Path) -> None:
    """If reading stops in the middle of a table, no process stays behind."""
    path = write(tmp_path / "a.parquet", pa.table({"text": ["x" * 100_000] * 200}))
    texts = read(path)
    assert next(texts)
    texts.close()  # type: ignore[attr-defined]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not any("tables" in Path(f"/proc/{child}/cmdline").read_text() for child in children)
