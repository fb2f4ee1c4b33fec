"""What `-s` can set: every value of a run by the path that `dsc show` prints, blocks, phases and `let`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiler.cli.main import command_parser
from dsl.canonical import canonical
from dsl.leaves import leaves
from dsl.load import load
from dsl.messages.diagnostics import SpecError
from dsl.schema import BUILT_IN, Dense, Gqa, Moe, Spec

ROOT = Path(__file__).parents[2]
BASE = (ROOT / "tests" / "ui" / "lib" / "base.dsc").read_text("utf-8")
STEP = 16 * 128  # tokens


def read(tmp_path: Path, *overrides: str, text: str = "") -> Spec:
    """The base spec with the changes of `text`, and with overrides."""
    run = "" if "run base" in text else "run base { }\n"
    (tmp_path / "base.dsc").write_text(BASE, encoding="utf-8")
    (tmp_path / "spec.dsc").write_text(f'import "base.dsc"\n{run}{text}', encoding="utf-8")
    return load(tmp_path / "spec.dsc", overrides=overrides)


def refused(tmp_path: Path, *overrides: str) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, *overrides)
    return [(item.code, item.message) for item in caught.value.diagnostics]


def at(spec: Any, path: str) -> Any:
    for part in path.split("."):
        spec = spec[int(part)] if part.isdigit() else getattr(spec, part)
    return spec


def test_layer_ranges_are_counted_in_the_order_of_their_layers(tmp_path: Path) -> None:
    spec = read(tmp_path, "model.layers.1.ffn.experts=32", "model.layers.0.ffn.inner=hidden * 3")
    dense, moe = (span.ffn for span in spec.model.layers)
    assert isinstance(dense, Dense) and isinstance(moe, Moe)
    assert (dense.inner, moe.experts, moe.top_k) == (192 * 3, 32, 4)
    assert [span.last for span in read(tmp_path, "model.layers.1=1..7").model.layers] == [0, 7]
    text = "model base {\n  layers 1..3 { ffn moe { top_k = 2 } }\n  layers 0..0 { ffn dense { inner = 64 } }\n}\n"
    spec = read(tmp_path, "model.layers.1.ffn.inner=model.layers.0.ffn.inner / 2", text=text)
    assert [span.ffn.inner for span in spec.model.layers] == [64, 32]


def test_a_layer_range_that_cannot_be_read_is_the_first_one(tmp_path: Path) -> None:
    text = "model base {\n  layers 0..0 { ffn dense { inner = 64 } }\n  layers 1..many { ffn moe { top_k = 2 } }\n}\n"
    with pytest.raises(SpecError, match="many"):
        read(tmp_path, text=text)
    mended = read(tmp_path, "model.layers.0=1..3", text=text)
    assert [(span.first, span.last) for span in mended.model.layers] == [(0, 0), (1, 3)]


@pytest.mark.parametrize("key", ["layers.2.ffn.inner", "layers.0", "layers.ffn.inner", "layers.99999.ffn.inner"])
def test_a_missing_layer_range(key: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, "layers.1.ffn.experts=8")
    (mistake,) = caught.value.diagnostics
    assert mistake.hint == "layers belong to the model: write `-s model.layers.1.ffn.experts=…`"
    assert refused(tmp_path, f"model.{key}=8") == [("E0504", f"`model.{key}` names no value of a layer range")]


def test_the_rate_and_one_phase_of_it(tmp_path: Path) -> None:
    spec = read(tmp_path, "train.rate=warmup 10 steps to 1e-3, constant 5 steps, cosine to 1e-5")
    assert [(phase.shape, phase.end, phase.end_tokens // STEP) for phase in spec.train.rate] == [
        ("linear", 1e-3, 10),
        ("constant", 1e-3, 15),
        ("cosine", 1e-5, 100),
    ]
    spec = read(tmp_path, "train.rate.0=warmup 30 steps to 1e-3")
    assert [(phase.end, phase.end_tokens // STEP) for phase in spec.train.rate] == [(1e-3, 30), (2e-4, 100)]


@pytest.mark.parametrize(
    ("written", "end"), [("-1e-3 + 3e-3", 2e-3), ("-1e-3 * 2 + 3e-3", 1e-3), ("3e-3 - 1e-3 - 1e-3", 1e-3), ("-0", 0.0)]
)
def test_a_number_after_a_word_may_have_a_sign(written: str, end: float, tmp_path: Path) -> None:
    spec = read(tmp_path, f"train.rate=warmup 15 steps to {written}, constant")
    assert spec.train.rate[0].end == pytest.approx(end) == spec.train.rate[1].start


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("train.rate.2=constant", "E0504"),
        ("train.rate.0=", "E0504"),
        ("train.rate.0=3", "E0504"),
        ("train.rate.0=constantly at 1", "E0704"),
        ("train.rate=1e-3", "E0204"),
        ("train.rate=constant at 1e-3, seed = 4", "E0504"),
    ],
)
def test_an_invalid_phase(override: str, code: str, tmp_path: Path) -> None:
    assert refused(tmp_path, override)[0][0] == code


def test_blocks_are_written_as_in_a_file(tmp_path: Path) -> None:
    gqa = "model.attention gqa { heads = 4, kv_heads = 2, head_dim = 32, rope { theta = 10_000 } }"
    spec = read(tmp_path, gqa, "train.batch { from = 16, to = 32, over = 20K tokens }", "model.attention.kv_heads=4")
    assert isinstance(spec.model.attention, Gqa) and spec.model.attention.kv_heads == 4
    assert (spec.train.batch.start, spec.train.batch.end) == (16, 32)
    assert [span.last for span in read(tmp_path, "model.layers 0..5 { ffn dense { inner = 8 } }").model.layers] == [5]


def test_lets_of_the_file(tmp_path: Path) -> None:
    text = 'let width = 64\nlet where = "a"\nrun base { data { source = where } }\nmodel base { hidden = width * 2 }\n'
    spec = read(tmp_path, "width=48", 'where="b"', text=text)
    assert (spec.model.hidden, spec.data.source) == (96, "b")
    assert refused(tmp_path, "height=3")[0][0] == "E0201"


def test_a_let_that_is_misspelt_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "lib.dsc").write_text("let depth = 4\n", "utf-8")
    layers = "layers 0..depth { ffn dense { inner = 64 } }"
    text = f'import "lib.dsc"\nlet width = 64\nmodel base {{ hidden = width * 2, {layers} }}\n'
    spec = read(tmp_path, "depth=6", "width=48", text=text)
    assert (spec.model.hidden, spec.model.layers[-1].last) == (96, 6), "of an imported file, too"
    for name, hint in (("widht", "did you mean `width`?"), ("zebra", "every `let` outside blocks can be set: ")):
        with pytest.raises(SpecError) as caught:
            read(tmp_path, f"{name}=3", text=text)
        (mistake,) = caught.value.diagnostics
        assert mistake.code == "E0504" and mistake.hint.startswith(hint)
        assert hint[0] == "d" or mistake.hint.endswith("`depth`, `width`")
        assert mistake.span is not None and mistake.span.text == name
    with pytest.raises(SpecError) as caught:
        read(tmp_path, "paralel=3", text=text)
    assert caught.value.diagnostics[0].hint == "did you mean the block `parallel`?"


def test_the_forms_of_the_language_page(tmp_path: Path) -> None:
    """Each `-s` that sets a rate in docs/language.md or in the help of a command."""
    page = (ROOT / "docs" / "language.md").read_text("utf-8")
    help_text = " ".join(command_parser("train").format_help().split())
    for override, ends in (
        ("train.rate=warmup 20 steps to 1e-3, cosine to 1e-4", [(1e-3, 20), (1e-4, 100)]),
        ("train.rate.0=warmup 50 steps to 2e-3", [(2e-3, 50), (2e-4, 100)]),
    ):
        assert f"`-s '{override}'`" in page
        phases = read(tmp_path, override).train.rate
        assert [(phase.end, phase.end_tokens // STEP) for phase in phases] == ends
    assert "-s 'train.rate=warmup 20 steps to 1e-3, cosine to 1e-4'" in help_text and "-s width=64" in help_text


def test_none_takes_away(tmp_path: Path) -> None:
    spec = read(tmp_path, "model.layers.1.ffn.balance.bias_rate=none", "train.checkpoint=none", "recompute=[]")
    moe = spec.model.ffn(1)
    assert isinstance(moe, Moe) and moe.balance.bias_rate is None
    assert spec.train.checkpoint is None and spec.recompute == ()


def test_a_built_in_precision_is_changed_only_for_the_run(tmp_path: Path) -> None:
    mine = "precision my_bf16 extends bf16 { compute = fp32 }\n"
    for overrides, text in (
        (["precision=bf16"], ""),
        ([], "run base { precision = bf16 }\n"),
        (["precision=bf16"], mine),
    ):
        spec = read(tmp_path, *overrides, "precision.moments=bf16", "precision.combine=fp32", text=text)
        changed = spec.precision
        assert changed.name == ("my_bf16_" if text == mine else "my_bf16")
        assert changed.model_copy(update={"name": "bf16", "moments": "fp32", "combine": "bf16"}) == BUILT_IN["bf16"]
        assert (changed.moments, changed.combine) == ("bf16", "fp32")
        (tmp_path / "shown.dsc").write_text(canonical(spec), encoding="utf-8")
        assert load(tmp_path / "shown.dsc") == spec
    assert BUILT_IN["bf16"].moments == "fp32"
    assert refused(tmp_path, "precision.moment=bf16") == [("E0201", "`precision` has no key `moment`")]
    unknown = refused(tmp_path, "precision=bf17", "precision.moments=bf16")
    assert ("E0504", "the run names no existing precision, so `moments` cannot be set") in unknown


@pytest.mark.parametrize("name", ["quickstart", "tiny"])
def test_every_printed_path_can_be_set(name: str) -> None:
    """Setting a value to itself, by the path and text that `dsc show` prints, does not change the spec."""
    path = ROOT / "specs" / f"{name}.dsc"
    spec = load(path)
    tried = 0
    for leaf in leaves(spec):
        names = leaf.path.split(".")
        if names[-1] in ("kind", "name") and names[0] != "schedule":
            continue  # a label
        try:
            overridden = load(path, overrides=[f"{leaf.path}={leaf.text}"])
        except SpecError as error:
            raise AssertionError(leaf) from error
        if names[0] == "precision" and names[1:] and spec.precision.name in BUILT_IN:  # the run's, equal
            assert overridden.precision.name == f"my_{spec.precision.name}"
            precision = overridden.precision.model_copy(update={"name": spec.precision.name})
            overridden = overridden.model_copy(update={"precision": precision})
        assert overridden == spec, leaf
        tried += 1
    assert tried > 40
