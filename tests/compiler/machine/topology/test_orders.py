"""Programs on clusters of several kinds of devices: each pipeline rank uses the times of its own devices."""

from __future__ import annotations

from functools import cache

import pytest

from compiler.emit.build_summary import does_not_fit
from compiler.ir import Body
from compiler.machine.rates import Rates
from compiler.pipeline import lower_spec
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.plan.split_blocks import held_rows
from compiler.predict.memory import rank_memories
from compiler.predict.memory_state import proven_memories
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import lane_times, overlaps_of, rank_times, stage_costs
from compiler.program.lower.scheduler import Scheduler
from compiler.program.lowered import Lowered
from compiler.program.proof import prove
from dsl.schema import Device, Machine, More, Spec
from runtime.contract.actions import KINDS, Action
from tests.specs.shipped import shipped

FAST = Device(name="h100", sms=132, memory=10**12, hbm=3.35e12, bf16=989e12)
SLOW = Device(name="a100", sms=108, memory=10**12, hbm=2.039e12, bf16=312e12)


def mixed(schedule: str, *kinds: Device, experts: int = 8, layout: str | None = None) -> Spec:
    """Qwen3 on four pipeline ranks of eight devices, the first half on one kind."""
    base = shipped("qwen3-30b-a3b.dsc", "pretrain")
    first, *more = [Machine(devices=8, device=kind, nvlink=450e9, nic=50e9) for kind in kinds]
    nodes = 4 // len(kinds)
    cluster = base.cluster.model_copy(
        update={"nodes": nodes, "node": first, "more": More(nodes=nodes, node=more[0]) if more else None}
    )
    batch = base.train.batch.model_copy(update={"start": 64, "end": 64})
    parallel = {"pipeline": 4, "expert": experts, "data": 8, "layout": layout}
    return base.model_copy(
        update={
            "cluster": cluster,
            "parallel": base.parallel.model_copy(update=parallel),
            "schedule": base.schedule.model_copy(update={"name": schedule}),
            "train": base.train.model_copy(update={"micro_batch": 1, "batch": batch}),
        }
    )


@cache
def lowered(schedule: str) -> tuple[Spec, Lowered]:
    chosen = mixed(schedule, FAST, SLOW)
    return chosen, lower_spec(chosen)


def bodies_of(found: Lowered, rank: int) -> dict[str, Body]:
    (program,) = (each for name, each in found.programs.items() if name.startswith("train"))
    return {body.name: body for body in program.bodies[rank]}


def test_orders_suit_the_device_of_each_rank() -> None:
    """Ranks 0 and 3 are mirrored, on different devices: on its own device no body is slower than in the other's order,
    and some are faster; the work is the same."""
    _, found = lowered("dualpipe")
    times = rank_times(found.lowering)
    here, there = bodies_of(found, 0), bodies_of(found, 3)
    faster = 0
    assert here.keys() == there.keys()
    for name in here:
        for ours, other, table in ((here[name], there[name], times[0]), (there[name], here[name], times[3])):
            mine, its = lane_times(ours.instructions, table), lane_times(other.instructions, table)
            assert (mine.compute, mine.communication) == (its.compute, its.communication)
            faster += mine.end < its.end
            assert mine.end <= its.end * 1.002, name  # orders are searched for: of two good ones either may be found
    assert faster >= 2


def test_planned_peaks_equal_those_proven_for_each_rank() -> None:
    """The planner visits one of the bodies that differ only in their peers. Results equal the proof rank by rank."""
    chosen, found = lowered("dualpipe")
    rows = held_rows(chosen)
    (name,) = (name for name in found.schedules if name.startswith("train"))
    planned = rank_memories(chosen, found.lowering, found.schedules[name], rows=lambda *_: rows)
    assert tuple(each.activations + each.buffers for each in planned) == found.certificates[name].peak_bytes


def test_a_body_on_two_kinds_is_reported_at_its_slowest() -> None:
    chosen, found = lowered("dualpipe")
    (name,) = (name for name in found.programs if name.startswith("train"))
    rates = rank_rates(chosen)
    times = rank_times(Lowering(found.plan, rates))
    table = dict(overlaps_of(found.programs, times)[name].bodies)
    for body in bodies_of(found, 0):
        each = [lane_times(bodies_of(found, rank)[body].instructions, times[rank]).end for rank in (0, 3)]
        assert table[body].end == max(each)


def test_equal_devices_of_two_names_make_the_programs_of_one() -> None:
    one, two = mixed("dualpipe", FAST), mixed("dualpipe", FAST, FAST)
    a, b = lower_spec(one), lower_spec(two)
    assert a.programs == b.programs and a.certificates == b.certificates


def test_costs_of_stages_use_the_devices_that_run_them() -> None:
    """Ranks with equal layers: each half costs as much as on a cluster of only its devices."""
    layout = "Et*12|t*12|t*12|t*12L"
    specs = [mixed("1f1b", *kinds, layout=layout) for kinds in ((FAST, SLOW), (FAST,), (SLOW,))]
    weights = []
    for chosen in specs:
        plan = make_plan(chosen)
        costs = stage_costs(Lowering(plan, rank_rates(chosen)), ())
        stages = range(len(plan.stages))
        weights.append([float(sum(costs.of(Action(kind, s, 0), s) for kind in KINDS)) for s in stages])
    both, fast, slow = weights
    assert both[:2] == pytest.approx(fast[:2], rel=1e-5) and both[2:] == pytest.approx(slow[2:], rel=1e-5)
    assert slow[2] > 1.8 * fast[2]


def test_one_set_of_rates_applies_to_all_ranks() -> None:
    chosen = mixed("zbv", FAST)
    plan, rates = make_plan(chosen), rank_rates(chosen)
    schedule = Scheduler(chosen, Lowering(plan, rank_rates(chosen))).schedule(8)
    assert stage_costs(Lowering(plan, rates), ("BF",)) == stage_costs(Lowering(plan, rates[0]), ("BF",))
    programs = [Lowering(plan, each).program(schedule) for each in (rates[0], rates)]
    assert programs[0] == programs[1]
    with pytest.raises(AssertionError, match="for each pipeline rank"):
        Lowering(plan, rates[:2]).program(schedule)


def test_a_program_by_other_rates_is_proven_too() -> None:
    """Proofs do not depend on rates: any mixture of orders is a correct program."""
    chosen, found = lowered("dualpipe")
    (schedule,) = (each for name, each in found.schedules.items() if name.startswith("train"))
    fast, *_, slow = rank_rates(chosen)
    rates: list[Rates] = [fast, slow, fast, slow]
    prove(Lowering(found.plan, rates).program(schedule), found.plan, held_rows(chosen))


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_every_rank_is_held_against_its_own_device(schedule: str) -> None:
    """A plan that fits each device fits, however small the smallest is; a byte less on one rank is reported."""
    chosen, found = lowered(schedule)
    held = [each.total for each in proven_memories(chosen, found.plan, found.certificates.values())]
    first, second = max(held[:2]), max(held[2:])

    def on(here: int, there: int) -> Spec:
        devices = (
            device.model_copy(update={"memory": memory, "reserve": 0})
            for device, memory in ((FAST, here), (SLOW, there))
        )
        return mixed(schedule, *devices)

    assert does_not_fit(on(first, second), found) == ""
    for here, there, rank, name in (
        (first - 1, second, held.index(first), "h100"),
        (first, second - 1, 2 + held[2:].index(second), "a100"),
    ):
        said = does_not_fit(on(here, there), found)
        assert f"rank {rank} needs the most" in said and f"of device {name};" in said
