"""FLOPs per token of any model, from the ops of its layers."""

from __future__ import annotations

from compiler.plan.blocks import model_steps
from compiler.predict.flops import flops_per_token
from compiler.predict.prediction import Flops
from dsl.schema import Model, Spec
from tests.specs.shipped import shipped


def flops_of(spec: Spec) -> Flops:
    """FLOPs per token of a spec's model at its sequence length."""
    return flops_per_token(model_steps(spec), spec.train.micro_batch * spec.train.sequence)


def flops_of_model(model: Model, sequence: int) -> Flops:
    """FLOPs per token of a model, on one device and in FP32."""
    spec = shipped("tiny.dsc")
    train = spec.train.model_copy(update={"sequence": sequence, "micro_batch": 1})
    return flops_of(spec.model_copy(update={"model": model, "train": train}))
