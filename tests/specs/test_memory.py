"""The lower bound of memory: never above the memory of the fullest device by the plan and its proof, and near it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.ir import Plan
from compiler.pipeline import compile_spec, lower_spec
from compiler.plan.split_blocks import balanced_rows
from compiler.program.lowered import LoweredPlan
from compiler.program.proof import prove
from dsl.closed_forms.memory import ITEMSIZE, lower_bound
from dsl.schema import Lora, Spec
from runtime.build.build import Build
from runtime.state.state import build_state
from tests.runtime.step.specs import spec as small_spec
from tests.specs.shipped import RUNS, planned, shipped
from tests.specs.strategies import specs


def held_by_rank(spec: Spec, plan: Plan) -> Counter[int]:
    """Bytes of weights, gradients and optimizer state of each rank, by the plan."""
    precision, bytes_by_rank = spec.precision, Counter[int]()
    trained_bytes = ITEMSIZE[precision.parameter] + ITEMSIZE[precision.gradients]
    state = 2 * ITEMSIZE[precision.moments]
    state += 0 if precision.master == precision.parameter else ITEMSIZE[precision.master]
    for replica in plan.replicas:
        trained = replica.role == "parameter"
        for rank in replica.holders:
            bytes_by_rank[rank] += replica.num_elements * (trained_bytes if trained else ITEMSIZE[precision.parameter])
    sizes = {replica.key: replica.num_elements for replica in plan.replicas}
    for bucket in plan.buckets:
        owned = -(-sum(map(sizes.__getitem__, bucket.replicas)) // (len(bucket.holders) if spec.parallel.zero else 1))
        for rank in bucket.holders:
            bytes_by_rank[rank] += owned * state
    return bytes_by_rank


def fullest(spec: Spec, lowered: LoweredPlan) -> int:
    """Bytes of the fullest device: its state, and its peak of activations if no rank receives a row."""
    plan = lowered.plan
    peaks = [max(c.peak_fixed_bytes[p] for c in lowered.certificates.values()) for p in range(plan.mesh.pp)]
    return max(size + peaks[plan.mesh.coordinates(rank).pp_rank] for rank, size in held_by_rank(spec, plan).items())


@settings(max_examples=100)
@given(specs())
def test_never_above_a_plan(spec: Spec) -> None:
    assert lower_bound(spec).total <= fullest(spec, lower_spec(spec))


def test_weights_beside_adapters_have_no_gradients_and_no_state() -> None:
    spec = small_spec(2, 2, 2, 4)
    adapted = lower_bound(spec.model_copy(update={"adapter": Lora(rank=2, on=("out",))}))
    full = lower_bound(spec)
    assert full.gradients > 0 and full.optimizer > 0
    assert adapted == replace(full, gradients=0, optimizer=0)


@pytest.mark.parametrize(("file", "run"), RUNS)
def test_never_above_the_plan_of_a_shipped_spec(file: str, run: str) -> None:
    spec = shipped(file, run)
    bound, real = lower_bound(spec).total, fullest(spec, planned(file, run))
    assert bound <= real
    # The bound only covers state; long sequences and several residual streams hold more activations.
    if spec.train.sequence <= 4096 and spec.model.hyper_connections is None:
        assert real < 7 * bound, "a bound of use"


FITS = (
    "tiny.dsc",
    "quickstart.dsc",
    "laptop-gqa.dsc",
    "laptop-v2.dsc",
    "laptop-hybrid.dsc",
    "single-gpu.dsc",
    "moe-8gpu.dsc",
)


@pytest.mark.parametrize("file", FITS)
def test_fits_its_device(file: str) -> None:
    """Two thirds of the memory are enough even if a rank receives twice the rows of an even load in every layer."""
    spec = shipped(file)
    lowered = planned(file, spec.name)
    state = max(held_by_rank(spec, lowered.plan).values())
    proofs = [prove(program, lowered.plan, 2 * balanced_rows(spec)) for program in lowered.programs.values()]
    peak = max(max(proof.peak_bytes) for proof in proofs)
    assert state + peak < spec.cluster.node.device.memory * 2 / 3


def held_by(rank: int, build: Build) -> dict[str, int]:
    state = build_state(build.plan, rank, torch.device("cpu"))
    return {
        "weights": sum(bucket.parameters.nbytes for bucket in state.buckets),
        "gradients": sum(bucket.gradients.nbytes for bucket in state.buckets),
        "optimizer": sum(t.nbytes for bucket in state.buckets for piece in bucket.owned for t in piece.state.values()),
    }


@pytest.mark.parametrize("mesh", [(1, 1, 1, 0), (1, 2, 2, 0), (2, 2, 2, 0), (2, 2, 4, 1)])
def test_never_above_a_running_rank(tmp_path: Path, segments: Segments, mesh: tuple[int, int, int, int]) -> None:
    """What ranks allocate; with one stage, and nothing divided unevenly, the bound is exactly that."""
    pp, ep, dp, zero = mesh
    spec = small_spec(pp, ep, dp, 2 * pp, zero=zero)
    write_build(tmp_path / "build", compile_spec(spec, segments=segments).files)
    build, bound = Build.open(tmp_path / "build"), lower_bound(spec)
    ranks = [held_by(rank, build) for rank in range(pp * dp)]
    assert bound.weights + bound.gradients + bound.optimizer <= max(sum(rank.values()) for rank in ranks)
    if pp == 1:
        assert {"weights": bound.weights, "gradients": bound.gradients, "optimizer": bound.optimizer} == ranks[0]


def test_deepseek_v3() -> None:
    """The published set-up: 2,048 devices of 79.1 GiB, FP32 gradients and master weights, BF16 moments, ZeRO-1."""
    spec = shipped("deepseek-v3.dsc")
    bound = lower_bound(spec)
    mean = 671_026_419_200 / 2048
    assert bound.optimizer / mean == pytest.approx(4 + 2 * 2, rel=0.02)  # one owner for each state, and the MTP block's
    assert bound.gradients == pytest.approx(2 * bound.weights, rel=1e-6)
    assert 20 < bound.total / 2**30 < 30


def test_zero_1_shards_only_the_optimizer() -> None:
    spec = shipped("moe-8gpu.dsc")
    replicated = lower_bound(spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"zero": 0})}))
    divided = lower_bound(spec)
    assert (divided.weights, divided.gradients) == (replicated.weights, replicated.gradients)
    assert divided.optimizer < replicated.optimizer
