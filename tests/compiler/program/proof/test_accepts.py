"""Valid programs are accepted, and their certificates are true."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from compiler.ir import Body, Plan, Program, Use
from compiler.ir.program import Message
from compiler.ir.stage_placement import BIDIRECTIONAL
from compiler.program.proof import ProofError, ProofFacts, prove
from compiler.schedule.dualpipe import dualpipe
from compiler.schedule.one_f_one_b import forward_only, one_f_one_b
from tests.compiler.program.proof.ledger import peak_bytes
from tests.compiler.program.proof.programs import (
    FAMILY,
    REWARDED,
    dualpipe_program,
    family_program,
    from_text,
    lowered,
    small_plan,
)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize(("factor", "extra"), [(2, 0), (2, 2), (4, 0)])
def test_every_small_dualpipe(ranks: int, factor: int, extra: int) -> None:
    micro_batches = factor * ranks + extra
    certificate = prove(dualpipe_program(ranks, micro_batches), small_plan(ranks))
    steps = [step for row in dualpipe(ranks, micro_batches).actions for step in row]
    assert certificate.num_actions == sum(str(step).count(".") for step in steps)
    assert certificate.num_messages == 2 * micro_batches * (ranks - 1)
    assert certificate.peak_activations == (ranks + 1,) * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_ramp_phases_and_evaluation_on_the_same_plan(ranks: int) -> None:
    """N < 2P runs as 1F1B on bidirectional storage, all micro-batches in direction 0."""
    plan = small_plan(ranks)
    assert plan.stage_placement == BIDIRECTIONAL
    for micro_batches in (1, 3, 2 * ranks - 1):
        certificate = prove(lowered(one_f_one_b(ranks, micro_batches)), plan)
        assert certificate.peak_activations == tuple(min(micro_batches, ranks - rank) for rank in range(ranks))
        certificate = prove(lowered(forward_only(BIDIRECTIONAL, ranks, micro_batches)), plan)
        assert certificate.peak_activations == tuple(min(1, i) for i in active(ranks, micro_batches))
        assert (certificate.num_messages, certificate.num_collectives) == (micro_batches * (ranks - 1), 2)


def active(ranks: int, micro_batches: int) -> list[int]:
    """The forwards of each rank in an evaluation."""
    return [len(row) for row in forward_only(BIDIRECTIONAL, ranks, micro_batches).actions]


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), FAMILY)
def test_the_family(name: str, ranks: int, micro_batches: int) -> None:
    """Every schedule is proven; each stage boundary between two ranks has two messages."""
    program, plan = family_program(name, ranks, micro_batches)
    certificate = prove(program, plan)
    paths = [
        [plan.stage_placement.rank_of(ranks, micro_batches, stage.index, k) for stage in plan.stages]
        for k in range(micro_batches)
    ]
    hops = sum(a != b for row in paths for a, b in pairwise(row))
    assert certificate.num_messages == 2 * hops
    assert (hops == 0) == (ranks == 1)
    assert prove(evaluation(plan, micro_batches), plan).num_messages == hops


Points = dict[Message, tuple[int, int]]  # invocation, and instruction of its body


def points_of(program: Program, kind: str) -> dict[tuple[int, int], Points]:
    """The places where messages from one rank to another are sent, or received."""
    points: dict[tuple[int, int], Points] = defaultdict(dict)
    for rank, invocations in enumerate(program.invocations):
        bodies = {body.name: body for body in program.bodies[rank]}
        for index, invocation in enumerate(invocations):
            for place, i in bodies[invocation.body].messages:
                if i.kind == kind and i.peer != rank:
                    edge = (rank, i.peer) if kind == "send" else (i.peer, rank)
                    points[edge][Message(i.producer, invocation.micro_batches[i.slot])] = index, place
    return points


def assert_released_at_once(program: Program) -> None:
    """Assert that a message is released after the first later invocation that received a reply which the other rank
    sent after receiving the message."""
    sent, received = points_of(program, "send"), points_of(program, "receive")
    wanted = []
    for (rank, peer), messages in sent.items():
        for message, (index, _) in messages.items():
            replies = [reply for reply, point in sent[peer, rank].items() if point > received[rank, peer][message]]
            answered = [arrival for arrival, _ in (received[peer, rank][reply] for reply in replies) if arrival > index]
            wanted += [(rank, min(answered), peer, message)] if answered else []
    calls = [(rank, *numbered) for rank, row in enumerate(program.invocations) for numbered in enumerate(row)]
    releases = [(rank, index, *release) for rank, index, call in calls for release in call.releases]
    assert sorted(releases) == sorted(wanted)
    assert bool(releases) == (len(program.invocations) > 1)


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), FAMILY)
def test_messages_are_released_once_a_reply_confirms_arrival(name: str, ranks: int, micro_batches: int) -> None:
    assert_released_at_once(family_program(name, ranks, micro_batches)[0])


def test_messages_of_one_micro_batch_at_a_time_are_released_at_once() -> None:
    """Each reply is to the last message."""
    rows = "\n".join(" ".join(f"F{rank}.{m} B{rank}.{m}" for m in range(4)) for rank in range(2))
    program, _ = from_text(f"# mine ranks=2 micro_batches=4 placement=loop(1)\n{rows}\n")
    assert_released_at_once(program)
    assert all(call.releases for call in program.invocations[0][1::2])


def evaluation(plan: Plan, micro_batches: int) -> Program:
    return lowered(forward_only(plan.stage_placement, plan.mesh.pp, micro_batches), plan.stage_placement)


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), [row for row in FAMILY if row[0] != "gpipe"])
def test_peak_bytes_of_the_family(name: str, ranks: int, micro_batches: int) -> None:
    """A value handed over inside a rank has one storage, not two; this is also compared with the ledger."""
    program, plan = family_program(name, ranks, micro_batches)
    for variant in (program, evaluation(plan, micro_batches)):
        certificate = prove(variant, plan, 36)
        assert certificate.peak_bytes == tuple(peak_bytes(variant, rank, 36) for rank in range(ranks))


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), REWARDED)
def test_reported_values_are_held_to_the_end(name: str, ranks: int, micro_batches: int) -> None:
    """The rank of the last stage keeps reported values of every micro-batch; this is also compared with the ledger."""
    program, plan = family_program(name, ranks, micro_batches)
    peaks = prove(program, plan, 36).peak_bytes
    assert peaks == tuple(peak_bytes(program, rank, 36) for rank in range(ranks))
    last = [plan.stage_placement.rank_of(ranks, micro_batches, len(plan.stages) - 1, k) for k in range(micro_batches)]
    silent = replace(plan, stages=tuple(replace(stage, tells=()) for stage in plan.stages))
    quiet = replace(program, bodies=tuple(tuple(map(without_tells, bodies)) for bodies in program.bodies))
    with pytest.raises(ProofError, match=r"tell F .*logp.* runs 0 times instead of once"):
        prove(quiet, plan, 36)
    for rank, (peak, quiet_peak) in enumerate(zip(peaks, prove(quiet, silent, 36).peak_bytes, strict=True)):
        num_earlier = last.count(rank) - 1  # the value of the last micro-batch exists at the peak anyway
        assert 0 < peak - quiet_peak <= num_earlier * LOGP_BYTES if num_earlier > 0 else peak == quiet_peak


LOGP_BYTES = 12 * 8  # of the tokens of a micro-batch


def without_tells(body: Body) -> Body:
    return replace(body, instructions=tuple(i for i in body.instructions if i.kind != "tell"))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_rank(micro_batches: int) -> None:
    certificate = prove(lowered(one_f_one_b(1, micro_batches)), small_plan(1))
    assert (certificate.num_messages, certificate.peak_activations) == (0, (1,))


@pytest.mark.parametrize("rows", [0, 1, 36, 1000])
@pytest.mark.parametrize("ranks", [2, 4])
def test_peak_bytes(ranks: int, rows: int) -> None:
    """Peaks equal those of a ledger that sums everything that exists after each event."""
    for program in (dualpipe_program(ranks, 2 * ranks), lowered(forward_only(BIDIRECTIONAL, ranks, 4))):
        certificate = prove(program, small_plan(ranks), rows)
        for rank in range(ranks):
            assert certificate.peak_bytes[rank] == peak_bytes(program, rank, rows)
            assert certificate.peak_fixed_bytes[rank] == peak_bytes(program, rank, 0)


def test_recorded_rows_replay() -> None:
    """A function of (rank, layer, micro-batch) is asked for every layer and micro-batch a rank runs."""
    program, plan = dualpipe_program(2, 4), small_plan(2)
    requests: set[tuple[int, str, int]] = set()

    def recorded(rank: int, layer: str, micro_batch: int) -> int:
        requests.add((rank, layer, micro_batch))
        return 36

    assert prove(program, plan, recorded) == prove(program, plan, 36)
    exchanges = {(stage.index, step.site) for stage in plan.stages for step in stage.steps if not isinstance(step, Use)}
    assert len(exchanges) == 2
    assert requests == {
        (plan.stage_placement.rank_of(2, 4, stage, k), layer, k) for stage, layer in exchanges for k in range(4)
    }


def test_prints() -> None:
    certificate = ProofFacts("dualpipe", BIDIRECTIONAL, 2, 4, 18, 540, 8, 40, 3, (3, 3), (10, 20), (100, 200))
    assert str(certificate).splitlines() == [
        "proven: dualpipe ranks=2 micro_batches=4 placement=bidirectional",
        "18 actions, 540 instructions, 8 messages, 40 exchanges, 3 collectives",
        "rank 0: at most 3 activations, 100 bytes (10 without received rows)",
        "rank 1: at most 3 activations, 200 bytes (20 without received rows)",
    ]
