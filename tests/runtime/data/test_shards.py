"""The Megatron format: the published bytes, round trips, and refusal of each corrupt header or length by name."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.files import DataError
from runtime.data.shards import ShardReader, ShardWriter

DOCUMENTS = st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=20), max_size=10)


def _write(prefix: Path, documents: list[list[int]], vocab: int = 300) -> None:
    with ShardWriter(prefix, vocab) as writer:
        for ids in documents:
            writer.add(ids)


@settings(max_examples=50)
@given(documents=DOCUMENTS, vocab=st.sampled_from([300, 65499, 65500, 129_280]))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab: int) -> None:
    prefix = tmp_path_factory.mktemp("shard") / "train"
    _write(prefix, documents, vocab)
    reader = ShardReader(prefix)
    stream = [i for ids in documents for i in ids]
    assert [reader.document(i).tolist() for i in range(reader.num_documents)] == documents
    assert reader.tokens(0, reader.num_tokens).tolist() == stream
    assert np.concatenate([np.zeros(0, np.int64), *reader.chunks(7)]).tolist() == stream
    assert prefix.with_suffix(".bin").stat().st_size == len(stream) * (2 if vocab < 65500 else 4)


def test_bytes_match_the_published_format(tmp_path: Path) -> None:
    _write(tmp_path / "train", [[1, 2, 3], [258]])
    assert (tmp_path / "train.bin").read_bytes() == bytes([1, 0, 2, 0, 3, 0, 2, 1])
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i2q3q", 3, 1, 0, 6, 0, 1, 2)
    assert (tmp_path / "train.idx").read_bytes() == index


def test_a_document_of_several_sequences_is_read(tmp_path: Path) -> None:
    """Megatron may cut a document into sentences; ours never does."""
    (tmp_path / "train.bin").write_bytes(np.arange(6, dtype="<i4").tobytes())
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3) + struct.pack("<3i3q3q", 1, 2, 3, 0, 4, 12, 0, 2, 3)
    (tmp_path / "train.idx").write_bytes(index)
    reader = ShardReader(tmp_path / "train")
    assert [reader.document(i).tolist() for i in range(reader.num_documents)] == [[0, 1, 2], [3, 4, 5]]


def test_every_changed_byte_of_the_index_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "train", [[1, 2, 3], [4], [5, 6]])
    path = tmp_path / "train.idx"
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        if i == len(good) - 2 * 8 or i == len(good) - 3 * 8:  # document boundaries may lie anywhere in order
            continue
        with pytest.raises(DataError, match=r"train\.(idx|bin)"):
            ShardReader(tmp_path / "train")
    path.write_bytes(good)
    assert ShardReader(tmp_path / "train").num_documents == 3


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_truncated_and_extended_files_are_refused(tmp_path: Path, suffix: str) -> None:
    _write(tmp_path / "train", [[1, 2, 3], [4]])
    path = tmp_path / f"train{suffix}"
    good = path.read_bytes()
    for content in (*(good[:n] for n in range(len(good))), good + b"\0"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"train\{suffix}"):
            ShardReader(tmp_path / "train")
    path.unlink()
    with pytest.raises(DataError, match=rf"train\{suffix}: no such file"):
        ShardReader(tmp_path / "train")


def test_huge_counts_are_refused_before_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"")
    for count in (2**40, 2**64 - 1):
        header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count)
        (tmp_path / "train.idx").write_bytes(header + bytes(64))
        with pytest.raises(DataError, match=r"train\.idx: 98 bytes, its header says"):
            ShardReader(tmp_path / "train")


def test_a_torn_write_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(KeyError), ShardWriter(tmp_path / "train", 300) as writer:
        writer.add([1])
        raise KeyError
    with pytest.raises(DataError, match=r"train\.idx: no such file"):
        ShardReader(tmp_path / "train")


def test_ids_outside_the_vocabulary_and_existing_files_are_refused(tmp_path: Path) -> None:
    for ids in ([300], [-1], []):
        with pytest.raises(AssertionError), ShardWriter(tmp_path / f"bad{ids}", 300) as writer:
            writer.add(ids)
    _write(tmp_path / "train", [[1]])
    with pytest.raises(FileExistsError):
        ShardWriter(tmp_path / "train", 300)
