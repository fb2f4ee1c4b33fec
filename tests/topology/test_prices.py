"""One price for every transfer of a spec: its path from the cluster, its rate from the table that the spec goes by."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.ir import Buffer
from compiler.lower import Lowering
from compiler.plan import make_plan
from compiler.predict.predict import predict
from compiler.predict.times import step_times
from compiler.rates import Rates, rates_of, shipped_table
from compiler.rates.rank_rates import rank_rates
from compiler.rates.table import Row, Table
from compiler.schedules import schedule_of
from compiler.schedules.simulate import simulate
from compiler.topology.links import LEVELS
from compiler.topology.messages import messages_s
from dsl.load import load
from dsl.schema import Spec
from tests.specs.shipped import shipped

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
    found = messages_s(fabric, plan, plan.stage_placement)
    assert set(found) == {(a, b) for a in range(4) for b in range(4) if abs(a - b) == 1}
    inside, between = fabric.link(0, 4), fabric.link(4, 8)
    assert inside is not None and between is not None
    assert fabric.path(0, 4) == ("nvlink",) and fabric.path(4, 8) == ("leaf", "nvlink")
    assert found[0, 1] == found[1, 0] == found[2, 3] == pytest.approx(3.3e-6 + HIDDEN / 360e9)
    assert found[1, 2] == found[2, 1] == pytest.approx(2.8e-6 + 3.3e-6 + HIDDEN / 40e9)
    assert (inside.bandwidth, between.bandwidth) == (360e9, 40e9)


def test_a_step_waits_for_each_message_as_long_as_it_takes() -> None:
    """Down the pipeline once and back: every hop counts by its own time."""
    spec = two_nodes()
    plan = make_plan(spec)
    schedule = schedule_of("1f1b", 4, 1)
    times = step_times(Lowering(plan, rank_rates(spec)), schedule)
    assert times.message(0, 1) == times.message(3, 2) and times.message(1, 2) > 8 * times.message(0, 1)
    ways = sum((2 * times.message(rank, rank + 1) for rank in range(3)), Fraction(0))
    work = sum((times.of(step, rank) for rank, steps in enumerate(schedule.actions) for step in steps), Fraction(0))
    assert simulate(schedule, times).makespan == work + ways


# ---------------------------------------------------------------- reductions


def with_rows(table: Table, *rows: dict[str, object]) -> Table:
    said = {"source": "here", "date": "2025-01-01"}
    return table.model_copy(update={"rows": (*table.rows, *(Row.model_validate({**row, **said}) for row in rows))})


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


def test_sums_over_the_network_are_measured_apart() -> None:
    spec = shipped("quickstart.dsc")
    spec = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"nodes": 2})})
    table = with_rows(shipped_table("cpu"), {"class": "all_reduce_network", "rate": 1e6})
    fabric = rates_of(spec, table).fabric
    assert fabric.reduce_s(1e6, range(4)) == rates_of(spec).fabric.reduce_s(1e6, range(4)), "of one node"
    assert fabric.reduce_s(1e6, (0, 4)) == pytest.approx(2e-4 + 1)


# ---------------------------------------------------------------- exchanges


def test_expert_groups_are_priced_where_they_lie() -> None:
    """Three nodes of eight, four ranks of six: the groups of the two in the middle are on two nodes each."""
    spec = shipped("moe-8gpu.dsc")
    parallel = spec.parallel.model_copy(update={"pipeline": 4, "data": 6, "expert": 6})
    cluster = spec.cluster.model_copy(update={"nodes": 3})
    rates = rank_rates(spec.model_copy(update={"parallel": parallel, "cluster": cluster}))
    assert [each.experts.spread.nodes for each in rates] == [1, 2, 2, 1]
    assert rates[0] is rates[3] and rates[0] is not rates[1]
    inside, across = (each.fabric.exchange_s(each.experts, True, ROWS, 4096) for each in rates[:2])
    assert across > 2 * inside


def test_the_group_that_lies_worst_counts() -> None:
    """Nodes of eight, groups of six in a rank of 24: the second of four is on two nodes, and all go in step."""
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
    found = {f"message {level}": fabric.message_s(0, b, 1e7) for level, b in ends.items()}
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        found |= {f"{kind} {level}": fabric.reduce_s(1e9, range(0, 2 * b, b), kind) for level, b in ends.items()}
    for way in (True, False):
        found[f"exchange {way} leaf"] = fabric.exchange_s(rates.experts, way, ROWS, 4096)
        found[f"exchange {way} nvlink"] = fabric.exchange_s(inside, way, ROWS, 4096)
    return found


@given(st.sampled_from(["nvlink", "nic"]), st.floats(1.01, 4.0))
def test_wider_links_are_never_slower_whatever_they_carry(wider: str, factor: float) -> None:
    """No transfer gets slower, and every transfer whose highest level got wider gets faster."""
    spec = shipped("deepseek-v3.dsc", "pretrain")
    peaks = {"nvlink": 200e9, "nic": 50e9}
    before, after = priced(spec, **peaks), priced(spec, **{**peaks, wider: peaks[wider] * factor})
    for transfer, seconds in before.items():
        assert after[transfer] <= seconds, transfer
        level = LEVELS.index(transfer.split()[-1])
        if (level == 0) == (wider == "nvlink"):
            assert after[transfer] < seconds, transfer
