"""Start-up cannot hang: the proof of the order in which channels are opened, against a machine that knows nothing of
it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import pytest

from compiler.ir import Plan, Program
from compiler.pipeline import lower_spec
from compiler.program.lower.opening_order import opening_order
from compiler.program.lowered import LoweredPlan
from compiler.program.proof import ProofError
from compiler.program.proof.start import check_lines, check_start, used_channels
from dsl.load import load
from runtime.comm.transport import WantedChannels
from runtime.contract import Opening
from tests.compiler.program.proof.first_use import Machine, UnopenedError, run, starts, steps
from tests.compiler.program.proof.programs import family_program
from tests.specs.shipped import NAMES, path_of

QUICKSTART_FIRST = sorted(NAMES, key=lambda name: (name != "quickstart", name))
Lines = list[list[Opening]]  # per pipeline rank


@cache
def lowered(name: str) -> LoweredPlan:
    return lower_spec(load(path_of(name)))


def lines_of(openings: Sequence[Opening], num_ranks: int) -> Lines:
    return [[opening for opening in openings if rank in opening.ranks] for rank in range(num_ranks)]


def ends(program: Program, plan: Plan, lines: Lines, lazy: bool = False) -> bool:
    """Whether the machine comes to the end of start-up and of a step; without `lazy` every channel must be open."""
    generator, num_ranks = random.Random(0), plan.mesh.pp
    try:
        stuck = run(starts(lines, plan.mesh, Machine()), generator)
        return not stuck and not run(steps(program, plan, lines, Machine(lazy)), generator) and num_ranks > 0
    except UnopenedError:
        return False


@pytest.mark.parametrize("name", QUICKSTART_FIRST)
def test_no_shipped_program_hangs(name: str) -> None:
    """World ranks at start-up, and then the pipeline ranks of every program."""
    compiled = lowered(name)
    plan = compiled.plan
    lines = lines_of(compiled.openings, plan.mesh.pp)
    assert run(starts(lines, plan.mesh, Machine()), random.Random(0)) == []
    for program in compiled.programs.values():
        assert run(steps(program, plan, lines, Machine()), random.Random(1)) == [], program.name


@pytest.mark.parametrize("name", ["quickstart", "deepseek-v3"])
def test_without_start_up_it_would_hang(name: str) -> None:
    """DualPipe's middle ranks first post to each other: 7 waits for 8 in channel 8→7, and 8 for 7 in 7→8."""
    compiled = lowered(name)
    num_ranks = compiled.plan.mesh.pp
    machine = Machine(lazy=True)
    train = max((p for n, p in compiled.programs.items() if n.startswith("train")), key=lambda p: p.num_micro_batches)
    stuck = run(steps(train, compiled.plan, [[] for _ in range(num_ranks)], machine), random.Random(0))
    middle = num_ranks // 2 - 1, num_ranks // 2
    assert set(middle) <= set(stuck)
    for rank, peer in (middle, middle[::-1]):
        channel = ("edge each", (peer, rank))
        assert (rank, channel) in machine.used and (peer, channel) not in machine.used


@pytest.mark.parametrize("name", QUICKSTART_FIRST)
def test_each_rank_makes_few_groups(name: str) -> None:
    """Its edges, its column and node, or its expert group, its tensor and context ranks, its buckets and the world: as
    many for thousands of ranks as for eight. Frozen buckets are never summed."""
    compiled = lowered(name)
    mesh = compiled.plan.mesh
    wanted = WantedChannels(mesh, compiled.openings, {})
    channels = [wanted.channels(rank) for rank in range(mesh.world)]
    limit = 11 + (mesh.tp > 1) + (mesh.cp > 1)
    assert all(len(of_rank) == len(set(of_rank)) <= limit for of_rank in channels)
    counts = Counter(channel for of_rank in channels for channel in of_rank)
    assert counts == {(o.kind, ranks): len(ranks) for o in compiled.openings for ranks in o.channels(mesh)}
    for bucket in compiled.plan.buckets:
        if len(bucket.holders) > 1 and not bucket.is_still:
            assert all(("reduce", tuple(bucket.holders)) in channels[rank] for rank in bucket.holders[:2])
    if name == "deepseek-v3":
        assert (mesh.world, len(compiled.openings), len(counts)) == (2048, 111, 5385)
        assert Counter(map(len, channels)) == {11: 1792, 9: 256}


# ---------------------------------------------------------------- mutants of start-up orders


def swap(lines: Lines, generator: random.Random) -> Lines:
    """Two rows are exchanged on all ranks."""
    rows = list(dict.fromkeys(opening for line in lines for opening in line))
    a, b = generator.sample(rows, 2)
    swapped = {a: b, b: a}
    order = [swapped.get(opening, opening) for opening in sorted(rows, key=_place_in(lines))]
    return lines_of(order, len(lines))


