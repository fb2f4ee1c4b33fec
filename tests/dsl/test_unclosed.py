"""A missing `}` is reported where it belongs by the indentation, and the rest is parsed as if it were there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dsl.load import analyse
from dsl.messages.diagnostics import Source
from dsl.text.edits import apply, edit_of
from dsl.text.parser import parse

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "specs").glob("*.dsc"))


def without_brace(text: str, line: int) -> str:
    """A text without the line of one brace."""
    lines = text.split("\n")
    assert lines[line].strip() == "}"
    return "\n".join(lines[:line] + lines[line + 1 :])


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_brace_of_a_shipped_spec_is_found_missing(path: Path) -> None:
    """Without any one brace that is alone on its line: one message, at its block, and the text is parsed as meant."""
    text = path.read_text("utf-8")
    complete = parse(Source("a", text))
    alone = [number for number, line in enumerate(text.split("\n")) if line.strip() == "}"]
    for line in alone:
        source = Source("a", without_brace(text, line))
        parsed = parse(source)
        (mistake,) = parsed.diagnostics
        assert mistake.code == "E0107" and not parsed.broken, line
        assert shape(parsed.document.body) == shape(complete.document.body), line
        edit = edit_of(mistake)
        if edit is not None:
            assert parse(Source("a", apply(source.text, [edit]))).diagnostics == ()


def shape(statements: tuple[object, ...]) -> list[object]:
    """The nesting of statements, by keys."""
    return [
        (
            type(statement).__name__,
            getattr(getattr(statement, "key", None), "text", ""),
            shape(getattr(statement, "body", ())),
        )
        for statement in statements
    ]


def test_braces_are_not_guessed_without_indentation() -> None:
    for text in ("run a {\nparallel {\npipeline = 2\n}\n", "run a { parallel { pipeline = 2 }", "a { b {\n}\n} }\nc {"):
        assert [item.code for item in parse(Source("a", text)).diagnostics][-1] == "E0107", text
    unindented = "run a {\nparallel {\npipeline = 2\nexpert = 1\n\nmodel m {\nvocab = 2\n}\n"
    parsed = parse(Source("a", unindented))
    assert {item.code for item in parsed.diagnostics} == {"E0107"}


def test_mistakes_after_a_missing_brace_are_reported() -> None:
    text = (ROOT / "specs/quickstart.dsc").read_text("utf-8").replace("vocab = 4096", "vocb = 4096")
    cut = text.replace("  }\n  schedule", "  schedule")
    assert cut != text
    mistakes = analyse("a.dsc", reader=lambda _: (Source("a.dsc", cut), ())).diagnostics
    assert [item.code for item in mistakes] == ["E0107", "E0201"]
    assert mistakes[0].notes[0].span is not None and mistakes[0].notes[0].span.text == "schedule"


def test_texts_without_some_braces_are_read_to_their_ends() -> None:
    """With any braces missing, the parser gives messages located within the text, and never fails."""
    chooser = random.Random(7)
    texts = [path.read_text("utf-8") for path in SPECS]
    for _ in range(150):
        text = chooser.choice(texts)
        places = [index for index, char in enumerate(text) if char in "{}"]
        removed = set(chooser.sample(places, chooser.randint(1, 4)))
        cut = "".join(char for index, char in enumerate(text) if index not in removed)
        parsed = parse(Source("a", cut))
        assert parsed.diagnostics or sum(text[index] == "{" for index in removed) * 2 == len(removed), removed
        assert all(item.span is not None and item.span.end <= len(cut) for item in parsed.diagnostics)
