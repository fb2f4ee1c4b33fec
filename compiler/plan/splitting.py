"""The split of a model's layers over stages, and the costs that decide it. Each part is made on first use.

The names of layers do not matter here, so one block may stand for all layers that differ only in names (blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce

from compiler.ir.stage_placement import ONE_STAGE, StagePlacement
from compiler.plan.actions.chains import Chains
from compiler.plan.blocks import CutModel, blocks_of, chains_of, cuts_by_site
from compiler.plan.holding import holding_of, moments_of, schedule_on
from compiler.plan.layer_runs import Blocks, Bytes, Holding, LayerSplit, Moments, Pipeline, Runs
from compiler.plan.spec_rates import parts_of_ranks, rates_of
from compiler.plan.split_search import Limits, TooLongError, search_of
from dsl.closed_forms.stages import may_overlap
from dsl.facts.layout import stages_of_layout
from dsl.schema import Spec

# --- Layers to pipeline stages: the exact min-max partition, given which stages share a rank and what devices hold
#
# The load of ranks comes first: a rank runs all of its stages on every micro-batch, and the most loaded rank limits the
# throughput. A slow stage only lengthens the filling and draining of the pipeline. Under `bidirectional`, each of the
# two copies of a stage runs half of the micro-batches, so the load of a rank is the mean of its two stages.
#
# Loads come from rates that are known to a few percent. If the most loaded rank of a split takes at most `1 / NEAR`
# more than the least possible, no measurement can tell the two apart. Among these near ties the best split has, in this
# order, the least bytes on the fullest device, the least load, the fastest slowest stage, and the least sum of squares
# of the stages' times. Splits that differ only in the number of layers of one kind are not near ties, as the errors of
# equal layers cancel. Layers of different kinds can be near ties, such as an MoE and a dense layer, whose rates belong
# to different kernels.
#
# The search follows every split within limits. If layers are alike, it only counts the layers of each stage
# (split_search.py).


def partition(pipeline: Pipeline) -> LayerSplit:
    """The best split. Only the first and the last stage may have no layers.

    If the search of a chunked placement exceeds `MOST_STEPS`, the result is the fastest split so far or, if there is
    none, the split with the fastest slowest stage. Without `pipeline.holding`, near ties do not count.
    """
    assert pipeline.num_stages <= pipeline.num_layers + 2, "there are more stages than layers can fill"
    fastest = _fastest(pipeline.stage_placement, pipeline.blocks)
    if fastest is None:
        single = Pipeline(ONE_STAGE, tuple(_slowest(pipeline, s) for s in range(pipeline.num_stages)))
        return pipeline.split_of(search_of(single).fastest()[1])
    limits, runs = fastest
    if pipeline.holding is not None:
        with suppress(TooLongError):
            runs = search_of(pipeline).fullest_least(limits, pipeline.held_bytes(runs))
    return pipeline.split_of(runs)


@lru_cache(maxsize=1024)
def _fastest(placement: StagePlacement, blocks: tuple[Blocks, ...]) -> tuple[Limits, Runs] | None:
    """The fastest split, with its limits; None if the search takes too long.

    Results are cached: many edits of a plan change what devices hold, but not the times of blocks.
    """
    with suppress(TooLongError):
        return search_of(Pipeline(placement, blocks)).fastest()
    return None


def _slowest(pipeline: Pipeline, stage: int) -> Blocks:
    return max(pipeline.kinds_of[stage], key=lambda blocks: sum(lane[-1] for lane in blocks.first_costs))


# --- splitting

MomentsOf = Callable[[Spec, StagePlacement, int, bool], Moments]


def moments_on(spec: Spec, placement: StagePlacement, num_ranks: int, within: bool) -> Moments:
    """The fullest moments of each rank under the schedule of the spec's largest batch; see `moments_of`."""
    return moments_of(schedule_on(spec, placement, num_ranks), within)


@dataclass(frozen=True)
class Splitting:
    """A model to split over the stages of a placement. `moments_on` returns the fullest moments of each rank."""

    model: CutModel
    num_stages: int
    placement: StagePlacement
    moments_on: MomentsOf = moments_on

    @cached_property
    def runs(self) -> Runs:
        """(begin, end) of the layers of each stage: those of the spec's layout, or of the best split (`partition`)."""
        spec = self.model.spec
        if spec.parallel.layout is None:
            return partition(self.pipeline).runs
        num_layers, mtp = len(self.model.blocks) - 2, spec.model.mtp.depth if spec.model.mtp else 0
        runs = stages_of_layout(spec.parallel.layout, num_layers, mtp)
        assert len(runs) == self.num_stages, "the rules check that a layout fits the schedule's stages"
        return runs

    @cached_property
    def pipeline(self) -> Pipeline:
        """The costs that decide the split: predicted times of blocks on their devices, and their memory."""
        overlaps = may_overlap(self.model.spec.schedule)
        blocks_on = {part: blocks_of(chains, overlaps) for part, chains in self._chains.items()}
        return Pipeline(self.placement, tuple(blocks_on[part] for part in self._parts), self._holding(within=True))

    @cached_property
    def least_holding(self) -> Holding:
        """A lower bound of the memory of the blocks on any stage, at moments between actions."""
        plain = self._holding(within=False)
        if not self.model.recomputed_blocks:
            return plain
        # Some layers of each stage are recomputed, and others are not.
        recomputed = replace(self.model, blocks=self.model.recomputed_blocks, recomputed_blocks=())
        uses = (use for block in recomputed.blocks for use in block.uses)
        recomputed = replace(recomputed, cuts=cuts_by_site(uses, recomputed.cuts_by_key))
        return reduce(_lesser, (plain, replace(self, model=recomputed).least_holding))

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
        """By part of the cluster, the chains of each block."""
        spec, parts = self.model.spec, self._parts
        return {part: chains_of(rates_of(spec, rank=parts.index(part)), self.model) for part in dict.fromkeys(parts)}

    def _holding(self, *, within: bool) -> Holding:
        holding, spec = self._blocks_holding, self.model.spec
        return replace(holding, moments=self.moments_on(spec, self.placement, self._num_ranks, within))

    @cached_property
    def _blocks_holding(self) -> Holding:
        """The memory of the blocks, without moments."""
        parts = self.model.spec.cluster.parts
        room = [parts[part][1].device.room for part in self._parts]
        return holding_of(self.model, self._chains[self._parts[0]], self.placement.copies, room)


def _lesser(a: Holding, b: Holding) -> Holding:
    """A lower bound of the memory of blocks, each of which is as in one of two holdings."""

    def least(left: Bytes, right: Bytes) -> Bytes:
        return min(left[0], right[0]), min(left[1], right[1]), min(left[2], right[2])

    layers = tuple(map(least, a.layers, b.layers))
    return replace(a, layers=layers, first=least(a.first, b.first), last=least(a.last, b.last))
