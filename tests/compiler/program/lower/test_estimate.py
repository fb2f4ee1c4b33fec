"""The costs of stages, compared with DeepSeek's public profile."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations_with_replacement
from types import SimpleNamespace
from typing import Any

import pytest

from compiler.ir.expert_placement import ReceivedRows
from compiler.plan.actions.lanes import end_of
from compiler.plan.actions.order import jobs_of
from compiler.plan.actions.search import best_order
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.predict.times import step_times
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import _common_rank, copy_time, costs_of_searches, stage_costs
from compiler.schedule.dualpipe import dualpipe
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import simulate
from compiler.schedule.weights import as_weight
from dsl.load import load
from runtime.contract.actions import KINDS, Action, Pair, Step, actions_of
from tests.compiler.program.lower.stages import chain, deepseek_v3, pair_kinds, small

# ms of four MoE layers on H800, DeepSeek's public profile: a lone action is its compute and all its communication.
PUBLISHED = {"F": 97.5, "I": 111.7, "W": 35.1, "B": 146.8}


def test_costs_sum_the_jobs_of_the_stages() -> None:
    lowering = deepseek_v3()
    costs = stage_costs(lowering, ("BF",))
    assert [kinds for kinds, _ in costs.pairs] == ["BF"]
    for kind in "FBIW":
        times = []
        for stage in range(len(lowering.plan.stages)):
            jobs = jobs_of([chain(deepseek_v3(), stage, kind)])
            times.append(Fraction(end_of(jobs, best_order(jobs)), 10**6))
        more_ms = float(costs.lone_time(kind) - sum(times) / len(times))
        # 8 of 16 stages send a message under a leaf switch and 7 between two leaves, where links lose a tenth.
        # After the message of a B come weight gradients.
        near_s, far_s = (latency_s + 4096 * 7168 * 2 / rate for latency_s, rate in ((2.8e-6, 40e9), (3.7e-6, 36e9)))
        message_ms = (8 * near_s + 7 * far_s) / 16 * 1e3
        assert more_ms == pytest.approx(message_ms if kind in "FI" else 0, rel=1e-3, abs=1e-5)
    # In the order of "BF": the search of orders breaks ties by it, and ends up to 2% apart.
    pair = jobs_of([chain(deepseek_v3(), 10, "B"), chain(deepseek_v3(), 5, "F")])
    alone = [jobs_of([chain(deepseek_v3(), 5, kind)]) for kind in "FB"]
    gain = end_of(pair, best_order(pair)) / sum(end_of(jobs, best_order(jobs)) for jobs in alone)
    gain *= lowering.rates[5].pair  # the plan's addition to a pair
    assert float(costs.pair_time("FB") / (costs.lone_time("F") + costs.lone_time("B"))) == pytest.approx(gain, rel=0.01)
    for factors in zip(*(weight.factors for weight in costs.stages), strict=True):  # of each kind
        assert float(sum(factors)) == pytest.approx(16)
    assert costs.latency == 0
    assert costs.gains() == {"BF"}


@pytest.mark.parametrize("kind", "FBIW")
def test_deepseek_v3_is_predicted_from_published_rates(kind: str) -> None:
    """Casts to FP8 and recomputation are included. Classes of kernels are calibrated on the same profile
    (compiler/predict/traced_layer.py); their sum per action, and the exchanges, are predictions."""
    lowering = deepseek_v3()
    # The profile's B does not overlap with its own exchanges, so its time is the sum of its parts.
    nodes = lowering.chains(5, 0).chain(kind)
    in_turn_ms = sum(node.time_ns for node in nodes) / 1e6
    assert in_turn_ms == pytest.approx(PUBLISHED[kind], rel=0.08)


def test_costs_time_a_schedule() -> None:
    lowering = small()
    schedule = dualpipe(2, 4)
    assert pair_kinds(schedule) == {"BF"}
    costs = stage_costs(lowering)
    alone = 2 * (costs.lone_time("F") + costs.lone_time("I") + costs.lone_time("W"))
    assert simulate(schedule, costs).makespan > alone


@pytest.mark.parametrize("placement", ["bidirectional", "v"])
def test_a_search_has_the_times_of_the_plan(placement: str) -> None:
    """Each kind on each stage and each pair on each rank takes this time with messages, to a thousandth of a weight."""
    spec = load("specs/quickstart.dsc", overrides=["schedule.name=auto", f"schedule.placement={placement}"])
    lowering = Lowering(make_plan(spec), rank_rates(spec))
    costs, plan = costs_of_searches(lowering), lowering.plan
    steps: list[list[Step]] = []
    for rank in range(2):
        sides = [(kind, stage) for kind in KINDS for stage in sorted(plan.stages_of(rank))]
        pairs = combinations_with_replacement(sides, 2)
        steps.append([Action(*side, 0) for side in sides] + [Pair(Action(*a, 0), Action(*b, 3)) for a, b in pairs])
    schedule = Schedule("all", 2, 4, plan.stage_placement, tuple(map(tuple, steps)))
    times = step_times(lowering, schedule)
    for rank, row in enumerate(steps):
        for step in row:
            mean = sum(costs.lone_time(action.kind) for action in actions_of(step))
            assert (
                abs(costs.step_time(step, rank) - times.step_time(step, rank))
                < max(mean, times.step_time(step, rank)) / 500
            ), step
    assert len({weight.label for weight in map(as_weight, costs.stages)}) == len(plan.stages)


@pytest.mark.parametrize("name", ["laptop-gqa", "llama3-8b"])
def test_the_time_of_a_host_copy_follows_from_its_bytes(name: str) -> None:
    """Cores copy within their memory, an accelerator over its link, with an assumed 5.12e10 bytes/s."""
    spec = load(f"specs/{name}.dsc")
    lowering = Lowering(make_plan(spec), rank_rates(spec))
    chains = [
        lowering.chains(stage, rank) for rank in range(lowering.plan.mesh.pp) for stage in lowering.plan.stages_of(rank)
    ]
    bytes_per_s = 5.12e10 if name == "llama3-8b" else lowering.rates[0].memory_bytes
    most_bytes = max(stage_chain.offloaded_bytes(ReceivedRows(stage_chain.rows)) for stage_chain in chains)
    assert float(copy_time(lowering)) == pytest.approx(1000 * most_bytes / bytes_per_s, rel=1e-3)


def test_equal_stages_share_a_label() -> None:
    lowering = deepseek_v3()
    labels = [as_weight(weight).label for weight in costs_of_searches(lowering).stages]
    assert len({*labels[1:8]}) == len({*labels[8:15]}) == 1 and len({*labels}) == 4
    for rank in range(16):
        stages = lowering.plan.stages_of(rank)
        assert len({labels[stage] for stage in stages}) == len(stages)


def test_the_common_rank_has_the_most_frequent_stages() -> None:
    """The order of the stages on a rank does not matter, as at the two ends of a V."""
    dense, moe, outer = {"F": 1, "B": 2}, {"F": 2, "B": 4}, {"F": 3, "B": 6}
    stages: dict[int, tuple[int, ...]] = {0: (0, 5), 1: (1, 4), 2: (2, 3)}
    plan: Any = SimpleNamespace(mesh=SimpleNamespace(pp=3), stages_of=stages.__getitem__)
    assert _common_rank(plan, [outer, dense, moe, dense, moe, outer]) == 1
    assert _common_rank(plan, [dense, outer, dense, moe, outer, moe]) == 0
    assert _common_rank(plan, [outer, dense, dense, dense, moe, outer]) == 0, "the first of those that are as common"
