"""Definitions, references, the outline, and quick fixes."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.tools.editor.actions import actions
from compiler.tools.editor.navigation import Symbol, definition, references, symbols
from dsl import load
from dsl.messages.diagnostics import Span
from dsl.resolve.files import reader_of_texts
from dsl.text.edits import apply
from tests.compiler.tools.editor.texts import HERE, QUICKSTART, ROOT, cursor, documented, in_quickstart


def defined(marked: str, **others: str) -> tuple[str, str, int] | None:
    """File, text and line of the definition at the cursor."""
    target = definition(*cursor(marked, **others))
    return None if target is None else (Path(target.source.name).name, target.text, target.line)


LIBRARY = "let base = 64\n\nmodel deep {\n  hidden = 7168\n}\n"


@pytest.mark.parametrize(
    ("marked", "wanted"),
    [
        ('import "lib.dsc"\nrun a { model = de|ep }', ("lib.dsc", "deep", 3)),
        ('import "lib.dsc"\nmodel b extends de|ep { }', ("lib.dsc", "deep", 3)),
        ('import "lib.dsc"\nmodel b { vocab = ba|se }', ("lib.dsc", "base", 1)),
        ('import "lib.dsc"\nmodel deep { }\nrun a { model = de|ep }', ("spec.dsc", "deep", 2)),
        ('import "li|b.dsc"', ("lib.dsc", "", 1)),
        ('import "nothing|.dsc"', None),
        ("model a { hidden = 4, vocab = hid|den * 2 }", ("spec.dsc", "hidden", 1)),
        ("model a { hidden = 4, vocab = model.hid|den * 2 }", ("spec.dsc", "hidden", 1)),
        ("model a {\n  let w = 4\n  hidden = |w\n}", ("spec.dsc", "w", 2)),
        ("model a {\n hidden = 4\n vocab = hid|den } } {", ("spec.dsc", "hidden", 2)),
        ("model |a { }", ("spec.dsc", "a", 1)),
        ("mod|el a { }", None),
        ("model a { hid|den = 4 }", None),
        ("# model |a\n", None),
        ("|", None),
    ],
)
def test_definition(marked: str, wanted: tuple[str, str, int] | None) -> None:
    assert defined(marked, lib=LIBRARY) == wanted


def test_a_reference_through_the_run_to_an_imported_model() -> None:
    text = in_quickstart("sequence    = 1|28").replace("sequence    = 1|28", "sequence    = model.hid|den")
    start = text.index("model quick {")
    assert defined('import "lib.dsc"\n' + text[:start], lib=text[start:].replace("|", "")) == ("lib.dsc", "hidden", 2)


def test_references_in_the_file_and_its_imports() -> None:
    text = 'import "lib.dsc"\nrun a { model = deep }\nmodel b extends deep { vocab = base, hidden = base }\n'
    document = documented(text, lib=f"{LIBRARY}model deeper extends deep {{ }}\n")
    deep = definition(document, text.index("deep"))
    assert deep is not None
    assert sorted((Path(reference.source.name).name, reference.line) for reference in references([document], deep)) == [
        ("lib.dsc", 3), ("lib.dsc", 6), ("spec.dsc", 2), ("spec.dsc", 3)
    ]  # fmt: skip


def test_references_of_values() -> None:
    text = "let base = 64\nmodel b { vocab = base, hidden = base * 2, init_std = 0.1 }\n"
    document = documented(text)
    base = definition(document, text.index("base,"))
    assert base is not None and base.line == 1
    assert [reference.start for reference in references([document], base)] == [
        4,
        text.index("base,"),
        text.index("base *"),
    ]


def test_outline() -> None:
    outline = symbols(
        documented('import "x.dsc"\nlet w = 4\nmodel m {\n  layers 0..3 { ffn moe { top_k = 2 } }\n').file
    )
    assert [(entry.name, entry.kind) for entry in outline] == [("x.dsc", "import"), ("w", "let"), ("model m", "model")]
    (layers,) = outline[2].children
    assert layers.name == "layers 0..3" and layers.children[0].children[0].detail == "2"


@pytest.mark.parametrize("path", sorted((ROOT / "specs").rglob("*.dsc")), ids=lambda path: path.stem)
def test_entries_of_the_outline_are_nested(path: Path) -> None:
    def within(symbol: Symbol) -> None:
        assert symbol.start < symbol.head_end <= symbol.end
        for child in symbol.children:
            assert symbol.start < child.start and child.end <= symbol.end
            within(child)

    for entry in symbols(documented(path.read_text("utf-8"), str(path)).file):
        within(entry)


# ---------------------------------------------------------------- edits


def mended(text: str) -> list[str]:
    """The text after each quick fix offered for the whole text."""
    document = documented(text)
    offered = actions([document], Span(document.source, 0, len(text)))
    return [apply(text, action.edits) for action in offered]


def test_a_spelling_is_corrected() -> None:
    assert mended(QUICKSTART.replace("pipeline = 2", "pipelin = 2")) == [
        QUICKSTART.replace("pipeline = 2", "pipeline = 2")
    ]


def test_fixes_are_offered_only_for_the_selected_range() -> None:
    document, offset = cursor(in_quickstart("hid|den = 192").replace("kv_rank", "kv_rnk"))
    assert actions([document], Span(document.source, offset, offset)) == ()


def test_each_edit_for_a_conflict_resolves_it() -> None:
    """Applying any one offered resolution leaves no errors."""
    text = QUICKSTART.replace("pipeline = 2 ", "pipeline = 3 ")
    document = documented(text)
    assert document.diagnostics
    offered = actions([document], Span(document.source, 0, len(text)))
    resolutions = [action for action in offered if action.mends.conflict is not None]
    assert resolutions and sum(action.is_preferred for action in resolutions) <= 1
    for action in resolutions:
        new_text = apply(text, action.edits)
        assert not load.analyse(HERE, reader=reader_of_texts({HERE: new_text})).diagnostics, action.title


def test_an_edit_of_another_file_names_it() -> None:
    library = "cluster four { nodes = 1, node { devices = 4, device cpu { memory = 4GB } } }\n"
    text = QUICKSTART.replace("cluster   = laptop", "cluster   = four").replace("pipeline = 2 ", "pipeline = 3 ")
    document = documented(f'import "lib.dsc"\n{text}', lib=library)
    titles = [action.title for action in actions([document], Span(document.source, 0, len(document.source.text)))]
    assert "write `pipeline = 2`" in titles and "write `name = 1f1b` and write `devices = 6` in lib.dsc" in titles


def test_edits_that_reveal_another_mistake_are_not_preferred() -> None:
    """A misspelt key hides an error in its value: the edit is offered, but not preferred."""
    for wrong, preferred in (("pipelin = 2", True), ("pipelin = x", False)):
        document = documented(QUICKSTART.replace("pipeline = 2", wrong))
        (action,) = (
            offer
            for offer in actions([document], Span(document.source, 0, len(document.source.text)))
            if offer.edits[0].text == "pipeline"
        )
        assert action.is_preferred == preferred, wrong


def test_a_missing_brace_is_put_where_the_indentation_says() -> None:
    """The edit puts the brace where the indentation says; until then, the rest of the file is still checked."""
    text = QUICKSTART.replace("  }\n  schedule", "  schedule").replace("beta1", "betta1")
    assert text != QUICKSTART.replace("beta1", "betta1")
    document = documented(text)
    assert sorted(item.code for item in document.diagnostics) == ["E0107", "E0201"]
    right = text.replace("  schedule", "  }\n  schedule")
    assert right in mended(text)
