"""`dsc plan` with completions: what their time depends on; planned caches equal those of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from compiler.predict.predict import predict
from compiler.predict.prediction import GenerationTime, Prediction
from compiler.tools.picture.drawing import Screen
from compiler.tools.report.prediction_text import text
from dsl.load import load
from dsl.schema import Spec
from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from tests.runtime.rl.learning import learning
from tests.runtime.step.specs import spec, with_rewards, without_mtp
from tests.specs.shipped import path_of
from tests.traced import SharedSegments as Segments


def rewarded(model: str, pp: int = 1, dp: int = 1, **keys: Any) -> Spec:
    base = without_mtp(spec(pp, 1, dp, 8 // dp, 4, 0, model, precision="fp32", sequence=16))
    return with_rewards(base, **{"group": 4, "prompt": 6, "completion": 10} | keys)


def planned(found: Spec) -> tuple[Prediction, GenerationTime]:
    prediction = predict(found)
    assert prediction.generation is not None
    return prediction, prediction.generation


def test_a_run_without_completions_has_no_generation() -> None:
    assert predict(without_mtp(spec(1, 1, 1, 8, 4, 0, "llama", precision="fp32"))).generation is None


def test_rounds_and_tokens() -> None:
    _, all_at_once = planned(rewarded("llama"))
    _, few = planned(rewarded("llama", slots=5))
    assert (all_at_once.slots, all_at_once.rounds, all_at_once.tokens) == (16, 10, 160)
    assert (few.slots, few.rounds, few.tokens) == (5, 40, 160), "16 sequences in slots for 5"
    assert few.seconds > all_at_once.seconds and few.cache_bytes * 16 == all_at_once.cache_bytes * 5
    _, again = planned(rewarded("llama", iterations=4))
    assert again.seconds == pytest.approx(all_at_once.seconds / 4) and again.rounds == all_at_once.rounds


def test_the_text_reports_generation_of_completions() -> None:
    prediction, generation = planned(rewarded("llama", slots=5))

    def line(predicted: GenerationTime, word: str) -> str:
        lines = text(replace(prediction, generation=predicted), Screen(200)).splitlines()
        return next(line for line in lines if word in line)

    assert "40 rounds of " in line(generation, "writing") and "if completions have the maximum" in line(
        generation, "writing"
    )
    assert line(generation, "keys and values").endswith("keys and values of 5 completions at a time")
    unfitting = replace(generation, fits=False)
    assert line(unfitting, "keys and values").endswith(
        "5 completions at a time: more than weights and state leave free"
    )


def test_generation_counts_in_the_time_of_a_run() -> None:
    prediction, generation = planned(rewarded("llama"))
    plain = predict(without_mtp(spec(1, 1, 1, 8, 4, 0, "llama", precision="fp32", sequence=16)))
    assert 0 < prediction.generation_share < 1
    assert prediction.whole_run.seconds == pytest.approx(
        prediction.whole_run.steps * (prediction.step.seconds + generation.seconds)
    )
    assert prediction.device_hours_per_trillion_tokens > plain.device_hours_per_trillion_tokens


@pytest.mark.parametrize("model", ["llama", "v3"])
def test_stages_divide_the_caches(model: str) -> None:
    of_two, of_one = (planned(rewarded(model, pp))[1].cache_bytes for pp in (2, 1))
    assert of_two == of_one // 2, "two layers, one per stage"


@pytest.mark.parametrize("model", ["llama", "v3"])
def test_planned_caches_equal_those_of_a_run(tmp_path: Path, segments: Segments, model: str) -> None:
    """Planned bytes of keys and values equal those that a rank of a run holds once each slot has had a sequence."""
    run_spec = rewarded(model, slots=4)
    write_build(tmp_path / "build", compile_spec(run_spec, segments=segments).files)
    trainer = learning(Build.open(tmp_path / "build"), 0, Board(1).bind(0))
    assert trainer.policy is not None
    forward, cache_bytes = trainer.policy.generator._forward, list[int]()
    forget = forward.forget

    def counted() -> None:
        cache_bytes.append(sum(tensor.nbytes for pair in forward._cache.values() for tensor in pair))
        forget()

    forward.forget = counted  # type: ignore[method-assign]
    trainer.roll_out()
    assert cache_bytes == [planned(run_spec)[1].cache_bytes]


def test_caches_that_do_not_fit_are_reported() -> None:
    """A device with room for little more than weights, gradients and state."""
    prediction, generation = planned(rewarded("llama"))
    rank = prediction.ranks[0]
    assert generation.fits and prediction.fits
    needed = rank.weights + rank.gradients + rank.optimizer + generation.cache_bytes
    small = rewarded("llama")
    node = small.cluster.node
    device = node.device.model_copy(update={"memory": needed - 1})
    cluster = small.cluster.model_copy(update={"node": node.model_copy(update={"device": device})})
    assert not planned(small.model_copy(update={"cluster": cluster}))[1].fits


def test_the_shipped_run() -> None:
    prediction, generation = planned(load(path_of("r1-tiny:r1")))
    assert generation.rounds == 24 and generation.slots == 64 and prediction.generation_share > 0.5
