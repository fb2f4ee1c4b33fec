"""Text and JSON forms, legality, placements."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement, V, loop
from compiler.schedule.dualpipe import dualpipe
from compiler.schedule.one_f_one_b import forward_only, one_f_one_b
from compiler.schedule.schedule import Schedule, ScheduleError, depends
from runtime.contract.actions import Action, Pair, Step

DUALPIPE_4_8 = """\
# dualpipe ranks=4 micro_batches=8 placement=bidirectional
F0.0 F0.1 F0.2 F3.4 I3.4 W3.4 F3.5 (F0.3|B3.5) (F3.6|B0.0) B3.6 (F3.7|B0.1) B3.7 I0.2 W0.2 I0.3 W0.3
F1.0 F2.4 F1.1 F2.5 F1.2 B2.4 (F2.6|B1.0) (F1.3|B2.5) (F2.7|B1.1) B2.6 B1.2 I2.7 I1.3 W2.7 W1.3
F1.4 F2.0 F1.5 F2.1 F1.6 B2.0 (F2.2|B1.4) (F1.7|B2.1) (F2.3|B1.5) B2.2 B1.6 I2.3 I1.7 W2.3 W1.7
F0.4 F0.5 F0.6 F3.0 I3.0 W3.0 F3.1 (F0.7|B3.1) (F3.2|B0.4) B3.2 (F3.3|B0.5) B3.3 I0.6 W0.6 I0.7 W0.7
"""


def some_schedules() -> list[Schedule]:
    return [
        dualpipe(2, 4),
        dualpipe(8, 20),
        one_f_one_b(1, 1),
        one_f_one_b(5, 3),
        forward_only(BIDIRECTIONAL, 4, 1),
        forward_only(loop(2), 3, 5),
        Schedule("no_work", 2, 1, loop(1), ((), ())),
    ]


def replaced(schedule: Schedule, rank: int, steps: list[Step]) -> Schedule:
    rows = [*schedule.actions]
    rows[rank] = tuple(steps)
    return dataclasses.replace(schedule, actions=tuple(rows))


def test_text_of_dualpipe() -> None:
    assert dualpipe(4, 8).to_text() == DUALPIPE_4_8


@pytest.mark.parametrize("schedule", some_schedules(), ids=lambda schedule: schedule.name)
def test_forms_are_exact_inverses(schedule: Schedule) -> None:
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_json_form() -> None:
    expected = (
        '{"schedule": "1f1b", "ranks": 2, "micro_batches": 1, "placement": "loop(1)",'
        ' "actions": [["F0.0", "B0.0"], ["F1.0", "B1.0"]]}'
    )
    assert one_f_one_b(2, 1).to_json() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("# x ranks=1 micro_batches=1\nF0.0\n", "line 1"),
        ("# x ranks=2 micro_batches=1 placement=loop(1)\nF0.0\n", "ranks=2, but 1 lines"),
        ("# x ranks=1 micro_batches=1 placement=loop(1)\nF0.0\n\n", "ranks=1, but 2 lines"),
        ("# x ranks=1 micro_batches=1 placement=loop(1)\nF0.0 B0,0\n", "line 2: 'B0,0' is not an action"),
    ],
)
def test_malformed_text(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "one object with the keys"),
        ('{"schedule": "x"}', "one object with the keys"),
        ('{"schedule":"x","ranks":true,"micro_batches":1,"placement":"v","actions":[]}', '"ranks" must be of type int'),
        ('{"schedule":"x","ranks":2,"micro_batches":1,"placement":"v","actions":[[]]}', "has 1 rows"),
        ('{"schedule":"x","ranks":1,"micro_batches":1,"placement":"v","actions":[[0]]}', "rank 0: expected a list"),
        ('{"schedule":"x","ranks":1,"micro_batches":1,"placement":"v","actions":[["F"]]}', "rank 0: 'F' is not an"),
    ],
)
def test_malformed_json(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_json(text)


EDITS = [  # edits of dualpipe(4, 8): (rank, old, new, expected error)
    (0, "F0.1 ", "", "rank 0, B0.1: comes before its F"),
    (0, " W0.3", "", "rank 0, W0.3: missing"),
    (2, " B2.2 ", " ", "rank 2, B2.2: missing"),
    (0, "F0.1", "F0.0", "rank 0, F0.0: runs after F of the same stage and micro-batch, so twice"),
    (1, "B2.6", "B2.4", "rank 1, B2.4: runs after F, B of the same stage and micro-batch, so twice"),
    (0, "I3.4 W3.4", "W3.4 I3.4", "rank 0, W3.4: comes before its I"),
    (0, "I3.4 W3.4", "B3.4 W3.4", "rank 0, W3.4: comes before its I"),
    (0, "I3.4 W3.4", "I3.4 B3.4", "rank 0, B3.4: runs after F, I of the same stage and micro-batch, so twice"),
    (0, "F0.1", "F1.1", "rank 0, F1.1: placement bidirectional runs it on rank 1"),
    (0, "F0.1", "F0.5", "rank 0, F0.5: placement bidirectional runs it on rank 3"),
    (0, "F0.1", "F4.1", "rank 0, F4.1: its schedule has 4 stages and 8 micro-batches"),
    (0, "F0.1", "F0.8", "rank 0, F0.8: its schedule has 4 stages and 8 micro-batches"),
    (3, "I3.0 W3.0", "(I3.0|W3.0)", r"rank 3, \(I3.0\|W3.0\): its two actions are not independent"),
]


@pytest.mark.parametrize(("rank", "old", "new", "message"), EDITS)
def test_illegal_edits(rank: int, old: str, new: str, message: str) -> None:
    lines = DUALPIPE_4_8.splitlines(keepends=True)
    assert old in lines[rank + 1]
    lines[rank + 1] = lines[rank + 1].replace(old, new, 1)
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text("".join(lines)).check()


def test_every_dropped_doubled_or_moved_action_is_illegal() -> None:
    """Any action that is dropped, doubled or moved to another rank is found, in any order of the micro-batches."""
    schedule = dualpipe(4, 8)
    for rank, steps in enumerate(schedule.actions):
        for index in range(len(steps)):
            without = [*steps[:index], *steps[index + 1 :]]
            twice = [*steps[: index + 1], *steps[index:]]
            moved = replaced(
                replaced(schedule, rank, without), (rank + 1) % 4, [*schedule.actions[rank - 3], steps[index]]
            )
            for mutant in (replaced(schedule, rank, without), replaced(schedule, rank, twice), moved):
                with pytest.raises(ScheduleError):
                    mutant.check()


def test_a_backward_for_some_but_not_all_is_illegal() -> None:
    schedule = forward_only(loop(1), 2, 2)
    schedule.check()
    with pytest.raises(ScheduleError, match=r"rank 1, B1\.0: missing"):
        replaced(schedule, 0, [*schedule.actions[0], Action("B", 0, 0), Action("B", 0, 1)]).check()


@pytest.mark.parametrize("schedule", [dataclasses.replace(dualpipe(2, 4), num_ranks=3),
                                      Schedule("odd", 3, 1, BIDIRECTIONAL, ((),) * 3)])  # fmt: skip
def test_sizes_that_do_not_fit(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"do not fit|even number of ranks"):
        schedule.check()


def test_depends_is_the_closure_of_the_direct_dependences() -> None:
    """`depends` is reachability in the graph of direct edges, B split as I and W, on 3 stages."""
    stages = range(3)
    parts = {kind: ("I", "W") if kind == "B" else (kind,) for kind in "FBIW"}
    edges = {("I", stage): [("F", stage), ("I", stage + 1)] for stage in stages}
    edges |= {("W", stage): [("I", stage)] for stage in stages}
    edges |= {("F", stage): [("F", stage - 1)] for stage in stages}

    def reachable(node: tuple[str, int], seen: set[tuple[str, int]]) -> set[tuple[str, int]]:
        for after in edges.get(node, []):
            if after in edges and after not in seen:
                seen.add(after)
                reachable(after, seen)
        return seen

    for (a, s), (b, t) in itertools.product(itertools.product("FBIW", stages), repeat=2):
        if s == t and {a, b} == {"B", "W"}:
            continue  # never both in one schedule
        first, second = {(kind, s) for kind in parts[a]}, {(kind, t) for kind in parts[b]}
        expected = any(({node} | reachable(node, set())) & second for node in first)
        assert depends(Action(a, s, 0), Action(b, t, 0)) == expected, (a, s, b, t)
        assert not depends(Action(a, s, 0), Action(b, t, 1))


@pytest.mark.parametrize("placement", [BIDIRECTIONAL, V, loop(1), loop(2), loop(3)], ids=str)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 8])
def test_placement_functions_agree(placement: StagePlacement, num_micro_batches: int) -> None:
    for num_ranks in (2, 4, 6):
        stages = range(placement.num_stages(num_ranks))
        used: dict[int, set[int]] = {rank: set() for rank in range(num_ranks)}
        for stage, micro_batch in itertools.product(stages, range(num_micro_batches)):
            rank = placement.rank_of(num_ranks, num_micro_batches, stage, micro_batch)
            used[rank].add(stage)
            mirror = placement.rank_of(num_ranks, num_micro_batches, stages[-1] - stage, micro_batch)
            assert mirror == (rank if placement == V else num_ranks - 1 - rank)
            if stage + 1 in stages:  # neighbouring stages are on neighbouring ranks, of a ring for loops
                distance = abs(placement.rank_of(num_ranks, num_micro_batches, stage + 1, micro_batch) - rank)
                assert distance in (
                    (1,) if placement == BIDIRECTIONAL else (0, 1) if placement == V else (1, num_ranks - 1)
                )
        for rank in range(num_ranks):
            stored = placement.stages_of(num_ranks, rank)
            assert list(stored) == sorted(stored)
            assert used[rank] <= set(stored)
            assert num_micro_batches == 1 or used[rank] == set(stored)
        halves = [placement.direction(num_micro_batches, micro_batch) for micro_batch in range(num_micro_batches)]
        assert halves == sorted(halves)
        assert sum(halves) == (num_micro_batches // 2 if placement == BIDIRECTIONAL else 0)


def test_supports() -> None:
    assert BIDIRECTIONAL.supports(loop(1), 4)
    assert BIDIRECTIONAL.supports(BIDIRECTIONAL, 4)
    assert not loop(1).supports(BIDIRECTIONAL, 4)
    assert not V.supports(loop(2), 4)
    assert not loop(2).supports(loop(1), 4)


def test_the_text_of_a_placement_is_exact() -> None:
    for placement in (BIDIRECTIONAL, V, *map(loop, (1, 2, 10, 9999))):
        assert StagePlacement.parse(str(placement)) == placement
        assert hash(StagePlacement.parse(str(placement))) == hash(placement)
    for text in ("", "V", "loop", "loop(01)", "loop(10000)", "loop(1) ", "bidirectional\n"):
        with pytest.raises(ValueError, match="unknown placement"):
            StagePlacement.parse(text)


def test_a_file_of_an_unknown_placement_is_refused() -> None:
    with pytest.raises(ScheduleError, match="unknown placement 'ring': expected bidirectional, v or loop"):
        Schedule.from_text("# x ranks=1 micro_batches=1 placement=ring\nF0.0 B0.0\n")
    with pytest.raises(ScheduleError, match="unknown placement 'ring'"):
        Schedule.from_json(
            '{"schedule":"x","ranks":1,"micro_batches":1,"placement":"ring","actions":[["F0.0","B0.0"]]}'
        )


@pytest.mark.parametrize(
    ("placement", "ranks"), [("ring", 2), ("loop(0)", 2), ("loop(1", 2), ("bidirectional", 3), ("v", 0)]
)
def test_no_such_placement(placement: str, ranks: int) -> None:
    with pytest.raises(ValueError, match=r"unknown placement|even number of ranks|at least 1 rank"):
        StagePlacement.parse(placement).num_stages(ranks)


def test_independent_pairs_are_legal() -> None:
    """Any two independent adjacent actions may be paired, W with W and F with F included."""
    generator = random.Random(3)
    for _ in range(50):
        schedule = dualpipe(4, 8)
        rank = generator.randrange(4)
        steps = list(schedule.actions[rank])
        index = generator.randrange(len(steps) - 1)
        first, second = steps[index : index + 2]
        if isinstance(first, Pair) or isinstance(second, Pair) or depends(second, first):
            continue
        steps[index : index + 2] = [Pair(second, first)]
        replaced(schedule, rank, steps).check()
