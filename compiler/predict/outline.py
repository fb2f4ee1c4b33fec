"""A spec as far as it has been planned: what a search asks of a plan, the cheap parts before the dear ones.

Most plans that a search tries lack memory, which is known once there are blocks, or a split of them: long before there
is a table of who holds which parameter.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

from compiler.ir import Cut
from compiler.ir.stage_placement import StagePlacement
from compiler.plan.blocks import CutModel, cut_model
from compiler.plan.layer_runs import Moments, stage_placement_of_spec
from compiler.plan.plan import plan_of
from compiler.plan.rank_rates import rank_rates
from compiler.plan.splitting import Splitting, moments_on
from compiler.predict.memory_floor import missing_anywhere, missing_with
from compiler.program.lower import Lowering
from dsl.closed_forms import ramp
from dsl.schema import Spec


@dataclass(frozen=True)
class Shared:
    """What many outlines have, each made once: cuts, by the key of a segment, and the moments of schedules."""

    cuts: dict[Hashable, Cut] = field(default_factory=dict)
    moments: dict[Hashable, Moments] = field(default_factory=dict)

    def cut(self, spec: Spec, *, alike: bool) -> CutModel:
        """The model of a spec."""
        model = cut_model(spec, self.cuts, alike=alike)
        self.cuts.update(model.cuts_by_key)
        return model

    def moments_on(self, spec: Spec, placement: StagePlacement, num_ranks: int, within: bool) -> Moments:
        """The fullest moments of each rank under the spec's schedule."""
        key = spec.schedule, ramp.micro_batches(spec)[-1], placement, num_ranks, within
        if key not in self.moments:
            self.moments[key] = moments_on(spec, placement, num_ranks, within)
        return self.moments[key]


@dataclass(frozen=True)
class Outline:
    """The plan of a spec; each part is made when it is first asked for."""

    spec: Spec
    shared: Shared

    @cached_property
    def model(self) -> CutModel:
        """The model, in which the first layer stands for all that differ from it in names alone."""
        return self.shared.cut(self.spec, alike=True)

    @cached_property
    def least_missing(self) -> tuple[int, int | None]:
        """Bytes that the fullest device surely lacks, below 0 where it may fit; and its pipeline rank, None where it
        lacks them on any split of the layers."""
        anywhere = missing_anywhere(self._splitting.least_holding, self._splitting.placement)
        return (anywhere, None) if anywhere > 0 else self.missing_as_split

    @cached_property
    def missing_as_split(self) -> tuple[int, int]:
        """Bytes that the fullest device surely lacks with layers split as they are planned, and its pipeline rank.

        It holds its weights and their kind all the time, and what forwards keep until it is used: as much as one
        micro-batch of a stage keeps, for as many of them as its schedule has under way.
        """
        splitting = self._splitting
        return missing_with(splitting.least_holding, splitting.placement, splitting.runs)

    @cached_property
    def lowering(self) -> Lowering:
        """The plan on its devices."""
        return Lowering(plan_of(self.shared.cut(self.spec, alike=False), self._splitting.runs), rank_rates(self.spec))

    @cached_property
    def _splitting(self) -> Splitting:
        placement = stage_placement_of_spec(self.spec)
        num_stages = placement.num_stages(self.spec.parallel.pipeline)
        return Splitting(self.model, num_stages, placement, self.shared.moments_on)
