"""Edits from hints: each offered edit removes its error, and causes no error of form."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dsl.facts import vocabulary
from dsl.load import analyse, refusals
from dsl.messages.diagnostics import OVERRIDE, Diagnostic, Source
from dsl.reference import keys
from dsl.resolve.files import read
from dsl.rules.codes import CODES
from dsl.text.edits import apply, corrects_spelling, edit_of

UI = Path(__file__).parents[2] / "ui"
NAMES = sorted(path.stem for path in UI.glob("*.dsc"))
FORM = {code for code in CODES if code < "E03"}  # the text, keys and blocks
FLOOR = 110  # hints over tests/ui that a machine can follow


@pytest.fixture(autouse=True)
def _in_ui(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(UI)


def overrides_of(name: str) -> list[str]:
    first = Path(f"{name}.dsc").read_bytes().split(b"\n")[0].decode(errors="replace")
    return first.removeprefix("# -s ").split(" -s ") if first.startswith("# -s ") else []


def said(name: str, overrides: Sequence[str], texts: Mapping[str, str] = {}) -> tuple[Diagnostic, ...]:
    """The diagnostics of a spec with some files replaced: errors, or else refusals."""

    def reader(path: str) -> tuple[Source, tuple[Diagnostic, ...]]:
        file = os.path.normpath(path)
        return (Source(file, texts[file]), ()) if file in texts else read(path)

    analysis = analyse(f"{name}.dsc", None, overrides, reader)
    return analysis.diagnostics or refusals(analysis)


def count(items: Sequence[Diagnostic]) -> Counter[tuple[str, str]]:
    """Errors without their spans, which an edit may move."""
    return Counter((item.code, item.message) for item in items)


@pytest.mark.parametrize("name", NAMES)
def test_an_edit_removes_its_mistake_and_adds_no_syntax_error(name: str) -> None:
    overrides = overrides_of(name)
    before = said(name, overrides)
    for item in before:
        edit = edit_of(item)
        if edit is None:
            continue
        source = edit.span.source
        text = apply(source.text, [edit])
        assert text != source.text
        if source.name == OVERRIDE:
            after = said(name, [text if override == source.text else override for override in overrides])
        else:
            after = said(name, overrides, {source.name: text})
        mistake = (item.code, item.message)
        assert count(after)[mistake] < count(before)[mistake], f"{item.hint}: {edit.text!r} mends nothing"
        assert not [key for key in count(after) - count(before) if key[0] in FORM], f"{item.hint}: {edit.text!r}"


def test_most_hints_that_suggest_a_change_have_an_edit() -> None:
    items = [item for name in NAMES for item in said(name, overrides_of(name))]
    followed = [item for item in items if edit_of(item) or item.conflict]
    assert len(followed) >= FLOOR, f"{len(followed)} of {len(items)}"
    corrections = [item for item in items if item.hint.startswith("did you mean `")]
    assert corrections and all(edit_of(item) for item in corrections if corrects_spelling(item))
    assert [item.hint for item in corrections if not corrects_spelling(item)] == ["did you mean `beta1` or `beta2`?"]


def test_all_edits_of_a_text_can_be_made_at_once() -> None:
    """All edits together, as with an editor's "fix all", leave fewer errors and none of form."""
    for name in NAMES:
        before = said(name, overrides_of(name))
        edits = [edit for item in before if (edit := edit_of(item)) and edit.span.source.name == f"{name}.dsc"]
        if not edits:
            continue
        after = said(name, overrides_of(name), {f"{name}.dsc": apply(edits[0].span.source.text, edits)})
        assert not [key for key in count(after) - count(before) if key[0] in FORM], name


EVERY_BLOCK = (
    (UI / "lib" / "base.dsc").read_text("utf-8")
    + """
precision mine extends bf16 { moments = bf16 }
model other extends base {
  attention gqa { heads = 4, kv_heads = 2, head_dim = 16, rope { theta = 10_000 } }
}
run other extends base {
  model = other, precision = mine
  sm { communication = 0 }
  train { validate { every = 50 steps } }
}
"""
)
WORDS = {*vocabulary.KEYS, *vocabulary.OTHERS, *vocabulary.ABSENT}
KEYS = {path.rpartition(".")[2] for path in keys()}
BLOCKS = {  # position of each block's brace → the block, except the `{ }` of a rate
    match.end(): match[1]
    for match in re.finditer(r"(\w+(?: [\w.]+)?)(?: extends \w+)?\s*\{", EVERY_BLOCK)
    if match[1] != "rate"
}


def with_keys(place: int, words: Sequence[str]) -> dict[str, Diagnostic]:
    """Key → diagnostic, for keys that do not belong to the block at an offset."""
    text = EVERY_BLOCK[:place] + "".join(f"\n{word} = 1" for word in words) + "\n" + EVERY_BLOCK[place:]
    items = said("all", (), {"all.dsc": text})
    return {item.span.text: item for item in items if item.code == "E0201" and item.span is not None}


@pytest.mark.parametrize("place", BLOCKS, ids=[f"{name}-{place}" for place, name in BLOCKS.items()])
def test_no_word_in_any_block_gets_an_edit_that_causes_another_error(place: int) -> None:
    """A word of another system or a key of another block never gets an edit that causes another error."""
    diagnostics: dict[str, Diagnostic] = {}
    words = sorted(WORDS | KEYS | {"frobnicate", "zzz"})
    for start in range(0, len(words), 80):  # of more than a hundred mistakes, no hints are given
        diagnostics |= with_keys(place, words[start : start + 80])
    assert len(diagnostics) > len(WORDS)
    for word, item in diagnostics.items():
        edit = edit_of(item) and edit_of(with_keys(place, [word])[word])
        if edit is not None:
            text = apply(edit.span.source.text, [edit])
            after = said("all", (), {"all.dsc": text})
            assert not [diagnostic for diagnostic in after if diagnostic.code in FORM], (word, edit.text)
        assert item.hint and not item.hint.startswith(("one of", "write `qk_norm`")), word
        if not item.hint.startswith(("did you mean", "remove it")):
            listed = re.fullmatch(r"`[\w ]+` takes .*", item.hint)
            assert bool(listed) == (word not in WORDS | KEYS), item.hint
            assert edit is None, "a key that is near no other has no edit"


def test_keys_that_are_missing_come_on_lines_of_their_own() -> None:
    """They are added below the line that opens the block, whatever follows the brace."""
    text = 'import "lib/base.dsc"\nrun a extends base { train { validate {  # how well\n    batches = 2 } } }\n'
    (item,) = said("all", (), {"all.dsc": text})
    edit = edit_of(item)
    assert edit is not None and edit.text.strip() == "every = 1000 steps"
    before, behind = text.split("    batches", 1)
    assert apply(text, [edit]) == f"{before}{edit.text}    batches{behind}" and edit.text.endswith("\n")


def test_edits_that_overlap_are_made_once() -> None:
    from dsl.messages.diagnostics import Edit, Span

    source = Source("a", "abcdef")
    edits = [Edit(Span(source, 3, 5), "Y"), Edit(Span(source, 0, 4), "X"), Edit(Span(source, 5, 5), "Z")]
    assert apply(source.text, edits) == "XeZf"
