"""The software that a plan assumes: launches, transport of rows, exchanges of tensor ranks, and the load of experts."""

from __future__ import annotations

import pytest

from compiler.machine.rates import shipped_table, shipped_table_names
from compiler.machine.rates.table import EXCHANGES, FLOPS, LAUNCH, MEMORY
from compiler.plan.spec_rates import copies_per_row, rates_of
from compiler.plan.split_blocks import balanced_rows
from compiler.plan.stack_rates import EAGER_LAUNCHES, EAGER_TIME, GRAPH_GAP
from compiler.predict.predict import predict, time_plan
from compiler.predict.rank_use import class_seconds, use_of
from compiler.predict.timed_plan import TimedPlan
from dsl.closed_forms.loads import load_by_chance
from dsl.load import resolve
from dsl.rules import train_refusals
from dsl.schema import Spec
from tests.specs.shipped import path_of


def spec_of(name: str, *overrides: str) -> Spec:
    return resolve(path_of(name), overrides=overrides).spec


def timed(name: str, *overrides: str) -> TimedPlan:
    return time_plan(spec_of(name, *overrides))


def test_launches_change_the_passes_over_memory_and_the_gaps() -> None:
    compiled, eager, graphs = (
        timed("moe-8gpu", f"stack.launches={launches}") for launches in ("compiled", "eager", "graphs")
    )
    assert compiled.step.seconds == timed("moe-8gpu").step.seconds
    assert eager.step.seconds > compiled.step.seconds > graphs.step.seconds
    (stage,) = compiled.plan.stages
    ours, slower, faster = (
        class_seconds(stage, compiled.plan.cuts, plan.rates[0], balanced_rows(plan.spec))
        for plan in (compiled, eager, graphs)
    )
    for kind, time_s in ours.items():
        passes = EAGER_TIME if kind in MEMORY else EAGER_LAUNCHES if kind == LAUNCH else 1.0
        if kind not in FLOPS:  # these also take the time of their bytes
            assert slower[kind] == pytest.approx(passes * time_s), kind
        assert faster[kind] == pytest.approx((GRAPH_GAP if kind == LAUNCH else 1.0) * time_s), kind
    # A graph has no call of the host for an exchange.
    exchanges = [next(a.busy_s for a in use_of(plan).axes if a.axis == "experts") for plan in (compiled, graphs)]
    assert exchanges[0] > 1.2 * exchanges[1]


def test_graphs_of_the_build_are_planned_as_graphs() -> None:
    assert timed("llama3-8b", "kernels.graphs=true").step == timed("llama3-8b", "stack.launches=graphs").step


def test_nccl_sends_each_row_on_its_own() -> None:
    v3, nccl = (spec_of("deepseek-v3", *overrides) for overrides in ((), ("stack.transport=nccl",)))
    assert copies_per_row(v3, 8) == 0.5 and copies_per_row(nccl, 8) == 1.0, "4 nodes of 8 for 8 experts"
    assert time_plan(nccl).step.seconds > 1.2 * time_plan(v3).step.seconds


@pytest.mark.parametrize("name", [name for name in shipped_table_names() if name != "cpu"])
def test_every_row_of_an_exchange_names_its_transport(name: str) -> None:
    rows = [row for row in shipped_table(name).rows if row.kind in EXCHANGES]
    assert rows and all(row.by for row in rows)


def test_a_plan_says_which_software_it_assumes() -> None:
    def said(*overrides: str) -> str:
        return " · ".join(predict(spec_of("moe-8gpu", *overrides)).assumptions)

    assert "launched by a host that keeps ahead" in said() and "as fast as by deepep" in said()
    assert "as fast as by nccl" in said("stack.transport=nccl")
    assert "as fast as by deepep, as table h100 has no row by hybridep" in said("stack.transport=hybridep")
    assert "replayed as CUDA graphs" in said("stack.launches=graphs")
    assert "tokens choose experts at random" in said("stack.balance=forced")


def test_forced_balance_is_the_median_load_by_chance() -> None:
    spec = spec_of("moe-8gpu", "stack.balance=forced")
    assert rates_of(spec).load == load_by_chance(spec, 0.5) > 1.0 == rates_of(spec_of("moe-8gpu")).load
    assert time_plan(spec).step.seconds > timed("moe-8gpu").step.seconds
    assert rates_of(spec_of("llama3-8b", "parallel.expert=2", "stack.balance=forced")).load == 1.0, "it has no experts"


def test_chunked_exchanges_of_tensor_ranks_take_the_time_of_one_chunk() -> None:
    apart, chunked = (timed("llama3-8b", "parallel.tensor=4", f"stack.tensor={how}") for how in ("apart", "chunked"))
    ours, theirs = (next(a.busy_s for a in use_of(plan).axes if a.axis == "tensor") for plan in (apart, chunked))
    assert theirs == pytest.approx(ours / 4, rel=1e-3)


def test_other_software_can_only_be_planned() -> None:
    assert [item.code for item in train_refusals(spec_of("moe-8gpu", "stack.transport=nccl"))] == ["E1010"]
    assert train_refusals(spec_of("moe-8gpu")) == ()
