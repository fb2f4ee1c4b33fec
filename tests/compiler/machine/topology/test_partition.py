"""The split of layers over stages, compared with all possible splits, and its invariants."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement, V, loop
from compiler.plan import split_search, splitting
from compiler.plan.holding import moments_of
from compiler.plan.layer_runs import Blocks, Bytes, Holding, Pipeline, Runs
from compiler.plan.split_search import NEAR, AlikeSearch, CellSearch, search_of
from compiler.plan.splitting import partition
from compiler.schedule import SCHEDULES, stand_in
from compiler.schedule.schedule import Schedule
from runtime.contract.actions import actions_of

PLACEMENTS = [loop(1), loop(2), loop(3), V, BIDIRECTIONAL]


def splits(num_layers: int, num_stages: int) -> list[Runs]:
    """All: the first and the last stage may be empty."""
    all_runs = []
    for cuts in combinations(range(num_layers + num_stages - 1), num_stages - 1):
        ends = (*(cut - i for i, cut in enumerate(cuts)), num_layers)
        runs = tuple(zip((0, *ends[:-1]), ends, strict=True))
        if all(end > begin for begin, end in runs[1:-1]):
            all_runs.append(runs)
    return all_runs


def by_hand(pipeline: Pipeline, runs: Runs) -> tuple[int, int, int, int]:
    """The bytes and the three loads from their definition, layer by layer."""
    last = len(runs) - 1

    def lanes(stage: int, blocks: Blocks) -> list[int]:
        parts = [blocks.layers[i] for i in range(*runs[stage])]
        parts += [blocks.first] * (stage == 0) + [blocks.last] * (stage == last)
        return [sum(part[lane] for part in parts) for lane in range(len(blocks.first))]

    ranks = []
    for rank, blocks in enumerate(pipeline.blocks):
        stage_lanes = [lanes(stage, blocks) for stage in pipeline.stage_placement.stages_of(pipeline.num_ranks, rank)]
        ranks.append(max(map(sum, zip(*stage_lanes, strict=True))))
    stages = []
    for stage in range(len(runs)):
        holders = pipeline.stage_placement.ranks_of_stage(pipeline.num_ranks, stage)
        stages.append(max(max(lanes(stage, pipeline.blocks[rank])) for rank in holders))
    return bytes_by_hand(pipeline, runs), max(ranks), max(stages), sum(load * load for load in stages)


def bytes_by_hand(pipeline: Pipeline, runs: Runs) -> int:
    """Bytes of the fullest rank, counted as if no device had more room than another."""
    holding, last = pipeline.holding, len(runs) - 1
    if holding is None:
        return 0
    fullest = 0
    for rank, moments in enumerate(holding.moments):
        stages = pipeline.stage_placement.stages_of(pipeline.num_ranks, rank)
        for moment in moments:
            total = max(holding.room) - holding.room[rank] - (holding.shared if {0, last} <= {*stages} else 0)
            for stage, often in zip(stages, moment, strict=True):
                blocks = [holding.layers[i] for i in range(*runs[stage])]
                blocks += [holding.first] * (stage == 0) + [holding.last] * (stage == last)
                total += sum(count * size for block in blocks for count, size in zip(often, block, strict=True))
            fullest = max(fullest, total)
    return fullest


def best_of(pipeline: Pipeline, every: list[Runs]) -> tuple[int, int, int, int]:
    """The score that holds least among splits that nearly tie with the fastest in load, slowest stage and squares."""
    scores = [by_hand(pipeline, runs) for runs in every]
    fastest = min(score[1:] for score in scores)
    if pipeline.holding is None:
        return min(score for score in scores if score[1:] == fastest)
    load, stage, squares = fastest
    limits = load + load // NEAR, stage + stage // NEAR, squares + 2 * squares // NEAR
    return min(score for score in scores if all(a <= b for a, b in zip(score[1:], limits, strict=True)))


def random_blocks(generator: random.Random, num_layers: int, lanes: int) -> Blocks:
    top = generator.choice([1, 3, 9, 50])

    def cost() -> tuple[int, ...]:
        return tuple(generator.randint(0 if generator.random() < 0.1 else 1, top) for _ in range(lanes))

    return Blocks(tuple(cost() for _ in range(num_layers)), cost(), tuple(3 * time for time in cost()))


def near_blocks(generator: random.Random, num_layers: int, lanes: int) -> Blocks:
    """Blocks whose layers differ by about 1%, as in a model, so that many splits are near ties."""

    def cost() -> tuple[int, ...]:
        return tuple(1000 + generator.choice([0, 0, 3, 7, 12]) for _ in range(lanes))

    return Blocks(tuple(cost() for _ in range(num_layers)), cost(), tuple(2 * time for time in cost()))


def random_holding(generator: random.Random, num_layers: int, schedule: Schedule) -> Holding:
    def block() -> Bytes:
        return generator.randint(0, 90), generator.randint(0, 20), generator.randint(0, 9)

    first, last = block(), block()
    layers = tuple(block() for _ in range(num_layers))
    room = tuple(generator.choice([500, 500, 560]) for _ in range(schedule.num_ranks))
    return Holding(layers, first, last, min(first[0], last[0]) // 2, moments_of(schedule), room)


def random_pipeline(
    generator: random.Random, placement: StagePlacement, lanes: int, num_kinds: int, holds: bool
) -> Pipeline:
    """A pipeline of few layers, with what its ranks hold under some schedule."""
    num_ranks = generator.choice([2, 4] if placement == BIDIRECTIONAL else [1, 2, 3])
    stages = Pipeline(placement, (Blocks(((1,),), (0,), (0,)),) * num_ranks).num_stages
    num_layers = generator.randint(max(1, stages - 2), max(1, min(stages + (6 if holds and stages < 7 else 3), 8)))
    make = generator.choice([near_blocks, near_blocks, random_blocks]) if holds else random_blocks
    kinds = [make(generator, num_layers, lanes) for _ in range(num_kinds)]
    schedule = stand_in(placement, num_ranks, 4 * num_ranks)
    holding = random_holding(generator, num_layers, schedule) if holds else None
    return Pipeline(placement, tuple(generator.choice(kinds) for _ in range(num_ranks)), holding)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("num_kinds", [1, 2])
@pytest.mark.parametrize("holds", [False, True])
def test_no_split_is_better(placement: StagePlacement, lanes: int, num_kinds: int, holds: bool) -> None:
    """No split is better in loads and bytes, on one and two kinds of devices, with one lane and with two."""
    generator = random.Random(f"{placement} {lanes} {num_kinds}")
    moved = 0
    for _ in range(10 if placement == loop(3) else 40):
        pipeline = random_pipeline(generator, placement, lanes, num_kinds, holds)
        split = partition(pipeline)
        every = splits(pipeline.num_layers, pipeline.num_stages)
        assert split.runs in every
        assert by_hand(pipeline, split.runs) == best_of(pipeline, every)
        assert pipeline.score(split.runs) == by_hand(pipeline, split.runs)
        moved += holds and partition(replace(pipeline, holding=None)).runs != split.runs
    assert moved >= 1 or not holds, "near ties are found"


def alike_pipeline(
    generator: random.Random, placement: StagePlacement, lanes: int, num_kinds: int, holds: bool
) -> Pipeline:
    """A pipeline of equal layers except for up to two in front, over ranks that run several stages."""
    num_ranks = generator.choice([2, 4] if placement == BIDIRECTIONAL else [2, 3])
    num_stages = placement.num_stages(num_ranks)
    unlike = generator.randint(0, num_ranks // placement.copies - 1)
    num_layers = generator.randint(max(num_stages - 2, unlike + 1), num_stages + 4)
    kinds = [
        replace(blocks, layers=(*blocks.layers[:unlike], *blocks.layers[-1:] * (num_layers - unlike)))
        for blocks in (random_blocks(generator, num_layers, lanes) for _ in range(num_kinds))
    ]
    holding = None
    if holds:
        schedule = stand_in(placement, num_ranks, 4 * num_ranks)
        drawn = random_holding(generator, num_layers, schedule)
        holding = replace(drawn, layers=(*drawn.layers[:unlike], *drawn.layers[-1:] * (num_layers - unlike)))
    return Pipeline(placement, tuple(generator.choice(kinds) for _ in range(num_ranks)), holding)


@pytest.mark.parametrize("placement", PLACEMENTS[1:], ids=str)
@pytest.mark.parametrize("num_kinds", [1, 2])
@pytest.mark.parametrize("holds", [False, True])
def test_layers_that_are_alike_are_split_by_their_counts(
    placement: StagePlacement, num_kinds: int, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search by counts finds the split of the search by beginnings, to the layer, and no split is better."""
    monkeypatch.setattr(split_search, "MOST_STEPS", 10**9)
    generator = random.Random(f"{placement} {num_kinds} {holds}")
    for _ in range(15 if placement == loop(3) else 40):
        pipeline = alike_pipeline(generator, placement, generator.choice([1, 2]), num_kinds, holds)
        quick = search_of(replace(pipeline, holding=None))
        assert isinstance(quick, AlikeSearch)
        limits, runs = quick.fastest()
        assert (limits, runs) == CellSearch(replace(pipeline, holding=None)).fastest()
        if holds:
            fullest = pipeline.held_bytes(runs)
            runs = search_of(pipeline).fullest_least(limits, fullest)
            assert runs == CellSearch(pipeline).fullest_least(limits, fullest)
        assert by_hand(pipeline, runs) == best_of(pipeline, splits(pipeline.num_layers, pipeline.num_stages))


