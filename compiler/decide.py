"""Everything that is decided before torch is imported: plan, schedules, programs, and the proofs of the programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.actions.order_cache import Orders
from compiler.ir import Plan, Program
from compiler.lower import Lowering
from compiler.lower.opening_order import opening_order
from compiler.lower.scheduler import Progress, Scheduler
from compiler.plan import make_plan
from compiler.plan.row_counts import held
from compiler.predict.memory_state import proven_memories
from compiler.predict.micro_batch_order import micro_batch_orders
from compiler.proof import Certificate, Prover
from compiler.proof.start import check_start
from compiler.rates.rank_rates import rank_rates
from compiler.schedules.forward import forward_only
from compiler.schedules.schedule import Schedule
from dsl import ramp
from dsl.memory import Memory
from dsl.schema import Spec
from runtime.contract import Opening


@dataclass(frozen=True)
class Lowered:
    """A plan and what runs on it: schedules, programs, and the proofs of the programs."""

    lowering: Lowering
    batches: tuple[tuple[int, int], ...]  # (first step, sequences of a step), ascending
    num_steps: int
    schedules: Mapping[str, Schedule]  # by program: train_8, evaluate_2
    programs: Mapping[str, Program]
    certificates: Mapping[str, Certificate]
    openings: tuple[Opening, ...]  # the channels of all ranks, in the order in which they are opened
    memories: tuple[Memory, ...]  # of a device of every pipeline rank, at the peak of the fullest of the programs
    micro_batch_orders: Mapping[str, tuple[int, ...]]  # by program, where micro-batches go by their cost

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
    progress: Progress = lambda _: None,
    orders: Orders | None = None,
) -> Lowered:
    """Plan, schedules, programs and their proofs; torch-free. Raises ProofError naming rank and action.

    `progress` is told of a search. `orders`: who finds the orders of instructions.
    """
    plan = make_plan(spec)
    lowering = Lowering(plan, rank_rates(spec), orders)
    growth = ramp.of(spec)
    num_steps = growth.steps_for(spec.train.tokens)
    batches = tuple((size.first_step, size.batch) for size in growth.sizes if size.first_step < num_steps)
    counts = ramp.micro_batches(spec)
    scheduler = Scheduler(spec, lowering, progress)
    schedules = {f"train_{n}": scheduler.schedule(n) for n in counts}
    if spec.train.validate is not None or spec.train.grpo is not None:  # completions are made by forwards, too
        n = counts[-1]
        schedules[f"evaluate_{n}"] = forward_only(plan.stage_placement, plan.mesh.pp, n)
    programs = {name: lowering.program(each, name.startswith("evaluate")) for name, each in schedules.items()}
    prover = Prover(plan, held(spec))
    certificates = {name: prover.prove(program) for name, program in programs.items()}
    openings = opening_order(plan, programs.values())
    check_start(plan, openings, programs.values())
    memories = proven_memories(spec, plan, certificates.values())
    ordered = micro_batch_orders(spec, lowering, schedules)
    return Lowered(lowering, batches, num_steps, schedules, programs, certificates, openings, memories, ordered)
