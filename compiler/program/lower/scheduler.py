"""The schedule of a plan: the spec's, by name or from its file, what stands in for it, or one that is searched for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from compiler.plan.spec_files import schedule_of_file
from compiler.program.lower.estimate import copy_time, costs_of_searches
from compiler.program.lower.lowering import Lowering
from compiler.schedule import AUTO, DEFAULT_CHUNKS, schedule_of, stand_in
from compiler.schedule.schedule import Schedule
from dsl.closed_forms import ramp
from dsl.schema import Spec

if TYPE_CHECKING:
    from compiler.schedule.solver import Solution, Solver

# Of a search when a spec is compiled: some seconds, and less for the sizes of a ramp that are of no use to longer ones.
_EFFORT, _RAMP_EFFORT = 0.5, 0.1
Progress = Callable[[str], None]


class Scheduler:
    """The schedules of a spec on its plan, for any number of micro-batches. A search for `auto` is one for all.

    A schedule of a file is of one size, the largest. `progress` is told of a search. `effort`: of a search.
    """

    def __init__(
        self,
        spec: Spec,
        lowering: Lowering,
        progress: Progress = lambda _: None,
        effort: float = _EFFORT,
    ) -> None:
        self._spec, self._lowering, self._given = spec, lowering, schedule_of_file(spec)
        self._progress, self._effort = progress, effort
        self._largest = ramp.micro_batches(spec)[-1]

    def largest(self) -> Schedule:
        """The schedule of the largest batch."""
        return self.schedule(self._largest)

    def schedule(self, num_micro_batches: int) -> Schedule:
        """The spec's schedule, or what stands in for it on the same stages where it has too few micro-batches.

        A ramp's first phases have so few. The program's name says which schedule runs. `auto` is searched for, at the
        predicted costs of the stages.
        """
        plan, name = self._lowering.plan, self._spec.schedule.name
        if self._given is not None:
            if num_micro_batches == self._given.num_micro_batches:
                return self._given
            return stand_in(plan.stage_placement, plan.mesh.pp, num_micro_batches)
        assert name is not None, "a schedule has a name or a file"
        if name == AUTO:
            return self._searched(num_micro_batches)
        return schedule_of(name, plan.mesh.pp, num_micro_batches, self._spec.schedule.chunks or DEFAULT_CHUNKS)

    def _searched(self, num_micro_batches: int) -> Schedule:
        # a schedule with a name does not wait for the search
        from compiler.schedule.solver import is_long, solved_with_copies

        placement, ranks = self._lowering.plan.stage_placement, self._lowering.plan.mesh.pp
        minor = num_micro_batches < self._largest and not is_long(placement, ranks, num_micro_batches)
        what = f"search for a schedule of {num_micro_batches} micro-batches"
        solver = replace(
            self._solver,
            effort=min(_RAMP_EFFORT, self._effort) if minor else self._effort,
            report=lambda share: self._progress(f"{what}: {share:.0%}"),
        )

        def search(solver: Solver) -> Solution:
            return solver.solve_on(placement, ranks, num_micro_batches)

        if not solver.costs.offloads:
            return search(solver).schedule
        return solved_with_copies(solver, ranks, len(self._lowering.plan.stages), search).schedule

    @cached_property
    def _solver(self) -> Solver:
        """The search, at the costs of the plan and under the cap of the spec."""
        from compiler.schedule.solver import Solver, default_cap

        plan, costs = self._lowering.plan, costs_of_searches(self._lowering)
        cap, ranks = self._spec.schedule.cap or Fraction(default_cap(plan.mesh.pp)), plan.mesh.pp
        by = Fraction(len(plan.stages), ranks)  # the spec's caps count shares of the model
        caps = tuple(each * by for each in cap) if isinstance(cap, tuple) else cap * by
        copy = copy_time(self._lowering) if self._spec.schedule.host_copies else None
        return Solver(replace(costs, O=copy, R=copy), caps)
