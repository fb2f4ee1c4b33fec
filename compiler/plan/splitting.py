"""How the layers of a model are split over stages, and by what; each part is made when it is first asked for.

The names of layers do not matter here, so the model may be one whose layers at one place are one block (blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, reduce

from compiler.ir.stage_placement import ONE_STAGE, StagePlacement
from compiler.plan.actions.chains import Chains
from compiler.plan.blocks import CutModel, blocks_of, chains_of, cuts_by_site
from compiler.plan.holding import holding_of, moments_of, schedule_on
from compiler.plan.layer_runs import Blocks, Bytes, Holding, LayerSplit, Moments, Pipeline, Runs
from compiler.plan.spec_rates import parts_of_ranks, rates_of
from compiler.plan.split_search import TooLongError, search_of
from dsl.closed_forms.stages import may_overlap
from dsl.facts.layout import stages_of_layout
from dsl.schema import Spec

# --- Layers to pipeline stages: the exact min-max partition, knowing which stages share a rank and what devices hold
#
# A rank's load comes first because a rank runs all its stages on every micro-batch, and the most loaded one sets the
# rhythm; of a slow stage only the filling and draining suffer. Under `bidirectional` each of the two copies of a stage
# runs half of the micro-batches, so a rank's load is the mean of its two stages.
#
# Loads come from rates, which are known to some percent: a split whose most loaded rank takes `1 / NEAR` more than the
# least there is cannot be told from it by a measurement. Of all these near ties the best is, in this order, the one
# with the least on the fullest device; the least load; the fastest slowest stage; the least sum of the squares of the
# stages' times. Layers of one kind cannot be near ties by their number, whose errors cancel: only unlike ones can, as a
# layer of experts and a dense one, whose rates are of different kernels.
#
# How: every split within limits is followed (split_search.py); where layers are alike, how many each stage has is
# enough (split_search.py).


def partition(pipeline: Pipeline) -> LayerSplit:
    """The best split. The first and the last stage may be without layers, the others not.

    Of chunked placements with more steps than `MOST_STEPS`, the fastest found by then; or, if even that is not found,
    the one whose slowest stage takes the least. Without `pipeline.holding` nothing is a near tie.
    """
    assert pipeline.num_stages <= pipeline.num_layers + 2, "more stages than can be filled"
    try:
        limits, runs = search_of(replace(pipeline, holding=None)).fastest()
    except TooLongError:
        single = Pipeline(ONE_STAGE, tuple(_slowest(pipeline, s) for s in range(pipeline.num_stages)))
        return pipeline.split_of(search_of(single).fastest()[1])
    if pipeline.holding is not None:
        with suppress(TooLongError):
            runs = search_of(pipeline).fullest_least(limits, pipeline.held(runs))
    return pipeline.split_of(runs)


def _slowest(pipeline: Pipeline, stage: int) -> Blocks:
    return max(pipeline.kinds_of[stage], key=lambda blocks: sum(lane[-1] for lane in blocks.before))


# --- splitting

MomentsOf = Callable[[Spec, StagePlacement, int, bool], Moments]


def moments_on(spec: Spec, placement: StagePlacement, num_ranks: int, within: bool) -> Moments:
    """The fullest moments of each rank under the schedule of the spec's largest batch (`moments_of`)."""
    return moments_of(schedule_on(spec, placement, num_ranks), within)


@dataclass(frozen=True)
class Splitting:
    """A model to split over the stages of a placement. `moments_on`: how often stages hold what."""

    model: CutModel
    num_stages: int
    placement: StagePlacement
    moments_on: MomentsOf = moments_on

    @cached_property
    def runs(self) -> Runs:
        """(begin, end) of the layers of each stage: the layout's, or the best there are (balance.py)."""
        spec = self.model.spec
        if spec.parallel.layout is None:
            return partition(self.pipeline).runs
        num_layers, mtp = len(self.model.blocks) - 2, spec.model.mtp.depth if spec.model.mtp else 0
        runs = stages_of_layout(spec.parallel.layout, num_layers, mtp)
        assert len(runs) == self.num_stages, "the rules hold a layout to the schedule's stages"
        return runs

    @cached_property
    def pipeline(self) -> Pipeline:
        """What the layers are split by: the times that blocks are predicted to take where they run, and what they
        hold."""
        overlaps = may_overlap(self.model.spec.schedule)
        on = {part: blocks_of(each, overlaps) for part, each in self._chains.items()}
        return Pipeline(self.placement, tuple(on[part] for part in self._parts), self._holding(within=True))

    @cached_property
    def least_holding(self) -> Holding:
        """What the blocks hold at least, wherever they are, and at moments between actions."""
        found = self._holding(within=False)
        if not self.model.again:
            return found
        # some layers of each stage are run again, and others are not
        again = replace(self.model, blocks=self.model.again, again=())
        uses = (use for block in again.blocks for use in block.uses)
        again = replace(again, cuts=cuts_by_site(uses, again.cuts_by_key))
        return reduce(_lesser, (found, replace(self, model=again).least_holding))

    @property
    def _num_ranks(self) -> int:
        return self.num_stages // self.placement.stages_per_rank

    @cached_property
    def _parts(self) -> tuple[int, ...]:
        """The part of the cluster of each rank."""
        spec, ranks = self.model.spec, self._num_ranks
        return parts_of_ranks(spec) if ranks == spec.parallel.pipeline else (0,) * ranks

    @cached_property
    def _chains(self) -> Mapping[int, Sequence[Chains]]:
        """By part of the cluster."""
        spec, parts = self.model.spec, self._parts
        return {part: chains_of(rates_of(spec, rank=parts.index(part)), self.model) for part in dict.fromkeys(parts)}

    def _holding(self, *, within: bool) -> Holding:
        found, spec = self._held, self.model.spec
        return replace(found, moments=self.moments_on(spec, self.placement, self._num_ranks, within))

    @cached_property
    def _held(self) -> Holding:
        """What the blocks hold, without moments."""
        parts = self.model.spec.cluster.parts
        room = [parts[part][1].device.memory for part in self._parts]
        return holding_of(self.model, self._chains[self._parts[0]], self.placement.copies, room)


def _lesser(a: Holding, b: Holding) -> Holding:
    """What the blocks of a model hold at least, if each is as in one of two."""

    def least(one: Bytes, other: Bytes) -> Bytes:
        return min(one[0], other[0]), min(one[1], other[1]), min(one[2], other[2])

    layers = tuple(map(least, a.layers, b.layers))
    return replace(a, layers=layers, first=least(a.first, b.first), last=least(a.last, b.last))
