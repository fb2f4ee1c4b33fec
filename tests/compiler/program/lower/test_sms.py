"""SMs of exchanges: only if none are reserved, exchanges take them from concurrent compute."""

from __future__ import annotations

import pytest

from compiler.plan.actions.lanes import OrderEnd
from compiler.plan.actions.order import run_of_chains
from compiler.plan.spec_rates import rates_of
from compiler.program.lower import Lowering
from dsl.schema import Sm
from tests.compiler.program.lower.stages import deepseek_v3, lowering_of
from tests.specs.shipped import shipped

TAKEN = 24 / 132  # the share of SMs in DeepEP's figures


def on(spec_name: str, plan_of: Lowering, sms: int) -> Lowering:
    """The stages of a spec's plan with this number of SMs reserved for communication."""
    spec = shipped(spec_name).model_copy(update={"sm": Sm(communication=sms)})
    return Lowering(plan_of.plan, rates_of(spec))


def taken(lowering: Lowering, *actions: tuple[str, int]) -> tuple[OrderEnd, int, int]:
    """(end of an action or a pair, time of its segments with all SMs, time of its segments during an exchange)."""
    chains = [lowering.chains(stage, 0).chain(kind) for kind, stage in actions]
    computed = [node for chain in chains for node in chain if node.uses_lane and not node.is_exchange]
    alone, beside = (sum(times) for times in zip(*((node.alone_ns, node.time_ns) for node in computed), strict=True))
    return run_of_chains(chains, [0] * len(chains), lowering.orders), alone, beside


def test_a_pair_pays_for_the_sms_of_its_exchanges() -> None:
    """With none reserved, exchanges are as fast as with the 24 of their measurement, and compute is as slow."""
    unreserved, reserved = (taken(on("deepseek-v3.dsc", deepseek_v3(), sms), ("F", 5), ("B", 10))[0] for sms in (0, 24))
    assert unreserved == reserved


@pytest.mark.parametrize("kind", "FBI")
def test_a_lone_action_pays_only_while_it_exchanges(kind: str) -> None:
    planned = lowering_of(shipped("moe-8gpu.dsc"))
    assert shipped("moe-8gpu.dsc").sm.communication == 0, "1F1B overlaps no two actions"
    run, alone, beside = taken(on("moe-8gpu.dsc", planned, 0), (kind, 0))
    together = run.compute + run.exchange - run.end  # both lanes are busy
    assert alone <= run.compute <= alone + together * TAKEN + 100
    assert beside > alone * 1.05 and run.compute < beside
    reserved, alone_too, beside = taken(on("moe-8gpu.dsc", planned, 24), (kind, 0))
    assert reserved.compute == beside and alone_too == alone, "kernels are made for the SMs that are left"
    assert reserved.exchange == run.exchange and reserved.end > run.end


def test_an_action_that_exchanges_nothing_has_all_sms() -> None:
    planned = lowering_of(shipped("moe-8gpu.dsc"))
    for sms in (0, 24):
        run, alone, beside = taken(on("moe-8gpu.dsc", planned, sms), ("W", 0))
        assert run == OrderEnd(alone, alone, 0) and beside > alone
