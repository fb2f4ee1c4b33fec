"""Hover: the meaning of a word, and its value in the resolved spec."""

from __future__ import annotations

import pytest

from compiler.tools.editor.hover import hover
from dsl.reference.keys import blocks
from tests.compiler.tools.editor.texts import QUICKSTART, ROOT, cursor, documented, in_quickstart


def about(marked: str, **others: str) -> str:
    tooltip = hover(*cursor(marked, **others))
    return tooltip.text if tooltip is not None else ""


@pytest.mark.parametrize(
    ("marked", "wanted"),
    [
        ("dat|a     = auto", ["**data**", "= 2", "all devices that the other degrees leave"]),
        ("data     = au|to", ["= 2"]),
        ("ste|ps       = 130", ["= 266,240 tokens = 130 steps"]),
        ("model     = qu|ick", ["**model quick**", "6,012,272 parameters", "4 layers (1 dense, 3 moe)"]),
        ("cluster   = lap|top", ["4 × cpu", "4GB per device"]),
        ("precision = fp|32", ["built in"]),
        ("run quick|start", ["266,240 tokens in 130 steps", "pipeline = 2, expert = 2, data = 2"]),
        ("memory = 4|GB", ["= 4,000,000,000 bytes"]),
        ("validation = 5|%", ["= 0.05"]),
        ("war|mup 15 steps", ["linear from 0 to 0.002 until token 30,720 (step 15)"]),
        ("cosine t|o 2e-4", ["cosine from 0.002 to 0.0002 until token 266,240 (step 130)"]),
        ("every = 50 ste|ps", ["50 steps = 102,400 tokens"]),
        ("layers 1.|.3", [""]),
        ("layers |1..3", ["= 3 layers"]),
        ("score   = sig|moid", ["each expert is scored on its own"]),
        ("atten|tion mla", ["attention of every layer"]),
        ("attention m|la", ["Multi-head latent attention"]),
        ("hid|den = 192", ["width of the residual stream", "1 to 1,048,576", "required"]),
        ("be|ta1 = 0.9", ["decay of the first moment", "default: `0.9`"]),
        ("name = dual|pipe", ["micro-batches from both ends"]),
    ],
)
def test_words_of_the_quickstart(marked: str, wanted: list[str]) -> None:
    text = about(in_quickstart(marked))
    for part in wanted:
        assert part in text


def test_hover_on_a_value_explains_the_value_and_not_its_key() -> None:
    sigmoid = "each expert is scored on its own; the score of a group is the sum of its two best (DeepSeek-V3)"
    assert about(in_quickstart("score   = sig|moid")) == f"**sigmoid**\n\n{sigmoid}"
    assert about(in_quickstart("name = dual|pipe")).startswith("**dualpipe**\n\nmicro-batches from both ends")


def test_literals_and_comments_have_no_hover() -> None:
    assert about(in_quickstart("hidden = 1|92")) == ""
    assert "= 192" not in about(in_quickstart("hid|den = 192"))
    assert about("# hid|den\n") == "" and about('import "l|ib.dsc"') == ""


@pytest.mark.parametrize(
    ("key", "meaning"), [("from", "in the first step"), ("to", "end of the ramp"), ("over", "length of the ramp")]
)
def test_keys_of_a_batch_that_grows(key: str, meaning: str) -> None:
    text = "run a {\n  train { batch { from = 16, to = 32, over = 1M tokens, other = 1 } }\n}\n"
    description = about(text.replace(f" {key} =", f" {key}| ="))
    assert description.startswith(f"**{key}**") and meaning in description
    assert about(text.replace("other", "oth|er")) == ""


MODEL = (
    "model m {{ vocab = 4096, hidden = {hidden}, init_std = 0.02, norm_eps = 1e-6\n"
    "  attention gqa {{ heads = 8, kv_heads = 2, head_dim = 64, rope {{ theta = 1e4 }} }}\n"
    "  layers 0..3 {{ ffn dense {{ inner = {inner} }} }}\n}}\n"
)


def test_arithmetic_and_references() -> None:
    text = "let base = 64\n" + MODEL.format(hidden="base * 112", inner="hid|den * 4")
    assert "hidden = base * 112" in about(text) and "= 7,168" in about(text)
    assert "= 28,672" in about(text.replace("|", "").replace("inner = ", "in|ner = "))
    assert "= 7,168" in about(text.replace("|", "").replace("hidden = ", "hid|den = "))
    assert "let base = 64" in about(text.replace("|", "").replace("= base", "= ba|se"))
    assert "= 64" in about(text.replace("|", "").replace("let base", "let ba|se"))


def test_a_value_of_an_imported_block_is_taken_from_its_file() -> None:
    library = MODEL.format(hidden="256", inner="hidden * 4")
    document = documented('import "lib.dsc"\nrun a { model = m }', lib=library)
    about_m = hover(document, document.source.text.index("= m ") + 2)
    assert about_m is not None and "4 layers (4 dense)" in about_m.text


def test_the_spec_as_published() -> None:
    """Hovers over the files on disk, with imports, show the counts of arXiv 2412.19437."""
    path = ROOT / "specs/deepseek-v3.dsc"
    text = path.read_text("utf-8")
    document = documented(text, str(path))
    hovers = {
        marked: hover(document, text.index(marked) + 1) for marked in ("deepseek_v3", "data ", "tokens  ", "warmup")
    }
    texts = {marked: tooltip.text if tooltip is not None else "" for marked, tooltip in hovers.items()}
    assert "671,026,419,200 parameters" in texts["deepseek_v3"]
    assert "= 128" in texts["data "]
    assert "14,800,000,000,000 tokens" in texts["tokens  "] and "steps" in texts["tokens  "]
    assert "(step 2,000)" in texts["warmup"]


def test_mistakes_elsewhere_leave_the_rest_known() -> None:
    broken = QUICKSTART.replace("hidden = 192", "hiden = 192").replace("steps       = 130", "steps       = 10 kg")
    for marked, wanted in (
        ("dat|a     = auto", "= 2"),
        ("memory = 4|GB", "4,000,000,000"),
        ("kv_|rank", "rank of keys"),
    ):
        text = broken.replace(marked.replace("|", ""), marked)
        assert wanted in about(text)
    assert about(broken.replace("model     = quick", "model     = qu|ick")) == "**model quick**", "it cannot be counted"


def test_values_that_differ_between_runs_are_both_shown() -> None:
    head, tail = QUICKSTART.split("run quickstart {", 1)
    two_runs = f"{head}run quickstart {{{tail}\nrun other extends quickstart {{ parallel {{ pipeline = 1 }} }}\n"
    text = about(two_runs.replace("    data     = auto", "    dat|a     = auto"))
    assert "= 2 in quickstart" in text and "= 4 in other" in text
    assert " in " not in about(two_runs.replace("steps       = 130", "ste|ps       = 130")).split("\n\n")[1], (
        "they agree"
    )


def test_every_key_of_the_reference_has_a_hover() -> None:
    """Each key has a hover in a text with only its unclosed block."""
    for block in blocks():
        parts, path, heads = block.path.split("."), "", []
        heads += [] if parts[0] in ("run", "model", "cluster", "precision") else ["run mine {"]
        for part in parts:
            path = f"{path}.{part}".lstrip(".")
            heads += [candidate.head + " {" for candidate in blocks() if candidate.path == path]
        opened = "\n".join(heads).replace("NAME", "mine").replace("FIRST..LAST", "0..3")
        for key in block.keys:
            text = about(f"{opened}\n|{key.name} = 1")
            assert key.meaning in text, key.path
