"""The parser's table matches the grammar, and the parser gives the results of lark's own parser."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from lark import Lark
from lark.exceptions import UnexpectedInput

from dsl.messages.diagnostics import Source
from dsl.text import make_table
from dsl.text.syntax import Statement
from dsl.text.table import END, TableParser, Token, UnexpectedError, load, tokens
from dsl.text.tree import Builder

ROOT = Path(__file__).parents[2]
TEXTS = [path.read_text("utf-8") for path in sorted((ROOT / "specs").rglob("*.dsc"))]


def by_lark(lark: Lark, text: str) -> tuple[Statement, ...] | None:
    """The statements that lark parses; None on a syntax error."""
    try:
        tree = lark.parse(text)
    except UnexpectedInput:
        return None
    builder = Builder(Source("text", text))
    methods = {rule.method for rule in load().rules} - {"", "*"}

    def built(node: Any) -> Any:
        if not hasattr(node, "children"):
            return Token(node.type, str(node), node.start_pos, node.end_pos)
        name = str(node.data)
        assert name in methods
        return getattr(builder, name)(*(built(child) for child in node.children))

    statements: tuple[Statement, ...] = built(tree)
    return statements


def by_table(text: str) -> tuple[Statement, ...] | None:
    parser = TableParser(Builder(Source("text", text)))
    try:
        for token in tokens(text):
            parser.feed(token)
        body: tuple[Statement, ...] = parser.finish()
    except UnexpectedError as error:
        assert error.accepts
        return None
    return body


@pytest.fixture(scope="module")
def lark() -> Lark:
    return Lark(make_table.GRAMMAR.read_text("utf-8"), parser="lalr", lexer="basic", maybe_placeholders=False)


def test_the_table_is_current() -> None:
    assert make_table.TABLE.read_text("utf-8") == make_table.table_text(), "run `python -m dsl.text.make_table`"


def test_the_grammar_has_no_name_that_looks_like_a_terminal() -> None:
    table = load()
    rules = {rule.origin for rule in table.rules}
    symbols = {name for state in table.states for name in state}
    assert all(name.isupper() != (name in rules) for name in symbols - {END})


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_specs_are_read_as_lark_reads_them(text: str, lark: Lark) -> None:
    statements = by_table(text)
    assert statements is not None and statements == by_lark(lark, text)


def test_soups_are_read_or_refused_as_by_lark(lark: Lark) -> None:
    """Words of the specs in random order; many of these texts are invalid."""
    chooser = random.Random(1)
    words = sorted({token.text for text in TEXTS for token in tokens(text)}) + ["\n", "{", "}", "=", ",", "(", ")"] * 9
    read = 0
    for _ in range(1500):
        text = " ".join(chooser.choices(words, k=chooser.randint(1, 7)))
        if chooser.random() < 0.7:
            text = f"a = {text}\n" if chooser.random() < 0.5 else f"a {{ {text} }}"
        statements = by_table(text)
        assert statements == by_lark(lark, text), text
        read += statements is not None
    assert 100 < read < 1400


def test_accepted_terminals_are_exactly_those_that_can_be_fed() -> None:
    names = {name for state in load().states for name in state if name.isupper()} - {END}
    text = TEXTS[0]
    parser = TableParser(Builder(Source("text", text)))
    for token in list(tokens(text))[:60]:
        before = parser.copy_state()
        fed = set()
        for name in names:
            try:
                parser.feed(Token(name, "1", 0, 1))
                fed.add(name)
            except UnexpectedError as error:
                assert name not in error.accepts
                accepts = error.accepts - {END}
            parser.restore(before)
        assert fed == accepts
        parser.feed(token)
