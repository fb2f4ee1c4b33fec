"""Everything that is decided before torch is imported: plan, schedules, programs, and the proofs of the programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from compiler.ir import Plan, Program
from compiler.lower import Lowering
from compiler.lower.estimate import stage_costs
from compiler.lower.order_cache import Orders
from compiler.plan import make_plan
from compiler.predict.memory_state import proven_memories
from compiler.proof import Certificate, Prover
from compiler.schedules import AUTO, DEFAULT_CHUNKS, schedule_of, stand_in
from compiler.schedules.forward import forward_only
from compiler.schedules.schedule import Schedule
from compiler.solver import Solver, default_cap, is_long
from compiler.topology.rank_kinds import rank_rates
from dsl import ramp
from dsl.memory import Memory
from dsl.schema import Moe, Spec

if TYPE_CHECKING:
    from compiler.experts.spec_placement import OwnPlacement  # with numpy

# Of a search when a spec is compiled: some seconds, and less for the sizes of a ramp that are of no use to longer ones.
_EFFORT, _RAMP_EFFORT = 0.5, 0.1
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Lowered:
    """A plan and what runs on it: schedules, programs, and the proofs of the programs."""

    lowering: Lowering
    batches: tuple[tuple[int, int], ...]  # (first step, sequences of a step), ascending
    num_steps: int
    schedules: Mapping[str, Schedule]  # by program: train_8, evaluate_2
    programs: Mapping[str, Program]
    certificates: Mapping[str, Certificate]
    memories: tuple[Memory, ...]  # of a device of every pipeline rank, at the peak of the fullest of the programs

    @property
    def plan(self) -> Plan:
        """The plan that the programs run."""
        return self.lowering.plan

    @property
    def main_schedule(self) -> Schedule:
        """The schedule of the largest batch."""
        return max((s for n, s in self.schedules.items() if n.startswith("train")), key=lambda s: s.num_micro_batches)


def lower_spec(
    spec: Spec,
    own: Schedule | None = None,
    progress: Progress = lambda _: None,
    placement: OwnPlacement | None = None,
    orders: Orders | None = None,
) -> Lowered:
    """Plan, schedules, programs and their proofs; torch-free. Raises ProofError naming rank and action.

    `own`: the schedule of the file that the spec names (compiler/schedules/spec_schedule.py). `progress` is told of a
    search. `placement`: of experts, from the file that it names. `orders`: who finds the orders of instructions.
    """
    plan = make_plan(spec, own, placement)
    lowering = Lowering(plan, rank_rates(spec), orders)
    growth = ramp.of(spec)
    num_steps = growth.steps_for(spec.train.tokens)
    batches = tuple((size.first_step, size.batch) for size in growth.sizes if size.first_step < num_steps)
    counts = ramp.micro_batches(spec)
    scheduler = Scheduler(spec, lowering, own, progress)
    schedules = {f"train_{n}": scheduler.schedule(n) for n in counts}
    if spec.train.validate is not None:
        n = counts[-1]
        schedules[f"evaluate_{n}"] = forward_only(plan.stage_placement, plan.mesh.pp, n)
    programs = {name: lowering.program(each, name.startswith("evaluate")) for name, each in schedules.items()}
    prover = Prover(plan, balanced_rows(spec))
    certificates = {name: prover.prove(program) for name, program in programs.items()}
    memories = proven_memories(spec, plan, certificates.values())
    return Lowered(lowering, batches, num_steps, schedules, programs, certificates, memories)


def balanced_rows(spec: Spec) -> int:
    """Rows an expert rank receives in a layer when the experts' load is even: as many as it sends."""
    top_k = max((layers.ffn.top_k for layers in spec.model.layers if isinstance(layers.ffn, Moe)), default=0)
    return spec.train.micro_batch * spec.train.sequence * top_k


class Scheduler:
    """The schedules of a spec on its plan, for any number of micro-batches. A search for `auto` is one for all.

    `own`: the schedule of the file that the spec names, which is of one size, the largest. `progress` is told of a
    search. `effort`: of a search.
    """

    def __init__(
        self,
        spec: Spec,
        lowering: Lowering,
        own: Schedule | None = None,
        progress: Progress = lambda _: None,
        effort: float = _EFFORT,
    ) -> None:
        self._spec, self._lowering, self._own = spec, lowering, own
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
        if self._own is not None:
            if num_micro_batches == self._own.num_micro_batches:
                return self._own
            return stand_in(plan.stage_placement, plan.mesh.pp, num_micro_batches)
        assert name is not None, "a spec that names a file is lowered with its schedule"
        if name == AUTO:
            return self._searched(num_micro_batches)
        return schedule_of(name, plan.mesh.pp, num_micro_batches, self._spec.schedule.chunks or DEFAULT_CHUNKS)

    def _searched(self, num_micro_batches: int) -> Schedule:
        placement, ranks = self._lowering.plan.stage_placement, self._lowering.plan.mesh.pp
        minor = num_micro_batches < self._largest and not is_long(placement, ranks, num_micro_batches)
        what = f"search for a schedule of {num_micro_batches} micro-batches"
        return self._solver.solve_on(
            placement,
            ranks,
            num_micro_batches,
            min(_RAMP_EFFORT, self._effort) if minor else self._effort,
            lambda share: self._progress(f"{what}: {share:.0%}"),
        ).schedule

    @cached_property
    def _solver(self) -> Solver:
        """The search; stages are weighed to a thousandth, which is more than is known."""
        plan, costs = self._lowering.plan, stage_costs(self._lowering)
        stages = tuple(Fraction(max(1, round(1000 * each)), 1000) for each in costs.stages)
        cap, ranks = self._spec.schedule.cap, plan.mesh.pp
        cap = (cap or default_cap(ranks)) * len(plan.stages) // ranks  # the spec's counts shares of the model
        return Solver(replace(costs, stages=stages), cap)
