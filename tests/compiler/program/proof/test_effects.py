"""Programs proven together, by one prover and from shared bodies, have the same certificates as separately."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from functools import cache

import pytest

from compiler.ir import Body, Instruction, Program
from compiler.ir.stage_placement import BIDIRECTIONAL
from compiler.program.lower import Lowering
from compiler.program.proof import ProofError, Prover, prove
from compiler.program.proof.structure import Bodies
from compiler.schedule.dualpipe import dualpipe
from compiler.schedule.one_f_one_b import forward_only, one_f_one_b
from tests.compiler.program.proof.mutants import MUTATIONS, NothingToEditError
from tests.compiler.program.proof.programs import lowered, small_plan

RANKS, ROWS = 4, 7
SCHEDULES = [
    *(dualpipe(RANKS, size) for size in (8, 10, 16)),
    *(one_f_one_b(RANKS, size) for size in (3, 6)),
    forward_only(BIDIRECTIONAL, RANKS, 8),
]


@cache
def together() -> list[Program]:
    lowering = Lowering(small_plan(RANKS))
    return [lowering.program(schedule, evaluate=schedule.name == "evaluate") for schedule in SCHEDULES]


def test_bodies_made_for_another_program() -> None:
    assert together() == [lowered(schedule) for schedule in SCHEDULES]


def test_bodies_that_differ_only_in_their_peer_are_proven_once() -> None:
    """This applies as long as the peer is not the rank itself. All other fields distinguish bodies."""
    bodies, rank = Bodies(), 2
    send = Instruction("send", 0, "F1", "F", reads=("a",), peer=1)

    def number(instruction: Instruction) -> int:
        return bodies.number(rank, Body("F1", ("F1",), (instruction,)))

    assert number(send) == number(replace(send, peer=0)) == number(replace(send, peer=3))
    assert number(send) != number(replace(send, peer=rank))
    for field in fields(Instruction):
        if field.name != "peer":
            value = getattr(send, field.name)
            assert number(send) != number(replace(send, **{field.name: value * 2 if value else 1})), field.name


def test_certificates_equal_those_of_separate_proofs() -> None:
    plan = small_plan(RANKS)
    prover = Prover(plan, ROWS)
    for program in together():
        assert prover.prove(program) == prove(program, plan, ROWS)


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_programs_proven_before_hide_no_fault(name: str) -> None:
    """A refused program is refused with the same message after valid ones have been proven."""
    plan, programs, generator = small_plan(RANKS), together(), random.Random(name)
    prover = Prover(plan, ROWS)
    for program in programs:
        prover.prove(program)
    for _ in range(8):
        try:
            faulty = MUTATIONS[name](programs[0], generator)
        except NothingToEditError:
            assert "place of a tensor" in name, "a program has all else that is mutated"
            break
        assert fault(faulty, prover) == fault(faulty, Prover(plan, ROWS))


def fault(program: Program, prover: Prover) -> str:
    try:
        prover.prove(program)
    except ProofError as error:
        return str(error)
    return ""
