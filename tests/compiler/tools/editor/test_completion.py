"""Completion: proposals at a cursor, in texts that mostly do not parse."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_args

import pytest

from compiler.tools.editor.block_keys import CompletionItem
from compiler.tools.editor.completion import complete
from dsl.messages.diagnostics import Source
from dsl.reference.keys import blocks
from dsl.schema import AnyAttention, AnyOptimizer, Gqa, Node
from dsl.schema.base import fields_of
from dsl.text.parser import parse
from dsl.text.syntax import NAMED
from tests.compiler.tools.editor.texts import HERE, cursor, documented, in_quickstart

LIBRARY = "model deep { }\ncluster big { }\nprecision fp8 { }\nlet base = 64\n"
FOLDERS = {"/nowhere": ["clusters/", "lib.dsc", "notes.txt", "spec.dsc"], "/nowhere/clusters": ["h800.dsc"]}


def items(marked: str, **others: str) -> tuple[CompletionItem, ...]:
    document, offset = cursor(marked, **others)
    return complete(document, offset, lambda folder: FOLDERS.get(folder, []))


def labels(marked: str, **others: str) -> list[str]:
    return [item.label for item in items(marked, **others)]


def kinds(union: object) -> list[str]:
    """The kinds that a block of the language comes in, in the order of the schema."""
    return [member.model_fields["kind"].default for member in get_args(union)]


def in_order(cls: type[Node]) -> Callable[[str], tuple[bool, int]]:
    """Sorts keys of a block as completion does: required keys first, then as in the schema."""
    fields = fields_of(cls)
    return lambda key: (not fields[key].required, list(fields).index(key))


FILE = ["run", "model", "cluster", "precision", "import", "let"]
PARALLEL = [
    "expert",
    "expert_tensor",
    "data",
    "tensor",
    "context",
    "layout",
    "placement",
    "route",
    "zero",
    "shard",
    "overlap_reduce",
]
SHAPES = ["warmup", "linear", "constant", "cosine"]


@pytest.mark.parametrize(
    ("marked", "wanted"),
    [
        ("|", FILE),
        ("mod|", FILE),
        ("model a { }\n|\nmodel b { }", FILE),
        ("run a {\n  parallel { pipeline = 2, |", PARALLEL),
        ("run a {\n  parallel { pipeline = 2, exp|", PARALLEL),
        ("run a {\n  parallel {\n    |\n  }\n  schedule { name = 1f1b }\n}", None),
        ("model a {\n  attention |", kinds(AnyAttention)),
        ("model a {\n  attention | {\n", kinds(AnyAttention)),
        ("model a {\n  layers 0..3 {\n    ffn |\n  }\n}", ["dense", "moe", "custom"]),
        ("model a {\n  layers 0..3 {\n    |", ["ffn", "attention"]),
        ("run a {\n  train {\n    optimizer |", kinds(AnyOptimizer)),
        (
            "model a { attention gqa {\n heads = 4\n |",
            sorted(fields_of(Gqa).keys() - {"kind", "heads"}, key=in_order(Gqa)),
        ),
        ("model a { attention gqa { rope { |", ["theta", "width", "scaling"]),
        ("model a { attention gqa { rope { theta = 1e4, scaling |", ["linear", "llama3", "yarn"]),
        ("model a { attention gqa { qk_norm = |", ["head", "width"]),
        ("run a { train { batch { from = 8, |", ["to", "over"]),
        ("run a { train { checkpoint { every = 10, keep = 2, |", ["best", "keep_every", "failure", "background", "to"]),
        # values
        ("run a {\n  model = |\n}\nmodel b { }", ["b"]),
        ("run a {\n  precision = |", ["fp64", "fp32", "bf16", "fp8_block", "mxfp8", "nvfp4"]),
        ("model b extends | { }\nmodel c { }\nmodel d { }", ["c", "d"]),
        ("model b |", ["extends"]),
        ("run a { schedule { name = |", None),
        ("model m { layers 0..1 { ffn moe { choice = |", ["scores", "table"]),
        ("model m { layers 0..1 { ffn moe { score = |", ["sigmoid", "softmax", "sqrt_softplus"]),
        ("model m { layers 0..1 { ffn moe { normalize = |", ["true", "false"]),
        ("run a { recompute = |", ["[ ]"]),
        (
            "run a { recompute = [rmsnorm, swiglu, |",
            ["mla_up", "qkv", "hyper", "up", "attention", "dense", "router", "shared", "experts", "logits", "layer"],
        ),
        ("run a {\n  unfused = [residual_norm,\n    route, |", ["join", "quantise", "norm_gradient"]),
        ("run a { parallel { data = |", ["auto"]),
        ("run a { train { optimizer adamw { clip = |", ["none"]),
        ("run a { data { tokenizer = |", ["train(4096)", '"tokenizer.json"']),
        ("run a { data { source = |", ["python_stdlib"]),
        ("run a { data { source = \"|", []),
        ("let width = 64\nrun a { train = |", []),
        ("let width = 64\nmodel m { layers = |", []),
        ("run a { data { source = python_stdlib }  # |", []),
        # units
        ("cluster c { node { nic = 50|", ["50TB/s", "50GB/s", "50MB/s", "50bytes/s"]),
        ("run a { train { tokens = 10|", ["10T tokens", "10B tokens", "10M tokens", "10 tokens"]),
        ("run a { train { tokens = 10T |", ["tokens"]),
        ("run a { train { tokens = 10T tokens |", []),
        ("run a { train { steps = 10 |", ["steps"]),
        ("run a { train { checkpoint { every = 50 |", ["steps"]),
        ("run a { data { validation = 5|", ["5%"]),
        ("model m { hidden = 7|", []),
        # phases
        ("run a { train { rate { |", SHAPES),
        ("run a { train { rate { warmup 10 steps to 1e-3\n |", SHAPES),
        ("run a { train { rate { warmup 10 |", ["tokens", "steps", "to", "from"]),
        ("run a { train { rate { warmup 10 steps |", ["to", "from"]),
        ("run a { train { rate { warmup 10 steps to |", []),
        ("run a { train { rate { constant |", ["at", "until", "over"]),
        ("run a { train { rate { cosine |", ["to", "from", "until", "over"]),
        ("run a { train { rate { constant until 5 tokens |", ["at"]),
        ("run a { train { rate { constant at 1e-4 |", ["until", "over"]),
        ("run a { train { rate { cosine to 1e-4 over 4T |", ["tokens", "steps", "from"]),
        ("model m { mtp { weight = 0.3 |", ["until"]),
        ("model m { mtp { weight = 0.3 until 10T |", ["tokens", "steps", "then"]),
        ("model m { mtp { weight = 0.3 until 10T tokens |", ["then"]),
        ("model m { mtp { weight = 0.3 until 10T tokens then 0.1 |", ["until"]),
        ("let most = 8.5\nrun a { schedule { name = auto, cap = |", ["none", "name", "most"]),
        ("run a { schedule { name = auto, cap = 8.5|", []),
        # references
        ("let width = 64\nmodel m { hidden = 8, vocab = |", ["hidden", "width"]),
        ("let width = 64\nmodel m { hidden = 8, vocab = hidden * |", ["hidden", "width"]),
        # imports
        ('import "|', ['"clusters/"', '"lib.dsc"']),
        ('import "clusters/|"', ['"clusters/h800.dsc"']),
        ('import "clusters/h8|', ['"clusters/h800.dsc"']),
        ("let |", []),
        ("run |", []),
        # a bracket that is not closed
        ("run a {\n  recompute = [rmsnorm\n}\n|", FILE),
        ("model a { attention gqa { rope {\n  theta = (1e4\n  |", ["width", "scaling"]),
        ("model a { attention gqa { rope {\n  theta = (1e4\n  width = 8\n  |", ["scaling"]),
        ("run a { nonsense { |", []),
        ("run a { model = b, nonsense = |", []),
    ],
)  # fmt: skip
def test_proposals(marked: str, wanted: list[str] | None) -> None:
    proposed = labels(marked)
    assert proposed == wanted if wanted is not None else len(proposed) > 5


def test_keys_that_name_blocks_are_proposed_as_keys() -> None:
    kind_of = {item.label: item.kind for item in items("run a { |")}
    assert {kind_of[name] for name in NAMED} == {"key"} and kind_of["train"] == kind_of["parallel"] == "block"


def test_names_come_through_imports_even_of_broken_texts() -> None:
    for text in ('import "lib.dsc"\nrun a {\n  model = |', 'import "lib.dsc"\nrun a {\n  model = |\n  } } [ {'):
        assert labels(text, lib=LIBRARY) == ["deep"]
        assert labels(text, lib='import "more.dsc"\n', more=LIBRARY) == ["deep"]
    odd = 'import\nimport "a\0.dsc"\nimport "no.txt"\nlet n = 2\nimport "lib.dsc"\nrun a { model = |'
    assert labels(odd, lib=LIBRARY) == ["deep"]
    assert labels('import "lib.dsc"\nrun a { precision = |', lib=LIBRARY)[:4] == ["fp8", "fp64", "fp32", "bf16"]
    assert "base" in labels('import "lib.dsc"\nmodel m { hidden = |', lib=LIBRARY)


def test_names_come_through_a_circle_of_imports() -> None:
    assert labels('import "lib.dsc"\nrun a { model = |', lib='import "spec.dsc"\nmodel b { }') == ["b"]


def test_a_dot_proposes_the_keys_of_the_named_block() -> None:
    proposed = labels("run a { model = b\n train { sequence = model.|")
    assert {"model.hidden", "model.vocab", "model.attention"} <= set(proposed) and "model.name" not in proposed
    assert "model.mtp.depth" in labels("run a { train { sequence = model.mtp.|")
    proposed = labels("run a { train { sequence = model.attention.|")
    assert len({*proposed}) == len(proposed), "kinds of attention share keys"
    rope = [f"model.attention.rope.{key}" for key in ("theta", "width", "scaling")]
    assert labels("run a { train { sequence = model.attention.rope.|") == rope
    (heads,) = (
        item for item in items("model a { attention mla { heads = model.attention.|") if item.label.endswith(".heads")
    )
    assert (heads.kind, heads.detail) == ("reference", "attention heads")
    assert labels("model a { attention mla { kv_rank = head_dim.|") == [
        "head_dim.nope", "head_dim.rope", "head_dim.value"
    ]  # fmt: skip


def test_tokens_and_steps_exclude_each_other() -> None:
    assert "steps" not in labels("run a { train { tokens = 10B\n |")
    assert "tokens" not in labels("run a { train { steps = 10\n |")
    assert {"steps", "tokens"} <= set(labels("run a { train { |"))


def test_layers_may_be_given_again() -> None:
    assert "layers" in labels("model a { layers 0..2 { ffn dense { inner = 4 } }\n |")


def test_the_word_at_the_cursor_is_replaced() -> None:
    for item in items("run a {\n  mod|el = b\n}"):
        assert (item.start, item.end) == (10, 15)
        assert item.snippet == "", "the rest of the statement is there already"
    unit = items("run a { train { tokens = 10|")[1]
    assert (unit.start, unit.end) == (25, 27)


def test_required_keys_come_first_with_documentation() -> None:
    proposals = items("model a {\n  |")
    required = [item.detail == "required" for item in proposals]
    assert required == sorted(required, reverse=True) and not all(required) and any(required)
    hidden = next(item for item in proposals if item.label == "hidden")
    assert "width of the residual stream" in hidden.documentation
    assert hidden.snippet == "hidden = ${1:7168}"


def plain(snippet: str) -> str:
    """The text that a snippet inserts with all placeholders unchanged."""
    text = re.sub(r"\$\{\d+\|([^,|]*)[^|]*\|\}", r"\1", snippet)
    text = re.sub(r"\$\{\d+:((?:\\.|[^}\\])*)\}", r"\1", text)
    text = re.sub(r"\$\d+", "", text)
    return re.sub(r"\\([$}\\])", r"\1", text)


def test_every_snippet_of_a_key_parses() -> None:
    """Snippets of every block of the schema parse with their placeholders unchanged."""
    number = 0
    for block in blocks():
        head = block.head.replace("NAME", "mine").replace("FIRST..LAST", "0..3")
        outer_heads = ["run mine"] if block.path.split(".")[0] not in NAMED and block.path != "run" else []
        for part in block.path.split(".")[:-1]:
            outer_head = next((outer_block.head for outer_block in blocks() if outer_block.path.endswith(part)), None)
            outer_heads += [outer_head.replace("NAME", "mine").replace("FIRST..LAST", "0..3")] if outer_head else []
        opened = " { ".join([*dict.fromkeys(outer_heads), head]) + " {\n"
        for item in items(f"{opened}|"):
            text = plain(item.snippet)
            if text.endswith("= "):
                text += "mine"
            result = parse(Source(HERE, f"x {{\n{text}\n}}"))
            assert not result.diagnostics, (item, text)
            number += 1
    assert number > 80


def test_every_key_of_every_block_is_proposed() -> None:
    """Walk the schema, and write a spec text for each block by hand."""
    for block in blocks():
        parts = block.path.split(".")
        texts = [] if parts[0] in (*NAMED, "run") else ["run mine {"]
        path = ""
        for part in parts:
            path = f"{path}.{part}".lstrip(".")
            enclosing = next((candidate for candidate in blocks() if candidate.path == path), None)
            if enclosing is not None:
                texts.append(enclosing.head.replace("NAME", "mine").replace("FIRST..LAST", "0..3") + " {")
        document, text = documented("\n".join(texts)), "\n".join(texts)
        proposed = {item.label for item in complete(document, len(text), lambda folder: [])}
        wanted = {key.name for key in block.keys} - {"within"}  # which dsc writes
        assert proposed == (wanted | {"phase"} if block.path == "run" else wanted), block.path


def test_in_a_complete_spec_only_missing_keys_are_proposed() -> None:
    assert labels(in_quickstart("    seed       = 1\n|")) == ["initial", "only", "ema", "health", "grpo"]
    assert labels(in_quickstart("{ |beta1 = 0.9,")) == ["beta1", "eps", "qk_clip"], "beta1 may become another key"
