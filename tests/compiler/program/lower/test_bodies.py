"""Emitted bodies: the predicted time equals that of two machines with queues, and waits are at the right
places."""

from __future__ import annotations

from collections import Counter

import pytest

from compiler.ir import Body, Program
from compiler.ir.stage_placement import ONE_STAGE
from compiler.plan.actions.chains import ChainNode, Key
from compiler.plan.actions.lanes import end_of
from compiler.plan.actions.order import Orders, finish, interleave, jobs_of
from compiler.plan.actions.search import best_order
from compiler.plan.split_blocks import balanced_rows
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import Overlap, lane_times, overlaps_of, times_on
from compiler.program.proof import prove
from compiler.schedule.dualpipe import dualpipe
from compiler.schedule.schedule import Schedule
from runtime.contract.actions import parse_step
from runtime.contract.names import BodyName
from tests.compiler.program.lower.events import Machines, given_to
from tests.compiler.program.lower.stages import chain, deepseek_v3, lowering_of, small
from tests.specs.shipped import shipped

EXCHANGES = ("counts", "dispatch", "combine")
ROWS = (  # every kind of pair, on a pipeline of one rank
    "(F0.0|F0.1) (B0.0|B0.1)",
    "F0.0 (F0.1|B0.0) B0.1",
    "(F0.0|F0.1) (I0.0|I0.1) (W0.0|W0.1)",
    "F0.0 (F0.1|I0.0) (I0.1|W0.0) W0.1",
    "(F0.0|F0.1) (B0.0|I0.1) W0.1",
    "(F0.0|F0.1) I0.0 (B0.1|W0.0)",
    "F0.0 I0.0 (F0.1|W0.0) B0.1",
)


def one_rank() -> Lowering:
    return lowering_of(shipped("laptop-v2.dsc", "laptop_v2"))


def by_hand(row: str) -> Program:
    lowering = one_rank()
    steps = tuple(map(parse_step, row.split()))
    schedule = Schedule("by_hand", 1, 2, lowering.plan.stage_placement, (steps,))
    schedule.check()
    return lowering.program(schedule)


def small_program() -> Program:
    lowering = small()
    return lowering.program(dualpipe(2, 4))


def assert_as_predicted(body: Body, nodes: dict[Key, ChainNode]) -> None:
    predicted, times = lane_times(body.instructions, nodes), {key: node.time_ns for key, node in nodes.items()}
    end, exposed = Machines(body, times).run(given_to(body))
    assert end == predicted.end
    assert predicted.end - predicted.compute == exposed
    moved = sum(times[i.kind, i.phase, i.site] for i in body.instructions if i.kind in EXCHANGES)
    assert predicted.communication == moved
    assert 0 <= predicted.hidden <= 1


@pytest.mark.parametrize("row", ROWS)
def test_every_kind_of_pair_is_proven_and_takes_the_predicted_time(row: str) -> None:
    lowering = one_rank()
    program, times = by_hand(row), dict(times_on(lowering, 0))
    spec = shipped("laptop-v2.dsc", "laptop_v2")
    assert prove(program, lowering.plan, balanced_rows(spec)).num_actions == len(row.replace("|", " ").split())
    for body in program.bodies[0]:
        assert_as_predicted(body, times)


def test_a_program_takes_the_predicted_time_of_its_stages() -> None:
    lowering = small()
    program, times = small_program(), dict(times_on(lowering, 0))
    for body in {body.name: body for bodies in program.bodies for body in bodies}.values():
        assert_as_predicted(body, times)
        jobs = jobs_of([chain(small(), action.stage, action.kind) for action in body.actions])
        assert lane_times(body.instructions, times).end == end_of(jobs, best_order(jobs))


def test_a_pair_of_deepseek_v3_takes_the_predicted_time() -> None:
    lowering = deepseek_v3()
    times = dict(times_on(lowering, 0))
    order = interleave([chain(deepseek_v3(), 5, "F"), chain(deepseek_v3(), 10, "B")], Orders())
    name = BodyName("F5_B10")
    body = Body(name, name.actions, finish(order, name.actions, (frozenset(), frozenset())))
    assert_as_predicted(body, times)


def test_waits_precede_the_first_reader_and_sends_follow_their_operand() -> None:
    quiet = ("wait", "receive", "load", "constant", "free")
    for body in (*(b for bodies in small_program().bodies for b in bodies), *by_hand(ROWS[3]).bodies[0]):
        for index, i in enumerate(body.instructions):
            if i.kind in ("wait", "receive"):
                next_one = next((n for n in body.instructions[index:] if n.kind not in quiet), None)
                writes = {b.name for b in i.writes}
                readers = [
                    n for n in body.instructions[index:] if n.slot == i.slot and writes & set(n.reads) and n is not i
                ]
                if readers and readers[0].kind not in quiet:
                    assert readers[0] is next_one, f"{body.name}: {i.kind} {i.site} stands before {next_one}"
            if i.kind == "send":
                maker = next(n for n in reversed(body.instructions[:index]) if i.reads[0] in {b.name for b in n.writes})
                between = body.instructions[body.instructions.index(maker) + 1 : index]
                assert all(n.kind in (*quiet, "record", "tell", "send") for n in between)
        assert not any(i.wait == "send" for i in body.instructions)


def test_the_hidden_share_covers_the_whole_step() -> None:
    lowering = small()
    program, times = small_program(), times_on(lowering, 0)
    (overlap,) = overlaps_of({"train_4": program}, times).values()
    assert isinstance(overlap, Overlap)
    bodies = dict(overlap.bodies)
    counts = [Counter(call.body for call in calls) for calls in program.invocations]
    exposed = sum(n * (bodies[name].end - bodies[name].compute) for c in counts for name, n in c.items())
    moved = sum(n * bodies[name].communication for c in counts for name, n in c.items())
    assert overlap.total.hidden == pytest.approx(1 - exposed / moved)
    kinds = dict(overlap.kinds)
    assert list(kinds) == ["B", "F", "I", "W", "F&B"]
    assert kinds["F&B"].hidden > kinds["F"].hidden


def test_evaluation_frees_at_once() -> None:
    """A forward without backward keeps nothing, in any order of its segments."""
    lowering = small()
    steps = tuple((parse_step(f"F{rank}.0"),) for rank in range(2))
    program = lowering.program(Schedule("evaluate", 2, 1, ONE_STAGE, steps), evaluate=True)
    assert prove(program, lowering.plan).peak_activations == (1, 1)