def test_more_stages_than_can_be_filled_are_refused() -> None:
    blocks = Blocks(((1,),), (1,), (1,))
    assert partition(Pipeline(loop(1), (blocks,) * 3)).runs == ((0, 0), (0, 1), (1, 1))
    with pytest.raises(AssertionError, match="more stages than layers can fill"):
        partition(Pipeline(loop(1), (blocks,) * 4))


def test_a_slow_rank_gets_fewer_layers() -> None:
    """Half as fast, half as many: two of six."""
    fast, slow = (Blocks(((time,),) * 6, (0,), (0,)) for time in (10, 20))
    split = partition(Pipeline(loop(1), (fast, slow)))
    assert split.runs == ((0, 4), (4, 6)) and (split.rank_load, split.stage_load) == (40, 40)
    assert partition(Pipeline(loop(1), (slow, fast))).runs == ((0, 2), (2, 6))


def test_the_ends_of_a_fold_share_a_rank() -> None:
    """The head costs three layers: a rank with both ends gets one of ten; the last of four pipeline ranks gets none."""
    blocks = Blocks(((1,),) * 10, (0,), (3,))
    split = partition(Pipeline(V, (blocks, blocks)))
    sizes = [end - begin for begin, end in split.runs]
    assert split.rank_load == 7 and sizes[0] + sizes[3] in (3, 4)
    assert split.stage_load == 4


