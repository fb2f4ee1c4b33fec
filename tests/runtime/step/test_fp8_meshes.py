"""FP8 blocks on several ranks, in real processes: losses and gradients are those of one rank up to the order of sums.

Every token goes to every expert, in whole tiles of rows: so tiles along rows, which weight gradients of routed experts
read, have the same numbers on every mesh. If a tile had rows from several ranks, its rounding would differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import BUILT_IN, Batch, Device, Machine, Parallel, ScheduleBlock, Spec
from tests.runtime.step.processes import run_module
from tests.runtime.step.test_fp8 import RECOMPUTE
from tests.runtime.step.test_fp8 import chosen as of_one_rank
from tests.runtime.step.test_memory import measured_peaks

SEQUENCE, MICRO_BATCHES = 64, 8  # tokens; micro-batches of a step, over all data ranks
# (pipeline, expert, data), ZeRO stage, transport of messages
MESHES = {
    "one": (1, 1, 1, 0, "memory"),
    "dualpipe": (2, 2, 2, 0, "memory"),
    "dualpipe, gloo": (2, 2, 2, 0, "gloo"),
    "dualpipe, zero 1": (2, 2, 2, 1, "memory"),
    "zbv, zero 2": (2, 2, 2, 2, "memory"),
}
SUMS = 2e-5  # of a tensor's size: what orders of sums in FP32 differ


def chosen(pp: int, ep: int, dp: int, zero: int = 0, recompute: str = "nothing", steps: int = 2) -> Spec:
    """A spec with the same global batch on every mesh."""
    base = of_one_rank(recompute=recompute)
    batch = 2 * MICRO_BATCHES
    device = Device(name="cpu", memory=4 * 10**9)
    train = {"sequence": SEQUENCE, "batch": Batch(start=batch, end=batch), "tokens": steps * batch * SEQUENCE}
    return base.model_copy(
        update={
            "cluster": base.cluster.model_copy(update={"node": Machine(devices=pp * dp, device=device)}),
            "parallel": Parallel(pipeline=pp, expert=ep, data=dp, zero=zero),
            "schedule": ScheduleBlock(name="1f1b" if pp == 1 else "dualpipe" if zero < 2 else "zbv"),
            "train": base.train.model_copy(update=train),
        }
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> Callable[[str], list[dict[str, Tensor]]]:
    """The results of a mesh's ranks after two steps; each mesh runs once."""

    @cache
    def run(name: str) -> list[dict[str, Tensor]]:
        pp, ep, dp, zero, transport = MESHES[name]
        folder, world = tmp_path_factory.mktemp("ranks"), pp * dp
        write_build(folder / "builds" / "it", compile_spec(chosen(pp, ep, dp, zero), segments=segments).files)
        run_module("tests.runtime.step.ranks", folder, world, transport)
        return [load_file(folder / "out" / "it" / f"rank_{rank}.safetensors") for rank in range(world)]

    return run


@pytest.mark.parametrize("mesh", ["dualpipe", "dualpipe, gloo", "zbv, zero 2"])
def test_a_step_on_any_mesh_equals_one_rank(ranks: Callable[[str], list[dict[str, Tensor]]], mesh: str) -> None:
    (alone,) = ranks("one")
    names = set()
    for rank in ranks(mesh):
        for name in (key for key in rank if key.startswith("gradient/")):
            error = float((rank[name] - alone[name]).norm() / alone[name].norm())
            assert error <= SUMS, f"{name}: {error:.2g}"
            names.add(name)
        losses = rank["rows"][0, :3], alone["rows"][0, :3]
        assert torch.allclose(*losses, rtol=SUMS, atol=0), losses
        assert torch.allclose(rank["rows"][1], alone["rows"][1], rtol=2.0**-8), "the step after it"
    assert names == {key for key in alone if key.startswith("gradient/")}


def test_context_ranks_differ_only_by_roundings(
    ranks: Callable[[str], list[dict[str, Tensor]]], tmp_path: Path, segments: Segments
) -> None:
    """Tiles along rows have other tokens than on one rank, and other roundings: each gradient is as far from the
    float64 gradient as one rank's is."""
    base = chosen(1, 1, 1, steps=1)
    split = base.parallel.model_copy(update={"context": 2})
    machine = base.cluster.node.model_copy(update={"devices": 2})
    in_two = {"parallel": split, "cluster": base.cluster.model_copy(update={"node": machine})}
    results = {}
    for name, update in {"exact": {"precision": BUILT_IN["fp64"]}, "context": in_two}.items():
        files = compile_spec(base.model_copy(update=update), segments=segments).files
        write_build(tmp_path / name / "builds" / "it", files)
        run_module("tests.runtime.step.ranks", tmp_path / name, 2 if name == "context" else 1, "memory")
        results[name] = load_file(tmp_path / name / "out" / "it" / "rank_0.safetensors")
    (alone,) = ranks("one")
    ratios = []
    for name in (key for key in alone if key.startswith("gradient/")):
        exact = results["exact"][name]
        wanted, error = (
            float((gradients[name] - exact).norm() / exact.norm()) for gradients in (alone, results["context"])
        )
        assert error <= 2 * wanted, f"{name}: {error:.2g}, on one rank {wanted:.2g}"
        ratios.append(error / wanted)
    assert 0.8 < median(ratios) < 1.25


def test_with_zero_bits_are_equal(ranks: Callable[[str], list[dict[str, Tensor]]]) -> None:
    """Weights and losses do not depend on which rank updates a weight."""
    for plain, divided in zip(ranks("dualpipe"), ranks("dualpipe, zero 1"), strict=True):
        assert plain.keys() == divided.keys()
        assert [name for name in plain if name != "rows" and not torch.equal(plain[name], divided[name])] == []
        assert torch.equal(plain["rows"][:, :3], divided["rows"][:, :3]), (
            "all but the norm, whose sum has another order"
        )


@pytest.mark.parametrize(("pp", "ep", "dp", "recompute"), [(1, 1, 1, "nothing"), (2, 2, 2, "as published")])
def test_proven_peak_is_the_measured_one(
    tmp_path: Path, segments: Segments, pp: int, ep: int, dp: int, recompute: str
) -> None:
    assert recompute in RECOMPUTE
    measured_peaks(tmp_path, segments, chosen(pp, ep, dp, recompute=recompute, steps=1))
