"""Parameter counts: the published ones exactly, and for every model what the compiler itself lays out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from compiler.plan.parameters import parameters as laid_out
from dsl import counts
from dsl.schema import Spec
from tests.specs.shipped import RUNS, shipped
from tests.specs.strategies import specs

# Main models, without the MTP block. The sums of the safetensors on Hugging Face; DeepSeek-V3's with the biases of its
# 58 gates, Moonlight's without the 27·64 constant angles that its files hold besides.
PUBLISHED = {
    "deepseek-v3.dsc": 671_026_419_200,
    "deepseek-v2.dsc": 235_741_434_880,
    "deepseek-v2-lite.dsc": 15_706_484_224,
    "moonlight-16b-a3b.dsc": 15_960_111_936 - 27 * 64,
    "kimi-k2.dsc": 1_026_408_232_448,
    "llama3-8b.dsc": 8_030_261_248,
    "qwen3-30b-a3b.dsc": 30_532_122_624,
}


@pytest.mark.parametrize(("file", "total"), PUBLISHED.items())
def test_published_totals(file: str, total: int) -> None:
    assert counts.parameters(shipped(file).model).total == total


def test_deepseek_v3_in_parts() -> None:
    """arXiv 2412.19437, and the sizes of its layers (reference by arithmetic from the public configuration)."""
    model = shipped("deepseek-v3.dsc").model
    count = counts.parameters(model)
    assert count.bias == 58 * 256 == 14_848
    assert count.attention == 187_107_328
    assert counts.layer_parameters(model, 60) == 11_507_286_272
    moe = model.ffn(60)
    assert moe.kind == "moe" and counts.expert_parameters(moe, model.hidden) == 44_040_192
    assert (round(count.active / 1e9, 2), round(count.active_without_embedding / 1e9, 2)) == (37.55, 36.63)
    assert round(count.mtp / 1e9, 2) == 11.61
    assert count.embedding == count.head == 129_280 * 7168


def test_active_parameters_as_the_papers_round_them() -> None:
    rounded = {"deepseek-v2.dsc": 21, "kimi-k2.dsc": 33, "moonlight-16b-a3b.dsc": 3, "qwen3-30b-a3b.dsc": 3}
    for file, billions in rounded.items():
        assert round(counts.parameters(shipped(file).model).active / 1e9) == billions, file
    assert round(counts.parameters(shipped("qwen3-30b-a3b.dsc").model).active / 1e9, 1) == 3.4


def assert_as_laid_out(spec: Spec) -> None:
    rows, model, count = laid_out(spec), spec.model, counts.parameters(spec.model)
    main = [row for row in rows if not row.name.startswith("mtp.")]
    assert sum(row.num_elements for row in main) == count.total
    assert sum(row.num_elements for row in rows) == count.total + count.mtp
    assert sum(row.num_elements for row in main if row.role == "bias") == count.bias
    assert sum(row.num_elements for row in rows if row.name == "embedding") == count.embedding
    assert sum(row.num_elements for row in rows if row.name == "head") == count.head
    for layer in range(model.num_layers):
        mine = [row for row in main if row.name.startswith(f"layers.{layer}.")]
        assert sum(row.num_elements for row in mine) == counts.layer_parameters(model, layer)
        attention = [row for row in mine if ".attention." in row.name and not row.name.endswith(".attention.norm")]
        assert sum(row.num_elements for row in attention) == count.attention
        idle = [row for row in mine if row.expert is not None and row.expert >= getattr(model.ffn(layer), "top_k", 0)]
        active = counts.layer_parameters(model, layer) - sum(row.num_elements for row in idle)
        assert counts.active_layer_parameters(model, model.ffn(layer)) == active
    assert count.active_without_embedding == count.active - count.embedding


@pytest.mark.parametrize(("file", "run"), RUNS)
def test_shipped_models_are_laid_out_so(file: str, run: str) -> None:
    assert_as_laid_out(shipped(file, run))


@settings(max_examples=60)
@given(specs())
def test_random_models_are_laid_out_so(spec: Spec) -> None:
    assert_as_laid_out(spec)
