"""The smallest plan that the runtime accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime import contract


def small_plan(pp: int = 1, dp: int = 1, **parts: Any) -> contract.RunPlan:
    """A plan with one parameter, one layer, and one sample per data rank. `parts`: fields of the plan to replace."""
    weight = contract.HeldParameter("w", "w", (2,), init=None, decay=False)
    plan = contract.RunPlan(
        run="small",
        mesh=contract.Mesh(pp=pp, dp=dp, ep=1, tp=1, cp=1),
        placement=f"loop({pp})",
        zero=0,
        precision=contract.PlannedPrecision(*["float32"] * 9),
        row_alignment=1,
        model=contract.PlannedModel(
            name="small",
            vocab=2,
            hidden=1,
            init_std=0.02,
            norm_eps=1e-6,
            attention={"kind": "gqa"},
            layers=(contract.PlannedLayers(0, 0, {"kind": "dense", "inner": 1}),),
            mtp=None,
        ),
        train=contract.TrainRecipe(
            sequence=1,
            micro_batch=1,
            batch=contract.BatchGrowth(dp, dp, 0),
            tokens=1,
            optimizer=contract.OptimizerRecipe(
                "adamw", {"beta1": 0.5, "beta2": 0.5, "eps": 0.5}, weight_decay=0.5, clip=None
            ),
            rate=(contract.RecipeRatePhase("constant", 1.0, 1.0, 1),),
            seed=0,
            checkpoint=None,
            validate=None,
        ),
        optimizer=contract.OptimizerState((contract.OptimizerTensor("moment1", "float32"),), "element"),
        data=contract.DataRecipe("x", contract.TrainedTokenizer(300), validation=0.0),
        steps=1,
        batches=((0, dp),),
        mtp_weight=None,
        message=None,
        openings=(),
        records=("loss",),
        moe_layers=(),
        stages=(("embed", "L0.attention", "head"),),
        overlap=contract.OverlapTimes(bodies={}, programs={}),
        memory=(0,) * pp,
        cluster=(contract.NodeKind(1, pp * dp, "cpu", None, 1 << 30),),
        communication_sms=0,
        buckets=(contract.PlannedBucket("w", (0,), (0,), (weight,)),),
        biases=(),
    )
    return replace(plan, **parts)
