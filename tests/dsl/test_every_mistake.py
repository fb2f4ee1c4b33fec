"""Each of several mistakes in a text is reported once, at its place; consequences of a mistake are not reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsl.load import analyse
from dsl.messages.diagnostics import Diagnostic, Source
from dsl.text.edits import apply, edit_of

SPECS = Path(__file__).parents[2] / "specs"


def spec(name: str, edits: dict[str, str]) -> str:
    """A shipped spec with one space before each `=`, and with the first occurrence of some words replaced."""
    text = re.sub(r"(\w) +=", r"\1 =", (SPECS / f"{name}.dsc").read_text("utf-8"))
    for old, new in edits.items():
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def said(text: str) -> tuple[Diagnostic, ...]:
    return analyse("a.dsc", reader=lambda _: (Source("a.dsc", text), ())).diagnostics


def told(text: str) -> list[tuple[str, str]]:
    return [(item.code, item.span.text if item.span is not None else "") for item in said(text)]


WARMUP, COSINE = "warmup 15 steps to 2e-3", "cosine to 2e-4"


@pytest.mark.parametrize(
    ("edits", "wanted"),
    [
        # one mistake, one message
        ({"sequence = 128": "sequence = 1e15"}, [("E0303", "1e15")]),
        ({"pipeline = 2": "pipeline = 1e9"}, [("E0303", "1e9")]),
        ({"nodes = 1": "nodes = 1e9"}, [("E0303", "1e9")]),
        ({"devices = 4": "devices = 1e9"}, [("E0303", "1e9")]),
        ({"model quick": "mdel quick"}, [("E0201", "mdel")]),
        ({"model quick": "network quick"}, [("E0201", "network")]),
        ({WARMUP: "warmup -7 steps to 2e-3"}, [("E0108", "-")]),
        ({"layers 0..0": "layers -7"}, [("E0108", "-")]),
        ({"train(4096)": "train(3 GB)"}, [("E0108", "GB")]),
        ({"pipeline = 2": "pipeline x = 2"}, [("E0108", "x")]),
        ({COSINE: "cosine to -1"}, [("E0303", "-1")]),
        # as many messages as there are mistakes
        ({WARMUP: "warmup 15 steps to 99", COSINE: "cosine to 98"}, [("E0303", "99"), ("E0303", "98")]),
        ({WARMUP: "warmup 3GB to 99", COSINE: "cosine to 1 over 3GB"}, [("E0303", "99"), ("E0301", "3GB")]),
        ({"batch = 16": "batch = 0", COSINE: "cosine to 99"}, [("E0303", "0"), ("E0303", "99")]),
        ({"devices = 4": "devices = oops", COSINE: "cosine to 99"}, [("E0303", "99"), ("E0401", "oops")]),
        # several in one block, without consequences: a wrong key is not also reported as missing
        ({"batch = 16": "batch { from = 8, too = 16, over = 9K tokens, 3 }"}, [("E0201", "too"), ("E0108", "3")]),
        (
            {"batch = 16": "batch { form = 8, to = oops, ovr = 9K tokens }"},
            [("E0201", "form"), ("E0401", "oops"), ("E0201", "ovr")],
        ),
        ({"batch = 16": "batch { from = 8, to = oops, over = 9K tokens }"}, [("E0401", "oops")]),
        ({"batch = 16": "batch { from = 8, 3, over = 9K tokens }"}, [("E0108", "3")]),
        ({"ffn dense": "let inner = 512, fnn dense"}, [("E0201", "fnn")]),
        ({"ffn dense": "ffn dens"}, [("E0205", "dens")]),
        ({"ffn dense {": "depth = 3, width = 4, ffn dense {"}, [("E0201", "depth"), ("E0201", "width")]),
        # contents of a block with a misspelt name
        ({"train {": "trian {", "seed ": "sed "}, [("E0201", "trian"), ("E0201", "sed")]),
        ({"rate {": "rat {", WARMUP: "wrmup 1 steps to 1"}, [("E0201", "rat"), ("E0704", "wrmup")]),
        ({"attention mla": "atention mla", "heads = 4": "heads = 0"}, [("E0201", "atention"), ("E0303", "0")]),
        ({"layers 1": "lyers 1", "experts = 16": "experts = 9"}, [("E0803", "2"), ("E0201", "lyers"), ("E0901", "4")]),
        ({"layers 1": "lyers 1", "ffn moe": "fnn moe"}, [("E0201", "lyers"), ("E0201", "fnn")]),
        ({"run quick": "rn quick", "zero = 0": "zero = x"}, [("E0201", "rn"), ("E0401", "x")]),
        # values that depend on themselves, wherever they are read
        ({"run quick": "let x = y\nlet y = x\nrun quick", "seed = 1": "seed = x"}, [("E0402", "y")]),
        ({"seed = 1": "seed = steps", "steps = 130": "steps = seed"}, [("E0402", "seed")]),
        (
            {
                "heads = 4": "heads = kv_rank",
                "kv_rank = 64": "kv_rank = heads",
                "layers 1..3 {": "layers 1..3 { attention { heads = kv_rank + 2 }",
            },
            [("E0402", "kv_rank")],
        ),
        (
            {
                "heads = 4": "heads = a.a",
                "layers 1..3 {": "layers 1..3 { let a = b, let b = a\n attention { heads = b }",
            },
            [("E0401", "a.a"), ("E0402", "a")],
        ),
        # several conflicts
        ({"devices = 4": "devices = 1", "micro_batch = 2": "micro_batch = 5"}, [("E0801", "auto"), ("E0807", "16")]),
        ({"devices = 4": "devices = 1", "experts = 16": "experts = 9"}, [("E0801", "auto"), ("E0901", "4")]),
    ],
)
def test_each_mistake_is_reported_once(edits: dict[str, str], wanted: list[tuple[str, str]]) -> None:
    mistakes = told(spec("quickstart", edits))
    assert mistakes == wanted or (mistakes[:1] == wanted[:1] and sorted(mistakes) == sorted(wanted)), mistakes


def test_every_conflict_has_its_edits() -> None:
    """Edits of one conflict do not depend on those of another, and each resolves its conflict."""
    text = spec(
        "quickstart",
        {"devices = 4": "devices = 1", "micro_batch = 2 ": "micro_batch = 5 ", "experts = 16": "experts = 9"},
    )
    before = said(text)
    assert [item.code for item in before] == ["E0801", "E0807", "E0901"]
    for item in before:
        assert item.conflict is not None and item.conflict.resolutions, item.code
        for edits in item.conflict.resolutions:
            after = [mistake.code for mistake in said(apply(text, edits))]
            assert item.code not in after and len(after) < 3, edits


def test_a_contradictory_model_is_not_reported_as_lack_of_memory() -> None:
    mistakes = said(spec("quickstart", {"experts = 16": "experts = 9", "memory = 4GB": "memory = 20MB"}))
    assert [item.code for item in mistakes] == ["E0803", "E0901", "E0812"]
    conflict = mistakes[0].conflict
    assert conflict is not None and sorted(line.text for line in conflict.lines) == ["2", "9"]
    assert [[edit.text for edit in edits] for edits in conflict.resolutions] == [["1", "3"]], "not with fewer experts"
    assert mistakes[2].conflict is None and "plan with" in mistakes[2].hint


@pytest.mark.parametrize(
    ("edits", "written"),
    [
        ({"seed = 1": "seed = model.hiden"}, "seed = model.hidden"),
        ({"seed = 1": "seed = cluster.node.devces"}, "seed = cluster.node.devices"),
        ({"seed = 1": "seed = model.attention.mispelt"}, None),
        ({"steps = 5": "steps = 320 tokens"}, "    tokens = 320 tokens\n"),
        ({"steps = 5": "tokens = 5 steps"}, "    steps = 5 steps\n"),
        ({"steps = 5": "tokens = 5 steps + 3 tokens"}, None),
        ({"steps = 5": "steps = 5 6"}, None),
        ({"steps = 5": "steps = 5, checkpoint { every = 50 tokens }"}, None),
        ({"ffn dense {": "ffn dense foo {"}, "ffn dense {"),
        ({"steps = 5": "steps = 0"}, None),  # the hint has an example
        ({"precision = fp32": 'precision = "fp32"'}, "precision = fp32"),
        ({"query_rank = 8": "query_rank = 8, query_rnk = 4"}, None),
        ({"top_groups = 1": "top_groups = 1, top_group = 2"}, None),
    ],
)
def test_an_edit_writes_the_intended_text(edits: dict[str, str], written: str | None) -> None:
    """An edit is offered only where the meaning is certain and the key that it writes is not set yet."""
    text = spec("tiny", edits)
    (item,) = said(text)
    edit = edit_of(item)
    if written is None:
        assert edit is None, edit
        return
    assert edit is not None
    after = apply(text, [edit])
    assert written in after and not said(after)


def test_two_keys_are_corrected_to_two() -> None:
    text = spec("tiny", {"groups  = 2, top_groups = 1".replace("  ", " "): "top_group = 1, grups = 2"})
    edits = [edit for item in said(text) if (edit := edit_of(item)) is not None]
    assert len(edits) == 2 and not said(apply(text, edits))


def test_a_bound_has_its_unit() -> None:
    for wrong, message in {
        "memory = -4GB": "`memory = -4GB` is out of bounds: at least 1 byte",
        "memory = 2_000_000TiB": "`memory = 2_000_000TiB` is out of bounds: at most 1048576TiB",
        "memory = 4GB, price = -2USD/h": "`price = -2USD/h` is out of bounds: at least 0USD/h",
        "memory = 4GB, hbm = 0GB/s": "`hbm = 0GB/s` is out of bounds: at least 1bytes/s",
    }.items():
        assert [item.message for item in said(spec("tiny", {"memory = 4GB": wrong}))] == [message]


def test_so_many_steps_are_too_many_tokens() -> None:
    text = spec("tiny", {"steps = 5": "steps = 1e9", "sequence = 16": "sequence = 4M"})
    (item,) = said(text)
    assert item.message == "`steps = 1e9` are 16,000,000,000,000,000 tokens: at most 10,000,000,000,000,000"
    assert item.span is not None and item.span.text == "1e9"
