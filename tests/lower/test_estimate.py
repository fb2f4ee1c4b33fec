"""The costs of stages, beside DeepSeek's public profile."""

from __future__ import annotations

from fractions import Fraction

import pytest

from compiler.actions.lanes import best_order, end_of
from compiler.actions.order import jobs_of
from compiler.lower.estimate import stage_costs
from compiler.schedules.dualpipe import dualpipe
from compiler.schedules.simulate import simulate
from tests.lower.stages import chain, deepseek_v3, pair_kinds, small

# ms of four MoE layers on H800, DeepSeek's public profile: a lone action is its compute and all its communication.
PUBLISHED = {"F": 97.5, "I": 111.7, "W": 35.1, "B": 146.8}


def test_costs_are_those_of_the_stages() -> None:
    lowering = deepseek_v3()
    costs = stage_costs(lowering, ("BF",))
    assert [kinds for kinds, _ in costs.pairs] == ["BF"]
    for kind in "FBIW":
        times = []
        for stage in range(len(lowering.plan.stages)):
            jobs = jobs_of([chain(deepseek_v3(), stage, kind)])
            times.append(Fraction(end_of(jobs, best_order(jobs)), 10**6))
        more_ms = float(costs.one(kind) - sum(times) / len(times))
        # A message to the next node: 15 of 16 stages send one. Behind that of a B there are weight gradients.
        message_ms = 15 / 16 * (2.8e-6 + 4096 * 7168 * 2 / 40e9) * 1e3
        assert more_ms == pytest.approx(message_ms if kind in "FI" else 0, rel=1e-3, abs=1e-5)
    pair = jobs_of([chain(deepseek_v3(), 5, "F"), chain(deepseek_v3(), 10, "B")])
    alone = [jobs_of([chain(deepseek_v3(), 5, kind)]) for kind in "FB"]
    gain = end_of(pair, best_order(pair)) / sum(end_of(jobs, best_order(jobs)) for jobs in alone)
    assert float(costs.two("FB") / (costs.one("F") + costs.one("B"))) == pytest.approx(gain, rel=0.01)
    assert float(sum(costs.stages)) == pytest.approx(16)
    assert costs.latency == 0
    assert costs.gains() == {"BF"}


@pytest.mark.parametrize("kind", "FBIW")
def test_deepseek_v3_is_predicted_from_published_rates(kind: str) -> None:
    """Casts to FP8 and recomputation are in it. Classes of kernels are calibrated on the same profile
    (compiler/predict/traced_layer.py); that they add up to its actions, and what these exchange, is predicted."""
    lowering = deepseek_v3()
    # The profile's B does not overlap with its own exchanges, so its time is that of its parts in turn.
    nodes = lowering.chains(5, 0).of(kind)
    in_turn_ms = sum(node.time_ns for node in nodes) / 1e6
    assert in_turn_ms == pytest.approx(PUBLISHED[kind], rel=0.08)


def test_costs_time_a_schedule() -> None:
    lowering = small()
    schedule = dualpipe(2, 4)
    assert pair_kinds(schedule) == {"BF"}
    costs = stage_costs(lowering)
    alone = 2 * (costs.one("F") + costs.one("I") + costs.one("W"))
    assert simulate(schedule, costs).makespan > alone
