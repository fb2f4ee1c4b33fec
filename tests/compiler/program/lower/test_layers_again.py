"""Which steps of a layer a backward reruns, which values then outlive the forward, and the cost."""

from __future__ import annotations

import pytest

from compiler.ir import Body, Communication, Plan, Program, Stage
from compiler.plan.blocks import model_steps
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.predict.flops import flops_per_token
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import lane_times, times_on
from compiler.schedule import SCHEDULES
from dsl.schema import Spec
from tests.runtime.step.specs import spec

MOE = ["attention", "router", "dispatch"]
SPLIT = ["enter", "gather", "attention", "scatter"]


def again(original: Spec, layers: int | None = None, *names: str) -> Spec:
    return original.model_copy(update={"recompute": ("layer", *names), "recompute_layers": layers})


def programs(original: Spec, schedule: str) -> tuple[Plan, Lowering, Program]:
    plan, pp = make_plan(original), original.parallel.pipeline
    lowering = Lowering(plan, rank_rates(original))
    return plan, lowering, lowering.program(SCHEDULES[schedule].generate(pp, 4 * pp))


def run_again(stage: Stage, layer: str) -> list[str]:
    """The kinds of a layer's steps that are run again, in order."""
    steps = [step for step in stage.steps if step.site.block == layer and step.is_repeated]
    return [step.kind if isinstance(step, Communication) else step.segment.kind for step in steps]


@pytest.mark.parametrize(
    ("of", "tensor", "layer", "expected"),
    [
        ("llama", 1, "L0", ["attention"]),
        ("v3", 1, "L1", MOE),
        ("v3", 1, "M0", MOE),
        ("qwen", 1, "L1", MOE),
        ("llama", 2, "L1", [*SPLIT, "between", "gather"]),
        ("v3", 2, "L1", [*SPLIT, "router", "dispatch"]),
    ],
)
def test_steps_that_a_backward_needs_are_rerun(of: str, tensor: int, layer: str, expected: list[str]) -> None:
    """Not rerun: the last product, the return of rows from experts, and the following sum over tensor ranks."""
    (stage,) = make_plan(again(spec(1, 1, 1, 4, of=of, tensor=tensor))).stages
    assert run_again(stage, layer) == expected
    assert not [step for step in stage.steps if step.is_repeated and step.site.block[0] not in "LM"]


def test_the_first_layers_of_each_stage() -> None:
    """Other layers are recomputed by the other names; the layer of the MTP block counts after those of its stage."""
    chosen = again(spec(2, 1, 1, 4, schedule="1f1b"), 1, "swiglu")
    chosen = chosen.model_copy(update={"parallel": chosen.parallel.model_copy(update={"layout": "Ett|ttmL"})})
    stages = make_plan(chosen).stages
    assert [sorted({step.site.block for step in stage.steps if step.is_repeated}) for stage in stages] == [
        ["L0"],
        ["L2"],
    ]
    kinds = {use.site: use.segment.recompute for use in make_plan(chosen).uses}
    assert (kinds["L2.experts"], kinds["L3.experts"]) == (("experts",), ("swiglu",))
    stages_of_three = make_plan(chosen.model_copy(update={"recompute_layers": 3})).stages
    assert [sorted({step.site.block for step in stage.steps if step.is_repeated}) for stage in stages_of_three] == [
        ["L0", "L1"],
        ["L2", "L3", "M0"],
    ]


@pytest.mark.parametrize(
    ("of", "schedule", "tensor"), [("v3", "1f1b", 1), ("v3", "zbv", 1), ("split", "1f1b", 2), ("everything", "zb1p", 1)]
)
def test_nothing_is_rerun_needlessly_or_kept(of: str, schedule: str, tensor: int) -> None:
    plan, _, program = programs(again(spec(2, 1, 1, 4, of=of, schedule=schedule, tensor=tensor)), schedule)
    for bodies in program.bodies:
        for body in bodies:
            stage = plan.stages[int(body.actions[0][1:])]
            if len(body.actions) == 1 and body.actions[0][0] in "BI" and any(step.is_repeated for step in stage.steps):
                _is_read(body)
            if len(body.actions) == 1 and body.actions[0][0] == "F":
                assert kept(body) <= inputs_and_counts(stage)


def _is_read(body: Body) -> None:
    """Assert that results of a rerun forward are read later in the backward, or kept for weight gradients."""
    forwards = [(index, i) for index, i in enumerate(body.instructions) if i.phase == "F" and i.kind in ("run", "wait")]
    assert forwards
    freed = {name for i in body.instructions if i.kind == "free" for name in i.reads}
    for index, i in forwards:
        written = {buffer.name for buffer in i.writes}
        later = {name for reader in body.instructions[index + 1 :] if reader.kind != "free" for name in reader.reads}
        assert written & later or written - freed, i.site
        assert "counts" not in (i.kind, i.wait)


def kept(body: Body) -> set[str]:
    """The values of layers that are live after a body, except a norm's per-row numbers."""
    written = {buffer.name for i in body.instructions for buffer in i.writes}
    freed = {name for i in body.instructions if i.kind == "free" for name in i.reads}
    outside = ("M0_head", "M0_final_", "M0_input_", "M0_loss_", "M0_embed")
    live = {name for name in written - freed if not name.startswith(outside) and not name.endswith("_rstd")}
    return {name for name in live if name[0] in "LM" and name[1].isdigit()}


def inputs_and_counts(stage: Stage) -> set[str]:
    """Inputs of layers, exchanged counts, and the inputs of a norm after experts or after the sum over tensor ranks:
    without these, experts or the sum would be rerun for the norm."""
    layers = {step.site.block for step in stage.steps if step.is_repeated}
    names = {name for step in stage.steps for name in step.inputs if not name.startswith(f"{step.site.block}_")}
    names |= {f"{layer}_{name}" for layer in layers for name in ("route", "offsets", "h")}
    names |= {f"{layer}_{name}" for layer in layers for name in ("join_unpermute_0", "leave_add_bias_0")}
    return names | {"M0_input"}


def test_a_second_forward_takes_time_and_no_flops_of_the_model() -> None:
    """The backward of a stage takes longer by at most a forward; MFU is of the FLOPs that a model has."""
    plain = spec(1, 2, 2, 4)
    longer = []
    for chosen in (plain, again(plain)):
        _, lowering, program = programs(chosen, "1f1b")
        bodies = {body.name: body for body in program.bodies[0]}
        longer.append([lane_times(bodies[name].instructions, times_on(lowering, 0)) for name in ("F0", "B0")])
    (forward, kept_backward), (_, backward) = longer
    assert 0 < backward.compute - kept_backward.compute < forward.compute
    assert 0 < backward.communication - kept_backward.communication < forward.communication
    steps = [list(model_steps(chosen)) for chosen in (plain, again(plain))]
    assert flops_per_token(steps[0], 12) == flops_per_token(steps[1], 12)
