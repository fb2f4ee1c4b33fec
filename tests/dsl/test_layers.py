"""Ranges of layers: `by`, and an attention of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsl.load import load
from dsl.schema import Dense, Gqa, Mla, Model, Moe

SPECS = Path(__file__).parent.parent.parent / "specs"
GQA = "attention gqa { heads = 4, kv_heads = 2, head_dim = hidden / 4, qk_norm = true, rope { theta = 10_000 } }"


def model_of(tmp_path: Path, layers: str, attention: str = GQA) -> Model:
    """The model of tiny.dsc with other layers and another attention."""
    shutil.copy(SPECS / "tiny.dsc", tmp_path)
    path = tmp_path / "mine.dsc"
    blocks = f"model mine {{ vocab = 4096, hidden = 64, init_std = 0.02, norm_eps = 1e-6\n{attention}\n{layers} }}"
    path.write_text(f'import "tiny.dsc"\nrun mine extends tiny {{ model = mine }}\n{blocks}\n', encoding="utf-8")
    return load(path, "mine").model


def test_a_range_by_goes_before_the_range_around_it(tmp_path: Path) -> None:
    model = model_of(tmp_path, "layers 0..9 { ffn dense { inner = 8 } }, layers 1..9 by 4 { ffn dense { inner = 16 } }")
    assert [model.ffn(layer).inner for layer in range(10)] == [8, 16, 8, 8, 8, 16, 8, 8, 8, 16]
    assert [model.layers_of(index) for index in (0, 1)] == [(0, 2, 3, 4, 6, 7, 8), (1, 5, 9)]
    assert model.num_layers == 10 and [span.by for span in model.layers] == [1, 4]


def test_ranges_by_can_hold_all_layers(tmp_path: Path) -> None:
    model = model_of(
        tmp_path, "layers 0..6 by 2 { ffn dense { inner = 8 } }, layers 1..5 by 2 { ffn dense { inner = 9 } }"
    )
    assert [model.ffn(layer).inner for layer in range(model.num_layers)] == [8, 9] * 3 + [8]


def test_what_a_range_by_leaves_out_is_as_around_it(tmp_path: Path) -> None:
    dense = "layers 0..2 { ffn dense { inner = 8 }, attention { qk_norm = false } }"
    rest = "layers 3..8 { ffn dense { inner = 16 } }"
    model = model_of(tmp_path, f"{dense}\n{rest}\nlayers 1..7 by 2 {{ attention {{ rope {{ theta = 500 }} }} }}")
    every = model.layers[1]
    assert (every.first, every.by, every.ffn) == (1, 2, Dense(inner=8)), (
        "of the range that holds the first of its layers"
    )
    assert isinstance(every.attention, Gqa) and not every.attention.qk_norm and every.attention.rope.theta == 500
    assert model.attention_of(3) is every.attention and model.attention_of(4) is model.attention


def test_attention_of_a_range_is_put_over_the_models(tmp_path: Path) -> None:
    layers = "layers 0..1 { ffn dense { inner = 8 } }\nlayers 2..3 { ffn dense { inner = 8 }, attention { heads = 8 } }"
    model = model_of(tmp_path, layers)
    own = model.layers[1].attention
    assert isinstance(own, Gqa) and isinstance(model.attention, Gqa)
    assert own == model.attention.model_copy(update={"heads": 8})
    assert [at for at, _ in model.attentions] == ["model.attention", "model.layers.1.attention"]


def test_attention_of_another_kind_takes_nothing_over(tmp_path: Path) -> None:
    head = "head_dim { nope = 8, rope = 4, value = 8 }"
    mla = f"attention mla {{ heads = 2, query_rank = none, kv_rank = 8, {head}, rope {{ theta = 1000 }} }}"
    model = model_of(tmp_path, f"layers 0..3 {{ ffn dense {{ inner = 8 }} }}\nlayers 3..3 by 2 {{ {mla} }}")
    assert isinstance(model.attention_of(3), Mla) and model.has_latents
    assert isinstance(model.attention_of(0), Gqa)


@pytest.mark.parametrize("setting", ["model.layers.1.attention.heads=8", "model.layers.1.attention { heads = 8 }"])
def test_overrides_reach_the_attention_of_a_range(setting: str) -> None:
    model = load(SPECS / "quickstart.dsc", overrides=[setting]).model
    assert model.attention.heads == 4 and model.attention_of(1).heads == 8 and isinstance(model.ffn(1), Moe)


def test_attention_of_mtp_is_put_over_the_models(tmp_path: Path) -> None:
    layers = "layers 0..2 { ffn dense { inner = 8 } }\nlayers 3..3 { ffn dense { inner = 8 }, attention { heads = 8 } }"
    usual = model_of(tmp_path, f"{layers}\nmtp {{ depth = 1, weight = 0.3 }}")
    assert usual.attention_of_mtp is usual.attention_of(3), "that of the last layer"
    own = model_of(tmp_path, f"{layers}\nmtp {{ depth = 1, weight = 0.3, attention {{ window = 16 }} }}")
    assert isinstance(own.attention, Gqa)
    assert own.attention_of_mtp == own.attention.model_copy(update={"window": 16})
    assert own.attentions[-1] == ("model.mtp.attention", own.attention_of_mtp)
