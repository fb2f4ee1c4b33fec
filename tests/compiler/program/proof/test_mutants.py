"""The proof's decisions compared with the executor's results, on mutants that end with other results."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from compiler.ir import Instruction, Program
from compiler.program.proof import ProofError, prove
from compiler.schedule.one_f_one_b import one_f_one_b
from tests.compiler.program.proof.census import Tally, accepted, census, tally
from tests.compiler.program.proof.executor import Outcome, Symbols, outcomes
from tests.compiler.program.proof.mutants import edited, with_row
from tests.compiler.program.proof.programs import (
    AGAIN,
    DIVIDED,
    FAMILY,
    OFFLOADED,
    REWARDED,
    SPLIT,
    dualpipe_program,
    family_program,
    lowered,
    small_plan,
)


@pytest.mark.parametrize("schedule", sorted({name for name, _, _ in FAMILY}))
def test_mutants_that_end_otherwise_are_rejected(schedule: str) -> None:
    """A sample, 630 in all, of what `python -m tests.compiler.program.proof.census` counts; most equivalent ones met
    are accepted."""
    rows = [row for row in FAMILY if row[0] == schedule]
    counts = Tally()
    for _, row_counts in census(90, 1, rows):
        counts += row_counts
    assert counts.different == counts.rejected == 90, counts.missed
    assert counts.equivalent - counts.accepted <= max(3, 0.4 * counts.equivalent), "of a handful, three may be rejected"


def hold(found: Tally) -> None:
    """All of 60 mutants that end otherwise are rejected, and most of those that are equivalent are accepted."""
    assert found.different == found.rejected == 60, found.missed
    assert found.equivalent - found.accepted <= max(3, 0.4 * found.equivalent), "of a handful, three may be rejected"


@pytest.mark.parametrize("which", range(len(DIVIDED)))
def test_mutants_of_divided_state_that_end_otherwise_are_rejected(which: int) -> None:
    """Gathers, zeros and scatters are mutated too, and the values that tensors are taken from."""
    hold(tally(*family_program(*DIVIDED[which]), 60, seed=1))


@pytest.mark.parametrize("which", range(len(SPLIT)))
def test_mutants_of_split_layers_that_end_otherwise_are_rejected(which: int) -> None:
    """Gathers and scatters of rows between tensor ranks are mutated too."""
    ((_, counts),) = census(60, 1 + which, SPLIT[which : which + 1])
    hold(counts)


def test_mutants_of_layers_that_are_run_again_are_rejected() -> None:
    """Forwards inside backwards, and rows that go to the experts again, are mutated too."""
    counts = Tally()
    for _, row_counts in census(60 * len(AGAIN), 1, AGAIN):
        counts += row_counts
    assert counts.different == counts.rejected == 60 * len(AGAIN), counts.missed
    assert counts.accepted >= 0.6 * counts.equivalent


@pytest.mark.parametrize("which", range(len(REWARDED)))
def test_mutants_of_reported_values_are_rejected(which: int) -> None:
    ((_, counts),) = census(60, 1 + which, REWARDED[which : which + 1])
    hold(counts)


@pytest.mark.parametrize("which", range(len(OFFLOADED)))
def test_mutants_of_copies_to_the_host_are_rejected(which: int) -> None:
    """Copies (O and R) are dropped, doubled, moved and swapped too, and so are the copied values."""
    counts = tally(*family_program(*OFFLOADED[which]), 25, seed=1)
    assert counts.different == counts.rejected == 25, counts.missed


def test_copies_that_are_wrong_are_named() -> None:
    """Copied values are not read while on the host, come back once, and include all that a forward saved."""
    program, plan = family_program(*OFFLOADED[0])
    row = program.invocations[0]
    index_of = {(invocation.body, *invocation.micro_batches): index for index, invocation in enumerate(row)}
    micro_batch = next(invocation.micro_batches[0] for invocation in row if invocation.body == "O0")
    first, second = index_of["O0", micro_batch], index_of["R0", micro_batch]

    def without(*gone: int) -> Program:
        remaining = tuple(invocation for index, invocation in enumerate(row) if index not in gone)
        return with_row(program, 0, remaining)

    swapped = list(row)
    swapped[first], swapped[second] = row[second], row[first]
    copied_too_little = copied_less(program)
    for changed, message in (
        (
            without(second),
            f"rank 0, B0.{micro_batch}: the values that its F saved are on the host: put R0.{micro_batch} before it",
        ),
        (without(first), f"rank 0, R0.{micro_batch}: comes before its O"),
        (with_row(program, 0, tuple(swapped)), f"rank 0, R0.{micro_batch}: comes before its O"),
        (with_row(program, 0, (*row[:first], row[first], *row[first:])), "so twice"),
        (copied_too_little, "rank 0, O0: to_host has other operands than a forward of its stage saves"),
        (never_freed(program), "is written twice"),
    ):
        with pytest.raises(ProofError, match=re.escape(message)):
            prove(changed, plan)


def copied_less(program: Program) -> Program:
    """The program with one value missing in the first O of its first rank."""
    return with_instructions(program, lambda i: replace(i, reads=i.reads[1:]) if i.kind == "to_host" else i)


def never_freed(program: Program) -> Program:
    """The program in which the first rank does not free copied values."""
    return with_instructions(program, lambda i: replace(i, reads=()) if i.kind == "free" and i.action == "O0" else i)


def with_instructions(program: Program, change: Callable[[Instruction], Instruction]) -> Program:
    first, *other_bodies = program.bodies
    changed = tuple(replace(body, instructions=tuple(map(change, body.instructions))) for body in first)
    return replace(program, bodies=(changed, *other_bodies))


@pytest.mark.parametrize("ranks", [2, 4])
def test_changes_that_keep_results_are_accepted(ranks: int) -> None:
    """Reductions in another common order; sends that are only drained at the end."""
    program, plan = dualpipe_program(ranks, 2 * ranks), small_plan(ranks)
    reference = outcomes(program, plan, symbols := Symbols())
    drained = tuple(tuple(i._replace(releases=()) for i in row) for row in program.invocations)
    records, *reduces, norm = program.epilogue
    reordered = replace(program, epilogue=(*reduces[::-1], records, norm))
    for variant in (reordered, replace(program, invocations=drained)):
        assert accepted(variant, plan)
        assert outcomes(variant, plan, symbols) == reference
    assert prove(replace(program, invocations=drained), plan).peak_bytes >= prove(program, plan).peak_bytes


def test_schedules_agree_on_the_gradients() -> None:
    """DualPipe and 1F1B on one plan sum the same terms into every replica on every holder."""
    plan, symbols = small_plan(4), Symbols()
    first, second = (
        outcomes(program, plan, symbols)[0] for program in (dualpipe_program(4, 8), lowered(one_f_one_b(4, 8)))
    )
    assert gradients(first) == gradients(second)
    assert len(gradients(first)) == sum(len(replica.holders) for replica in plan.replicas)


def gradients(outcome: Outcome) -> frozenset[object]:
    assert outcome.fault == ""
    assert isinstance(outcome.results, tuple)
    return outcome.results[1]


def test_the_executor_sees_faults() -> None:
    """The executor alone, without the proof, detects a hang, garbage and a lost gradient."""
    program, plan, symbols = dualpipe_program(2, 4), small_plan(2), Symbols()
    reference = outcomes(program, plan, symbols)
    waiting = tuple(tuple(i._replace(posts=()) for i in row) for row in program.invocations)
    assert outcomes(replace(program, invocations=waiting), plan, symbols)[0].fault == "KeyError"
    unreduced = outcomes(replace(program, epilogue=program.epilogue[:1] + program.epilogue[2:]), plan, symbols)
    assert unreduced[0].fault == ""
    assert unreduced != reference
    row = program.invocations[0]
    one_action_less = replace(program, invocations=(edited(row, "drop", random.Random(0)), program.invocations[1]))
    assert all(outcome.fault for outcome in outcomes(one_action_less, plan, symbols))


@pytest.mark.parametrize("phase", "FIW")
def test_the_executor_sees_the_tensors_of_a_segment(phase: str) -> None:
    """A build passes a segment its tensors in order, so a call with one left out or doubled is another call."""
    program, plan = dualpipe_program(2, 4), small_plan(2)
    reference = outcomes(program, plan, symbols := Symbols())
    for edit in ("drop", "double"):
        changed = with_tensors(program, phase, edit)
        assert outcomes(changed, plan, symbols) != reference
        assert not accepted(changed, plan)


def with_tensors(program: Program, phase: str, edit: str) -> Program:
    """The first segment of a phase that has tensors, called with one less or one twice."""
    for body in program.bodies[0]:
        for index, i in enumerate(body.instructions):
            if i.kind == "run" and i.phase == phase and i.params:
                changed = replace(i, params=edited(i.params, edit, random.Random(0)))
                instructions = (*body.instructions[:index], changed, *body.instructions[index + 1 :])
                bodies = tuple(
                    replace(candidate, instructions=instructions) if candidate is body else candidate
                    for candidate in program.bodies[0]
                )
                return replace(program, bodies=(bodies, *program.bodies[1:]))
    raise AssertionError(f"no {phase} has tensors")
