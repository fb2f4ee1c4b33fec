"""Compares a plan's statements about an optimizer with ranks' allocations: python -m tests.extended_optimizer SPEC."""

from __future__ import annotations

import sys
from math import prod

import pytest
import torch

from compiler.pipeline import compile_spec, lower_spec
from compiler.predict.memory_state import rank_states
from compiler.predict.predict import time_plan
from dsl.closed_forms.memory import ITEMSIZE
from dsl.load import load
from dsl.schema import Spec
from runtime.contract import KernelList, RunPlan
from runtime.state.state import FlatBucket, build_state


def state_bytes(buckets: tuple[FlatBucket, ...]) -> int:
    return sum(tensor.nbytes for bucket in buckets for piece in bucket.owned for tensor in piece.state.values())


def check_memory(spec: Spec, plan: RunPlan) -> None:
    """Check that the fullest device of each pipeline rank holds the planned bytes exactly."""
    dp = plan.mesh.dp
    planned = rank_states(spec, lower_spec(spec).plan)
    states = [build_state(plan, rank, torch.device("cpu")) for rank in range(plan.mesh.world)]
    names = [tensor.name for tensor in spec.train.optimizer.state]
    for pp_rank, memory in enumerate(planned):
        of_rank = [state.buckets for state in states[pp_rank * dp : (pp_rank + 1) * dp]]
        assert memory.optimizer == max(map(state_bytes, of_rank))
        assert {memory.gradients} == {sum(bucket.gradients.nbytes for bucket in buckets) for buckets in of_rank}
    for state in states:
        assert all([*piece.state] == names for bucket in state.buckets for piece in bucket.owned)


def check_owners(spec: Spec, plan: RunPlan) -> list[int]:
    """Check that each parameter is whole on one owner, and that the FLOPs of owners are balanced."""
    work, flops = [0] * plan.mesh.world, [0] * plan.mesh.world
    largest = 0
    for bucket in plan.buckets:
        assert len(bucket.owners) == len(bucket.parameters), "every bucket here has several holders"
        for parameter, owner in zip(bucket.parameters, bucket.owners, strict=True):
            update_flops = sum(map(spec.train.optimizer.flops, parameter.updated_shapes))
            flops[bucket.holders[owner]] += update_flops
            work[bucket.holders[owner]] += update_flops + prod(parameter.shape)
            largest = max(largest, update_flops + prod(parameter.shape))
    assert max(work) - min(work) <= largest
    for rank in range(plan.mesh.world):
        for state_bucket in build_state(plan, rank, torch.device("cpu")).buckets:
            shapes = {piece.shapes for piece in state_bucket.owned}
            assert shapes <= {entry.parameter.updated_shapes for entry in state_bucket.entries}
    return flops


def check_price(spec: Spec, plan: RunPlan, flops: list[int]) -> None:
    """Check that the update takes the bytes of its row at one rate, and its FLOPs at the rate of products."""
    timing, precision, row = time_plan(spec), spec.precision, spec.train.optimizer
    assert precision.master == precision.parameter, "weights are their own masters here"
    elements = sum(prod(parameter.shape) for parameter in plan.parameters)
    tensors = [precision.master, *(getattr(precision, tensor.role) for tensor in row.state)]
    element_bytes = ITEMSIZE[precision.gradients] + 2 * sum(ITEMSIZE[dtype] for dtype in tensors)
    states = [build_state(plan, rank, torch.device("cpu")) for rank in range(plan.mesh.world)]
    owned = max(sum(piece.master.numel() for bucket in state.buckets for piece in bucket.owned) for state in states)
    (rates,) = timing.rates
    seconds = (owned * element_bytes + elements * ITEMSIZE[precision.gradients]) / rates.rate("optimizer", "any", ())
    seconds += max(flops) / rates.rate("gemm", precision.compute, ())
    assert timing.step.tail.update_s == pytest.approx(seconds * max(1.0, timing.shared))


def main(path: str) -> None:
    spec = load(path)
    files = dict(compile_spec(spec).files)
    plan, kernels = RunPlan.from_json(files["plan.json"]), KernelList.from_json(files["kernels.json"])
    check_memory(spec, plan)
    flops = check_owners(spec, plan) if spec.train.optimizer.unit == "matrix" else [0]
    check_price(spec, plan, flops)
    assert kernels.optimizer.op == spec.train.optimizer.kind and kernels.optimizer.kernel is None
    assert not [name for name in files if name.startswith("kernels/") and spec.train.optimizer.kind in name]


if __name__ == "__main__":
    main(sys.argv[1])
