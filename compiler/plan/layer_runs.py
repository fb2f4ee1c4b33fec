"""A pipeline to split layers over: the stages of its ranks, and the costs of a model's blocks on each of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from compiler import ir
from compiler.ir import StageStep
from compiler.ir.dtypes import data_of
from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement, V, loop
from compiler.model.segments.interpret import cut
from compiler.plan.actions.chains import ValueNames
from compiler.plan.spec_files import schedule_of_file
from compiler.schedule import AUTO, DEFAULT_CHUNKS, SCHEDULES
from dsl.closed_forms.stages import fewest_stages_of_rank, is_folded, is_mirrored
from dsl.schema import Spec

Cost = tuple[int, ...]  # nanoseconds on each lane; lanes run at the same time, so a load is the largest sum of a lane
Runs = tuple[tuple[int, int], ...]  # (begin, end) of the layers of each stage
Bytes = tuple[int, int, int]  # always held; per micro-batch until its backward; per micro-batch with a deferred W
Moment = tuple[Bytes, ...]  # for each stage of a rank, how often it holds each of the three `Bytes`
Moments = tuple[tuple[Moment, ...], ...]  # for each rank, its fullest moments


def stage_placement_of_spec(spec: Spec) -> StagePlacement:
    """The stage placement of a spec's schedule: which stages each pipeline rank holds."""
    if (schedule := schedule_of_file(spec)) is not None:
        return schedule.stage_placement
    name, chunks = spec.schedule.name, spec.schedule.chunks
    assert name is not None
    if name != AUTO:
        return SCHEDULES[name].stage_placement(chunks or DEFAULT_CHUNKS)
    return BIDIRECTIONAL if is_mirrored(spec) else V if is_folded(spec) else loop(fewest_stages_of_rank(spec.schedule))


@dataclass(frozen=True)
class Blocks:
    """The costs of a model's blocks on one kind of device: its layers, and the blocks at both ends."""

    layers: tuple[Cost, ...]
    first: Cost
    last: Cost

    @cached_property
    def first_costs(self) -> tuple[tuple[int, ...], ...]:
        """By lane, the cost of the first n layers."""
        return tuple((0, *accumulate(lane)) for lane in zip(*self.layers, strict=True))

    @cached_property
    def last_costs(self) -> tuple[tuple[int, ...], ...]:
        """By lane, the cost of the last n layers."""
        return tuple((0, *accumulate(reversed(lane))) for lane in zip(*self.layers, strict=True))


@dataclass(frozen=True)
class Holding:
    """The memory of a model's blocks on a device, in bytes (compiler/plan/holding.py)."""

    layers: tuple[Bytes, ...]
    first: Bytes
    last: Bytes
    shared: int  # that both ends have in common: a rank with both holds it once
    moments: Moments
    room: tuple[int, ...]  # memory of each rank's device


@dataclass(frozen=True)
class LayerSplit:
    """A run of layers for each stage, and the loads of the split."""

    runs: Runs
    rank_load: int  # nanoseconds of a micro-batch on the most loaded rank
    stage_load: int  # nanoseconds of a micro-batch in the slowest stage
    held_bytes: int = (
        0  # bytes on the fullest device, plus how much smaller its memory is than the largest; 0 if unknown
    )


@dataclass(frozen=True)
class LaneCosts:
    """Nanoseconds of a lane on a kind of device, or bytes of a moment of a rank, by run of layers."""

    costs: tuple[tuple[int, ...], ...]  # for each run, the cost of the first n layers from the end where it begins
    ends: tuple[int, ...]  # for each run, the cost of its stage without layers


