"""Programs on clusters of several kinds of devices: each pipeline rank uses the times of its own devices."""

from __future__ import annotations

from functools import cache

import pytest

from compiler.emit.build_summary import memory_error_text
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
from compiler.program.lowered import LoweredPlan
from compiler.program.proof import prove
from dsl.schema import Device, Machine, MoreNodes, Spec
from runtime.contract.actions import KINDS, Action
from tests.specs.shipped import shipped

FAST = Device(name="h100", sms=132, memory=10**12, hbm=3.35e12, bf16=989e12)
SLOW = Device(name="a100", sms=108, memory=10**12, hbm=2.039e12, bf16=312e12)


def mixed(schedule: str, *kinds: Device, experts: int = 8, layout: str | None = None) -> Spec:
    """Qwen3 on four pipeline ranks of eight devices, the first half on one kind."""
    base = shipped("qwen3-30b-a3b.dsc", "pretrain")
    first, *rest = [Machine(devices=8, device=kind, nvlink=450e9, nic=50e9) for kind in kinds]
    nodes = 4 // len(kinds)
    cluster = base.cluster.model_copy(
        update={"nodes": nodes, "node": first, "more": MoreNodes(nodes=nodes, node=rest[0]) if rest else None}
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
def lowered(schedule: str) -> tuple[Spec, LoweredPlan]:
    spec = mixed(schedule, FAST, SLOW)
    return spec, lower_spec(spec)


def bodies_of(found: LoweredPlan, rank: int) -> dict[str, Body]:
    (program,) = (program for name, program in found.programs.items() if name.startswith("train"))
    return {body.name: body for body in program.bodies[rank]}


def test_orders_suit_the_device_of_each_rank() -> None:
    """Ranks 0 and 3 are mirrored, on different devices: on its own device no body is slower than in the other's order,
    and some are faster; the work is the same."""
    _, lowered_spec = lowered("dualpipe")
    times = rank_times(lowered_spec.lowering)
    first_bodies, last_bodies = bodies_of(lowered_spec, 0), bodies_of(lowered_spec, 3)
    faster = 0
    assert first_bodies.keys() == last_bodies.keys()
    for name in first_bodies:
        for mine, theirs, table in (
            (first_bodies[name], last_bodies[name], times[0]),
            (last_bodies[name], first_bodies[name], times[3]),
        ):
            my_times, their_times = lane_times(mine.instructions, table), lane_times(theirs.instructions, table)
            assert (my_times.compute, my_times.communication) == (their_times.compute, their_times.communication)
            faster += my_times.end < their_times.end
            # orders are searched for: of two good ones either may be found
            assert my_times.end <= their_times.end * 1.002, name
    assert faster >= 2


def test_planned_peaks_equal_those_proven_for_each_rank() -> None:
    """The planner visits one of the bodies that differ only in their peers. Results equal the proof rank by rank."""
    spec, lowered_spec = lowered("dualpipe")
    rows = held_rows(spec)
    (name,) = (name for name in lowered_spec.schedules if name.startswith("train"))
    planned = rank_memories(spec, lowered_spec.lowering, lowered_spec.schedules[name], rows=lambda *_: rows)
    assert (
        tuple(memory.activations + memory.buffers for memory in planned) == lowered_spec.certificates[name].peak_bytes
    )


def test_a_body_on_two_kinds_is_reported_at_its_slowest() -> None:
    spec, lowered_spec = lowered("dualpipe")
    (name,) = (name for name in lowered_spec.programs if name.startswith("train"))
    rates = rank_rates(spec)
    times = rank_times(Lowering(lowered_spec.plan, rates))
    table = dict(overlaps_of(lowered_spec.programs, times)[name].bodies)
    for body in bodies_of(lowered_spec, 0):
        ends = [lane_times(bodies_of(lowered_spec, rank)[body].instructions, times[rank]).end for rank in (0, 3)]
        assert table[body].end == max(ends)


def test_equal_devices_of_two_names_make_the_programs_of_one() -> None:
    one_kind, two_kinds = mixed("dualpipe", FAST), mixed("dualpipe", FAST, FAST)
    lowered_one, lowered_two = lower_spec(one_kind), lower_spec(two_kinds)
    assert lowered_one.programs == lowered_two.programs and lowered_one.certificates == lowered_two.certificates


def test_costs_of_stages_use_the_devices_that_run_them() -> None:
    """Ranks with equal layers: each half costs as much as on a cluster of only its devices."""
    layout = "Et*12|t*12|t*12|t*12L"
    specs = [mixed("1f1b", *kinds, layout=layout) for kinds in ((FAST, SLOW), (FAST,), (SLOW,))]
    weights = []
    for spec in specs:
        plan = make_plan(spec)
        costs = stage_costs(Lowering(plan, rank_rates(spec)), ())
        stages = range(len(plan.stages))
        weights.append([float(sum(costs.step_time(Action(kind, s, 0), s) for kind in KINDS)) for s in stages])
    halves, fast, slow = weights
    assert halves[:2] == pytest.approx(fast[:2], rel=1e-5) and halves[2:] == pytest.approx(slow[2:], rel=1e-5)
    assert slow[2] > 1.8 * fast[2]


def test_one_set_of_rates_applies_to_all_ranks() -> None:
    spec = mixed("zbv", FAST)
    plan, rates = make_plan(spec), rank_rates(spec)
    schedule = Scheduler(spec, Lowering(plan, rank_rates(spec))).schedule(8)
    assert stage_costs(Lowering(plan, rates), ("BF",)) == stage_costs(Lowering(plan, rates[0]), ("BF",))
    programs = [Lowering(plan, given_rates).program(schedule) for given_rates in (rates[0], rates)]
    assert programs[0] == programs[1]
    with pytest.raises(AssertionError, match="for each pipeline rank"):
        Lowering(plan, rates[:2]).program(schedule)


def test_a_program_by_other_rates_is_proven_too() -> None:
    """Proofs do not depend on rates: any mixture of orders is a correct program."""
    spec, lowered_spec = lowered("dualpipe")
    (schedule,) = (schedule for name, schedule in lowered_spec.schedules.items() if name.startswith("train"))
    fast, *_, slow = rank_rates(spec)
    rates: list[Rates] = [fast, slow, fast, slow]
    prove(Lowering(lowered_spec.plan, rates).program(schedule), lowered_spec.plan, held_rows(spec))


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_every_rank_is_held_against_its_own_device(schedule: str) -> None:
    """A plan that fits each device fits, however small the smallest is; a byte less on one rank is reported."""
    spec, lowered_spec = lowered(schedule)
    totals = [memory.total for memory in proven_memories(spec, lowered_spec.plan, lowered_spec.certificates.values())]
    first, second = max(totals[:2]), max(totals[2:])

    def on(here: int, there: int) -> Spec:
        devices = (
            device.model_copy(update={"memory": memory, "reserve": 0})
            for device, memory in ((FAST, here), (SLOW, there))
        )
        return mixed(schedule, *devices)

    assert memory_error_text(on(first, second), lowered_spec) == ""
    for first_memory, second_memory, rank, name in (
        (first - 1, second, totals.index(first), "h100"),
        (first, second - 1, 2 + totals[2:].index(second), "a100"),
    ):
        message = memory_error_text(on(first_memory, second_memory), lowered_spec)
        assert f"rank {rank} needs the most" in message and f"of device {name};" in message
