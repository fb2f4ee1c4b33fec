"""Programs that are proven together: with shared bodies and effects, the same programs and certificates as alone."""

from __future__ import annotations

import random
from functools import cache

import pytest

from compiler.ir import Plan, Program
from compiler.lower import lower
from compiler.lower.program import Bodies
from compiler.proof import Effects, ProofError, prove
from compiler.schedules.dualpipe import dualpipe
from compiler.schedules.forward import forward_only
from compiler.schedules.one_f_one_b import one_f_one_b
from compiler.stage_placement import BIDIRECTIONAL
from tests.proof.mutants import MUTATIONS
from tests.proof.programs import lowered, small_plan

RANKS, ROWS = 4, 7
SCHEDULES = [
    *(dualpipe(RANKS, size) for size in (8, 10, 16)),
    *(one_f_one_b(RANKS, size) for size in (3, 6)),
    forward_only(BIDIRECTIONAL, RANKS, 8),
]


@cache
def together() -> list[Program]:
    made: Bodies = {}
    plan = small_plan(RANKS)
    return [lower(plan, each, plan.cuts, evaluate=each.name == "evaluate", made=made) for each in SCHEDULES]


def test_bodies_made_for_another_program() -> None:
    assert together() == [lowered(schedule) for schedule in SCHEDULES]


def test_certificates_are_those_of_lone_proofs() -> None:
    plan, effects = small_plan(RANKS), Effects()
    for program in together():
        assert prove(program, plan, ROWS, effects) == prove(program, plan, ROWS)


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_effects_hide_no_fault(name: str) -> None:
    """A program that is refused alone is refused in the same words after right ones have been proven."""
    plan, programs, effects, generator = small_plan(RANKS), together(), Effects(), random.Random(name)
    for program in programs:
        prove(program, plan, ROWS, effects)
    for _ in range(8):
        faulty = MUTATIONS[name](programs[0], generator)
        assert fault(faulty, plan, effects) == fault(faulty, plan, None)


def fault(program: Program, plan: Plan, effects: Effects | None) -> str:
    try:
        prove(program, plan, ROWS, effects)
    except ProofError as error:
        return str(error)
    return ""
