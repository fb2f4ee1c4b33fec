"""The cost of scale: closed forms beside simulated runs, and the page beside plans."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import scale
from compiler.predict.predict import predict
from compiler.predict.prediction import Prediction, seconds
from dsl.closed_forms.stragglers import expected_maximum, slowest_factor
from dsl.load import resolve
from dsl.schema import Spec
from tests.specs.shipped import path_of


def planned(*overrides: str) -> tuple[Spec, Prediction]:
    spec = resolve(scale.SPEC, overrides=overrides).spec
    return spec, predict(spec)


def test_closed_forms_agree_with_simulated_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "CLUSTERS", 20)
    monkeypatch.setattr(scale, "FAILURES", 200)
    spec, prediction = planned("cluster.nodes=2048", "parallel.data=auto", "train.batch=122880")
    factor, goodput = slowest_factor(spec.cluster), prediction.goodput
    assert goodput is not None
    step_s = prediction.step.seconds / factor
    run = scale.simulate(spec.cluster.world, 0.0175, step_s, goodput, np.random.default_rng(1))
    assert run.slowest_error < 0.003 and run.slowest == pytest.approx(factor, abs=4 * run.slowest_error)
    assert run.goodput_error < 0.003 and run.goodput == pytest.approx(goodput.best, abs=4 * run.goodput_error)


def test_the_page_has_the_figures_of_the_plan() -> None:
    _, prediction = planned()
    row = next(line for line in scale.PAGE.read_text("utf-8").splitlines() if line.startswith("| 2,048 |"))
    assert f"| {seconds(prediction.step.seconds)} |" in row, "run: python -m benchmarks.scale"
    assert prediction.goodput is not None and f"| {prediction.goodput.best:.2%} |" in row


@pytest.mark.parametrize("count", [1, 2, 8, 100, 2048])
def test_the_expected_maximum_is_that_of_drawn_numbers(count: int) -> None:
    drawn = np.random.default_rng(count).standard_normal((4000, count)).max(axis=1)
    assert expected_maximum(count) == pytest.approx(drawn.mean(), abs=0.02 + 3 * drawn.std() / 4000**0.5)


def factor(*settings: str) -> float:
    return slowest_factor(resolve(path_of("llama3-8b"), overrides=settings).spec.cluster)


def test_slow_devices_cost_their_slowdown_once_there_surely_is_one() -> None:
    plain, many = factor("cluster.scale.spread=0"), factor("cluster.scale.spread=0", "cluster.scale.slow=10%")
    assert plain == 1.0
    assert many == pytest.approx(1 + 0.1 * (1 - 0.9**256))


def test_more_devices_never_make_a_step_shorter() -> None:
    factors = [
        factor(f"cluster.nodes={nodes}", f"train.batch={nodes * 16}", "parallel.data=auto") for nodes in (1, 8, 64, 512)
    ]
    assert factors == sorted(factors) and factors[0] == 1.0 < factors[1]
    assert slowest_factor(resolve(path_of("quickstart")).spec.cluster) == 1.0, "CPUs have no such figures"