@dataclass(frozen=True)
class StageCell:
    """The ranks that store the same stages, with their costs."""

    stages: tuple[int, ...]
    times: tuple[LaneCosts, ...]
    bytes: tuple[LaneCosts, ...]

    @cached_property
    def costs(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each run, the costs of the first n layers on every lane, with lanes of time first."""
        return tuple(zip(*(lane.costs for lane in (*self.times, *self.bytes)), strict=True))

    @cached_property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """For each run, the time on every lane of its stage without layers."""
        return tuple(zip(*(lane.ends for lane in self.times), strict=True))

    @cached_property
    def empty(self) -> tuple[int, ...]:
        """The cost of the cell on every lane without layers."""
        return tuple(sum(lane.ends) for lane in (*self.times, *self.bytes))


@dataclass(frozen=True)
class Pipeline:
    """The stages of each rank, and the costs of the blocks on it."""

    stage_placement: StagePlacement
    blocks: tuple[Blocks, ...]  # for each pipeline rank; equal devices share one value
    holding: Holding | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.blocks)

    @cached_property
    def kinds(self) -> tuple[Blocks, ...]:
        """The distinct values of `blocks`."""
        return tuple({id(blocks): blocks for blocks in self.blocks}.values())

    @cached_property
    def num_stages(self) -> int:
        return self.stage_placement.num_stages(self.num_ranks)

    @property
    def num_layers(self) -> int:
        return len(self.blocks[0].layers)

    @property
    def is_folded(self) -> bool:
        return self.stage_placement.form != "loop"

    @cached_property
    def cells(self) -> tuple[tuple[tuple[int, ...], tuple[Blocks, ...]], ...]:
        """(stages, distinct blocks of the ranks that hold them), in the order of their first stages."""
        cells: dict[tuple[int, ...], dict[int, Blocks]] = {}
        for rank, blocks in enumerate(self.blocks):
            cells.setdefault(self.stage_placement.stages_of(self.num_ranks, rank), {})[id(blocks)] = blocks
        return tuple((stages, tuple(kinds.values())) for stages, kinds in sorted(cells.items(), key=lambda f: f[0]))

    def stage_load(self, stage: int, begin: int, end: int) -> int:
        """The load of a stage with a run of layers, on the slowest rank that holds it."""
        return max(self.loads((stage,), blocks, ((begin, end),)) for blocks in self.kinds_of[stage])

    @cached_property
    def kinds_of(self) -> dict[int, tuple[Blocks, ...]]:
        return {stage: kinds for stages, kinds in self.cells for stage in stages}

    def loads(self, stages: Sequence[int], blocks: Blocks, runs: Sequence[tuple[int, int]]) -> int:
        """The load of several stages on one kind of device, on the fuller lane."""
        last = self.num_stages - 1
        return max(
            sum(lane[end] - lane[begin] for begin, end in runs)
            + sum((first if s == 0 else 0) + (final if s == last else 0) for s in stages)
            for lane, first, final in zip(blocks.first_costs, blocks.first, blocks.last, strict=True)
        )

    @cached_property
    def lanes(self) -> tuple[StageCell, ...]:
        """The cells with all their lanes."""
        return tuple(
            StageCell(stages, tuple(self._times(stages, kinds)), tuple(dict.fromkeys(self._bytes(stages))))
            for stages, kinds in self.cells
        )

    def _descends(self, run: int) -> bool:
        """Whether the stages of a run begin at the last layer."""
        return self.is_folded and run == 1

    def _times(self, stages: Sequence[int], kinds: Sequence[Blocks]) -> Iterator[LaneCosts]:
        last = self.num_stages - 1
        down = [self._descends(run) for run in range(len(stages))]
        for blocks in kinds:
            for before, behind, first, final in zip(
                blocks.first_costs, blocks.last_costs, blocks.first, blocks.last, strict=True
            ):
                ends = tuple((first if s == 0 else 0) + (final if s == last else 0) for s in stages)
                yield LaneCosts(tuple(behind if descends else before for descends in down), ends)

    def _bytes(self, stages: tuple[int, ...]) -> Iterator[LaneCosts]:
        """Lanes of bytes, one per moment of each rank that holds the stages.

        A device with less memory than the largest one counts as holding the difference.
        """
        holding = self.holding
        if holding is None:
            return
        last, kinds = self.num_stages - 1, [*dict.fromkeys(holding.layers)]
        for rank, moments in enumerate(holding.moments):
            if self.stage_placement.stages_of(self.num_ranks, rank) != stages:
                continue
            for moment in moments:
                ends = [
                    (held_by(counts, holding.first) if s == 0 else 0)
                    + (held_by(counts, holding.last) if s == last else 0)
                    for s, counts in zip(stages, moment, strict=True)
                ]
                ends[0] += max(holding.room) - holding.room[rank] - (holding.shared if {0, last} <= {*stages} else 0)
                costs = []
                for run, counts in enumerate(moment):
                    of_kind = {kind: held_by(counts, kind) for kind in kinds}
                    layers = [of_kind[layer] for layer in holding.layers]
                    costs.append((0, *accumulate(reversed(layers) if self._descends(run) else layers)))
                yield LaneCosts(tuple(costs), tuple(ends))

    def score(self, runs: Runs) -> tuple[int, int, int, int]:
        """(bytes of the fullest rank, largest load of a rank, largest load of a stage, sum of squares of stage loads).

        Less is better. The load of a rank is the sum of its stages; `split_of` takes the mean if a rank runs each of
        them on half of the micro-batches.
        """
        ranks = [self.loads(stages, b, [runs[s] for s in stages]) for stages, kinds in self.cells for b in kinds]
        stage_loads = [self.stage_load(s, *run) for s, run in enumerate(runs)]
        return self.held_bytes(runs), max(ranks), max(stage_loads), sum(load * load for load in stage_loads)

    def held_bytes(self, runs: Runs) -> int:
        """Bytes of the fullest rank."""
        size, fullest = self.num_layers, 0
        for cell in self.lanes:
            for lane in cell.bytes:
                spent = sum(lane.ends)
                for run, s in enumerate(cell.stages):
                    begin, end = runs[s]
                    begin, end = (size - end, size - begin) if self._descends(run) else (begin, end)
                    spent += lane.costs[run][end] - lane.costs[run][begin]
                fullest = max(fullest, spent)
        return fullest

    def split_of(self, runs: Runs) -> LayerSplit:
        """The runs, with their loads."""
        fullest, rank_load, stage_load, _ = self.score(runs)
        return LayerSplit(runs, rank_load // self.stage_placement.copies, stage_load, fullest)


def held_by(counts: Bytes, sizes: Bytes) -> int:
    """Bytes of a block: the sum of its three kinds of bytes `sizes`, each times its count in `counts`."""
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


# --- A layer whose backward recomputes its forward: which of its steps run again
#
# Only the layer's input is kept. Steps whose values a backward of the layer reads run again, including the dispatch of
# rows to experts. A segment runs again only if another one reads its results: otherwise its backward recomputes what it
# reads inside itself (compiler/model/segments/recompute.py). So neither the last product of a feed-forward part nor the
# return of its rows runs twice.

CutOf = Callable[[ir.Segment], ir.Cut]


class Cutter:
    """Cuts segments. Each distinct segment is cut once, unless its cut was given."""

    def __init__(self, by_key: dict[Hashable, ir.Cut]) -> None:
        self._by_key = by_key

    def __call__(self, segment: ir.Segment) -> ir.Cut:
        key = segment.key
        if key not in self._by_key:
            self._by_key[key] = cut(segment)
        return self._by_key[key]


class RecomputedSteps:
    """The recomputed steps of layers that differ only in names, and so have the same steps recomputed."""

    def __init__(self, cut_of: CutOf) -> None:
        self._cut_of = cut_of
        self._first: tuple[StageStep, ...] = ()

    def steps(self, plain: Sequence[StageStep], inside: Sequence[StageStep]) -> tuple[StageStep, ...]:
        """The steps of a layer, with `is_repeated` set as `recomputed_steps` decides."""
        if not self._first:
            self._first = recomputed_steps(plain, inside, self._cut_of)
        of_kind = zip(self._first, plain, inside, strict=True)
        return tuple(
            replace(step if first.is_repeated else inner, is_repeated=first.is_repeated)
            for first, step, inner in of_kind
        )


def recomputed_steps(plain: Sequence[StageStep], inside: Sequence[StageStep], cut_of: CutOf) -> tuple[StageStep, ...]:
    """The steps of a recomputed layer.

    `plain` are its steps with segments whose backward recomputes nothing, and `inside` those with segments whose
    backward recomputes all of the segment.
    """
    read: set[str] = set()  # by backwards that run after the step's
    result: list[StageStep] = []
    for step, inner in zip(reversed(plain), reversed(inside), strict=True):
        if isinstance(step, ir.Communication):
            is_repeated = not read.isdisjoint(_moved_values(step))
            read |= _bases(step.inputs) if is_repeated else set()
        else:
            assert isinstance(inner, ir.Use), "both are lists of the same steps"
            is_repeated = not (read | _read_back(inner, cut_of)).isdisjoint(step.outputs if result else ())
            chosen_step = step if is_repeated else inner
            read |= _read_back(chosen_step, cut_of) | (set(step.inputs) if is_repeated else set())
            step = chosen_step
        result.append(replace(step, is_repeated=is_repeated))
    return tuple(reversed(result))


def _moved_values(step: ir.Communication) -> set[str]:
    """The values that an exchange moves. Offsets are not among them: they come with the counts, which are kept."""
    outputs = step.outputs[:-1] if step.kind == "dispatch" else step.outputs
    return _bases(buffer.name for buffer in outputs)


def _read_back(use: ir.Use, cut_of: CutOf) -> set[str]:
    """The values of its layer that a segment's backward reads."""
    cut = cut_of(use.segment)
    names = ValueNames.of(use, cut).values
    return _bases(names[arg] for arg in (*cut.I.args, *cut.W.args) if arg in names)


def _bases(names: Iterable[str]) -> set[str]:
    """The names of values; for FP8 values, the names of their data."""
    return set(map(data_of, names))