# ---------------------------------------------------------------- near ties go to what holds less


def mirrored(runs: Runs, num_layers: int) -> Runs:
    return tuple((num_layers - end, num_layers - begin) for begin, end in reversed(runs))


@pytest.mark.parametrize("placement", [loop(1), V, BIDIRECTIONAL], ids=str)
def test_mirrored_models_have_mirrored_splits(placement: StagePlacement) -> None:
    """The reversed model on reversed ranks has an equally good split: the mirrored split is one of its best.
    Times and bytes in other units have the same split."""
    generator = random.Random(str(placement))
    for _ in range(30):
        pipeline = random_pipeline(generator, placement, 2, 1 if placement == V else 2, True)
        holding = pipeline.holding
        assert holding is not None
        turned = replace(
            pipeline,
            blocks=tuple(
                replace(b, layers=b.layers[::-1], first=b.last, last=b.first)
                for b in (pipeline.blocks if placement == V else pipeline.blocks[::-1])
            ),
            holding=replace(
                holding,
                layers=holding.layers[::-1],
                first=holding.last,
                last=holding.first,
                moments=tuple(
                    tuple(moment[::-1] for moment in rank_moments)
                    for rank_moments in (holding.moments if placement == V else holding.moments[::-1])
                ),
                room=holding.room if placement == V else holding.room[::-1],
            ),
        )
        split, turned_split = partition(pipeline), partition(turned)
        assert pipeline.score(split.runs) == turned.score(turned_split.runs)
        assert turned.score(mirrored(split.runs, pipeline.num_layers)) == turned.score(turned_split.runs)
        longer = replace(pipeline, holding=_scaled(holding, 1000))
        assert partition(longer).runs == split.runs


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_the_unit_of_time_does_not_matter(placement: StagePlacement) -> None:
    """The split also stays the same where the squares of times are very large."""
    generator = random.Random(str(placement))
    for _ in range(10):
        pipeline = random_pipeline(generator, placement, 1, 2, False)
        longer = {id(blocks): _longer(blocks, 10**12) for blocks in pipeline.kinds}
        slow = replace(pipeline, blocks=tuple(longer[id(blocks)] for blocks in pipeline.blocks))
        assert partition(slow).runs == partition(pipeline).runs


