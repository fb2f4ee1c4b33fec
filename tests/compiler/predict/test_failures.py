"""The cost of failures, compared with simulated runs, and the best interval, compared with all others."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from compiler.predict.failures import best_steps, failure_assumptions, goodput_share
from runtime.contract import RunPlan
from runtime.launch.room import checkpoint_bytes
from tests.compiler.predict.test_predict import plan_of, spec_of

HOUR = 3600.0
FAILURES = 60_000
CASES = [  # interval, mtbf, copy, write, restart: seconds
    (600.0, 10_000.0, 5.0, 60.0, 300.0),
    (100.0, 1_000.0, 20.0, 90.0, 10.0),
    (50.0, 2_000.0, 5.0, 200.0, 60.0),  # a save waits for the previous one
    (3_000.0, 1_000.0, 5.0, 0.0, 0.0),
    (600.0, 10_000.0, 0.0, 0.0, 3_000.0),
]


def drawn(interval_s: float, mtbf_s: float, copy_s: float, write_s: float, restart_s: float) -> tuple[float, float]:
    """The goodput of a run with FAILURES failures, simulated event by event, and its standard error."""
    draw, kept_s, passed_s, squares = random.Random(5), 0.0, 0.0, 0.0
    for _ in range(FAILURES):
        until_failure_s = draw.expovariate(1 / mtbf_s)
        passed_s += until_failure_s
        clock, saved, written = 0.0, 0.0, 0.0  # time since this start; saved work; end of its write
        trained = 0.0
        while True:
            clock = (
                max(clock + interval_s, written) + copy_s
            )  # training waits for the write before it, then for the copy
            trained += interval_s
            written = clock + write_s
            if written > until_failure_s:
                break
            saved = trained
        kept_s, squares = kept_s + saved, squares + saved**2
        while True:  # a restart in which the next failure may come
            until_failure_s = draw.expovariate(1 / mtbf_s)
            passed_s += min(until_failure_s, restart_s)
            if until_failure_s >= restart_s:
                break
    return kept_s / passed_s, math.sqrt(squares) / passed_s  # the total time varies less than the time kept


@pytest.mark.parametrize("case", CASES)
def test_the_share_equals_that_of_simulated_runs(case: tuple[float, ...]) -> None:
    simulated, error = drawn(*case)
    assert abs(goodput_share(*case) - simulated) < 3 * error


@pytest.mark.parametrize("seed", range(40))
def test_no_interval_is_better_than_the_best(seed: int) -> None:
    draw = random.Random(seed)
    step_s, mtbf_s = draw.uniform(0.1, 30), 10 ** draw.uniform(3, 6)
    copy_s, write_s = draw.choice([0.0, draw.uniform(0, 60)]), draw.uniform(0, 600)
    best = best_steps(step_s, mtbf_s, copy_s, write_s)
    counts = range(1, int(mtbf_s / step_s) + 2)
    shares = {steps: goodput_share(steps * step_s, mtbf_s, copy_s, write_s, 60.0) for steps in counts}
    assert shares[best] == max(shares.values())


def test_a_run_that_makes_no_progress_has_no_goodput() -> None:
    assert goodput_share(100.0, 1.0, 0.0, 0.0, 1e9) == 0.0


def test_the_plan_predicts_the_cost_of_failures() -> None:
    goodput = plan_of("llama3-8b").goodput
    assert goodput is not None
    assert goodput.mtbf_s == 50_000 * HOUR / 256
    assert goodput.of_spec is not None
    assert goodput.best > goodput.share == goodput.of_spec
    often = plan_of("llama3-8b", f"train.checkpoint.every={goodput.best_steps} steps").goodput
    assert often is not None and often.share == goodput.best
    at_once = plan_of("llama3-8b", "train.checkpoint.background=false").goodput
    assert at_once is not None and at_once.copy_s == goodput.write_s > goodput.copy_s and at_once.write_s == 0
    rarer = plan_of("llama3-8b", "cluster.failures.mtbf=500_000h").goodput
    assert rarer is not None and rarer.share > goodput.share and rarer.best_steps > goodput.best_steps


def test_cpus_have_failures_if_the_cluster_states_them() -> None:
    assert plan_of("quickstart").goodput is None
    goodput = plan_of("quickstart", "cluster.failures.mtbf=10h").goodput
    assert goodput is not None and goodput.mtbf_s == 10 * HOUR / 4
    plan = RunPlan.from_json(Path("tests/golden/quickstart/plan.json").read_bytes())
    assert goodput.checkpoint_bytes == checkpoint_bytes(plan)


def test_assumptions_about_failures_are_listed() -> None:
    goodput = plan_of("quickstart", "cluster.failures.mtbf=10h").goodput
    (assumption,) = failure_assumptions(spec_of("quickstart", "cluster.failures.mtbf=10h"), goodput)
    assert "as frequent as the cluster states" in assumption
    (assumption,) = failure_assumptions(spec_of("quickstart"), goodput)
    assert "a device fails once in 50,000 hours" in assumption and "`failures` in the cluster" in assumption
    assert failure_assumptions(spec_of("quickstart"), None) == ()
