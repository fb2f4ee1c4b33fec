"""A pipeline to split layers over: what its ranks store, and what the blocks of a model cost on each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from compiler.schedules import DEFAULT_CHUNKS, placement_of
from compiler.schedules.placement import BIDIRECTIONAL, V, num_stages, stages_of
from dsl.schema import Spec
from dsl.stages import is_folded

Cost = tuple[int, ...]  # nanoseconds on each lane that goes on at the same time; a load is the largest of its sums
Runs = tuple[tuple[int, int], ...]  # (begin, end) of the layers of each stage


def storage_of(spec: Spec) -> str:
    """The placement of a spec's schedule: what each pipeline rank stores."""
    name, chunks = spec.schedule.name, spec.schedule.chunks
    assert name is not None
    return placement_of(name, spec.parallel.pipeline, chunks or DEFAULT_CHUNKS, is_folded(spec))


@dataclass(frozen=True)
class Blocks:
    """What the blocks of a model cost on one kind of device: the layers, and what the two ends have besides."""

    layers: tuple[Cost, ...]
    first: Cost
    last: Cost

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """On each lane, the cost of the first n layers."""
        return tuple((0, *accumulate(lane)) for lane in zip(*self.layers, strict=True))

    @cached_property
    def behind(self) -> tuple[tuple[int, ...], ...]:
        """The same of the last n layers."""
        return tuple((0, *accumulate(reversed(lane))) for lane in zip(*self.layers, strict=True))


@dataclass(frozen=True)
class Split:
    """Runs of layers, one a stage; how long a rank and a stage take at most, in nanoseconds for a micro-batch."""

    runs: Runs
    rank_load: int
    stage_load: int


@dataclass(frozen=True)
class Pipeline:
    """Which ranks store which stages, and what the blocks cost on each of them."""

    placement: str
    blocks: tuple[Blocks, ...]  # of each pipeline rank; equal devices share one value

    @property
    def num_ranks(self) -> int:
        return len(self.blocks)

    @cached_property
    def kinds(self) -> tuple[Blocks, ...]:
        """The different ones."""
        return tuple({id(blocks): blocks for blocks in self.blocks}.values())

    @cached_property
    def num_stages(self) -> int:
        return num_stages(self.placement, self.num_ranks)

    @property
    def num_layers(self) -> int:
        return len(self.blocks[0].layers)

    @property
    def folded(self) -> bool:
        return self.placement in (V, BIDIRECTIONAL)

    @cached_property
    def cells(self) -> tuple[tuple[tuple[int, ...], tuple[Blocks, ...]], ...]:
        """(stages, the different blocks of the ranks that store them) in the order of their first stages."""
        found: dict[tuple[int, ...], dict[int, Blocks]] = {}
        for rank, blocks in enumerate(self.blocks):
            found.setdefault(stages_of(self.placement, self.num_ranks, rank), {})[id(blocks)] = blocks
        return tuple((stages, tuple(kinds.values())) for stages, kinds in sorted(found.items(), key=lambda f: f[0]))

    def stage_load(self, stage: int, begin: int, end: int) -> int:
        """Of a run of layers as a stage, on the slowest rank that stores it."""
        return max(self.loads((stage,), blocks, ((begin, end),)) for blocks in self.kinds_of[stage])

    @cached_property
    def kinds_of(self) -> dict[int, tuple[Blocks, ...]]:
        return {stage: kinds for stages, kinds in self.cells for stage in stages}

    def loads(self, stages: Sequence[int], blocks: Blocks, runs: Sequence[tuple[int, int]]) -> int:
        """Of stages together on one kind of device: the fuller lane."""
        last = self.num_stages - 1
        return max(
            sum(lane[end] - lane[begin] for begin, end in runs)
            + sum((first if s == 0 else 0) + (final if s == last else 0) for s in stages)
            for lane, first, final in zip(blocks.before, blocks.first, blocks.last, strict=True)
        )

    def score(self, runs: Runs) -> tuple[int, int, int]:
        """(largest load of a rank, largest of a stage, sum of the stages' squares). What is less is better.

        Loads of ranks are sums of their stages; `split_of` makes the mean of them where a rank runs each half the time.
        """
        ranks = [self.loads(stages, b, [runs[s] for s in stages]) for stages, kinds in self.cells for b in kinds]
        each = [self.stage_load(s, *run) for s, run in enumerate(runs)]
        return max(ranks), max(each), sum(load * load for load in each)

    def split_of(self, runs: Runs) -> Split:
        """The runs, with their loads."""
        rank_load, stage_load, _ = self.score(runs)
        return Split(runs, rank_load // (2 if self.placement == BIDIRECTIONAL else 1), stage_load)
