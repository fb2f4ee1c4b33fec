"""Programs to prove: the real lowering of a small model with every V3 part, and of hand-made schedules."""

from __future__ import annotations

from functools import cache

from compiler.ir import Cut, Plan, Program, Use
from compiler.layers.stages import model_steps
from compiler.lower import lower
from compiler.plan import make_plan
from compiler.schedules.dualpipe import dualpipe
from compiler.schedules.schedule import Schedule
from compiler.shapes import cut
from dsl.schema import LayerRange, Spec
from tests.training.specs import spec


@cache
def small_spec(num_ranks: int) -> Spec:
    """One dense layer, then as many MoE layers as give every stage one, and an MTP block."""
    made = spec(pp=num_ranks, ep=2, dp=2, num_micro_batches=4 * num_ranks)
    dense, moe = made.model.layers
    layers = (dense, LayerRange(first=1, last=max(1, num_ranks - 1), ffn=moe.ffn))
    return made.model_copy(update={"model": made.model.model_copy(update={"layers": layers})})


@cache
def small_plan(num_ranks: int) -> Plan:
    return make_plan(small_spec(num_ranks))


@cache
def small_cuts(num_ranks: int) -> dict[str, Cut]:
    """By site. Segments with one key have one cut."""
    uses = [step for step in model_steps(small_spec(num_ranks)) if isinstance(step, Use)]
    keyed = {use.segment.key: use for use in uses}
    cuts = {key: cut(use.segment) for key, use in keyed.items()}
    return {use.site: cuts[use.segment.key] for use in uses}


def lowered(schedule: Schedule) -> Program:
    """The program of a schedule on the small model; `evaluate` by its name."""
    plan, cuts = small_plan(schedule.num_ranks), small_cuts(schedule.num_ranks)
    return lower(plan, schedule, cuts, evaluate=schedule.name == "evaluate")


@cache
def dualpipe_program(num_ranks: int, num_micro_batches: int) -> Program:
    return lowered(dualpipe(num_ranks, num_micro_batches))
