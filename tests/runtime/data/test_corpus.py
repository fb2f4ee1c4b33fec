"""Finding documents, and refusing bad ones with their location."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

import pytest

from runtime.data import corpus
from runtime.data.corpus import SourceFile, digest, find, note_on_shared
from runtime.data.files import DataError
from runtime.data.readers import MAX_DOCUMENT_BYTES, documents


def test_files_are_sorted_by_relative_name_in_any_folder(spec_folder: Path, tmp_path: Path) -> None:
    names = [file.name for file in find("corpus/**/*.txt", spec_folder).files]
    assert len(names) == 24 and names == sorted(names) and "deep/text01.txt" in names
    absolute = find(f"{spec_folder}/corpus/**/*.txt", tmp_path)
    assert [file.name for file in absolute.files] == names
    assert [file.name for file in find("../corpus/text00.txt", spec_folder / "corpus").files] == ["text00.txt"]


def test_ignored_files_are_counted_and_links_are_not_followed(spec_folder: Path, tmp_path: Path) -> None:
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
    matches = find("corpus/*", spec_folder)
    assert all(not file.path.is_symlink() for file in matches.files) and len(matches.files) == 8
    assert dict(matches.skipped) == {"symbolic link": 3, "not UTF-8": 1, "other suffix (.png)": 1, "not a file": 1}
    below = dict(find("corpus", spec_folder).skipped)
    assert below["symbolic link"] == 3, "a linked folder below the source is counted, too"
    with pytest.raises(DataError, match="1 file matches and is not read: 1 left out: symbolic link"):
        find("corpus/*/key.txt", spec_folder)


def test_virtual_files_of_the_kernel_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern for the whole machine matches files of processes, which may end meanwhile."""
    for name in ("a.jsonl", "b/c/d.jsonl", "proc/1/e.jsonl", "b/proc/f.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    (tmp_path / "b" / "linked").symlink_to(tmp_path / "b" / "c")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    source = f"{tmp_path}/**/*.jsonl"
    before = [file.name for file in find(source, tmp_path).files]
    assert before == ["a.jsonl", "b/c/d.jsonl", "b/proc/f.jsonl", "proc/1/e.jsonl"]
    monkeypatch.setattr(corpus, "_ROOT", tmp_path)
    assert [file.name for file in find(source, tmp_path).files] == before[:-1]


def test_hidden_files_are_read_only_where_a_source_names_them(tmp_path: Path) -> None:
    for name in ("seen.txt", ".hidden.txt", ".git/deep/log.txt"):
        (tmp_path / "notes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "notes" / name).write_text("text")
    for source in ("notes", "notes/**/*.txt"):
        matches = find(source, tmp_path)
        assert ([file.name for file in matches.files], matches.skipped) == (["seen.txt"], (("hidden", 2),))
    assert [file.name for file in find("notes/.git/**/*.txt", tmp_path).files] == ["deep/log.txt"]
    assert [file.name for file in find("notes/.*", tmp_path).files] == [".hidden.txt"]


def test_a_byte_order_mark_is_not_part_of_a_text(tmp_path: Path) -> None:
    """The text, and the digest that identifies prepared data, are those of the file without the mark."""
    texts, digests = [], []
    for name, mark in (("plain", b""), ("marked", codecs.BOM_UTF8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_bytes(mark + "zwölf".encode())
        (tmp_path / name / "b.jsonl").write_bytes(mark + b'{"text": "one"}\n{"text": "two"}\n')
        files = find(name, tmp_path).files
        texts.append([text for file in files for text in documents(file)])
        digests.append(digest(files[:1]))
    assert texts == [["zwölf", "one", "two"]] * 2 and digests[0] == digests[1]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_lines_in_another_encoding_are_named_as_such(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "wide.jsonl").write_bytes('{"text": "one"}\n{"text": "two"}\n'.encode(encoding))
    with pytest.raises(DataError, match=r"wide\.jsonl:1: in UTF-16, it seems: write it in UTF-8"):
        list(documents(find("wide.jsonl", tmp_path).files[0]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("corpus/*.rst", r"'corpus/\*\.rst': no \.txt, \.md, \.py, \.jsonl, .*, \.arrow file found in .*corpus$"),
        ("nowhere/*.txt", "no .* file found in .*nowhere"),
        ("", "expected python_stdlib or a pattern"),
        ("a\0b", "expected python_stdlib or a pattern"),
        ("corpus/*/../../x.txt", "cannot follow a wildcard"),
        ("corpus/**.txt", r"\*\*"),
        (".", r"this is a folder, write \./\*\*/\*\.txt"),
        ("corpus/..", r"this is a folder, write corpus/\.\./\*\*/\*\.txt"),
        ("/", r"this is a folder, write /\*\*/\*\.txt"),
    ],
)
def test_an_unmatched_source_reports_the_searched_folder(spec_folder: Path, source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        find(source, spec_folder)


def test_reasons_why_matching_files_are_not_read(tmp_path: Path) -> None:
    """For a folder of files with another suffix, the message is about these files."""
    for name in ("a.rst", "b.rst", "c.rst", "other.txt"):
        (tmp_path / name).write_text("text")
    with pytest.raises(DataError) as raised:
        find("*.rst", tmp_path)
    assert str(raised.value) == (
        "data source '*.rst': 3 files match and none is read: .rst is not one of .txt .md .py .jsonl "
        ".jsonl.gz .jsonl.zst .parquet .arrow; rename the files, or write their texts as lines of a .jsonl"
    )
    (tmp_path / "README").write_text("text")
    (tmp_path / "latin.md").write_bytes("é".encode("latin-1"))
    with pytest.raises(DataError, match=r"2 files match .*: 1 left out: not UTF-8; no suffix is not one of \.txt"):
        find("[RIl][Ea]*", tmp_path)
    with pytest.raises(DataError, match=r"4 files match .*: \.rst, no suffix are not one of \.txt"):
        find("[abcR]*", tmp_path)
    with pytest.raises(DataError, match=r"1 file matches and is not read: 1 left out: not UTF-8"):
        find("latin.*", tmp_path)


def test_names_and_texts_are_printable_in_messages(tmp_path: Path) -> None:
    """File names are untrusted: their escape sequences do not reach a terminal."""
    name = "\x1b[2J\u202ebad.jsonl"
    (tmp_path / name).write_text('{"text": 3}')
    (tmp_path / "a.\x1b[31m").write_text("")
    for pattern in ("*.jsonl", "a*"):
        with pytest.raises(DataError) as error:
            list(documents(find(pattern, tmp_path).files[0]))
        assert "\\x1b[" in str(error.value) and str(error.value).isprintable()


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe is refused at once, even if it replaced a file after the file was found."""
    for name in ("a.txt", "a.jsonl"):
        path = tmp_path / name
        path.write_text("text")
        (file,) = find(name, tmp_path).files
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(DataError, match=rf"{name}: not a regular file"):
            list(documents(file))
        with pytest.raises(DataError, match=rf"{name}: not a regular file"):
            digest((file,))


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


def test_a_file_of_several_sources_is_reported(tmp_path: Path) -> None:
    """The first such file by its path is named, whichever source has it first; links to it count as the same file."""
    a, b, c = (SourceFile(name, tmp_path / name) for name in ("a.txt", "b.txt", "c.txt"))
    (tmp_path / "a.txt").touch()
    (tmp_path / "d.txt").symlink_to("a.txt")
    link = SourceFile("d.txt", tmp_path / "d.txt")
    assert note_on_shared({"web": [a, b], "code": [c]}) == ""
    assert note_on_shared({"web": [c, b, a], "code": [b, link], "books": [c, b]}) == (
        f"files in several sources of the blend: 3, such as {tmp_path}/a.txt in web and code: what one "
        "source holds out may be trained on in another"
    )
    assert f"1, such as {tmp_path}/b.txt in web and code and books: " in note_on_shared(
        {"web": [b, a], "code": [b], "books": [b, c]}
    )
