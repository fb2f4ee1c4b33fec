"""FLOPs and MFU by the published definition: with the published step time, the published figures come out exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compiler.predict.predict import mfu_of, predict
from compiler.predict.prediction import Flops, RankTime, StepPrediction, Tail
from dsl.load import load, resolve
from dsl.schema import Model
from tests.specs.counted import flops_of_model

SPECS = Path(__file__).parents[3] / "specs"
NOTHING = RankTime(-1, 0, 0, 0, 0, 0, 0)


def model(name: str) -> Model:
    return resolve(SPECS / f"{name}.dsc").spec.model


def product_parameters(flops: Flops) -> float:
    """Parameters of the products that a token uses: FLOPs less the attention core, which causal attention halves."""
    return (2 * flops.causal - flops.full) / 6


def step(seconds: float, tokens: int) -> StepPrediction:
    return StepPrediction(seconds, tokens, "dualpipe", 120, NOTHING, (), Tail(0, 0, 0, 0), 0)


def test_flops_of_v3_equal_the_published_ones() -> None:
    flops = flops_of_model(model("deepseek-v3"), 4096)
    assert (round(flops.causal / 1e9, 1), round(flops.full / 1e9, 1)) == (249.8, 280.5)


def test_mfu_of_v3_at_the_published_step_time_is_the_published_one() -> None:
    flops = flops_of_model(model("deepseek-v3"), 4096)
    mfu = mfu_of(flops, step(19.926, 15360 * 4096), 2048 * 989e12)
    assert (round(mfu.causal * 100, 2), round(mfu.full * 100, 2)) == (38.94, 43.73)
    of_device = (mfu.causal * 989, mfu.full * 989)
    assert (round(of_device[0]), int(of_device[1])) == (385, 432)  # TFLOPS, as printed


def test_products_leave_out_embedding_gates_norms_and_mtp() -> None:
    # V2-Lite by hand: D 2048, 16 heads, no query rank, kv rank 512; layer 0 dense, 26 with 6 + 2 experts of 1408.
    D, H = 2048, 16
    attention = D * H * 192 + D * (512 + 64) + 512 * H * 256 + H * 128 * D
    experts, dense = 8 * 3 * D * 1408, 3 * D * 10944
    assert (
        product_parameters(flops_of_model(model("deepseek-v2-lite"), 4096))
        == 102400 * D + 27 * attention + 26 * experts + dense
    )
    v3 = model("deepseek-v3")
    assert flops_of_model(v3.model_copy(update={"mtp": None}), 4096) == flops_of_model(v3, 4096)


def test_attention_grows_with_the_sequence_and_half_of_it_is_causal() -> None:
    lite = model("deepseek-v2-lite")
    short, long = (flops_of_model(lite, sequence) for sequence in (2048, 4096))
    assert long.full - short.full == 2 * (long.causal - short.causal) == 6 * 27 * 16 * (192 + 128) * 2048


@pytest.mark.parametrize("factor", [2, 10])
def test_mfu_falls_as_the_step_grows(factor: int) -> None:
    flops = flops_of_model(model("quickstart"), 128)
    fast = mfu_of(flops, step(1.0, 1000), 4e12)
    slow = mfu_of(flops, replace(step(1.0, 1000), seconds=float(factor)), 4e12)
    assert fast.full == pytest.approx(slow.full * factor)


@pytest.mark.parametrize("degrees", [("tensor=8",), ("tensor=4", "pipeline=2")])
def test_tensor_ranks_split_the_work_of_a_model_and_add_none(degrees: tuple[str, ...]) -> None:
    """Tensor ranks change neither parameters nor FLOPs of the model, and a device computes its part of them."""
    alone, split = (
        predict(load(SPECS / "llama3-8b.dsc", overrides=[f"parallel.{degree}" for degree in overrides]))
        for overrides in ((), degrees)
    )
    assert split.flops == alone.flops and split.parameters == alone.parameters
    assert split.mfu is not None and alone.mfu is not None and 0.5 < split.mfu.causal / alone.mfu.causal < 1.5
