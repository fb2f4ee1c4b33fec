"""The memory per rank that the split of layers assumes, compared with that of the finished plan."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from compiler.plan.blocks import blocks_of, chains_of, cut_model
from compiler.plan.holding import kept_bytes, schedule_on
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rates_of
from compiler.plan.split_blocks import balanced_rows
from compiler.plan.split_search import NEAR
from compiler.plan.splitting import Splitting
from compiler.predict.memory import curve_of
from compiler.predict.predict import memories, time_plan
from compiler.program.lower import Lowering
from compiler.program.proof.effects import Effects
from compiler.program.proof.lifetimes import RankValues
from compiler.schedule.schedule import Schedule
from dsl.load import resolve
from dsl.schema import Spec
from tests.runtime.step.specs import spec as small_spec
from tests.specs.shipped import SPECS, shipped


def runs_of(spec: Spec) -> list[int]:
    """The layers of each stage."""
    stages = make_plan(spec).stages
    return [len({use.site.partition(".")[0] for use in s.steps if use.site.startswith("L")}) for s in stages]


@pytest.mark.parametrize("of", ["v3", "qwen"])
def test_bytes_kept_per_micro_batch_equal_those_of_its_actions(of: str) -> None:
    """To the byte: a forward keeps what its backward needs, and the backward keeps what its weight gradients need."""
    spec = small_spec(1, 2, 2, 6, of=of, schedule="zb1p")
    text = " ".join(f"{kind}0.{m}" for kind in "FIW" for m in range(6))
    schedule = Schedule.from_text(f"# mine ranks=1 micro_batches=6 placement=loop(1)\n{text}\n")
    plan, rates = make_plan(spec), rates_of(spec)
    program = Lowering(plan, rates).program(schedule)
    values = RankValues(program, schedule, 0, balanced_rows(spec), Effects(), 1)
    ends = curve_of(values, program, schedule).ends
    chains = chains_of(rates, cut_model(spec))
    for_backward, for_weights = (sum(kept_bytes(chain, kind) for chain in chains) for kind in "FI")
    forwards = {after - before for before, after in pairwise(ends[:6])}
    backwards = {after - before for before, after in pairwise(ends[5:12])}
    assert forwards == {for_backward}
    assert backwards == {for_weights - for_backward}


def test_costs_of_blocks_with_and_without_overlapped_exchanges() -> None:
    """With pairs, compute and exchanges are separate lanes; else they add up, except for overlaps in an action."""
    spec = small_spec(2, 2, 2, 4)
    chains = chains_of(rates_of(spec), cut_model(spec))
    pairs, alone = (blocks_of(chains, overlaps) for overlaps in (True, False))
    for lanes, (summed,) in zip(pairs.layers, alone.layers, strict=True):
        compute, exchanges = lanes
        assert max(compute, exchanges) <= summed <= compute + exchanges
    dense, *with_experts = (exchanges for _, exchanges in pairs.layers)
    assert dense == 0 and all(with_experts)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2", "llama3-8b", "qwen3-30b-a3b"])
def test_assumed_memory_is_near_the_peak_of_the_fullest_rank(name: str) -> None:
    """Temporary values of the running action are not counted, and of a pair the forward counts as if it ended first."""
    spec = shipped(f"{name}.dsc")
    timed_plan = time_plan(spec)
    placement, num_stages = timed_plan.plan.stage_placement, len(timed_plan.plan.stages)
    pipeline = Splitting(cut_model(spec), num_stages, placement).pipeline
    assert pipeline.holding is not None
    runs = tuple(pairwise((0, *accumulate(runs_of(spec)))))
    peak = max(memory.peak_bytes for memory in memories(timed_plan))
    assert pipeline.held_bytes(runs) == pytest.approx(peak, rel=0.05)
    assert schedule_on(spec, placement, timed_plan.plan.mesh.pp) == timed_plan.schedule


def test_deepseek_v3_begins_with_four_layers() -> None:
    """A first stage of five layers, with none before the head, is as fast within the error of rates, but holds more."""
    spec = shipped("deepseek-v3.dsc")
    five = resolve(SPECS / "deepseek-v3.dsc", None, ["parallel.layout=Et*5|(tttt|)*14mL"]).spec
    assert runs_of(spec) == [4] * 15 + [1] and runs_of(five) == [5, *[4] * 14, 0]
    plan_of_four, plan_of_five = time_plan(spec), time_plan(five)
    assert plan_of_four.step.seconds < plan_of_five.step.seconds * (1 + 1 / NEAR)
    peaks_of_four, peaks_of_five = (
        [memory.peak_bytes for memory in memories(timed_plan)] for timed_plan in (plan_of_four, plan_of_five)
    )
    assert max(peaks_of_four) <= max(peaks_of_five) and peaks_of_four[0] < peaks_of_five[0] - 2**30
    assert any("at most 1% more" in assumption for assumption in make_plan(spec).assumptions)
    assert not any("at most 1% more" in assumption for assumption in make_plan(five).assumptions)


def test_a_slightly_slower_split_is_chosen_if_only_it_fits() -> None:
    """Stages of 8, 8, 9 and 7 layers take as long as those that are chosen, and 4 GiB more than there are."""
    overrides = ["cluster.node.device.memory=44GiB", "cluster.node.device.reserve=0GiB"]
    spec = resolve(SPECS / "llama3-8b.dsc", None, overrides).spec
    even = resolve(SPECS / "llama3-8b.dsc", None, [*overrides, "parallel.layout=Et*8|t*8|t*9|t*7L"]).spec
    chosen, fastest = time_plan(spec), time_plan(even)
    assert all(memory.fits for memory in memories(chosen))
    assert not all(memory.fits for memory in memories(fastest))
    assert chosen.step.seconds < fastest.step.seconds * (1 + 1 / NEAR)