def _place_in(lines: Lines) -> Callable[[Opening], int]:
    """A place in an order that all lines keep."""
    remaining, order = [list(line) for line in lines], []
    while any(remaining):
        row = next(line[0] for line in remaining if line and all(remaining[r][0] == line[0] for r in line[0].ranks))
        order.append(row)
        for rank in row.ranks:
            remaining[rank].pop(0)
    return order.index


def drop(lines: Lines, generator: random.Random) -> Lines:
    """A row is left out by all ranks."""
    row = generator.choice([opening for line in lines for opening in line])
    return [[opening for opening in line if opening != row] for line in lines]


def repeat(lines: Lines, generator: random.Random) -> Lines:
    """A row comes again at the end of all lines."""
    row = generator.choice([opening for line in lines for opening in line])
    return [[*line, row] if row in line else line for line in lines]


def reorder(lines: Lines, generator: random.Random) -> Lines:
    """One rank opens two of its channels the other way round."""
    rank = generator.randrange(len(lines))
    line = list(lines[rank])
    a = generator.randrange(len(line) - 1)
    b = generator.choice([a + 1, generator.randrange(len(line))])
    line[a], line[b] = line[b], line[a]
    return [*lines[:rank], line, *lines[rank + 1 :]]


def shuffle(lines: Lines, generator: random.Random) -> Lines:
    """One rank opens its channels in any order."""
    rank = generator.randrange(len(lines))
    return [*lines[:rank], generator.sample(lines[rank], len(lines[rank])), *lines[rank + 1 :]]


def forget(lines: Lines, generator: random.Random) -> Lines:
    """One rank leaves a row out."""
    rank = generator.randrange(len(lines))
    line = list(lines[rank])
    del line[generator.randrange(len(line))]
    return [*lines[:rank], line, *lines[rank + 1 :]]


def again(lines: Lines, generator: random.Random) -> Lines:
    """One rank opens a channel twice."""
    rank = generator.randrange(len(lines))
    line = list(lines[rank])
    line.insert(generator.randrange(len(line) + 1), generator.choice(line))
    return [*lines[:rank], line, *lines[rank + 1 :]]


MUTATIONS = (swap, drop, repeat, reorder, shuffle, forget, again)
FAMILIES = [("dualpipe", 2, 4), ("dualpipe", 4, 8), ("1f1b", 4, 6), ("zbv", 4, 6), ("interleaved", 3, 6)]


@pytest.mark.parametrize("family", FAMILIES)
def test_proof_and_machine_agree_on_mutants(family: tuple[str, int, int]) -> None:
    """210 per family, 1,050 together: exactly those that hang or use an unopened channel are refused."""
    program, plan = family_program(*family)
    openings = opening_order(plan, [program])
    check_start(plan, openings, [program])
    lines, needed, generator = lines_of(openings, plan.mesh.pp), used_channels(plan, [program]), random.Random(0)
    assert ends(program, plan, lines)
    accepted = Counter[str]()
    for number in range(210):
        mutation = MUTATIONS[number % len(MUTATIONS)]
        changed = mutation(lines, generator)
        holds = ends(program, plan, changed)
        assert proven(changed, needed) == holds, (mutation.__name__, changed)
        accepted[mutation.__name__] += holds
    assert accepted["swap"] == 30, "any one order will do"
    assert max(accepted["reorder"], accepted["shuffle"]) < 30
    assert not any(accepted[name] for name in ("drop", "repeat", "forget", "again"))


def proven(lines: Lines, needed: set[Opening]) -> bool:
    try:
        check_lines(lines, needed)
    except ProofError:
        return False
    return True


def test_messages_of_the_start_up_proof() -> None:
    program, plan = family_program("dualpipe", 2, 4)
    openings = opening_order(plan, [program])
    needed, (first, second) = used_channels(plan, [program]), lines_of(openings, 2)
    with pytest.raises(ProofError, match=r"rank 0: open edge 0>1; rank 1: open edge 1>0; none of them can go on"):
        check_lines([first, [second[1], second[0], *second[2:]]], needed)
    with pytest.raises(ProofError, match=r"rank 0, open edge 0>1: opened 0 times instead of once"):
        check_start(plan, openings[1:], [program])
    with pytest.raises(ProofError, match=r"rank 0, open expert 0: opened 2 times instead of once"):
        check_start(plan, (*openings, Opening("expert", (0,), "block")), [program])
    with pytest.raises(ProofError, match=r"rank 0, open reduce 0: nothing that it runs uses this channel"):
        check_start(plan, (*openings, Opening("reduce", (0,), "all")), [program])
    with pytest.raises(ProofError, match=r"open edge 1>2: there is no such rank"):
        check_start(plan, (*openings, Opening("edge", (1, 2), "each")), [program])
