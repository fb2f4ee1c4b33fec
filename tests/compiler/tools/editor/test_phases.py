"""The editor in `phase` blocks of a run: completion, hover and definitions."""

from __future__ import annotations

import pytest

from compiler.tools.editor.hover import hover
from compiler.tools.editor.navigation import definition, references, symbols
from dsl.messages.diagnostics import Source
from dsl.text.formatter import format_source
from tests.compiler.tools.editor.test_completion import items, labels
from tests.compiler.tools.editor.texts import ROOT, cursor, documented

LONG = (ROOT / "specs" / "laptop-long.dsc").read_text("utf-8")


def in_long(marked: str) -> str:
    """The shipped spec with a `|` inserted as in `marked`."""
    part = marked.replace("|", "")
    assert LONG.count(part) == 1, part
    return LONG.replace(part, marked)


def about(marked: str) -> str:
    tooltip = hover(*cursor(in_long(marked)))
    return tooltip.text if tooltip is not None else ""


@pytest.mark.parametrize(
    ("marked", "has", "lacks"),
    [
        ("run a {\n  phase b { }\n  |", ["train", "phase"], []),
        ("run a {\n  phase b {\n    |", ["model", "parallel", "train", "recompute"], ["phase", "data", "adapter"]),
        (
            "run a {\n  phase b { train { |",
            ["sequence", "batch", "steps", "rate"],
            ["optimizer", "seed", "ema", "within"],
        ),
        ("run a {\n  phase b { parallel { zero = 1, |", ["pipeline", "context"], ["zero"]),
        ("run a {\n  phase b { train { rate { |", ["warmup", "constant"], []),
        ("run a {\n  phase b { schedule { name = |", ["1f1b", "dualpipe"], []),
        ("run a {\n  phase b { model = |\n}\n}\nmodel m { }\nmodel n extends m { }", ["m", "n"], []),
        ("run a {\n  phase b { phase c { |", [], ["model", "train"]),
        ("model a {\n  |", ["hidden"], ["phase"]),
    ],
)
def test_completion_in_phases(marked: str, has: list[str], lacks: list[str]) -> None:
    proposed = labels(marked)
    assert {*has} <= {*proposed} and not {*lacks} & {*proposed}


def test_nothing_is_required_of_a_phase() -> None:
    assert not any(item.detail for item in items("run a { phase b { train { |"))


@pytest.mark.parametrize(
    ("marked", "wanted"),
    [
        ("pha|se to_128", "the keys that change when the previous phase ends"),
        ("phase to_1|28", "`long.to_128`, phase 2 of 3, begins after 90 steps, 184,320 tokens"),
        ("phase to_2|56", "`long.to_256`, phase 3 of 3, begins after 110 steps, 225,280 tokens"),
        ("sequence = 128, batch = 16, st|eps = 20", "= 40,960 tokens = 20 steps"),
        ("recomp|ute = [rmsnorm, swiglu]", "recomputed in the backward"),
        ("model = stret|ched", "4 layers (1 dense, 3 moe)"),
    ],
)
def test_hover_in_phases(marked: str, wanted: str) -> None:
    assert wanted in about(marked)


def test_a_name_in_a_phase_leads_to_its_block_and_back() -> None:
    document, offset = cursor(in_long("model = stret|ched"))
    target = definition(document, offset)
    assert (
        target is not None and target.text == "stretched" and document.source.text[: target.start].endswith("\nmodel ")
    )
    assert [reference.start for reference in references([document], target)] == [
        target.start,
        document.source.text.index("stretched"),
    ]


def test_a_mistake_in_a_phase_is_shown_at_its_place() -> None:
    document = documented(LONG.replace("sequence = 128, batch = 16", "sequence = 128, batch = 18"))
    assert document.diagnostics and {
        diagnostic.span.text for diagnostic in document.diagnostics if diagnostic.span
    } <= {"18", "20"}
    assert not documented(LONG).diagnostics


def test_the_outline_has_phases() -> None:
    run = next(entry for entry in symbols(documented(LONG).file) if entry.name == "run long")
    phases = [entry for entry in run.children if entry.name.startswith("phase ")]
    assert [entry.name for entry in phases] == ["phase to_128", "phase to_256"]
    assert [entry.name for entry in phases[0].children] == ["model", "train"]


def test_a_phase_is_formatted_as_other_blocks_are() -> None:
    ragged = LONG.replace("  phase to_128 {\n    model = stretched", "  phase   to_128   {\n model=stretched")
    assert ragged != LONG and format_source(Source("spec.dsc", ragged)) == LONG
