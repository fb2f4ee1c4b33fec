"""Pairs of any two independent actions can be lowered and proven, and give the results of the single actions."""

from __future__ import annotations

from collections import Counter

import pytest

from compiler.ir import Program
from compiler.program.proof import prove
from compiler.schedule import SCHEDULES
from runtime.contract.actions import Pair
from tests.compiler.program.proof.executor import Symbols, outcomes
from tests.compiler.program.proof.pairs import kinds_of_pairs, paired
from tests.compiler.program.proof.programs import FAMILY, family_program, from_text, lowered

PAIRED = [row for row in FAMILY if row[0] != "dualpipe"]


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), PAIRED)
def test_paired_programs_end_alike(name: str, ranks: int, micro_batches: int) -> None:
    """Every gradient of every holder has the terms and the records of the unpaired program, in any interleaving."""
    program, plan = family_program(name, ranks, micro_batches)
    schedule = paired(SCHEDULES[name].generate(ranks, micro_batches))
    assert any(isinstance(step, Pair) for row in schedule.actions for step in row)
    overlapped = lowered(schedule, schedule.stage_placement)
    prove(overlapped, plan)
    symbols = Symbols()
    assert outcomes(overlapped, plan, symbols) == outcomes(program, plan, symbols)


def test_all_kinds_are_among_them() -> None:
    kinds: Counter[str] = Counter()
    for name, ranks, micro_batches in PAIRED:
        kinds += kinds_of_pairs(paired(SCHEDULES[name].generate(ranks, micro_batches)))
    assert {"FF", "BB", "BF", "FI", "FW", "II", "IW", "WW"} <= kinds.keys(), kinds


def test_two_stages_of_one_micro_batch() -> None:
    """I of a stage and W of the next in one pair: one passes its gradient to the other inside the rank."""
    text = "# bottom ranks=1 micro_batches=1 placement=v\nF0.0 F1.0 I1.0 (I0.0|W1.0) W0.0\n"
    program, plan = from_text(text)
    certificate = prove(program, plan)
    assert (certificate.num_messages, certificate.peak_activations) == (0, (2,))
    alone, _ = from_text(text.replace("(I0.0|W1.0)", "I0.0 W1.0"))
    symbols = Symbols()
    assert outcomes(program, plan, symbols) == outcomes(alone, plan, symbols)


def exchanges_of_slots(program: Program, name: str) -> list[int]:
    body = next(body for bodies in program.bodies for body in bodies if body.name == name)
    return [i.slot for i in body.instructions if i.kind in ("dispatch", "combine")]


def test_two_forwards_are_interleaved() -> None:
    """F&F during the fill: the exchange of one overlaps the compute of the other, instead of running in sequence."""
    text = "# two ranks=1 micro_batches=2 placement=loop(1)\n(F0.0|F0.1) (B0.0|B0.1)\n"
    program, plan = from_text(text)
    prove(program, plan)
    for name in ("F0_F0", "B0_B0"):
        slots = exchanges_of_slots(program, name)
        assert slots != sorted(slots) and slots != sorted(slots, reverse=True), (name, slots)
