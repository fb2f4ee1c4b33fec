"""MXFP8 and NVFP4 on several ranks, in real processes: losses and gradients equal those of one rank.

Every token goes to every expert, in whole tiles of rows: so tiles along rows, which weight gradients of routed experts
read, have the same numbers on every mesh, and results differ only by the order of sums. NVFP4 has a scale for each
tensor, and the tensor of an expert rank has rows of several micro-batches and of some experts. Results then differ by
roundings, but less than they differ from BF16.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import BUILT_IN, Batch, Spec
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import spec
from tests.runtime.step.test_bf16 import MODEL
from tests.runtime.step.test_formats import LOW_LAYERS

SEQUENCE, MICRO_BATCHES = 16, 4  # 32 tokens in a micro-batch: a tile of each format; micro-batches over all data ranks
SUMS = 2e-5  # of a tensor's size: what orders of sums in FP32 differ
RECIPES = {"mxfp8": BUILT_IN["mxfp8"], "nvfp4": LOW_LAYERS, "bf16": BUILT_IN["bf16"]}
# (pipeline, expert, data), ZeRO stage
MESHES = {
    "one": (1, 1, 1, 0),
    "experts": (2, 2, 2, 0),
    "data": (2, 1, 2, 0),
    "data, zero 1": (2, 1, 2, 1),
}
CASES = (
    *(("one", recipe) for recipe in RECIPES),
    *(("experts", "mxfp8"), ("experts", "nvfp4"), ("data", "nvfp4"), ("data, zero 1", "nvfp4")),
)
Ranks = dict[tuple[str, str], list[dict[str, Tensor]]]


def chosen(mesh: str, recipe: str) -> Spec:
    """Two steps with the same global batch on every mesh."""
    pp, ep, dp, zero = MESHES[mesh]
    base, batch = spec(pp, ep, dp, MICRO_BATCHES // dp, steps=2, zero=zero), 2 * MICRO_BATCHES
    train = {"sequence": SEQUENCE, "batch": Batch(start=batch, end=batch), "tokens": 2 * batch * SEQUENCE}
    return base.model_copy(
        update={"precision": RECIPES[recipe], "model": MODEL, "train": base.train.model_copy(update=train)}
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> Ranks:
    """The results of the ranks of each case. Cases with the same number of ranks train in one launch, in order."""
    results = {}
    for world in (1, 4):
        folder = tmp_path_factory.mktemp("ranks")
        cases = [case for case in CASES if (case[0] != "one") == (world == 4)]
        for case in cases:
            write_build(folder / "builds" / "-".join(case), compile_spec(chosen(*case), segments=segments).files)
        run_module("tests.runtime.step.ranks", folder, world, "memory")
        for case in cases:
            outputs = folder / "out" / "-".join(case)
            results[case] = [load_file(outputs / f"rank_{rank}.safetensors") for rank in range(world)]
    return results


def off(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize(("mesh", "recipe"), [("experts", "mxfp8"), ("data", "nvfp4")])
def test_a_step_on_any_mesh_equals_one_rank(ranks: Ranks, mesh: str, recipe: str) -> None:
    (alone,), names = ranks["one", recipe], set()
    for rank in ranks[mesh, recipe]:
        for name in (key for key in rank if key.startswith("gradient/")):
            assert off(rank[name], alone[name]) <= SUMS, name
            names.add(name)
        assert torch.allclose(rank["rows"][0], alone["rows"][0], rtol=SUMS, atol=0)
        assert torch.allclose(rank["rows"][1], alone["rows"][1], rtol=2.0**-8), "the step after it"
    assert names == {key for key in alone if key.startswith("gradient/")}


def test_with_expert_ranks_nvfp4_differs_by_roundings(ranks: Ranks) -> None:
    """They differ about half as much as from BF16 in gradients overall, and less than half as much in the loss."""
    (alone,), (bf16,) = ranks["one", "nvfp4"], ranks["one", "bf16"]
    for rank in ranks["experts", "nvfp4"]:
        names = [key for key in rank if key.startswith("gradient/")]
        errors = torch.tensor([off(rank[name], alone[name]) for name in names])
        apart = torch.tensor([off(alone[name], bf16[name]) for name in names])
        assert errors.norm() < 0.55 * apart.norm()
        loss, wide = alone["rows"][0, :1], bf16["rows"][0, :1]
        assert off(rank["rows"][0, :1], loss) < 0.5 * off(loss, wide)


def test_with_zero_bits_are_equal(ranks: Ranks) -> None:
    """Weights and losses do not depend on which rank updates a weight."""
    for plain, divided in zip(ranks["data", "nvfp4"], ranks["data, zero 1", "nvfp4"], strict=True):
        assert plain.keys() == divided.keys()
        assert [name for name in plain if name != "rows" and not torch.equal(plain[name], divided[name])] == []
        assert torch.equal(plain["rows"][:, :3], divided["rows"][:, :3]), (
            "all but the norm, whose sum has another order"
        )
