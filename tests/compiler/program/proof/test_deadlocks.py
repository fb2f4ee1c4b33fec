"""Programs that hang, or would if a send could be waited for: each is rejected, and the executor sees why."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest

from compiler.ir import Message, Program
from compiler.program.proof import ProofError, prove
from compiler.program.proof.channels import _proves_releases, _run_with_clocks, message_of, read_lines
from compiler.program.proof.structure import Structure
from compiler.schedule.schedule import Schedule
from tests.compiler.program.proof.executor import Symbols, outcomes
from tests.compiler.program.proof.mutants import MUTATIONS, NothingToEditError
from tests.compiler.program.proof.programs import dualpipe_program, family_program, from_text, lowered, small_plan
from tests.compiler.program.proof.test_rejects import rejected, with_invocations


def test_ranks_that_wait_in_a_circle() -> None:
    """No work is missing, but rank 0 waits for B1.0 before it runs F0.1, and rank 1 waits for F0.1 before B1.0."""
    text = "# circle ranks=2 micro_batches=2 placement=loop(1)\nF0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1\n"
    program, plan = lowered(Schedule.from_text(text)), small_plan(2)
    assert rejected(program, plan) == (
        "rank 0, B0.0: recv B1.0 waits for rank 1; rank 1, F1.1: recv F0.1 waits for rank 0; none of them can go on"
    )
    assert outcomes(program, plan, Symbols())[0].fault == "StuckError"


def in_own_order(program: Program) -> Program:
    """Receives posted in the order in which a rank awaits them, one ahead on each channel."""
    rows = []
    for rank, row in enumerate(program.invocations):
        bodies = {body.name: body for body in program.bodies[rank]}
        awaits: dict[int, list[tuple[int, Message]]] = defaultdict(list)
        for index, invocation in enumerate(row):
            for i in bodies[invocation.body].instructions:
                if i.kind == "receive":
                    awaits[i.peer].append((index, message_of(i, invocation.micro_batches[i.slot])))
        posts: dict[int, list[tuple[int, Message]]] = defaultdict(list)
        for peer, messages in sorted(awaits.items()):
            for k, (_, message) in enumerate(messages):
                posts[messages[max(k - 1, 0)][0]].append((peer, message))
        rows.append(tuple(invocation._replace(posts=tuple(posts[index])) for index, invocation in enumerate(row)))
    return replace(program, invocations=tuple(rows))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (6, 12), (8, 20)])
def test_receives_in_own_order(ranks: int, micro_batches: int) -> None:
    """Inside a pair, messages leave in another order than the peer awaits them, so FIFO breaks at every size."""
    program, plan = in_own_order(dualpipe_program(ranks, micro_batches)), small_plan(ranks)
    message = rejected(program, plan)
    assert re.match(r"rank \d, \S+: posts [FB]\d\.\d+ as message \d+ from rank \d, which sends [FB]\d\.\d+ as", message)
    if ranks == 4:
        reference = outcomes(dualpipe_program(ranks, micro_batches), plan, symbols := Symbols())
        assert outcomes(program, plan, symbols, reference) != reference


def blocking(program: Program, waited: frozenset[str], ahead: Sequence[int]) -> Program:
    """Sends of `waited` are awaited as soon as they begin, others as before; a rank posts its receives in
    its own order, `ahead[rank]` invocations before it awaits them."""
    rows = []
    for rank, row in enumerate(program.invocations):
        bodies = {body.name: body for body in program.bodies[rank]}
        posts: list[list[tuple[int, Message]]] = [[] for _ in row]
        releases = [[entry for entry in i.releases if str(entry[1]) not in waited] for i in row]
        for index, invocation in enumerate(row):
            for i in bodies[invocation.body].instructions:
                message = message_of(i, invocation.micro_batches[i.slot]) if i.peer >= 0 else None
                if i.kind == "receive" and message:
                    posts[max(index - ahead[rank], 0)].append((i.peer, message))
                elif message and str(message) in waited:
                    releases[index].append((i.peer, message))
        lists = zip(row, posts, releases, strict=True)
        rows.append(tuple(i._replace(posts=tuple(p), releases=tuple(r)) for i, p, r in lists))
    return replace(program, invocations=tuple(rows))


# Stages 0 and 2 on rank 0, 1 and 3 on rank 1; the two hangs of pytorch#172668 (Pipeline communication blocks …).
BOTH_SEND_FIRST = """# sends ranks=2 micro_batches=2 placement=loop(2)
F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1
F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1
"""
ODD_RANK_POSTS_FIRST = """# posts ranks=2 micro_batches=3 placement=loop(2)
F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 B2.1 F2.2 B0.0 B0.1 B2.2 B0.2
F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 B1.1 F3.2 B3.2 B1.2
"""


@pytest.mark.parametrize(
    ("text", "waited", "ahead", "message"),
    [
        # rank 0 waits for its send of F0.1 before it posts F1.0, rank 1 for F1.0 before it posts F0.1
        (BOTH_SEND_FIRST, {"F0.1", "F1.0"}, (0, 0), "rank 0, F0.1: releases F0.1"),
        # the odd rank posts F2.1 before it waits for B3.0; rank 0 waits for F0.2 before it posts B3.0
        (ODD_RANK_POSTS_FIRST, {"B3.0", "F0.2", "F2.1"}, (0, 1), "rank 0, F2.1: releases F2.1"),
        (ODD_RANK_POSTS_FIRST, {"B3.0", "F0.2"}, (0, 1), "rank 0, F0.2: releases F0.2"),
    ],
)
def test_sends_that_are_waited_for(text: str, waited: set[str], ahead: Sequence[int], message: str) -> None:
    """The schedule is valid; with the waits it hangs if a send only ends once its receive is posted."""
    program, plan = from_text(text)
    prove(program, plan)
    assert outcomes(program, plan, Symbols(), rendezvous=True)[0].fault == ""
    waiting = blocking(program, frozenset(waited), ahead)
    assert rejected(waiting, plan).startswith(message + ", but nothing it has received by then shows that rank 1")
    assert outcomes(waiting, plan, Symbols(), rendezvous=True)[0].fault == "StuckError"
    prove(blocking(program, frozenset(), ahead), plan)


def test_a_release_too_early_by_one() -> None:
    """Every release is at the first safe place: moved before it, it is rejected."""
    program, plan = dualpipe_program(4, 8), small_plan(4)
    moved = 0
    for rank, row in enumerate(program.invocations):
        for index, invocation in enumerate(row):
            for entry in invocation.releases:
                without = invocation._replace(releases=tuple(e for e in invocation.releases if e != entry))
                before = row[index - 1]._replace(releases=(*row[index - 1].releases, entry))
                message = rejected(
                    with_invocations(program, rank, (*row[: index - 1], before, without, *row[index + 1 :])), plan
                )
                assert message.startswith(f"rank {rank}, ")
                assert f"releases {entry[1]}, " in message
                moved += 1
    assert moved > 20


@pytest.mark.parametrize("row", [("dualpipe", 4, 8), ("interleaved", 3, 6), ("zbv", 4, 6), ("1f1b", 3, 6)])
def test_direct_messages_give_the_verdicts_of_vector_clocks(row: tuple[str, int, int]) -> None:
    """If the first pass accepts or refuses a faulty program, vector clocks give the same verdict and message."""
    program, plan = family_program(*row)
    draw, refused = random.Random(0), 0
    names = [name for name in sorted(MUTATIONS) if name.endswith((" post", " release", " send or receive", "'s peer"))]
    accepted = {(True, ""): 0, (False, ""): 0}  # by whether the first pass is sure, and the verdict of the second
    for number in range(160):
        try:
            mutant = MUTATIONS[names[number % len(names)]](program, draw)
            lines = read_lines(mutant, Structure(plan).schedule_of(mutant))
        except (NothingToEditError, ProofError):
            continue
        try:
            sure = _proves_releases(lines)
        except ProofError as error:
            with pytest.raises(ProofError, match=re.escape(str(error))):
                _run_with_clocks(lines)
            refused += 1
            continue
        fault = ""
        try:
            _run_with_clocks(lines)
        except ProofError as error:
            fault = str(error)
        assert not (sure and fault)
        accepted[sure, fault] = accepted.get((sure, fault), 0) + 1
    assert refused > 20 and accepted[True, ""] > 5 and len(accepted) > 2
    assert bool(accepted[False, ""]) == (row[0] == "interleaved"), "round a loop, a rank knows by way of a third"
