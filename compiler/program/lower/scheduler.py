"""The schedule of a plan: named by the spec, read from its file, found by a search, or a stand-in for one of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from compiler.plan.spec_files import schedule_of_file
from compiler.program.lower.estimate import copy_time, costs_of_searches, least_ratio
from compiler.program.lower.lowering import Lowering
from compiler.schedule import AUTO, schedule_of_block, stand_in
from compiler.schedule.schedule import Schedule
from dsl.closed_forms import ramp
from dsl.schema import Spec

if TYPE_CHECKING:
    from compiler.schedule.solver import Solution, Solver

# Effort of a search when a spec is compiled: a few seconds, and less for those sizes of a ramp whose result does not
# help the search for larger sizes.
_EFFORT, _RAMP_EFFORT = 0.5, 0.1
QUICK_EFFORT = 0.02  # of a search for a plan that may be the best: some tenths of a second
Progress = Callable[[str], None]


class Scheduler:
    """The schedules of a spec on its plan, for any number of micro-batches. All sizes of `auto` share one solver.

    A schedule from a file exists only for the largest number of micro-batches. `progress` is called with lines about a
    search, and `effort` limits its work.
    """

    def __init__(
        self,
        spec: Spec,
        lowering: Lowering,
        progress: Progress = lambda _: None,
        effort: float = _EFFORT,
    ) -> None:
        self._spec, self._lowering, self._from_file = spec, lowering, schedule_of_file(spec)
        self._progress, self._effort = progress, effort
        self._found: dict[int, Schedule] = {}  # by micro-batches, those that were searched for
        self._largest = ramp.micro_batches(spec)[-1]

    def largest(self) -> Schedule:
        """The schedule of the largest batch."""
        return self.schedule(self._largest)

    def schedule(self, num_micro_batches: int) -> Schedule:
        """The spec's schedule, or a stand-in on the same stages if it needs more micro-batches.

        The first phases of a batch-size ramp may have too few. The program's name says which schedule runs. `auto` is
        searched for, at the predicted costs of the stages.
        """
        plan, name = self._lowering.plan, self._spec.schedule.name
        if self._from_file is not None:
            if num_micro_batches == self._from_file.num_micro_batches:
                return self._from_file
            short = stand_in(plan.stage_placement, plan.mesh.pp, num_micro_batches)
            return short.deferring_at_most(self._spec.schedule.deferred)
        if name == AUTO:
            if num_micro_batches not in self._found:
                found = self._search_schedule(num_micro_batches)
                self._found[num_micro_batches] = found.deferring_at_most(self._spec.schedule.deferred)
            return self._found[num_micro_batches]
        return schedule_of_block(self._spec.schedule, plan.mesh.pp, num_micro_batches)

    def least_searched_s(self, factor: float) -> float:
        """A lower bound of the seconds of any schedule of the largest batch that a search may find, at predicted times.

        `factor`: by which a step takes longer on all devices. The bound is 0 if activations can be copied to the host.
        """
        from compiler.schedule.solver import lower_bound_of

        plan, costs, cap = self._lowering.plan, self._solver.costs, self._solver.cap
        if costs.can_offload:
            return 0.0
        caps = cap if isinstance(cap, tuple) else (cap,) * plan.mesh.pp
        least = lower_bound_of(plan.stage_placement, plan.mesh.pp, self._largest, costs, caps)
        return float(least * least_ratio(self._lowering, costs, factor)) / 1000

    def _search_schedule(self, num_micro_batches: int) -> Schedule:
        # Imported here: a schedule that is named needs no solver.
        from compiler.schedule.solver import is_long, solve_with_copies

        placement, ranks = self._lowering.plan.stage_placement, self._lowering.plan.mesh.pp
        minor = num_micro_batches < self._largest and not is_long(placement, ranks, num_micro_batches)
        task = f"search for a schedule of {num_micro_batches} micro-batches"
        solver = replace(
            self._solver,
            effort=min(_RAMP_EFFORT, self._effort) if minor else self._effort,
            report=lambda share: self._progress(f"{task}: {share:.0%}"),
        )

        def search(solver: Solver) -> Solution:
            return solver.solve_on(placement, ranks, num_micro_batches)

        if not solver.costs.can_offload:
            return search(solver).schedule
        return solve_with_copies(solver, ranks, len(self._lowering.plan.stages), search).schedule

    @cached_property
    def _solver(self) -> Solver:
        """The solver, at the costs of the plan and under the memory cap of the spec."""
        from compiler.schedule.solver import Solver, default_cap

        plan, costs = self._lowering.plan, costs_of_searches(self._lowering)
        cap, ranks = self._spec.schedule.cap or Fraction(default_cap(plan.mesh.pp)), plan.mesh.pp
        scale = Fraction(len(plan.stages), ranks)  # the spec's caps count shares of the model
        caps = tuple(share * scale for share in cap) if isinstance(cap, tuple) else cap * scale
        copy = copy_time(self._lowering) if self._spec.schedule.host_copies else None
        return Solver(replace(costs, O=copy, R=copy), caps)
