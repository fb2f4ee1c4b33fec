"""The run of a spec for `dsc schedule`: sizes, schedule, and costs of actions from its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

from compiler.cli.commands.schedule_tried import ANYTHING, TriedSettings
from compiler.ir import Plan, Use
from compiler.plan.plan import make_plan
from compiler.plan.spec_files import schedule_of_file
from compiler.plan.spec_rates import rank_rates
from compiler.predict.predict import scheduler_of
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import copy_time, rank_times, stage_costs
from compiler.program.lower.scheduler import Scheduler
from compiler.schedule import AUTO, DEFAULT_CHUNKS
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import has_copies
from compiler.tools.picture.comm_lane import lanes_of
from compiler.tools.picture.drawing import Lanes
from dsl.closed_forms import ramp
from dsl.facts.layout import layout_of
from dsl.schema import Spec


@dataclass(frozen=True)
class ScheduledRun:
    """The run of a spec at its largest batch size."""

    spec: Spec
    lowering: Lowering
    unit = "ms"  # of `costs`

    @property
    def plan(self) -> Plan:
        """The plan of the spec."""
        return self.lowering.plan

    @property
    def num_ranks(self) -> int:
        return self.spec.parallel.pipeline

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches per step on each data rank, at the final batch size."""
        return ramp.micro_batches(self.spec)[-1]

    @property
    def num_stages(self) -> int:
        return len(self.plan.stages)

    @property
    def chunks(self) -> int:
        return self.spec.schedule.chunks or DEFAULT_CHUNKS

    @property
    def name(self) -> str | None:
        """The name of its schedule; None if the schedule is in a file."""
        return self.spec.schedule.name

    @property
    def cap(self) -> Fraction | tuple[Fraction, ...] | None:
        return self.spec.schedule.cap

    @property
    def tried_settings(self) -> TriedSettings:
        """The copies and placements that `auto` searches when it is compared with other schedules."""
        schedule, placement = self.spec.schedule, self.plan.stage_placement
        if schedule.name != AUTO:
            return ANYTHING
        return TriedSettings(None, schedule.copies or 2, placement if schedule.placement else None)

    @property
    def layout(self) -> str:
        """The layers of each stage, in the notation of Megatron."""
        counts = [
            len({use.site.layer for use in stage.steps if isinstance(use, Use)} - {None}) for stage in self.plan.stages
        ]
        ends = [0, *accumulate(counts)]
        return layout_of(tuple(pairwise(ends)), self.spec.model.mtp.depth if self.spec.model.mtp else 0)

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on what a row of its picture is, if a pipeline rank has tensor or context ranks."""
        mesh = self.plan.mesh
        if mesh.columns == mesh.dp:
            return ()
        parts = (("data", mesh.dp), ("tensor", mesh.tp), ("context", mesh.cp))
        axes = " · ".join(f"{axis} {degree}" for axis, degree in parts if degree > 1)
        return (f"A row is a pipeline rank: {mesh.columns:,} devices that run one program ({axes}).",)

    @property
    def why_no_order(self) -> tuple[str, str]:
        """Why no micro-batch order is searched for this spec, and a hint."""
        if self.spec.schedule.order == "cost":
            cause = "with order = cost, each step of the run orders its own micro-batches when their samples are drawn"
            return (
                f"{cause}: leave --order out",
                '--costs FILE with "micro_batches": [1, 0.8, …] searches one for these',
            )
        cause = "--order needs micro-batches of unequal costs, and the plan of a spec assumes equal ones"
        return cause, '--costs FILE with "micro_batches"; -s schedule.order=cost, where documents = masked'

    def schedule(self, progress: Callable[[str], None] = lambda _: None) -> Schedule:
        """The schedule of the run, checked. A search reports to `progress`."""
        schedule = self.scheduler(progress).largest()
        schedule.check()
        return schedule

    def scheduler(self, progress: Callable[[str], None] = lambda _: None) -> Scheduler:
        """Makes the schedules of the run for any number of micro-batches."""
        return scheduler_of(self.spec, self.lowering, progress)

    def costs(self) -> Costs:
        """The costs of its stages, from the work in the plan and the rates of the devices."""
        file = schedule_of_file(self.spec)
        copies = self.spec.schedule.host_copies or (file is not None and has_copies(file))
        copy = copy_time(self.lowering) if copies else None
        return replace(stage_costs(self.lowering), O=copy, R=copy)

    def lanes(self, schedule: Schedule) -> tuple[Lanes, ...]:
        """The communication of each rank over time, for a schedule on the run's stages."""
        return lanes_of(self.lowering.program(schedule), rank_times(self.lowering))


def run_of(spec: Spec) -> ScheduledRun:
    """The run of a spec that has passed its checks."""
    return ScheduledRun(spec, Lowering(make_plan(spec), rank_rates(spec)))
