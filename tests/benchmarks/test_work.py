"""FLOPs of a step, against torch's own count on the model of `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV3ForCausalLM

from benchmarks.speed.limit import products_of
from benchmarks.speed.theirs_model import loss_of
from benchmarks.speed.work import work_of
from dsl.load import resolve
from tests.reference.config import Config
from tests.reference.huggingface import transformers_config

SPECS = Path(__file__).parents[2] / "specs"
BATCH, SEQUENCE = 2, 64


@pytest.mark.parametrize("name", ["bench-4", "bench-8"])
def test_flops_equal_those_of_transformers(name: str) -> None:
    model = resolve(SPECS / f"{name}.dsc").spec.model
    config = Config.from_plan(model.model_dump(mode="json") | {"sequence": SEQUENCE})
    torch.manual_seed(0)
    theirs = DeepseekV3ForCausalLM(transformers_config(config)).train()
    tokens = torch.randint(model.vocab, (BATCH, SEQUENCE))
    with FlopCounterMode(display=False) as counter:
        loss_of(theirs)(tokens, tokens).backward()
    work = work_of(model, BATCH, SEQUENCE)
    square = work.attention * 2 * SEQUENCE // (SEQUENCE + 1)  # eager attention also computes masked scores
    assert counter.get_total_flops() == work.product_flops + square


def test_the_limit_computes_only_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.ops.native.library._functions", dict)  # by torch, which counts
    work = work_of(resolve(SPECS / "bench-4.dsc").spec.model, 1, 16)
    step = products_of(work, torch.float32)
    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() == work.product_flops


def test_work_of_a_whole_batch() -> None:
    """A step of bench-4 takes 42.2 GFLOP of products and 2.0 of causal attention, as an independent count gave."""
    spec = resolve(SPECS / "bench-4.dsc").spec
    work = work_of(spec.model, spec.train.batch.end, spec.train.sequence)
    assert (work.tokens, round(work.product_flops / 1e9, 1), round(work.attention / 1e9, 1)) == (2048, 42.2, 2.0)
