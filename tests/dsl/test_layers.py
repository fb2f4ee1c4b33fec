"""Ranges of layers: `by`, and attention per range."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsl.load import load
from dsl.messages.diagnostics import SpecError
from dsl.schema import Dense, Gqa, Mla, Model, Moe
from tests import copies

SPECS = Path(__file__).parents[2] / "specs"
GQA = "attention gqa { heads = 4, kv_heads = 2, head_dim = hidden / 4, qk_norm = true, rope { theta = 10_000 } }"


def model_of(tmp_path: Path, layers: str, attention: str = GQA) -> Model:
    """The model of tiny.dsc with these layers and this attention."""
    copies.copy(SPECS / "tiny.dsc", tmp_path)
    path = tmp_path / "mine.dsc"
    blocks = f"model mine {{ vocab = 4096, hidden = 64, init_std = 0.02, norm_eps = 1e-6\n{attention}\n{layers} }}"
    path.write_text(f'import "tiny.dsc"\nrun mine extends tiny {{ model = mine }}\n{blocks}\n', encoding="utf-8")
    return load(path, "mine").model


def test_a_range_with_by_overrides_the_surrounding_range(tmp_path: Path) -> None:
    model = model_of(tmp_path, "layers 0..9 { ffn dense { inner = 8 } }, layers 1..9 by 4 { ffn dense { inner = 16 } }")
    assert [model.ffn(layer).inner for layer in range(10)] == [8, 16, 8, 8, 8, 16, 8, 8, 8, 16]
    assert [model.layers_of(index) for index in (0, 1)] == [(0, 2, 3, 4, 6, 7, 8), (1, 5, 9)]
    assert model.num_layers == 10 and [span.by for span in model.layers] == [1, 4]


def test_ranges_with_by_can_hold_all_layers(tmp_path: Path) -> None:
    model = model_of(
        tmp_path, "layers 0..6 by 2 { ffn dense { inner = 8 } }, layers 1..5 by 2 { ffn dense { inner = 9 } }"
    )
    assert [model.ffn(layer).inner for layer in range(model.num_layers)] == [8, 9] * 3 + [8]


def test_keys_omitted_in_a_range_with_by_are_inherited(tmp_path: Path) -> None:
    dense = "layers 0..2 { ffn dense { inner = 8 }, attention { qk_norm = false } }"
    upper = "layers 3..8 { ffn dense { inner = 16 } }"
    model = model_of(tmp_path, f"{dense}\n{upper}\nlayers 1..7 by 2 {{ attention {{ rope {{ theta = 500 }} }} }}")
    every = model.layers[1]
    assert (every.first, every.by, every.ffn) == (1, 2, Dense(inner=8)), (
        "of the range that holds the first of its layers"
    )
    assert isinstance(every.attention, Gqa) and not every.attention.qk_norm and every.attention.rope.theta == 500
    assert model.attention_of(3) is every.attention and model.attention_of(4) is model.attention


NONE_LEFT = ("no layer is left for this range", "remove this range", "0..0")


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        ("0..0, 2..3", [("no range holds layer 1", "write `layers 1..3`", "2..3")]),
        ("0..0, 3..5", [("no range holds layers 1..2", "write `layers 1..5`", "3..5")]),
        ("1..3", [("no range holds layer 0", "write `layers 0..3`", "1..3")]),
        ("0..0, 0..3", [("layer 0 is in two ranges", "write `layers 1..3`", "0..3")]),
        ("0..1, 1..1", [("layer 1 is in two ranges", "remove this range", "1..1")]),
        ("0..1, 1..2", [("layer 1 is in two ranges", "write `layers 2..2`", "1..2")]),
        ("0..0, 0..2 by 2", [NONE_LEFT, ("no range holds layer 1", "add `layers 1..1 { … }`", "0..2")]),
        (
            "0..0, 0..5 by 5",
            [NONE_LEFT, ("no range holds layer 1 and 3 more up to layer 4", "add `layers 1..4 { … }`", "0..5")],
        ),
        ("0..3, 1..3 by 2, 0..3 by 3", [("layer 3 is in two ranges with `by`", "remove this range", "1..3")]),
        ("0..3, 1..3 by 2, 1..2 by 3", [("layer 1 is in two ranges with `by`", "remove this range", "1..3")]),
        ("0..6 by 3, 1..4 by 3, 2..2", [("no range holds layer 5", "add `layers 5..5 { … }`", "0..6")]),
        ("0..4 by 2, 1..1", [("no range holds layer 3", "add `layers 3..3 { … }`", "0..4")]),
    ],
)
def test_each_layer_is_in_one_range(tmp_path: Path, ranges: str, found: list[tuple[str, str, str]]) -> None:
    with pytest.raises(SpecError) as caught:
        model_of(
            tmp_path,
            "\n".join(f"layers {layer_range} {{ ffn dense {{ inner = 8 }} }}" for layer_range in ranges.split(", ")),
        )
    assert [
        (mistake.message, mistake.hint, mistake.span.text) for mistake in caught.value.diagnostics if mistake.span
    ] == found


def test_attention_of_each_range_can_be_rotated(tmp_path: Path) -> None:
    """One mistake each, at its place, whatever kind of attention precedes it."""
    ffn = "ffn dense { inner = 8 }"
    delta = "attention deltanet { heads = 4, key_heads = 2, key_dim = 16, value_dim = 16, gate = channel }"
    plain, odd = "attention { heads = 4 }", "attention { head_dim = 15 }"
    part, wide = "attention { rope { width = 7 } }", "attention { rope { width = 32 } }"
    ranges = (delta, plain, odd, part, wide, odd)
    layers = "\n".join(f"layers {index}..{index} {{ {ffn}, {attention} }}" for index, attention in enumerate(ranges))
    with pytest.raises(SpecError) as caught:
        model_of(tmp_path, layers)
    mistakes = [(mistake.code, mistake.message) for mistake in caught.value.diagnostics]
    odd_head = ("E0903", "head_dim = 15 is odd, but columns are rotated in pairs")
    odd_width = ("E0903", "width = 7 is odd, but columns are rotated in pairs")
    assert mistakes == [
        odd_head,
        odd_width,
        ("E0925", "width = 32 columns are rotated, but a head has only 16"),
        odd_head,
    ]


def test_attention_of_a_range_overrides_that_of_the_model(tmp_path: Path) -> None:
    layers = "layers 0..1 { ffn dense { inner = 8 } }\nlayers 2..3 { ffn dense { inner = 8 }, attention { heads = 8 } }"
    model = model_of(tmp_path, layers)
    overridden = model.layers[1].attention
    assert isinstance(overridden, Gqa) and isinstance(model.attention, Gqa)
    assert overridden == model.attention.model_copy(update={"heads": 8})
    assert [path for path, _ in model.attentions] == ["model.attention", "model.layers.1.attention"]


def test_attention_of_another_kind_inherits_nothing(tmp_path: Path) -> None:
    head = "head_dim { nope = 8, rope = 4, value = 8 }"
    mla = f"attention mla {{ heads = 2, query_rank = none, kv_rank = 8, {head}, rope {{ theta = 1000 }} }}"
    model = model_of(tmp_path, f"layers 0..3 {{ ffn dense {{ inner = 8 }} }}\nlayers 3..3 by 2 {{ {mla} }}")
    assert isinstance(model.attention_of(3), Mla) and model.has_latents
    assert isinstance(model.attention_of(0), Gqa)


@pytest.mark.parametrize("setting", ["model.layers.1.attention.heads=8", "model.layers.1.attention { heads = 8 }"])
def test_overrides_reach_the_attention_of_a_range(setting: str) -> None:
    model = load(SPECS / "quickstart.dsc", overrides=[setting]).model
    assert model.attention.heads == 4 and model.attention_of(1).heads == 8 and isinstance(model.ffn(1), Moe)


def test_attention_of_mtp_overrides_that_of_the_model(tmp_path: Path) -> None:
    layers = "layers 0..2 { ffn dense { inner = 8 } }\nlayers 3..3 { ffn dense { inner = 8 }, attention { heads = 8 } }"
    usual = model_of(tmp_path, f"{layers}\nmtp {{ depth = 1, weight = 0.3 }}")
    assert usual.attention_of_mtp is usual.attention_of(3), "that of the last layer"
    overridden = model_of(tmp_path, f"{layers}\nmtp {{ depth = 1, weight = 0.3, attention {{ window = 16 }} }}")
    assert isinstance(overridden.attention, Gqa)
    assert overridden.attention_of_mtp == overridden.attention.model_copy(update={"window": 16})
    assert overridden.attentions[-1] == ("model.mtp.attention", overridden.attention_of_mtp)
