"""Hand-made faults: each is rejected, with the rank and the action named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from compiler.ir import Body, BucketCollective, Buffer, Instruction, Invocation, Message, Plan, Program, Replica
from compiler.ir.stage_placement import ONE_STAGE
from compiler.program.proof import Effects, ProofError, prove
from compiler.program.proof.lifetimes import check_values
from compiler.program.proof.structure import Structure
from compiler.schedule.one_f_one_b import one_f_one_b
from runtime.contract import Reduction
from tests.compiler.program.proof.programs import dualpipe_program, lowered, small_plan

Edit = Callable[[list[Instruction]], list[Instruction]]


def rejected(program: Program, plan: Plan) -> str:
    with pytest.raises(ProofError) as caught:
        prove(program, plan)
    return str(caught.value)


def with_invocations(program: Program, rank: int, row: tuple[Invocation, ...]) -> Program:
    return replace(program, invocations=(*program.invocations[:rank], row, *program.invocations[rank + 1 :]))


def with_body(program: Program, rank: int, name: str, edit: Edit) -> Program:
    def changed(body: Body) -> Body:
        return replace(body, instructions=tuple(edit(list(body.instructions)))) if body.name == name else body

    assert name in {body.name for body in program.bodies[rank]}
    bodies = tuple(changed(body) for body in program.bodies[rank])
    return replace(program, bodies=(*program.bodies[:rank], bodies, *program.bodies[rank + 1 :]))


# ---------------------------------------------------------------- messages


def test_other_faults_of_channels() -> None:
    program, plan = dualpipe_program(2, 4), small_plan(2)
    row = program.invocations[0]
    index = next(number for number, invocation in enumerate(row) if invocation.posts)
    (source, message), *rest = row[index].posts

    def posting(*posts: tuple[int, Message]) -> str:
        return rejected(
            with_invocations(program, 0, (*row[:index], row[index]._replace(posts=posts), *row[index + 1 :])), plan
        )

    assert posting((0, message), *rest).startswith(f"rank 0, {row[index].body.split('_')[0]}.")
    assert "names rank 7" in posting((7, message), *rest)
    last = row[-1]._replace(posts=(*row[-1].posts, (source, message)))
    assert f"posts {message}, which rank 1 never sends" in rejected(
        with_invocations(program, 0, (*row[:-1], last)), plan
    )


def test_a_message_that_is_posted_after_it_is_awaited() -> None:
    program, plan = lowered(one_f_one_b(2, 1)), small_plan(2)
    row = program.invocations[1]
    assert row[0].posts
    late = (row[0]._replace(posts=()), row[1]._replace(posts=row[0].posts))
    assert rejected(with_invocations(program, 1, late), plan) == (
        "rank 1, F1.0: recv F0.0 has no posted receive, or was awaited already"
    )


@pytest.mark.parametrize("change", [{"shape": (1, 16)}, {"dtype": "float32"}])
def test_a_message_of_another_shape(change: dict[str, object]) -> None:
    program, plan = dualpipe_program(2, 4), small_plan(2)
    assert program.message is not None
    assert re.match(
        r"rank \d, [FB]\d\.\d: (send|receive) [FI]: \w+ is float64\[12, 16\], but a message of the program",
        rejected(replace(program, message=replace(program.message, **change)), plan),  # type: ignore[arg-type]
    )
    assert "the program has no message buffer" in rejected(replace(program, message=None), plan)


# ---------------------------------------------------------------- bodies and values


def position(items: list[Instruction], kind: str, phase: str = "", wait: str = "") -> int:
    return next(k for k, i in enumerate(items) if i.kind == kind and phase in ("", i.phase) and wait in ("", i.wait))


def moved(kind: str, by: int, phase: str = "") -> Edit:
    def edit(items: list[Instruction]) -> list[Instruction]:
        item = items.pop(index := position(items, kind, phase))
        items.insert(index + by, item)
        return items

    return edit


def changed(kind: str, phase: str = "", wait: str = "", **fields: object) -> Edit:
    def edit(items: list[Instruction]) -> list[Instruction]:
        index = position(items, kind, phase, wait)
        items[index] = replace(items[index], **fields)  # type: ignore[arg-type]
        return items

    return edit


def dropped(kind: str, phase: str = "", wait: str = "") -> Edit:
    def edit(items: list[Instruction]) -> list[Instruction]:
        del items[position(items, kind, phase, wait)]
        return items

    return edit


def freeing_early(items: list[Instruction]) -> list[Instruction]:
    """A value that the last run reads is freed before it."""
    last = max(k for k, i in enumerate(items) if i.kind == "run")
    items.insert(last, Instruction("free", 0, items[0].action, "F", reads=items[last].reads[:1]))
    return items


def waiting_before_the_start(items: list[Instruction]) -> list[Instruction]:
    wait = items.pop(position(items, "wait"))
    items.insert(position(items, wait.wait), wait)
    return items


def waiting_at_the_end(items: list[Instruction]) -> list[Instruction]:
    """Moves the wait for the dispatch to the end, after its rows have been read."""
    items.append(items.pop(position(items, "wait", wait="dispatch")))
    return items


def writing_twice(items: list[Instruction]) -> list[Instruction]:
    """The first run overwrites the message that it received."""
    index = position(items, "run")
    items[index] = replace(items[index], writes=(*items[index].writes, *items[position(items, "receive")].writes))
    return items


def with_operands_swapped(items: list[Instruction]) -> list[Instruction]:
    """The head gets the targets as its hidden state, and the hidden state as its targets."""
    index = next(number for number, i in enumerate(items) if i.site == "head")
    items[index] = replace(items[index], reads=items[index].reads[::-1])
    return items


def with_another_operand(kind: str) -> Edit:
    def edit(items: list[Instruction]) -> list[Instruction]:
        index = position(items, kind)
        items[index] = replace(items[index], reads=(*items[index].reads, "targets"))
        return items

    return edit


def with_phase(phase: str) -> Edit:
    def edit(items: list[Instruction]) -> list[Instruction]:
        index = position(items, "run")
        items[index] = replace(items[index], phase=phase)
        return items

    return edit


def dangling_alias(items: list[Instruction]) -> list[Instruction]:
    index = position(items, "run")
    buffer, *rest = items[index].writes
    items[index] = replace(items[index], writes=(replace(buffer, alias="gone"), *rest))
    return items


# body F0 of rank 0 has no MTP; F1 of rank 1 has it, with its loads and losses; B1 is its backward
EDITS: list[tuple[int, str, Edit, str]] = [
    (0, "F0", dropped("send"), "rank 0, F0: send F runs 0 times instead of once"),
    (1, "F1", dropped("receive"), "rank 1, F1: receive F runs 0 times instead of once"),
    (1, "F1", dropped("load"), "rank 1, F1: load F .* runs 0 times instead of once"),
    (1, "F1", dropped("record"), "rank 1, F1: record F .* runs 0 times instead of once"),
    (1, "F1", dropped("run"), "rank 1, F1: run F .* runs 0 times instead of once"),
    (1, "B1", dropped("run", "W"), "rank 1, B1: run W .* runs 0 times instead of once"),
    (1, "B1", dropped("run", "I"), "rank 1, B1: run I .* runs 0 times instead of once"),
    (1, "B1", dropped("constant"), "rank 1, B1: constant I .* runs 0 times instead of once"),
    (1, "F1", dropped("counts"), "rank 1, F1: counts F M0 runs 0 times instead of once"),
    (1, "F1", dropped("wait", wait="dispatch"), "rank 1, F1: wait dispatch F M0 runs 0 times instead of once"),
    (1, "F1", changed("run", site="L9.attention"), "rank 1, F1: run F L9.attention does not belong to it"),
    (1, "F1", changed("run", slot=1), "rank 1, F1: run F .* is in slot 1 of F1"),
    (1, "F1", changed("run", action="F0"), "rank 1, F0: run F .* is in slot 0 of F1"),
    (1, "F1", with_phase("I"), "rank 1, F1: run F final_norm runs 0 times instead of once"),
    (1, "F1", changed("run", reads=("targets",)), "rank 1, F1: run F .* has other operands than its stage says"),
    (1, "F1", changed("run", params=("head", "final_norm")), "rank 1, F1: run F .* has other operands"),
    (1, "B1", changed("run", "W", params=()), "rank 1, B1: run W .* has other operands"),
    (1, "B1", changed("send", reads=("d_loss",)), "rank 1, B1: send I has other operands"),
    (
        1,
        "F1",
        changed("receive", writes=(Buffer("h", (12, 16), "float64"),)),
        "rank 1, F1: receive F has other operands",
    ),
    (
        1,
        "F1",
        changed("wait", wait="dispatch", reads=()),
        "rank 1, F1: wait dispatch F M0 has other operands",
    ),
    (1, "F1", waiting_before_the_start, "rank 1, F1: wait counts F M0 has no start with its operands"),
    (1, "F1", waiting_at_the_end, r"rank 1, F1\.0: run F M0.experts: M0_received_rows is not live"),
    (1, "F1", moved("receive", 40), r"rank 1, F1\.0: run F final_norm: \w+ is not live"),
    (1, "F1", freeing_early, r"rank 1, F1\.0: run F .*: \w+ is not live"),
    (1, "F1", dropped("free"), r"rank 1, stage 1, micro-batch 0: \w+ is never freed"),
    (1, "F1", changed("free", reads=("nothing",)), r"rank 1, F1\.0: free F: nothing is not live"),
    (1, "F1", dangling_alias, "rank 1, F1: run F final_norm has other operands"),
    (1, "F1", writing_twice, "rank 1, F1: run F final_norm has other operands"),
    (1, "F1", with_operands_swapped, "rank 1, F1: run F head has other operands"),
]


@pytest.mark.parametrize(("rank", "name", "edit", "message"), EDITS)
def test_edited_bodies(rank: int, name: str, edit: Edit, message: str) -> None:
    program, plan = lowered(one_f_one_b(2, 2)), small_plan(2)
    assert re.match(message, refusal := rejected(with_body(program, rank, name, edit), plan)), refusal


@pytest.mark.parametrize(
    ("edit", "message"),
    [(dangling_alias, ".* aliases gone, which is not live"), (writing_twice, r".*\w+ is written twice")],
)
def test_the_pass_over_values_finds_faults_by_itself(edit: Edit, message: str) -> None:
    """The third pass alone also finds faults that the first pass finds."""
    program, plan = with_body(lowered(one_f_one_b(2, 2)), 1, "F1", edit), small_plan(2)
    with pytest.raises(ProofError, match=rf"rank 1, F1\.0: run F final_norm: {message}"):
        check_values(program, Structure(plan).schedule_of(program), 1, 0, Effects())


# ---------------------------------------------------------------- schedules, plans, replicas


def test_programs_of_an_illegal_schedule() -> None:
    program, plan = dualpipe_program(2, 4), small_plan(2)
    row = program.invocations[0]
    named = row[0]._replace(body="F7")
    assert rejected(with_invocations(program, 0, (named, *row[1:])), plan).startswith(
        "rank 0, F7: no body of this name"
    )
    out_of_range = row[0]._replace(micro_batches=(9,))
    assert rejected(with_invocations(program, 0, (out_of_range, *row[1:])), plan).startswith(
        "rank 0, F0.9: its schedule has 2 stages"
    )
    assert rejected(with_invocations(program, 0, row[:-1]), plan) == "rank 0, W0.1: missing"
    assert rejected(with_invocations(program, 0, row[::-1]), plan).startswith("rank 0, W0.1: comes before its I")
    doubled = replace(program, bodies=(program.bodies[0] * 2, program.bodies[1]))
    assert rejected(doubled, plan) == "rank 0: two bodies have one name"
    idle = replace(program.bodies[0][0], name="F0_again")
    unused = replace(program, bodies=((*program.bodies[0], idle), program.bodies[1]))
    assert rejected(unused, plan) == "rank 0: a body is never invoked, or an invoked one is missing"


def test_programs_of_another_plan() -> None:
    program = dualpipe_program(2, 4)
    assert "the plan has 4" in rejected(program, small_plan(4))
    single = replace(small_plan(2), stage_placement=ONE_STAGE)
    assert rejected(program, single) == "a bidirectional program runs stages that a loop(1) plan does not store there"
    fewer = replace(small_plan(2), stages=small_plan(2).stages[:1])
    assert rejected(program, fewer) == "placement bidirectional on 2 ranks does not fit 1 stages"


def test_gradients_that_are_not_reduced() -> None:
    program, plan = dualpipe_program(2, 4), small_plan(2)
    records, first, second, *rest = program.epilogue
    assert first.bucket

    def with_epilogue(*epilogue: BucketCollective) -> str:
        return rejected(replace(program, epilogue=epilogue), plan)

    after = "after the last body"
    assert with_epilogue(records, second, *rest) == f"{first}: runs 0 times instead of 1 {after}"
    assert with_epilogue(records, first, second, second, *rest) == f"{second}: runs 2 times instead of 1 {after}"
    fewer = replace(first, bucket=replace(first.bucket, replicas=first.bucket.replicas[1:]))
    assert with_epilogue(records, fewer, second, *rest).startswith(f"{first}: runs")


def test_sums_that_are_missing_or_elsewhere() -> None:
    program, plan = dualpipe_program(2, 4), small_plan(2)
    records, *reduces, norm = program.epilogue
    (targets,) = program.prologue

    def with_lists(**lists: tuple[BucketCollective, ...]) -> str:
        return rejected(replace(program, **lists), plan)  # type: ignore[arg-type]

    assert with_lists(prologue=()) == "sum targets: runs 0 times instead of 1 before the first body"
    assert with_lists(epilogue=(*reduces, norm)) == "sum records: runs 0 times instead of 1 after the last body"
    assert with_lists(epilogue=(norm, records, *reduces)).startswith(f"sum norm: runs before {reduces[-1]}")
    assert with_lists(epilogue=(*program.epilogue, targets)).startswith("sum targets: runs 1 times instead of 0")
    gathered = replace(program, update=(replace(reduces[0], kind="gather"),))
    assert rejected(gathered, replace(plan, zero=0)).startswith(f"gather {reduces[0].name}: runs 1 times instead of 0")
    assert rejected(replace(program, update=()), replace(plan, zero=1)).startswith("gather ")


def test_reductions_that_start_wrongly() -> None:
    """A reduction comes too early, twice, never, for nothing, after no invocation, or in two orders."""
    program, plan = dualpipe_program(2, 4), small_plan(2)
    (first, second, *rest), of_other = program.reductions
    assert [reduction.stages for reduction in of_other] == [reduction.stages for reduction in program.reductions[0]]

    def with_row(*row: Reduction) -> str:
        return rejected(replace(program, reductions=((*row, *rest), of_other)), plan)

    last = len(program.invocations[0]) - 1
    assert with_row(Reduction(0, first.stages), second).startswith(f"rank 0, {first}: started before ")
    assert with_row(first, first, second) == f"rank 0, {first}: started 2 times instead of 1"
    assert with_row(second) == f"rank 0, {first}: started 0 times instead of 1"
    assert (
        with_row(first, second, second._replace(stages=(7,)))
        == "rank 0, reduction of stage 7: started 1 times instead of 0"
    )
    assert "not behind its invocations" in with_row(first, second._replace(after=last + 1))
    late = [reduction._replace(after=last) for reduction in (*rest, second, first)]
    assert rejected(replace(program, reductions=(tuple(late), of_other)), plan).startswith(
        "rank 1: starts reductions in"
    )
    assert rejected(replace(program, reductions=()), plan) == "0 ranks start reductions, of 2"


def test_buckets_of_other_stages() -> None:
    """A bucket that leaves out a stage would be summed before all is in it."""
    program, plan = dualpipe_program(2, 4), small_plan(2)
    fewer = replace(plan.buckets[0], stages=(1,))
    assert rejected(program, replace(plan, buckets=(fewer, *plan.buckets[1:]))).endswith("has other stages")


def test_plans_whose_replicas_are_not_summed() -> None:
    program, plan = dualpipe_program(2, 4), small_plan(2)

    def with_replicas(edit: Callable[[Replica], Replica]) -> str:
        return rejected(program, replace(plan, replicas=tuple(edit(replica) for replica in plan.replicas)))

    def one_holder_less(replica: Replica) -> Replica:
        return replace(replica, holders=replica.holders[:-1]) if replica.name == "head" else replica

    assert with_replicas(one_holder_less).startswith("reduce head: held by ranks [0, 1, 2]")
    expert = next(replica for replica in plan.replicas if ".experts." in replica.name)

    def elsewhere(replica: Replica) -> Replica:
        return replace(replica, holders=(0, 3)) if replica.name == expert.name else replica

    assert with_replicas(elsewhere).startswith(f"reduce {expert.name}: held by ranks [0, 3]")

    bucket, *buckets = plan.buckets
    lost = replace(plan, buckets=(replace(bucket, replicas=bucket.replicas[1:]), *buckets))
    assert rejected(program, lost) == f"reduce {bucket.replicas[0]}: it is in 0 buckets"
    twice = replace(plan, buckets=(*plan.buckets, replace(bucket, replicas=bucket.replicas[:1])))
    assert rejected(program, twice) == f"reduce {bucket.replicas[0]}: it is in 2 buckets"
    fewer_holders = replace(plan, buckets=(replace(bucket, holders=bucket.holders[:1]), *buckets))
    assert rejected(program, fewer_holders) == f"reduce {bucket.replicas[0]}: bucket {bucket.name} has other holders"
