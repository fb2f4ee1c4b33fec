"""What the proof decides against what the executor sees: a thousand mutants that end with other results."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from compiler.ir import Plan, Program
from compiler.proof import ProofError, prove
from compiler.schedules.one_f_one_b import one_f_one_b
from tests.proof.executor import Outcome, Symbols, outcomes
from tests.proof.mutants import edited, mutant
from tests.proof.programs import dualpipe_program, lowered, small_plan


def accepted(program: Program, plan: Plan) -> bool:
    try:
        prove(program, plan)
    except ProofError:
        return False
    return True


@pytest.mark.parametrize(("ranks", "micro_batches", "count", "seed"), [(2, 4, 350, 1), (2, 6, 350, 2), (4, 8, 300, 3)])
def test_mutants_with_other_results_are_rejected(ranks: int, micro_batches: int, count: int, seed: int) -> None:
    """All of `count` non-equivalent mutants are rejected; most equivalent ones met on the way are accepted."""
    program, plan, symbols = dualpipe_program(ranks, micro_batches), small_plan(ranks), Symbols()
    reference = outcomes(program, plan, symbols)
    assert {outcome.fault for outcome in reference} == {""}
    assert len(set(reference)) == 1, "a proven program ends alike in every interleaving"
    generator = random.Random(seed)
    different = 0
    equivalent: list[bool] = []
    while different < count:
        name, mutated = mutant(program, generator)
        holds = accepted(mutated, plan)
        if outcomes(mutated, plan, symbols, reference) == reference:
            equivalent.append(holds)
        else:
            different += 1
            assert not holds, f"accepted: {name}"
    assert sum(equivalent) > 0.6 * len(equivalent)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_changes_no_result_is_accepted(ranks: int) -> None:
    """Reductions in another common order; sends that are all drained in the end."""
    program, plan = dualpipe_program(ranks, 2 * ranks), small_plan(ranks)
    reference = outcomes(program, plan, symbols := Symbols())
    drained = tuple(tuple(replace(i, releases=()) for i in row) for row in program.invocations)
    for variant in (replace(program, reduces=program.reduces[::-1]), replace(program, invocations=drained)):
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
    """It is not the proof that makes a hang, garbage or a lost gradient visible."""
    program, plan, symbols = dualpipe_program(2, 4), small_plan(2), Symbols()
    reference = outcomes(program, plan, symbols)
    waiting = tuple(tuple(replace(i, posts=()) for i in row) for row in program.invocations)
    assert outcomes(replace(program, invocations=waiting), plan, symbols)[0].fault == "KeyError"
    unreduced = outcomes(replace(program, reduces=program.reduces[1:]), plan, symbols)
    assert unreduced[0].fault == ""
    assert unreduced != reference
    row = program.invocations[0]
    short = replace(program, invocations=(edited(row, "drop", random.Random(0)), program.invocations[1]))
    assert all(outcome.fault for outcome in outcomes(short, plan, symbols))
