"""Any legal schedule lowers, is proven, and sums the same terms as every other schedule on its placement."""

from __future__ import annotations

from random import Random

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement, V, loop
from compiler.program.proof import prove
from compiler.schedule.schedule import Schedule
from runtime.build.certificate import replay
from runtime.contract.actions import Action, Step
from tests.compiler.program.proof.executor import Symbols, outcomes
from tests.compiler.program.proof.pairs import paired
from tests.compiler.program.proof.programs import lowered, small_plan
from tests.compiler.program.proof.test_certificate import events_of

PLACEMENTS = [
    (loop(1), 3, 3),
    (loop(2), 1, 2),
    (loop(2), 2, 3),
    (loop(2), 3, 2),
    (loop(3), 2, 2),
    (V, 1, 2),
    (V, 2, 3),
    (V, 3, 2),
    (BIDIRECTIONAL, 2, 3),
    (BIDIRECTIONAL, 4, 3),
]


def random_schedule(placement: StagePlacement, ranks: int, micro_batches: int, generator: Random) -> Schedule:
    """Actions in a random order that keeps what each needs before it; backwards whole or split, at random."""
    stages = placement.num_stages(ranks)
    rows: list[list[Step]] = [[] for _ in range(ranks)]
    ready = [Action("F", 0, k) for k in range(micro_batches)]
    while ready:
        action = ready.pop(generator.randrange(len(ready)))
        stage, k = action.stage, action.micro_batch
        rows[placement.rank_of(ranks, micro_batches, stage, k)].append(action)
        if action.kind == "F" and stage < stages - 1:
            ready.append(Action("F", stage + 1, k))
        if action.kind == "F" and stage == stages - 1:
            ready.append(Action(generator.choice(["B", "I"]), stage, k))
        if action.kind in "BI" and stage:
            ready.append(Action(generator.choice(["B", "I"]), stage - 1, k))
        if action.kind == "I":
            ready.append(Action("W", stage, k))
    return Schedule("random", ranks, micro_batches, placement, tuple(map(tuple, rows)))


@pytest.mark.parametrize(("placement", "ranks", "micro_batches"), PLACEMENTS, ids=str)
def test_any_schedule(placement: StagePlacement, ranks: int, micro_batches: int) -> None:
    plan, symbols, generator = small_plan(ranks, placement), Symbols(), Random(f"{placement} {ranks}")
    reference = None
    for _ in range(4):
        schedule = random_schedule(placement, ranks, micro_batches, generator)
        for variant in (schedule, paired(schedule)):
            program = lowered(variant, placement)
            prove(program, plan)
            assert replay(events_of(program)) == ""
            results = outcomes(program, plan, symbols)
            reference = reference or results[:1]
            assert set(results) == set(reference)
            assert not results[0].fault
