"""Plans, memory and prices follow an optimizer's row in the table: whole matrices, scratch memory, products."""

from __future__ import annotations

from math import prod
from typing import ClassVar

import pytest
import torch

from compiler.emit.build_files import plan_json
from compiler.pipeline import lower_spec
from compiler.plan.sharding import work_of
from compiler.predict.memory import UPDATE
from compiler.predict.memory_state import rank_states
from compiler.predict.predict import memories, time_plan
from dsl.schema import AdamW, Muon, Spec, StateTensor
from dsl.schema.optimizers import Unit
from runtime.contract import RunPlan
from runtime.state.state import build_state
from tests.runtime.step.specs import spec as small_spec

SCRATCH = 1 << 30


class Whole(AdamW):
    """One tensor of state for each parameter, held whole by its owner."""

    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("momentum"),)
    unit: ClassVar[Unit] = "matrix"

    def flops(self, shape: tuple[int, ...]) -> int:
        """A billion FLOPs for each element of a matrix, so that the price shows them."""
        return 10**9 * prod(shape) if len(shape) == 2 else 0


class Roomy(Whole):
    """The row above with scratch memory for matrices."""

    def scratch_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """A gibibyte for each matrix."""
        return SCRATCH if len(shape) == 2 else 0


def with_row(spec: Spec, row: type[AdamW | Muon]) -> Spec:
    """The spec with another optimizer."""
    return spec.model_copy(update={"train": spec.train.model_copy(update={"optimizer": row()})})


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("pp", "ep", "dp", "schedule"), [(2, 2, 4, "dualpipe"), (1, 2, 4, "1f1b"), (2, 1, 3, "zbv")])
def test_owners_have_parameters_whole(pp: int, ep: int, dp: int, schedule: str, zero: int) -> None:
    """Each parameter has one owner among its holders; the fullest rank of a stage holds the planned bytes exactly."""
    spec = with_row(small_spec(pp, ep, dp, 2 * pp, zero=zero, schedule=schedule), Whole)
    lowered = lower_spec(spec)
    plan = RunPlan.from_json(plan_json(spec, lowered, {}))
    states = [build_state(plan, rank, torch.device("cpu")) for rank in range(pp * dp)]
    owned = [[(piece.part, bucket.name) for bucket in s.buckets for piece in bucket.owned] for s in states]
    bytes_of = [sum(t.nbytes for b in s.buckets for piece in b.owned for t in piece.state.values()) for s in states]
    for pp_rank, planned in enumerate(rank_states(spec, lowered.plan)):
        assert planned.optimizer == max(bytes_of[pp_rank * dp : (pp_rank + 1) * dp])
    for bucket in plan.buckets:
        start = 0
        for parameter in bucket.parameters:
            part, start = slice(start, start + prod(parameter.shape)), start + prod(parameter.shape)
            count = sum((part, bucket.name) in of_rank for of_rank in owned)
            assert count == (1 if zero else len(bucket.holders)), parameter.name


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("pp", "ep", "dp", "schedule"), [(2, 2, 4, "dualpipe"), (1, 2, 4, "1f1b"), (2, 1, 3, "zbv")])
def test_matrices_have_owners_and_the_rest_is_cut(pp: int, ep: int, dp: int, schedule: str, zero: int) -> None:
    """A matrix has one tensor of state, all else two; the fullest rank of a stage holds the planned bytes."""
    spec = with_row(small_spec(pp, ep, dp, 2 * pp, zero=zero, schedule=schedule), Muon)
    lowered = lower_spec(spec)
    plan = RunPlan.from_json(plan_json(spec, lowered, {}))
    states = [build_state(plan, rank, torch.device("cpu")) for rank in range(pp * dp)]
    bytes_of = [sum(t.nbytes for b in s.buckets for piece in b.owned for t in piece.state.values()) for s in states]
    for pp_rank, planned in enumerate(rank_states(spec, lowered.plan)):
        assert planned.optimizer == max(bytes_of[pp_rank * dp : (pp_rank + 1) * dp])
    for bucket in plan.buckets:
        matrices = [parameter for parameter in bucket.parameters if parameter.matrices]
        assert len(matrices) == (0 if bucket.rest else len(bucket.parameters))
        assert len(bucket.owners) == (len(matrices) if zero and len(bucket.holders) > 1 else 0)
    for owned_bucket in (bucket for state in states for bucket in state.buckets):
        names = {name for piece in owned_bucket.owned for name in piece.state}
        assert names <= ({"moment1", "moment2"} if owned_bucket.is_of_rest else {"momentum"})
        parts = len(owned_bucket.holders) if zero and owned_bucket.is_of_rest else 1
        assert (
            sum(piece.master.numel() for piece in owned_bucket.owned) * parts == owned_bucket.padded
            or not owned_bucket.is_of_rest
        )


def test_the_work_of_matrices_is_balanced() -> None:
    """By FLOPs, in which a matrix of twice the shorter side counts four times as much and more."""
    spec = with_row(small_spec(1, 1, 4, 2, zero=1, schedule="1f1b"), Muon)
    plan = lower_spec(spec).plan
    table = {replica.key: replica for replica in plan.replicas}
    (bucket,) = (bucket for bucket in plan.buckets if not bucket.is_of_rest)
    work = [work_of(Muon(), table[name]) for name in bucket.replicas]
    loads = [sum(w for w, o in zip(work, bucket.owners, strict=True) if o == owner) for owner in range(4)]
    assert max(loads) - min(loads) <= max(work) and min(loads) > 0
    gate_and_up = table["layers.0.ffn.up"]
    assert gate_and_up.updated_shapes == ((22, 16), (22, 16))
    assert work_of(Muon(), gate_and_up) == 2 * 5 * (4 * 16 * 16 * 22 + 2 * 16**3) + 44 * 16


def test_work_is_balanced() -> None:
    """No rank could pass its last parameter to a less loaded rank and become the less loaded of the two."""
    spec = with_row(small_spec(1, 1, 4, 2, zero=1, schedule="1f1b"), Whole)
    (bucket,) = lower_spec(spec).plan.buckets
    shapes = {replica.name: replica.shape for replica in lower_spec(spec).plan.replicas}
    work = [Whole().flops(shapes[name]) + prod(shapes[name]) for name in bucket.replicas]
    loads = [sum(w for w, o in zip(work, bucket.owners, strict=True) if o == owner) for owner in range(4)]
    assert max(loads) - min(loads) <= max(work) and min(loads) > 0


def test_prediction_includes_products_and_scratch_memory() -> None:
    base = small_spec(2, 1, 2, 4, zero=1, schedule="1f1b")
    elements, matrices, roomy = (time_plan(with_row(base, row)) for row in (AdamW, Whole, Roomy))
    assert matrices.step.tail.update_s > 10 * elements.step.tail.update_s
    assert roomy.step.tail == matrices.step.tail
    for small, large in zip(memories(matrices), memories(roomy), strict=True):
        state = small.weights + small.gradients + small.optimizer
        assert small.peak_action != UPDATE == large.peak_action
        assert large.peak_bytes == state + SCRATCH == large.worst_bytes
        assert (large.activations, large.buffers) == (SCRATCH, 0)
    assert [m.total for m in lower_spec(with_row(base, Roomy)).memories] == [m.peak_bytes for m in memories(roomy)]
