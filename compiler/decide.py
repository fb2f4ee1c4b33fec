"""Everything that is decided before torch is imported: plan, schedules, programs, and the proofs of the programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from compiler.ir import Plan, Program
from compiler.lower import lower
from compiler.lower.estimate import stage_costs
from compiler.lower.lanes import Best, best_order
from compiler.lower.program import Bodies
from compiler.plan import make_plan
from compiler.predict.memory_state import proven_memories
from compiler.proof import Certificate, Effects, prove
from compiler.schedules import AUTO, DEFAULT_CHUNKS, schedule_of, stand_in
from compiler.schedules.costs import Costs
from compiler.schedules.forward import forward_only
from compiler.schedules.schedule import Schedule
from compiler.solver import Cores, default_cap, is_long, solve_on
from compiler.topology.rank_kinds import rank_rates
from dsl import ramp
from dsl.memory import Memory
from dsl.schema import Moe, Spec

if TYPE_CHECKING:
    from compiler.experts.spec_placement import OwnPlacement  # with numpy

# Of a search when a spec is compiled: some seconds, and less for the sizes of a ramp that are of no use to longer ones.
_EFFORT, _RAMP_EFFORT = 0.5, 0.1


@dataclass(frozen=True)
class Lowered:
    """Everything that is decided before torch is imported."""

    plan: Plan
    batches: tuple[tuple[int, int], ...]  # (first step, sequences of a step), ascending
    num_steps: int
    schedules: Mapping[str, Schedule]  # by program: train_8, evaluate_2
    programs: Mapping[str, Program]
    certificates: Mapping[str, Certificate]
    memories: tuple[Memory, ...]  # of a device of every pipeline rank, at the peak of the fullest of the programs

    @property
    def main_schedule(self) -> Schedule:
        """That of the largest batch."""
        return max((s for n, s in self.schedules.items() if n.startswith("train")), key=lambda s: s.num_micro_batches)


@dataclass(frozen=True)
class Search:
    """What a search for the schedule `auto` goes by, and what was found already for other numbers of micro-batches."""

    costs: Costs
    progress: Callable[[str], None] = lambda _: None  # told how far it is
    cores: Cores = field(default_factory=dict)
    effort: float = _EFFORT


def lower_spec(
    spec: Spec,
    own: Schedule | None = None,
    progress: Callable[[str], None] = lambda _: None,
    placement: OwnPlacement | None = None,
    best: Best = best_order,
) -> Lowered:
    """Plan, schedules, programs and their proofs; torch-free. Raises ProofError naming rank and action.

    `own`: the schedule of the file that the spec names (compiler/schedules/spec_schedule.py). `progress` is told of a
    search. `placement`: of experts, from the file that it names. `best`: who knows or finds orders
    (compiler/lower/order_cache.py).
    """
    plan = make_plan(spec, own, placed=placement)
    growth = ramp.of(spec)
    num_steps = growth.steps_for(spec.train.tokens)
    batches = tuple((size.first_step, size.batch) for size in growth.sizes if size.first_step < num_steps)
    counts = ramp.micro_batches(spec)
    search = search_of(spec, plan, progress)
    schedules = {f"train_{n}": schedule_for(spec, plan, n, own, search) for n in counts}
    if spec.train.validate is not None:
        n = counts[-1]
        schedules[f"evaluate_{n}"] = forward_only(plan.stage_placement, plan.mesh.pp, n)
    rates = rank_rates(spec)
    made: Bodies = {}  # the sizes of a growing batch have most of their bodies in common
    effects = Effects()
    programs = {
        name: lower(plan, schedule, plan.cuts, rates, name.startswith("evaluate"), made, best)
        for name, schedule in schedules.items()
    }
    certificates = {name: prove(program, plan, balanced_rows(spec), effects) for name, program in programs.items()}
    memories = proven_memories(spec, plan, certificates.values())
    return Lowered(plan, batches, num_steps, schedules, programs, certificates, memories)


def balanced_rows(spec: Spec) -> int:
    """Rows an expert rank receives in a layer when the experts' load is even: as many as it sends."""
    top_k = max((layers.ffn.top_k for layers in spec.model.layers if isinstance(layers.ffn, Moe)), default=0)
    return spec.train.micro_batch * spec.train.sequence * top_k


def schedule_for(
    spec: Spec, plan: Plan, num_micro_batches: int, own: Schedule | None = None, search: Search | None = None
) -> Schedule:
    """The spec's schedule, or what stands in for it on the same stages where there are too few micro-batches for it.

    A ramp's first phases have so few. The program's name says which schedule runs. A file is of one size, the largest.
    `auto` is searched for, at the predicted costs of the stages; `search` remembers, for a run of several sizes.
    """
    name, chunks = spec.schedule.name, spec.schedule.chunks
    if own is not None:
        if num_micro_batches == own.num_micro_batches:
            return own
        return stand_in(plan.stage_placement, plan.mesh.pp, num_micro_batches)
    assert name is not None, "a spec that names a file is lowered with its schedule"
    if name == AUTO:
        search = search or search_of(spec, plan)
        assert search is not None
        ranks, held_by, progress = plan.mesh.pp, plan.stage_placement, search.progress
        minor = num_micro_batches < ramp.micro_batches(spec)[-1] and not is_long(held_by, ranks, num_micro_batches)
        return solve_on(
            held_by,
            ranks,
            num_micro_batches,
            search.costs,
            (spec.schedule.cap or default_cap(ranks)) * len(plan.stages) // ranks,  # the cap counts shares of the model
            min(_RAMP_EFFORT, search.effort) if minor else search.effort,
            search.cores,
            lambda share: progress(f"search for a schedule of {num_micro_batches} micro-batches: {share:.0%}"),
        ).schedule
    return schedule_of(name, plan.mesh.pp, num_micro_batches, chunks or DEFAULT_CHUNKS)


def search_of(spec: Spec, plan: Plan, progress: Callable[[str], None] = lambda _: None) -> Search | None:
    """At the predicted costs; stages are weighed to a thousandth, which is more than is known. None for a name."""
    if spec.schedule.name != AUTO:
        return None
    costs = stage_costs(plan, plan.cuts, rank_rates(spec))
    stages = tuple(Fraction(max(1, round(1000 * each)), 1000) for each in costs.stages)
    return Search(replace(costs, stages=stages), progress)
