"""The split of layers over stages: against every split there is, and what it keeps."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from compiler.layers.balance import partition
from compiler.layers.pipeline import Blocks, Pipeline
from compiler.schedules.placement import ranks_of_stage, stages_of

PLACEMENTS = ["loop(1)", "loop(2)", "loop(3)", "v", "bidirectional"]


def splits(num_layers: int, num_stages: int) -> list[tuple[tuple[int, int], ...]]:
    """All: the first and the last stage may be empty."""
    found = []
    for cuts in combinations(range(num_layers + num_stages - 1), num_stages - 1):
        ends = (*(cut - i for i, cut in enumerate(cuts)), num_layers)
        runs = tuple(zip((0, *ends[:-1]), ends, strict=True))
        if all(end > begin for begin, end in runs[1:-1]):
            found.append(runs)
    return found


def by_hand(pipeline: Pipeline, runs: tuple[tuple[int, int], ...]) -> tuple[int, int, int]:
    """The three loads from their definition, layer by layer."""
    last = len(runs) - 1

    def lanes(stage: int, blocks: Blocks) -> list[int]:
        parts = [blocks.layers[i] for i in range(*runs[stage])]
        parts += [blocks.first] * (stage == 0) + [blocks.last] * (stage == last)
        return [sum(part[lane] for part in parts) for lane in range(len(blocks.first))]

    ranks = []
    for rank, blocks in enumerate(pipeline.blocks):
        each = [lanes(stage, blocks) for stage in stages_of(pipeline.placement, pipeline.num_ranks, rank)]
        ranks.append(max(map(sum, zip(*each, strict=True))))
    stages = []
    for stage in range(len(runs)):
        holders = ranks_of_stage(pipeline.placement, pipeline.num_ranks, stage)
        stages.append(max(max(lanes(stage, pipeline.blocks[rank])) for rank in holders))
    return max(ranks), max(stages), sum(each * each for each in stages)


def random_blocks(generator: random.Random, num_layers: int, lanes: int) -> Blocks:
    top = generator.choice([1, 3, 9, 50])

    def cost() -> tuple[int, ...]:
        return tuple(generator.randint(0 if generator.random() < 0.1 else 1, top) for _ in range(lanes))

    return Blocks(tuple(cost() for _ in range(num_layers)), cost(), tuple(3 * each for each in cost()))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("num_kinds", [1, 2])
def test_no_split_is_better(placement: str, lanes: int, num_kinds: int) -> None:
    """On one kind of device and on two, with one lane and with two that go on together."""
    generator = random.Random(f"{placement} {lanes} {num_kinds}")
    for _ in range(40):
        num_ranks = generator.choice([2, 4] if placement == "bidirectional" else [1, 2, 3])
        stages = Pipeline(placement, (Blocks(((1,),), (0,), (0,)),) * num_ranks).num_stages
        num_layers = generator.randint(max(1, stages - 2), max(1, min(stages + 3, 8)))
        kinds = [random_blocks(generator, num_layers, lanes) for _ in range(num_kinds)]
        pipeline = Pipeline(placement, tuple(generator.choice(kinds) for _ in range(num_ranks)))
        split = partition(pipeline)
        every = splits(num_layers, stages)
        assert split.runs in every
        assert by_hand(pipeline, split.runs) == min(by_hand(pipeline, runs) for runs in every)
        assert pipeline.score(split.runs) == by_hand(pipeline, split.runs)


def test_more_stages_than_can_be_filled_are_refused() -> None:
    one = Blocks(((1,),), (1,), (1,))
    assert partition(Pipeline("loop(1)", (one,) * 3)).runs == ((0, 0), (0, 1), (1, 1))
    with pytest.raises(AssertionError, match="can be filled"):
        partition(Pipeline("loop(1)", (one,) * 4))


def test_a_slow_rank_gets_fewer_layers() -> None:
    """Half as fast, half as many: two of six."""
    fast, slow = (Blocks(((each,),) * 6, (0,), (0,)) for each in (10, 20))
    split = partition(Pipeline("loop(1)", (fast, slow)))
    assert split.runs == ((0, 4), (4, 6)) and (split.rank_load, split.stage_load) == (40, 40)
    assert partition(Pipeline("loop(1)", (slow, fast))).runs == ((0, 2), (2, 6))


def test_the_ends_of_a_fold_share_a_rank() -> None:
    """A head of three layers: the rank of both ends has one of ten, while a pipeline of four gives its last none."""
    blocks = Blocks(((1,),) * 10, (0,), (3,))
    split = partition(Pipeline("v", (blocks, blocks)))
    sizes = [end - begin for begin, end in split.runs]
    assert split.rank_load == 7 and sizes[0] + sizes[3] in (3, 4)
    assert split.stage_load == 4
