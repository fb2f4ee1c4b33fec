"""Edits from hints: each that is offered removes its mistake, and brings no mistake of form with it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dsl.codes import CODES
from dsl.diagnostics import Diagnostic
from dsl.edits import apply, corrects_spelling, edit_of
from dsl.load import analyse, refusals
from dsl.resolve.files import read
from dsl.source import OVERRIDE, Source

UI = Path(__file__).parents[1] / "ui"
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
    """What is said about a spec where some files have other texts: mistakes, or else refusals."""

    def reader(path: str) -> tuple[Source, tuple[Diagnostic, ...]]:
        file = os.path.normpath(path)
        return (Source(file, texts[file]), ()) if file in texts else read(path)

    analysis = analyse(f"{name}.dsc", None, overrides, reader)
    return analysis.diagnostics or refusals(analysis)


def count(items: Sequence[Diagnostic]) -> Counter[tuple[str, str]]:
    """Mistakes without their places, which an edit may move."""
    return Counter((item.code, item.message) for item in items)


@pytest.mark.parametrize("name", NAMES)
def test_an_edit_removes_its_mistake_and_adds_none_of_form(name: str) -> None:
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
            after = said(name, [text if each == source.text else each for each in overrides])
        else:
            after = said(name, overrides, {source.name: text})
        told = (item.code, item.message)
        assert count(after)[told] < count(before)[told], f"{item.hint}: {edit.text!r} mends nothing"
        assert not [key for key in count(after) - count(before) if key[0] in FORM], f"{item.hint}: {edit.text!r}"


def test_most_hints_that_say_an_edit_are_one() -> None:
    items = [item for name in NAMES for item in said(name, overrides_of(name))]
    followed = [item for item in items if edit_of(item) or item.conflict]
    assert len(followed) >= FLOOR, f"{len(followed)} of {len(items)}"
    meant = [item for item in items if item.hint.startswith("did you mean `")]
    assert meant and all(edit_of(item) for item in meant if corrects_spelling(item))
    assert [item.hint for item in meant if not corrects_spelling(item)] == ["did you mean `beta1` or `beta2`?"]


def test_all_edits_of_a_text_can_be_made_at_once() -> None:
    """As an editor's "fix everything" does: fewer mistakes of every kind that had an edit, none of form."""
    for name in NAMES:
        before = said(name, overrides_of(name))
        edits = [edit for item in before if (edit := edit_of(item)) and edit.span.source.name == f"{name}.dsc"]
        if not edits:
            continue
        after = said(name, overrides_of(name), {f"{name}.dsc": apply(edits[0].span.source.text, edits)})
        assert not [key for key in count(after) - count(before) if key[0] in FORM], name


def test_edits_that_overlap_are_made_once() -> None:
    from dsl.diagnostics import Edit
    from dsl.source import Span

    source = Source("a", "abcdef")
    edits = [Edit(Span(source, 3, 5), "Y"), Edit(Span(source, 0, 4), "X"), Edit(Span(source, 5, 5), "Z")]
    assert apply(source.text, edits) == "XeZf"
