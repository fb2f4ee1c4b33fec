"""Finding documents, refusing bad ones with their place, and dividing files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.corpus import MAX_DOCUMENT_BYTES, SourceFile, digest, documents, find, split
from runtime.data.errors import DataError

LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
NAMES = st.lists(st.text(LETTERS, min_size=1, max_size=9), min_size=2, max_size=60, unique=True)


def _files(names: list[str]) -> tuple[SourceFile, ...]:
    return tuple(sorted(SourceFile(name, Path("x")) for name in names))


@given(NAMES, st.floats(0.001, 0.999), st.integers(0, 2**63))
def test_split_divides_into_two_non_empty_parts(names: list[str], fraction: float, seed: int) -> None:
    files = _files(names)
    found = split(files, fraction, seed)
    assert found.train and found.validation
    assert tuple(sorted(found.train + found.validation)) == files
    assert found == split(tuple(reversed(files)), fraction, seed)


@settings(max_examples=40)
@given(NAMES, NAMES, st.floats(0.3, 0.7), st.integers(0, 5))
def test_a_file_keeps_its_side_when_others_come(names: list[str], more: list[str], fraction: float, seed: int) -> None:
    anchors = [f"anchor{i}" for i in range(40)]  # enough that neither side is empty by chance (below 1e-6)
    before = split(_files(sorted({*names, *anchors})), fraction, seed)
    after = split(_files(sorted({*names, *anchors, *more})), fraction, seed)
    assert set(before.validation) <= set(after.validation)
    assert set(before.train) <= set(after.train)


def test_split_holds_out_about_the_fraction_and_depends_on_the_seed() -> None:
    files = _files([f"{i}.py" for i in range(10_000)])
    held = [len(split(files, 0.05, seed).validation) for seed in range(5)]
    assert all(abs(count - 500) < 4 * (10_000 * 0.05 * 0.95) ** 0.5 for count in held)
    assert split(files, 0.05, 0) != split(files, 0.05, 1)


def test_split_of_nothing_and_of_one_file() -> None:
    files = _files(["a", "b"])
    assert split(files, 0.0, 1).train == files
    with pytest.raises(DataError, match="one file cannot be divided"):
        split(files[:1], 0.5, 1)
    with pytest.raises(DataError, match=r"validation = 1\.0"):
        split(files, 1.0, 1)


def test_find_is_sorted_by_relative_name_wherever_the_folder_lies(spec_folder: Path, tmp_path: Path) -> None:
    names = [file.name for file in find("corpus/**/*.txt", spec_folder).files]
    assert len(names) == 24 and names == sorted(names) and "deep/text01.txt" in names
    absolute = find(f"{spec_folder}/corpus/**/*.txt", tmp_path)
    assert [file.name for file in absolute.files] == names
    assert [file.name for file in find("../corpus/text00.txt", spec_folder / "corpus").files] == ["text00.txt"]


def test_what_is_left_out_is_counted_and_links_are_not_followed(spec_folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.txt").write_text("private")
    corpus = spec_folder / "corpus"
    (corpus / "out.txt").symlink_to(secret / "key.txt")
    (corpus / "loop.txt").symlink_to(corpus / "loop.txt")
    (corpus / "linked").symlink_to(secret)
    (corpus / "latin.txt").write_bytes("é".encode("latin-1"))
    (corpus / "picture.png").write_bytes(b"\x89")
    os.mkfifo(corpus / "pipe.txt")
    found = find("corpus/*", spec_folder)
    assert all(not file.path.is_symlink() for file in found.files) and len(found.files) == 8
    assert dict(found.skipped) == {"symbolic link": 2, "not UTF-8": 1, "other suffix": 1, "not a file": 1}
    with pytest.raises(DataError, match="1 left out: symbolic link"):
        find("corpus/*/key.txt", spec_folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("corpus/*.rst", r"'corpus/\*\.rst': no \.txt, \.md, \.py, \.jsonl file found in .*corpus"),
        ("nowhere/*.txt", "no .* file found in .*nowhere"),
        ("corpus", r"corpus is a folder, write corpus/\*\*/\*\.txt"),
        ("", "expected python_stdlib or a pattern"),
        ("a\0b", "expected python_stdlib or a pattern"),
        ("corpus/*/../../x.txt", "cannot follow a wildcard"),
        ("corpus/**.txt", r"\*\*"),
        (".", r"this is a folder, write \./\*\*/\*\.txt"),
        ("corpus/..", r"this is a folder, write corpus/\.\./\*\*/\*\.txt"),
        ("/", r"this is a folder, write /\*\*/\*\.txt"),
    ],
)
def test_nothing_found_says_where_it_looked(spec_folder: Path, source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find(source, spec_folder)


def test_jsonl_gives_one_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\n"}\n\n{"text": ""}\n{"text": "zw\\u00f6lf", "id": 2}', encoding="utf-8")
    assert list(documents(find("*.jsonl", tmp_path).files[0])) == ["one\n", "zwölf"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 10_000, "not JSON"),
        ('{"txt": "x"}', 'expected an object with a string under "text"'),
        ('["text"]', "expected an object"),
        ('{"text": 3}', "expected an object"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ("\udc80", "not JSON"),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(DataError, match=rf"bad\.jsonl:3: .*{message}"):
        list(documents(SourceFile("bad.jsonl", path)))


@pytest.mark.parametrize("name", ["big.txt", "big.jsonl"])
def test_a_document_is_bounded(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as stream:
        stream.truncate(MAX_DOCUMENT_BYTES + 1)
    with pytest.raises(DataError, match=rf"{name}.*64 MiB"):
        list(documents(find(name, tmp_path).files[0]))


def test_digest_follows_names_and_contents_not_the_place(spec_folder: Path, tmp_path: Path) -> None:
    before = digest(find("corpus/*.txt", spec_folder).files)
    spec_folder.rename(tmp_path / "moved")
    assert digest(find("corpus/*.txt", tmp_path / "moved").files) == before
    (tmp_path / "moved/corpus/text00.txt").rename(tmp_path / "moved/corpus/text.txt")
    assert digest(find("corpus/*.txt", tmp_path / "moved").files) != before
