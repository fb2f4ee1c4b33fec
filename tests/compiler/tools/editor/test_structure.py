"""The fault-tolerant reader against the parser, on texts that parse and on all their prefixes; cursor positions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.cli.commands.check import examine
from compiler.schedule import SCHEDULES
from compiler.tools.editor import outline
from compiler.tools.editor.completion import complete
from compiler.tools.editor.hover import hover
from compiler.tools.editor.navigation import definition, symbols
from compiler.tools.editor.protocol import Client, ClientLines, text_edits
from dsl.messages.diagnostics import Source
from dsl.text.parser import parse
from dsl.text.syntax import Attribute, Block, Import, Let, Line, Statement
from tests.compiler.tools.editor.texts import QUICKSTART, ROOT, documented

SPECS = sorted((ROOT / "specs").rglob("*.dsc"))
Shape = tuple[str, str, tuple["Shape", ...]]  # type: ignore[misc]


def test_only_the_beginning_of_a_long_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "MAX_WORDS", 5)
    assert [token.text for token in outline.tokens("a = 1\nb = 2\nc = 3\n")] == ["a", "=", "1", "\n", "b"]


def parsed(statement: Statement) -> Shape:
    """Key, value and body of a statement, without spaces."""
    if isinstance(statement, Block):
        return statement.head.text.replace(" ", ""), "", tuple(parsed(child) for child in statement.body)
    if isinstance(statement, Attribute):
        return statement.key.text, "".join(statement.phrase.span.text.split()), ()
    if isinstance(statement, Let):
        return f"let{statement.name.text}", "".join(statement.phrase.span.text.split()), ()
    assert isinstance(statement, (Line, Import))
    return statement.span.text.replace(" ", ""), "", ()


def read(node: outline.OutlineNode) -> Shape:
    head, value = ("".join(token.text for token in tokens) for tokens in (node.head, node.value))
    return head, value, tuple(read(child) for child in node.body)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_the_structure_equals_that_of_the_parser(path: Path) -> None:
    source = Source(str(path), path.read_text("utf-8"))
    assert [read(node) for node in outline.read(source.text).body] == [
        parsed(statement) for statement in parse(source).document.body
    ]


def test_tokens_of_incomplete_text() -> None:
    tokens = outline.tokens('a = model. + train(4) # x\nb = "no end\n0..2')
    assert [(token.kind, token.text) for token in tokens] == [
        ("word", "a"), ("sign", "="), ("word", "model."), ("sign", "+"), ("word", "train"), ("sign", "("),
        ("number", "4"), ("sign", ")"), ("comment", "# x"), ("newline", "\n"), ("word", "b"), ("sign", "="),
        ("string", '"no end'), ("newline", "\n"), ("number", "0"), ("sign", ".."), ("number", "2"),
    ]  # fmt: skip


def test_blocks_are_found_in_every_beginning_of_a_text() -> None:
    """For every prefix, the cursor at its end is in the innermost open block."""
    for end in range(len(QUICKSTART)):
        text = QUICKSTART[:end]
        opened: list[int] = []
        for token in outline.tokens(text):
            if token.kind == "sign" and token.text == "{":
                opened.append(token.start)
            elif token.kind == "sign" and token.text == "}":
                opened.pop()
        place = outline.place(text, outline.read(text), end)
        assert [node.opened for node in place.block.path()] == opened, text[-60:]


def test_a_top_level_block_begins_even_inside_open_blocks() -> None:
    file = outline.read("run a {\n  train {\n    rate {\nmodel b {\n  hidden = 1\n}\ncluster c extends d {\n}\n")
    assert [node.key for node in file.body] == ["run", "model", "cluster"]
    assert [node.key for node in file.body[1].body] == ["hidden"]


@given(st.text(alphabet='ab =,{}[]()"#\n.|0T%-run model extends import let', max_size=120), st.integers(0, 120))
def test_no_text_breaks_a_feature(text: str, offset: int) -> None:
    document = documented(text)
    offset = min(offset, len(document.source.text))
    for item in complete(document, offset, lambda folder: ["x.dsc", "y/"]):
        assert 0 <= item.start <= offset <= item.end <= len(text)
    tooltip = hover(document, offset)
    assert tooltip is None or tooltip.start <= offset <= tooltip.end
    definition(document, offset)
    symbols(document.file)


def test_no_mutation_of_a_spec_breaks_a_feature() -> None:
    """Every line left out, doubled, and cut in half."""
    lines = QUICKSTART.splitlines(keepends=True)
    for index, line in enumerate(lines):
        for new in ("", line * 2, line[: len(line) // 2]):
            text = "".join([*lines[:index], new, *lines[index + 1 :]])
            document, offset = documented(text), len("".join(lines[:index])) + len(new)
            complete(document, offset, lambda folder: [])
            hover(document, offset)
            definition(document, offset)
            symbols(document.file)


TEXTS = st.text(alphabet=st.sampled_from("aé😀\n\r\t𝔘漢 "), max_size=40)


@given(TEXTS, st.sampled_from(["utf-8", "utf-16", "utf-32"]))
def test_positions_round_trip(text: str, encoding: str) -> None:
    lines = ClientLines(text, encoding)
    for offset in range(len(text) + 1):
        line, column = lines.position(offset)
        inside_crlf = text[offset - 1 : offset + 1] == "\r\n"
        assert lines.offset(line, column) == (offset - 1 if inside_crlf else offset)
        start = lines.starts[line]
        units = {"utf-8": 1, "utf-16": 2, "utf-32": 4}[encoding]
        codec = {"utf-8": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}[encoding]
        assert column == len(text[start:offset].encode(codec)) // units


def test_a_place_beyond_the_text_is_its_end() -> None:
    assert ClientLines("ab\ncd").offset(0, 99) == 2
    assert ClientLines("ab\ncd").offset(9, 0) == 5
    assert ClientLines("ab\r\ncd").offset(0, 99) == 2


def test_files_that_a_spec_names_are_read_as_dsc_check_reads_them(tmp_path: Path) -> None:
    """Errors in a schedule file are reported where the spec names it; a valid file gives none."""
    assert QUICKSTART.count("name = dualpipe") == 1
    text = QUICKSTART.replace("name = dualpipe", 'file = "mine.schedule"')
    path = tmp_path / "spec.dsc"
    path.write_text(text, "utf-8")
    (diagnostic,) = documented(text, str(path)).diagnostics
    assert diagnostic == examine(str(path), ()).diagnostics[0]
    assert diagnostic.code == "S0101" and "there is no file" in diagnostic.message
    assert diagnostic.span is not None and diagnostic.span.text == '"mine.schedule"'
    (tmp_path / "mine.schedule").write_text(SCHEDULES["dualpipe"].generate(2, 4).to_text(), "utf-8")
    assert documented(text, str(path)).diagnostics == ()


LINES = st.lists(st.sampled_from(["a\n", "b 😀\n", "\n", "c"]), max_size=6).map("".join)


@given(old=LINES, new=LINES, before=LINES, behind=LINES)
def test_a_text_is_replaced_where_it_differs(old: str, new: str, before: str, behind: str) -> None:
    client, texts = Client(), [f"{before}\nfirst\n{middle}\nlast\n{behind}" for middle in (old, new)]
    source, text = Source("spec.dsc", texts[0]), texts[1]
    edits = text_edits(client, source, text)
    assert bool(edits) == (source.text != text)
    for edit in edits:
        start, end = (client.offset(source, place) for place in (edit.range.start, edit.range.end))
        assert f"{source.text[:start]}{edit.new_text}{source.text[end:]}" == text
        first, last = (source.text.index(word) for word in ("first", "last"))
        assert first < start <= end <= last, "lines around keep their marks"
