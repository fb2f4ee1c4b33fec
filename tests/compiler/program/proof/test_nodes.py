"""Programs of expert groups on several nodes are proven, and faults of what their ranks forward are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compiler.ir import Body, Instruction, Program
from compiler.ir.expert_placement import ReceivedRows
from compiler.pipeline import lower_spec
from compiler.program.proof import ProofError, prove
from tests.runtime.step.specs import spec
from tests.runtime.step.test_nodes import on_nodes

LOWERED = lower_spec(on_nodes(spec(1, 4, 4, 3), 2))
PROGRAM, PLAN = LOWERED.programs["train_3"], LOWERED.plan


def edited(edit: dict[Instruction, Instruction]) -> Program:
    """The program with other instructions in the place of some."""

    def changed(body: Body) -> Body:
        return replace(body, instructions=tuple(edit.get(i, i) for i in body.instructions))

    return replace(PROGRAM, bodies=tuple(tuple(map(changed, bodies)) for bodies in PROGRAM.bodies))


def instructions(kind: str, wait: str = "") -> list[Instruction]:
    all_instructions = (i for bodies in PROGRAM.bodies for body in bodies for i in body.instructions)
    return [i for i in all_instructions if (i.kind, i.wait) == (kind, wait)]


def test_peak_bytes_include_forwarded_rows() -> None:
    """One more copy at each place is held while an exchange forwards it: 16 elements of 8 bytes."""
    peaks = [prove(PROGRAM, PLAN, ReceivedRows(40, copies, 30)).peak_bytes[0] for copies in (1000, 1001, 1003)]
    assert (peaks[1] - peaks[0], peaks[2] - peaks[1]) == (16 * 8, 2 * 16 * 8)


def test_counts_without_their_order() -> None:
    edit = {i: replace(i, reads=i.reads[:1]) for i in (*instructions("counts"), *instructions("wait", "counts"))}
    with pytest.raises(ProofError, match="counts F L1 has other operands"):
        prove(edited(edit), PLAN)


@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_an_exchange_without_its_tables(kind: str) -> None:
    edit = {
        i: replace(i, reads=tuple(name for name in i.reads if not name.endswith("_forwards")))
        for i in (*instructions(kind), *instructions("wait", kind))
    }
    with pytest.raises(ProofError, match="has other operands"):
        prove(edited(edit), PLAN)


def test_forwarded_rows_must_be_freed() -> None:
    forwarded = {b.name for i in instructions("wait", "dispatch") for b in i.writes if "forwarded" in b.name}
    assert forwarded
    frees = [i for i in instructions("free") if forwarded & {*i.reads}]
    edit = {i: replace(i, reads=tuple(name for name in i.reads if name not in forwarded)) for i in frees}
    with pytest.raises(ProofError, match=r"forwarded_.* is never freed"):
        prove(edited(edit), PLAN)
