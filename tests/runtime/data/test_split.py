"""Which documents are held out: neither split is empty, and no document changes its split when others are added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.corpus import SourceFile, find
from runtime.data.encode import RANKS, split
from runtime.data.files import DataError
from runtime.data.readers import documents

TEXTS = st.lists(st.text("abc \n", min_size=1, max_size=9), min_size=2, max_size=40, unique=True)


def _lines(path: Path, texts: list[str]) -> tuple[SourceFile, ...]:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return find("*.jsonl", path.parent).files


def _held(files: tuple[SourceFile, ...], fraction: float, seed: int) -> dict[tuple[str, str], bool]:
    divided = split(files, fraction, seed)
    return {(file.name, text): divided.is_held(file, text) for file in files for text in documents(file)}


@settings(max_examples=60)
@given(texts=TEXTS, fraction=st.floats(1e-300, 1 - 1e-12), seed=st.integers(0, 2**63))
def test_one_file_of_lines_is_divided(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], fraction: float, seed: int
) -> None:
    """Both splits get documents, whatever the share."""
    held_out = _held(_lines(tmp_path_factory.mktemp("split") / "a.jsonl", texts), fraction, seed)
    assert len(held_out) == len(texts) and set(held_out.values()) == {True, False}


def test_files_are_divided_as_wholes_and_both_sides_get_some(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md"):
        (tmp_path / name).write_text(f"text of {name}")
    files = find("*", tmp_path).files
    for seed in range(20):
        for fraction in (1e-300, 0.5, 1 - 1e-12):
            assert sorted(_held(files, fraction, seed).values()) == [False, True]


def test_documents_keep_their_split_when_others_are_added(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(300)]
    before = _held(_lines(tmp_path / "a.jsonl", texts), 0.3, 7)
    after = _held(_lines(tmp_path / "a.jsonl", ["new first", *texts, "new last"]), 0.3, 7)
    assert before.items() <= after.items() and len(after) == 302
    (tmp_path / "one.txt").write_text("a whole file")
    extended = _held(find("*", tmp_path).files, 0.3, 7)
    assert after.items() <= extended.items() and len(extended) == 303


def test_lines_of_equal_text_are_in_one_split_in_any_file(tmp_path: Path) -> None:
    texts = [f"text {i}" for i in range(200)]
    _lines(tmp_path / "a.jsonl", texts)
    held_out = _held(_lines(tmp_path / "b.jsonl", texts[::-1]), 0.5, 1)
    assert len(held_out) == 400
    assert all(held_out["a.jsonl", text] == held_out["b.jsonl", text] for text in texts)


def test_the_held_out_share_counts_documents_and_not_files(tmp_path: Path) -> None:
    """Three files, one with 98% of the lines: a twentieth of the lines is held out, and no whole file."""
    for name, count in (("large", 9800), ("a", 100), ("b", 100)):
        files = _lines(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(count)])
    counts = [sum(_held(files, 0.05, seed).values()) for seed in range(5)]
    assert all(abs(count - 500) < 4 * (10_000 * 0.05 * 0.95) ** 0.5 for count in counts), counts
    assert len(set(counts)) > 1, "the seed decides who is held out"


def test_no_share_or_no_files_hold_out_nothing(tmp_path: Path) -> None:
    files = _lines(tmp_path / "a.jsonl", ["one", "two"])
    assert not any(_held(files, 0.0, 1).values())
    assert split((), 0.0, 1) == split(files, 0.0, 2)


def test_files_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    for texts in (["alone"], ["twice", "twice"], ["", "alone"]):
        with pytest.raises(DataError, match=r"a\.jsonl: a single document cannot be divided: give more files"):
            split(_lines(tmp_path / "a.jsonl", texts), 0.5, 1)
    (tmp_path / "book.txt").write_text("text")
    with pytest.raises(DataError, match=r"book\.txt: a single document cannot be divided"):
        split(find("*.txt", tmp_path).files, 0.5, 1)
    with pytest.raises(DataError, match=r"validation = 1\.0"):
        split((), 1.0, 1)


def test_no_more_lines_are_read_than_needed(tmp_path: Path) -> None:
    """A mistake in the last line of a file that needs no more reading here is left to later readers."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(200)) + "{")
    assert split(find("*.jsonl", tmp_path).files, 0.5, 1).limit == RANKS // 2
