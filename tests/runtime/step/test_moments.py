"""Training with BF16 moments or master weights: a first step, a resume, and sharded over ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import Precision, Spec
from runtime.build.build import Build
from runtime.checkpoint.publish import TensorPart
from runtime.launch.heartbeat import Board
from runtime.state import snapshot
from runtime.step.trainer import Trainer
from tests.runtime.step.processes import run_module
from tests.runtime.step.samples import RandomSamples, weight
from tests.runtime.step.specs import spec

STEPS, RATE = 4, 1e-2  # its largest
SHORT, WIDE = Precision(name="short", moments="bf16"), Precision(name="wide", moments="fp32")


def chosen(precision: Precision, dp: int = 1, zero: int = 0) -> Spec:
    return spec(1, 1, dp, 4 // dp, STEPS, zero).model_copy(update={"precision": precision})


def trainer_of(folder: Path, segments: Segments, of: Spec) -> Trainer:
    write_build(folder, compile_spec(of, segments=segments).files)
    build = Build.open(folder)
    samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)
    trainer = Trainer(build, 0, samples, samples, Board(1).bind(0))
    for bucket, entry, _ in trainer.state.logical(lambda bucket: bucket.parameters):
        bucket.set_weight(entry, torch.from_numpy(weight(entry.name, entry.shape)))
    return trainer


def held(trainer: Trainer) -> dict[str, Tensor]:
    """The tensors that a checkpoint would have."""
    tensors = snapshot.take(trainer.state, trainer.plan, 0)
    return {
        name: (tensor.values.view(tensor.shape) if isinstance(tensor, TensorPart) else tensor).clone()
        for name, tensor in tensors.items()
    }


def test_the_first_update_equals_that_of_fp32_moments(tmp_path: Path, segments: Segments) -> None:
    """Weights use a step's moments before these are rounded; then moments are the nearest BF16 numbers."""
    after = {}
    for precision in (SHORT, WIDE):
        trainer = trainer_of(tmp_path / precision.name, segments, chosen(precision))
        trainer.train_step()
        after[precision.name] = held(trainer)
    for name, exact in after["wide"].items():
        tensor = after["short"][name]
        if name.startswith("moment"):
            assert tensor.dtype == torch.bfloat16
            # half a unit of BF16, and what both are off in FP32
            assert ((tensor.float() - exact).abs() <= (2.0**-8 + 2.0**-21) * exact.abs()).all(), name
        else:
            assert tensor.dtype == torch.float32
            # an update of at most the rate, of some ten operations
            assert ((tensor - exact).abs() <= 2.0**-22 * exact.abs() + 2.0**-20 * RATE).all(), name


def test_without_fp32_master_weights_each_update_is_rounded(tmp_path: Path, segments: Segments) -> None:
    """BF16 weights are updated like FP32 weights, then rounded; biases are FP32 in both."""
    after = {}
    for precision in (Precision(name="none", master="bf16"), WIDE):
        trainer = trainer_of(tmp_path / precision.name, segments, chosen(precision))
        for bucket, entry, values in trainer.state.logical(lambda bucket: bucket.parameters):
            bucket.set_weight(entry, values.clone())
        trainer.train_step()
        after[precision.name] = held(trainer)
    assert {name.partition("/")[0] for name in after["none"]} == {"weight", "moment1", "moment2", "bias"}
    for name, exact in after["wide"].items():
        tensor = after["none"][name]
        if name.startswith("weight"):
            assert tensor.dtype == torch.bfloat16
            # half a unit of BF16, and what both are off in FP32
            assert ((tensor.float() - exact).abs() <= (2.0**-8 + 2.0**-21) * exact.abs() + 2.0**-20 * RATE).all(), name
        else:
            assert tensor.dtype == torch.float32
            assert ((tensor - exact).abs() <= 2.0**-21 * exact.abs()).all(), name


def test_a_resumed_run_is_equal_to_the_bit(tmp_path: Path, segments: Segments) -> None:
    straight, before, after = (
        trainer_of(tmp_path / name, segments, chosen(SHORT)) for name in ("straight", "before", "after")
    )
    losses = [straight.train_step()["loss"] for _ in range(STEPS)]
    resumed_losses = [before.train_step()["loss"] for _ in range(STEPS // 2)]
    saved = held(before)
    snapshot.put_state(after.state, lambda names: {name: saved[name] for name in names})
    after.step, after.position = before.step, before.position
    resumed_losses += [after.train_step()["loss"] for _ in range(STEPS // 2)]
    assert resumed_losses == losses
    assert_equal(held(after), held(straight))


def test_moments_sharded_over_two_ranks_give_the_same_weights(tmp_path: Path, segments: Segments) -> None:
    """ZeRO may cut buckets anywhere: the update of an element does not depend on its neighbours."""
    full, divided = (chosen(SHORT, dp=2, zero=zero) for zero in (0, 1))
    assert_same_under_zero(tmp_path, segments, full, divided)


def assert_same_under_zero(folder: Path, segments: Segments, whole: Spec, divided: Spec) -> None:
    """Assert that two ranks with all state train the same weights as two with half of it each."""
    for name, variant in (("whole", whole), ("divided", divided)):
        write_build(folder / "builds" / name, compile_spec(variant, segments=segments).files)
    run_module("tests.runtime.step.ranks", folder, 2, "memory")
    for rank in range(2):
        full_tensors, divided_tensors = (
            load_file(folder / "out" / name / f"rank_{rank}.safetensors") for name in ("whole", "divided")
        )
        for tensors in (full_tensors, divided_tensors):
            del tensors["rows"]  # they are summed over the parts of a bucket, in another order
        assert_equal(divided_tensors, full_tensors)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
