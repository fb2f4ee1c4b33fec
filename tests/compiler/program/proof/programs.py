"""Programs to prove: the real lowering of a small model with every V3 part, and of hand-made schedules."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

from compiler.ir import Plan, Program
from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V, loop
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.program.lower import Lowering
from compiler.schedule import SCHEDULES
from compiler.schedule.dualpipe import dualpipe
from compiler.schedule.schedule import Schedule
from dsl.schema import LayerRange, Spec
from dsl.schema import ScheduleBlock as Named
from tests.compiler.schedule.offloading import offloading
from tests.runtime.step.specs import spec, with_rewards, without_mtp

PLACED_BY = {  # stage placement → a schedule of the language that has it
    BIDIRECTIONAL: Named(name="dualpipe"),
    V: Named(name="zbv"),
    ONE_STAGE: Named(name="1f1b"),
    loop(2): Named(name="interleaved", chunks=2),
    loop(3): Named(name="interleaved", chunks=3),
}

# name, ranks, micro-batches: every schedule at several sizes, so few micro-batches as it takes, and odd ones
FAMILY = (
    ("gpipe", 1, 2),
    ("gpipe", 3, 4),
    ("1f1b", 2, 5),
    ("1f1b", 4, 6),
    ("interleaved", 1, 3),
    ("interleaved", 2, 4),
    ("interleaved", 3, 6),
    ("zb1p", 2, 5),
    ("zb1p", 4, 6),
    ("zbv", 1, 3),
    ("zbv", 2, 5),
    ("zbv", 4, 6),
    ("dualpipev", 1, 3),
    ("dualpipev", 2, 5),
    ("dualpipev", 3, 6),
    ("dualpipe", 2, 4),
    ("dualpipe", 2, 6),
    ("dualpipe", 4, 8),
)


def usual(num_ranks: int) -> StagePlacement:
    """The placement that most schedules run on."""
    return BIDIRECTIONAL if num_ranks > 1 else ONE_STAGE


# likewise, where data ranks divide gradients (2), and weights (3)
DIVIDED = (
    ("zbv", 2, 5, 2),
    ("interleaved", 2, 4, 3),
    ("1f1b", 2, 5, 3),
    ("dualpipev", 2, 5, 3),
    ("dualpipe", 2, 4, 2),
    ("dualpipe", 2, 4, 3),
)


# likewise, where tensor ranks split the layers of a dense model, context ranks the sequences of one with experts, and
# tensor ranks both attention and experts
SPLIT = (
    ("split 1f1b", 2, 5),
    ("split zbv", 2, 5),
    ("split dualpipe", 2, 4),
    ("context zbv", 2, 5),
    ("context dualpipe", 2, 4),
    ("folded zbv", 2, 4),
    ("together zbv", 2, 4),
)
DEGREES = {
    "split": {"of": "split", "tensor": 2},
    "context": {"of": "v3", "context": 2, "sequence": 8},
    "folded": {"of": "v3", "tensor": 2, "expert_tensor": 2},
    "together": {"of": "together", "tensor": 2},
}

# likewise, where the backward of every layer runs its forward again
AGAIN = (("again 1f1b", 2, 5), ("again zbv", 2, 5), ("again dualpipe", 2, 4))

# likewise, for a run that learns from rewards: its heads report the log-probabilities of each micro-batch
REWARDED = (("rewards 1f1b", 2, 5), ("rewards zbv", 2, 5), ("rewards dualpipe", 2, 4))

# likewise, with copies to the host, so that ranks hold four fifths of their usual activations
OFFLOADED = (("offload gpipe", 2, 4), ("offload zbh2", 2, 5), ("offload zbv", 2, 5), ("offload dualpipev", 2, 5))


@cache
def small_spec(num_ranks: int, placement: StagePlacement, zero: int = 0) -> Spec:
    """One dense layer, then as many MoE layers as give every stage one, and an MTP block."""
    chosen = spec(pp=num_ranks, ep=2, dp=2 if zero < 2 else 4, num_micro_batches=4 * num_ranks, zero=zero)
    dense, moe = chosen.model.layers
    layers = (dense, LayerRange(first=1, last=max(1, placement.num_stages(num_ranks) - 1), ffn=moe.ffn))
    model = chosen.model.model_copy(update={"layers": layers})
    return chosen.model_copy(update={"model": model, "schedule": PLACED_BY[placement]})


@cache
def small_plan(num_ranks: int, placement: StagePlacement | None = None, zero: int = 0) -> Plan:
    return make_plan(small_spec(num_ranks, placement or usual(num_ranks), zero))


def lowered(schedule: Schedule, placement: StagePlacement | None = None, zero: int = 0) -> Program:
    """The program of a schedule on the small model, whose stages follow `placement`; an evaluation if named so."""
    plan = small_plan(schedule.num_ranks, placement, zero)
    chosen = small_spec(schedule.num_ranks, placement or usual(schedule.num_ranks), zero)
    rates = rank_rates(chosen) if zero else None  # sharded tensors are exchanged between existing devices
    return Lowering(plan, rates).program(schedule, evaluate=schedule.name == "evaluate")


def from_text(text: str) -> tuple[Program, Plan]:
    """The program of a written schedule, on its placement."""
    schedule = Schedule.from_text(text)
    return lowered(schedule, schedule.stage_placement), small_plan(schedule.num_ranks, schedule.stage_placement)


@cache
def dualpipe_program(num_ranks: int, num_micro_batches: int) -> Program:
    return lowered(dualpipe(num_ranks, num_micro_batches))


@cache
def family_program(name: str, num_ranks: int, num_micro_batches: int, zero: int = 0) -> tuple[Program, Plan]:
    """A named schedule's program and plan. Those in SPLIT, AGAIN, REWARDED or OFFLOADED have a model of their own, or
    copies."""
    if name.startswith("rewards "):
        return _rewarded_program(name.removeprefix("rewards "), num_ranks, num_micro_batches)
    if name.startswith("again "):
        return _again_program(name.removeprefix("again "), num_ranks, num_micro_batches)
    if name.startswith("offload "):
        offloaded = offloading(name.removeprefix("offload "), num_ranks, num_micro_batches, Fraction(4, 5))
        return lowered(offloaded, offloaded.stage_placement), small_plan(num_ranks, offloaded.stage_placement)
    if " " in name:
        return _split_program(*name.split(), num_ranks, num_micro_batches)
    schedule = SCHEDULES[name].generate(num_ranks, num_micro_batches)
    placement = schedule.stage_placement
    return lowered(schedule, placement, zero), small_plan(num_ranks, placement, zero)


def _again_program(name: str, num_ranks: int, num_micro_batches: int) -> tuple[Program, Plan]:
    """A named schedule's program and plan, of layers that are run again, rows to experts among it."""
    schedule = SCHEDULES[name].generate(num_ranks, num_micro_batches)
    plan = make_plan(small_spec(num_ranks, schedule.stage_placement).model_copy(update={"recompute": ("layer",)}))
    return Lowering(plan).program(schedule), plan


def _rewarded_program(name: str, num_ranks: int, num_micro_batches: int) -> tuple[Program, Plan]:
    """A named schedule's program and plan, for sampled tokens and a reference policy."""
    schedule = SCHEDULES[name].generate(num_ranks, num_micro_batches)
    plan = make_plan(with_rewards(without_mtp(small_spec(num_ranks, schedule.stage_placement)), kl=0.1))
    return Lowering(plan).program(schedule), plan


def _split_program(degree: str, name: str, num_ranks: int, num_micro_batches: int) -> tuple[Program, Plan]:
    """A named schedule's program and plan, of a model that two ranks split, as DEGREES has them."""
    schedule = SCHEDULES[name].generate(num_ranks, num_micro_batches)
    chosen = spec(num_ranks, 1, 1, 4 * num_ranks, schedule=name, **DEGREES[degree])  # type: ignore[arg-type]
    plan = make_plan(chosen)
    return Lowering(plan, rank_rates(chosen)).program(schedule, evaluate=False), plan
