"""Fusion passes match as often as stated in segments with every option of a model, in BF16 and in FP8."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from compiler.plan.blocks import cut_model
from dsl.schema import Clamp, Dense, Spec
from tests.compiler.model.segments.specs import gqa, mla, moe, spec

FFNS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "clamped": {"clamp": Clamp(limit=7.0)},
    "geglu": {"activation": "geglu"},
    "relu2": {"activation": "relu2"},
    "biased": {"bias": True},
    "biased, clamped": {"bias": True, "clamp": Clamp(limit=7.0, alpha=1.702, shift=1.0)},
    "biased, geglu": {"bias": True, "activation": "geglu"},
    "biased, relu2": {"bias": True, "activation": "relu2"},
}
RECOMPUTES: list[tuple[str, ...]] = [
    *((), ("rmsnorm",), ("rmsnorm", "swiglu"), ("dense", "shared", "experts", "router", "attention")),
    *(("layer",), ("up",), ("swiglu", "up"), ("rmsnorm", "qkv", "up")),
]


def with_options(ffn: dict[str, Any], shared: dict[str, Any], precision: str, **more: Any) -> Spec:
    """A run of two layers whose widths tiles divide."""
    mixture = moe(experts=8, inner=128, top_k=2, **ffn, **shared)
    attention = gqa(heads=4, kv_heads=2, head_dim=64) if more.pop("grouped", False) else mla(heads=4, kv_rank=128)
    if attention.kind == "mla":
        attention = attention.model_copy(
            update={"query_rank": 128, "head_dim": attention.head_dim.model_copy(update={"nope": 64, "value": 64})}
        )
    layers = (Dense(inner=256, **ffn), mixture)
    return spec(layers=layers, attention=attention, hidden=256, vocab=512, precision=precision, sequence=128, **more)


@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
@pytest.mark.parametrize("norm", ["pre", "post", "sandwich"])
def test_every_option_can_be_cut(norm: str, precision: str) -> None:
    shares = ({}, {"shared": 0}, {"shared_gate": True, "score": "sqrt_softplus"})
    for (ffn, shared), recompute in zip(product(FFNS.values(), shares), RECOMPUTES * 3, strict=True):
        for grouped, factor in ((False, 1.0), (True, 0.5)):
            model_spec = with_options(
                ffn, shared, precision, norm=norm, residual_scale=factor, logit_cap=30.0, grouped=grouped
            )
            assert cut_model(model_spec.model_copy(update={"recompute": recompute})).cuts
