"""One price for every transfer of a spec: the path from the cluster, the rate from the table of the spec."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.ir import Buffer
from compiler.machine.rates import Rates, shipped_table
from compiler.machine.rates.table import RateRow, RateTable
from compiler.machine.topology.fabric import LEVELS
from compiler.machine.topology.traffic import messages_of
from compiler.plan.actions.order import run_of_chains
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates, rates_of
from compiler.predict.predict import predict, time_plan
from compiler.predict.times import step_times
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import stage_costs
from compiler.schedule import schedule_of
from compiler.schedule.simulate import simulate
from dsl.load import load
from dsl.schema import Spec
from runtime.contract.actions import Action
from tests.specs.shipped import shipped

PUBLISHED = "benchmarks/published/zero-bubble.dsc:large"  # 16 pipeline ranks on two nodes
HIDDEN = 8192 * 4096 * 2  # bytes of a message of llama3-8b
ROWS = (Buffer("rows", ("R", 4096), "bfloat16"),)


def two_nodes() -> Spec:
    """Two nodes of eight devices, pipeline = 4, data = 4: ranks 0 and 1 are on one node, 2 and 3 on the other."""
    return load("specs/llama3-8b.dsc", overrides=["cluster.nodes=2"])


# ---------------------------------------------------------------- messages


def test_a_message_within_a_node_goes_over_nvlink() -> None:
    """360 GB/s within, 40 GB/s between; rank 1 is on the upper half of its node and 2 on the lower, other rails."""
    spec = two_nodes()
    plan, fabric = make_plan(spec), rates_of(spec).fabric
    seconds = messages_of(fabric, plan, plan.stage_placement).seconds
    assert set(seconds) == {(a, b) for a in range(4) for b in range(4) if abs(a - b) == 1}
    inside, between = fabric.link(0, 4), fabric.link(4, 8)
    assert inside is not None and between is not None
    assert fabric.path(0, 4) == ("nvlink",) and fabric.path(4, 8) == ("leaf", "nvlink")
    assert seconds[0, 1] == seconds[1, 0] == seconds[2, 3] == pytest.approx(3.3e-6 + HIDDEN / 360e9)
    assert seconds[1, 2] == seconds[2, 1] == pytest.approx(2.8e-6 + 3.3e-6 + HIDDEN / 40e9)
    assert (inside.bandwidth, between.bandwidth) == (360e9, 40e9)


def test_an_action_ends_when_its_message_is_there() -> None:
    """A micro-batch down the pipeline and back: every hop counts once, with its own time. After a backward has
    sent its gradient, it computes its last weight gradients."""
    spec = two_nodes()
    plan = make_plan(spec)
    lowering, schedule = Lowering(plan, rank_rates(spec)), schedule_of("1f1b", 4, 1)
    messages = messages_of(lowering.rates[0].fabric, plan, schedule.stage_placement).seconds
    times = step_times(lowering, schedule)
    for rank in range(4):
        for kind, peer in (("F", rank + 1), ("B", rank - 1)):
            alone = run_of_chains([lowering.chains(rank, rank).chain(kind)], (0,), lowering.orders)
            message_ns = round(messages.get((rank, peer), 0) * 1e9)
            action_ns = times.step_time(Action(kind, rank, 0), rank) * 10**6
            assert times.exchange_s(Action(kind, rank, 0), rank) == pytest.approx(message_ns * 1e-9)
            assert alone.end <= action_ns <= alone.end + message_ns
            if kind == "F":
                assert action_ns == alone.end + message_ns
    assert messages[1, 2] > 8 * messages[0, 1]
    work = sum(
        (times.step_time(step, rank) for rank, steps in enumerate(schedule.actions) for step in steps), Fraction(0)
    )
    assert simulate(schedule, times).makespan == work


def test_chunks_cost_messages() -> None:
    """With three chunks for each rank, a micro-batch is sent three times as often, and between nodes that is seen."""
    plain, chunked = (
        time_plan(load(PUBLISHED, overrides=["train.batch=48", *overrides]))
        for overrides in ((), ("schedule.name=interleaved", "schedule.chunks=3", 'parallel.layout="E|(t|)*46L"'))
    )
    messages = messages_of(plain.rates[0].fabric, plain.plan, plain.plan.stage_placement).seconds
    sent_s = [
        sum(
            step_times(timed_plan.lowering, timed_plan.schedule).exchange_s(step, 7)
            for step in timed_plan.schedule.actions[7]
        )
        for timed_plan in (plain, chunked)
    ]
    assert sent_s[0] == pytest.approx(48 * (messages[7, 8] + messages[7, 6]))
    assert sent_s[1] == pytest.approx(3 * sent_s[0])
    busy_s = [timed_plan.step.ranks[7].busy_s for timed_plan in (plain, chunked)]  # of the same three layers
    assert busy_s[1] - busy_s[0] == pytest.approx(2 * 48 * messages[7, 8], rel=0.1), "forwards wait for two more each"


def test_a_searched_schedule_has_the_price_of_steps() -> None:
    """The time that the search assumes for an action, with its messages, is the time that the step takes."""
    spec = two_nodes()
    plan = make_plan(spec)
    lowering, schedule = Lowering(plan, rank_rates(spec)), schedule_of("1f1b", 4, 4)
    times, costs = step_times(lowering, schedule), stage_costs(lowering)
    assert costs.latency == 0
    for kind, rank in product("FB", range(4)):
        action = Action(kind, rank, 0)
        assert costs.step_time(action, rank) == times.step_time(action, rank)


# ---------------------------------------------------------------- reductions


def with_rows(table: RateTable, *rows: dict[str, object]) -> RateTable:
    origin = {"source": "here", "date": "2025-01-01"}
    return table.model_copy(
        update={"rows": (*table.rows, *(RateRow.model_validate({**row, **origin}) for row in rows))}
    )


def test_measured_sums_price_the_reduction_of_a_cpu_plan() -> None:
    """A sum goes at the rate of messages if the table has no rows of all_reduce_node; with them, at their rate."""
    spec, cpu = shipped("quickstart.dsc"), shipped_table("cpu")
    slower = with_rows(cpu, *({"class": "all_reduce_node", "shape": (2, 4**k), "rate": 7e7} for k in (5, 8, 11)))
    before, after = (predict(spec, rates=rates_of(spec, table)).step.tail for table in (cpu, slower))
    steps = rates_of(spec).fabric.reduce_s(0, range(2))
    assert after.reduction_s > 9 * before.reduction_s
    assert rates_of(spec, slower).fabric.reduce_s(7e6, range(2)) == pytest.approx(steps + 0.1)
    assert after.update_s == before.update_s
    messages = [rates_of(spec, table).fabric.message_s(0, 1, 1e6) for table in (cpu, slower)]
    assert messages[0] == messages[1]


def test_sums_over_the_network_have_a_separate_rate() -> None:
    spec = shipped("quickstart.dsc")
    spec = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"nodes": 2})})
    table = with_rows(shipped_table("cpu"), {"class": "all_reduce_network", "rate": 1e6})
    fabric = rates_of(spec, table).fabric
    assert fabric.reduce_s(1e6, range(4)) == rates_of(spec).fabric.reduce_s(1e6, range(4)), "of one node"
    assert fabric.reduce_s(1e6, (0, 4)) == pytest.approx(2e-4 + 1)


# ---------------------------------------------------------------- exchanges


def test_expert_groups_are_priced_by_their_nodes() -> None:
    """Three nodes of eight, four ranks of six: the groups of the two middle ranks are on two nodes each."""
    spec = shipped("moe-8gpu.dsc")
    parallel = spec.parallel.model_copy(update={"pipeline": 4, "data": 6, "expert": 6})
    cluster = spec.cluster.model_copy(update={"nodes": 3})
    rates = rank_rates(spec.model_copy(update={"parallel": parallel, "cluster": cluster}))
    assert [of_rank.experts.spread.nodes for of_rank in rates] == [1, 2, 2, 1]
    assert rates[0] is rates[3] and rates[0] is not rates[1]
    inside, across = (of_rank.fabric.exchange_s(of_rank.experts, True, ROWS, 4096) for of_rank in rates[:2])
    assert across > 2 * inside


def test_the_most_spread_group_sets_the_price() -> None:
    """Nodes of eight, groups of six in a rank of 24: the second of four is on two nodes, and groups run in lockstep."""
    spec = shipped("moe-8gpu.dsc")
    parallel = spec.parallel.model_copy(update={"pipeline": 1, "data": 24, "expert": 6})
    cluster = spec.cluster.model_copy(update={"nodes": 3})
    (rates,) = rank_rates(spec.model_copy(update={"parallel": parallel, "cluster": cluster}))
    assert rates.experts.spread.nodes == 2 and list(rates.experts.members) == list(range(6, 12))


# ---------------------------------------------------------------- monotone


def priced(spec: Spec, nvlink: float, nic: float) -> dict[str, float]:
    """Seconds of every kind of transfer, by its highest level."""
    node = spec.cluster.node.model_copy(update={"nvlink": nvlink, "nic": nic})
    rates: Rates = rates_of(spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"node": node})}))
    fabric, inside = rates.fabric, rates_of(shipped("moe-8gpu.dsc")).experts
    ends = {"nvlink": 1, "leaf": 8, "spine": 8 * 32}
    seconds = {f"message {level}": fabric.message_s(0, b, 1e7) for level, b in ends.items()}
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        seconds |= {f"{kind} {level}": fabric.reduce_s(1e9, range(0, 2 * b, b), kind) for level, b in ends.items()}
    for way in (True, False):
        seconds[f"exchange {way} leaf"] = fabric.exchange_s(rates.experts, way, ROWS, 4096)
        seconds[f"exchange {way} nvlink"] = fabric.exchange_s(inside, way, ROWS, 4096)
    return seconds


@given(st.sampled_from(["nvlink", "nic"]), st.floats(1.01, 4.0))
def test_wider_links_are_never_slower_whatever_they_carry(wider: str, factor: float) -> None:
    """No transfer becomes slower, and every transfer whose highest level became wider becomes faster."""
    spec = shipped("deepseek-v3.dsc", "pretrain")
    peaks = {"nvlink": 200e9, "nic": 50e9}
    before, after = priced(spec, **peaks), priced(spec, **{**peaks, wider: peaks[wider] * factor})
    for transfer, seconds in before.items():
        assert after[transfer] <= seconds, transfer
        level = LEVELS.index(transfer.split()[-1])
        if (level == 0) == (wider == "nvlink"):
            assert after[transfer] < seconds, transfer
