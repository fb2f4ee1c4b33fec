"""When reductions start: as early as their terms and the common order of their ranks allow, in every named schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compiler.ir import Plan, Program
from compiler.ir.stage_placement import ONE_STAGE
from compiler.program.lower import Lowering
from compiler.program.lower.lowering import reductions_of
from compiler.schedule import SCHEDULES
from compiler.schedule.schedule import Schedule
from runtime.contract.actions import Action
from tests.compiler.program.proof.programs import FAMILY, family_program, small_plan

Stages = tuple[int, ...]


def last_terms(program: Program, rank: int, stages: Stages) -> int:
    """The last invocation of a rank in which an instruction adds to gradients of these stages, found instruction by
    instruction; -1 for none."""
    bodies = {body.name: body for body in program.bodies[rank]}
    adding = {
        name
        for name, body in bodies.items()
        if any(i.kind == "run" and i.phase == "W" and int(i.action[1:]) in stages for i in body.instructions)
    }
    return max(
        (index for index, invocation in enumerate(program.invocations[rank]) if invocation.body in adding), default=-1
    )


def groups(plan: Plan) -> dict[tuple[int, ...], set[Stages]]:
    """Pipeline ranks → the stages of the buckets that they share, read from world ranks."""
    stages_by_ranks: dict[tuple[int, ...], set[Stages]] = {}
    for bucket in plan.buckets:
        if len(bucket.holders) > 1:
            ranks = tuple(sorted({plan.mesh.coordinates(holder).pp_rank for holder in bucket.holders}))
            stages_by_ranks.setdefault(ranks, set()).add(bucket.stages)
    return stages_by_ranks


@pytest.mark.parametrize("row", FAMILY, ids=lambda row: "-".join(map(str, row)))
def test_reductions_start_as_soon_as_they_can(row: tuple[str, int, int]) -> None:
    """Each starts once, after its last term or the previous reduction on its channel, in one order on all ranks."""
    program, plan = family_program(*row)
    for ranks, wanted in groups(plan).items():
        orders = set()
        for rank in ranks:
            rank_reductions = [reduction for reduction in program.reductions[rank] if reduction.stages in wanted]
            orders.add(tuple(reduction.stages for reduction in rank_reductions))
            before = 0
            for reduction in rank_reductions:
                before = max(before, last_terms(program, rank, reduction.stages))
                assert reduction.after == before, (rank, reduction)
        (order,) = orders
        assert sorted(order) == sorted(wanted)
    started = {(rank, reduction.stages) for rank, starts in enumerate(program.reductions) for reduction in starts}
    assert started == {
        (rank, stages) for ranks, stage_sets in groups(plan).items() for rank in ranks for stages in stage_sets
    }


def test_without_overlap_all_start_behind_the_last_call() -> None:
    program, plan = family_program("dualpipe", 4, 8)
    late = reductions_of(replace(plan, overlap_reduce=False), SCHEDULES["dualpipe"].generate(4, 8).actions)
    for early, row, calls in zip(program.reductions, late, program.invocations, strict=True):
        assert {reduction.after for reduction in row} == {len(calls) - 1}
        assert min(reduction.after for reduction in early) < len(calls) - 1
        assert sorted(reduction.stages for reduction in row) == sorted(reduction.stages for reduction in early)


def test_evaluations_reduce_nothing() -> None:
    plan = small_plan(2)
    steps = tuple(tuple(Action("F", stage, 0) for stage in range(2) if stage == rank) for rank in range(2))
    program = Lowering(plan).program(Schedule("evaluate", 2, 1, ONE_STAGE, steps), evaluate=True)
    assert program.reductions == ()