def _longer(blocks: Blocks, by: int) -> Blocks:
    def times(cost: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(by * time for time in cost)

    return Blocks(tuple(map(times, blocks.layers)), times(blocks.first), times(blocks.last))


def _scaled(held: Holding, by: int) -> Holding:
    def times(block: Bytes) -> Bytes:
        always, until_backward, until_weights = (by * size for size in block)
        return always, until_backward, until_weights

    return Holding(
        tuple(map(times, held.layers)),
        times(held.first),
        times(held.last),
        by * held.shared,
        held.moments,
        tuple(by * size for size in held.room),
    )


def test_near_ties_prefer_less_memory() -> None:
    """Rank 0 has more micro-batches in flight: it gives up a layer if that costs 1% of the time, but not 2%."""

    def split(first: int) -> Runs:
        blocks = Blocks(((100,),) * 5, (first,), (100 - first,))
        schedule = SCHEDULES["1f1b"].generate(2, 8, 1)
        holding = Holding(((10, 5, 0),) * 5, (0, 0, 0), (0, 0, 0), 0, moments_of(schedule), (99, 99))
        return partition(Pipeline(loop(1), (blocks, blocks), holding)).runs

    assert split(0) == ((0, 3), (3, 5)), "3 and 2 and the end, even: the other way the last rank takes a third more"
    for last, expected in ((0, 2), (3, 2), (5, 3)):  # 300 + 50, and 300 + 50 + last with three layers on the last rank
        blocks = Blocks(((100,),) * 5, (50,), (50 + last,))
        schedule = SCHEDULES["1f1b"].generate(2, 8, 1)
        holding = Holding(((10, 5, 0),) * 5, (0, 0, 0), (0, 0, 0), 0, moments_of(schedule), (99, 99))
        runs = partition(Pipeline(loop(1), (blocks, blocks), holding)).runs
        assert runs == ((0, expected), (expected, 5)), last


def test_too_many_steps_still_give_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the search for fewer bytes is cut short, the result is as fast; without any result, stages are balanced."""
    monkeypatch.setattr(splitting, "_fastest", splitting._fastest.__wrapped__)
    generator = random.Random(7)
    pipeline = random_pipeline(generator, loop(3), 1, 1, True)
    fastest = partition(replace(pipeline, holding=None))
    steps = []
    step = split_search.CellSearch._step
    monkeypatch.setattr(split_search.CellSearch, "_step", lambda self: (steps.append(1), step(self))[1])
    search_of(replace(pipeline, holding=None)).fastest()
    monkeypatch.setattr(split_search, "MOST_STEPS", len(steps))
    assert partition(pipeline).runs == fastest.runs
    monkeypatch.setattr(split_search, "MOST_STEPS", 1)
    with pytest.raises(split_search.TooLongError):
        partition(pipeline)


# ---------------------------------------------------------------- how many micro-batches are under way


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_the_fullest_moments_of_a_schedule(name: str) -> None:
    """Every step of a schedule is covered by one of these moments, and each moment occurs at a step."""
    row = SCHEDULES[name]
    schedule = row.generate(4, 16, 2)
    for rank, moments in enumerate(moments_of(schedule)):
        stages = schedule.stage_placement.stages_of(4, rank)
        until_backward, until_weights = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
        met = set()
        for step in schedule.actions[rank]:
            for action in sorted(actions_of(step), key=lambda action: action.kind != "F"):
                until_backward[action.stage] += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
                until_weights[action.stage] += {"F": 0, "B": 0, "I": 1, "W": -1}[action.kind]
                reached = tuple((1, until_backward[s], until_weights[s]) for s in stages)
                met.add(reached)
                assert any(all(x <= y for a, b in zip(reached, moment, strict=True) for x, y in zip(a, b, strict=True))
                           for moment in moments), (rank, str(step))  # fmt: skip
        assert set(moments) <= met
        assert not any(until_backward.values()) and not any(until_weights.values())


def test_a_split_that_only_holds_more_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[Pipeline]()

    def counted(pipeline: Pipeline) -> CellSearch:
        searched.append(pipeline)
        return search_of(pipeline)

    monkeypatch.setattr("compiler.plan.splitting.search_of", counted)
    draw = random.Random(0)
    blocks = Blocks(tuple((draw.randrange(1, 1000),) for _ in range(8)), (3,), (7,))
    pipeline = Pipeline(V, (blocks,) * 3)
    first = partition(pipeline)
    assert partition(pipeline) == first and searched == [pipeline]
    slower = Pipeline(V, (replace(blocks, first=(4,)),) * 3)
    partition(slower)
    assert searched == [pipeline, slower]
