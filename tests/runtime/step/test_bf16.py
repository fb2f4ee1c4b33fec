"""Training in BF16, in real processes: the error of a whole step is that of its roundings, and all meshes agree.

The same step in FP32, with random rounding wherever the BF16 segments round, gives the size of this error. Every token
goes to every expert here, since rounding would decide near ties differently.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import Dense, Spec
from dsl.schema.run import Fusion
from tests.compiler.model.segments.rounding import SAMPLES, assert_rounded, at_random
from tests.runtime.step.processes import run_module
from tests.runtime.step.rounded_step import first_step
from tests.runtime.step.specs import MOE, mla, model, spec
from tests.runtime.step.test_memory import measured_peaks
from tests.runtime.step.test_recompute import again

MICRO_BATCHES = 8  # of a step, over all data ranks
EVERYONE = MOE.model_copy(update={"experts": 4, "top_k": 4, "groups": 1, "top_groups": 1})
MODEL = model(mla(), Dense(inner=22), EVERYONE, mtp=True)


def chosen(pp: int, ep: int, dp: int, zero: int = 0, precision: str = "bf16", steps: int = 2) -> Spec:
    """A spec with the same global batch on every mesh."""
    return spec(pp, ep, dp, MICRO_BATCHES // dp, steps, zero, precision=precision).model_copy(update={"model": MODEL})


# (pipeline, expert, data), ZeRO stage, transport of messages: gloo does not support BF16
MESHES = {
    "one": (1, 1, 1, 0, "gloo"),
    "dualpipe": (2, 2, 2, 0, "gloo"),
    "dualpipe, zero 1": (2, 2, 2, 1, "gloo"),
    "dualpipe, zero 1, memory": (2, 2, 2, 1, "memory"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> dict[str, list[dict[str, Tensor]]]:
    """The results of two BF16 steps of the ranks of each mesh."""
    results = {}
    for name, (pp, ep, dp, zero, transport) in MESHES.items():
        folder, world = tmp_path_factory.mktemp("ranks"), pp * dp
        write_build(folder / "builds" / "it", compile_spec(chosen(pp, ep, dp, zero), segments=segments).files)
        run_module("tests.runtime.step.ranks", folder, world, transport)
        results[name] = [load_file(folder / "out" / "it" / f"rank_{rank}.safetensors") for rank in range(world)]
    return results


@pytest.fixture(scope="module")
def wide(
    tmp_path_factory: pytest.TempPathFactory, segments: Segments
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Gradients and losses of the first step in FP32: as it is, and with random roundings."""
    folder = tmp_path_factory.mktemp("wide") / "build"
    fp32 = chosen(1, 1, 1, precision="fp32")
    apart = fp32.model_copy(update={"unfused": get_args(Fusion)})  # so that all roundings are between ops
    write_build(folder, compile_spec(apart, segments=segments).files)
    return first_step(folder), [first_step(folder, seed) for seed in range(SAMPLES)]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_differs_from_fp32_by_its_roundings(
    ranks: dict[str, list[dict[str, Tensor]]], wide: tuple[dict[str, Tensor], list[dict[str, Tensor]]], mesh: str
) -> None:
    """Every gradient on every rank that holds it, against the FP32 run."""
    exact, samples = wide
    names = set()
    for rank in ranks[mesh]:
        for name in (key.removeprefix("gradient/") for key in rank if key.startswith("gradient/")):
            gradient = rank[f"gradient/{name}"]
            assert gradient.dtype == torch.float32
            assert_rounded(gradient, exact[name], [sample[name] for sample in samples], f"{mesh}: {name}")
            names.add(name)
    assert names == exact.keys() - {"loss", "mtp_loss"}


def test_meshes_agree(ranks: dict[str, list[dict[str, Tensor]]]) -> None:
    """Weights are BF16 and equal on all holders; weights and losses are the same with and without ZeRO."""
    for plain, divided in zip(ranks["dualpipe"], ranks["dualpipe, zero 1"], strict=True):
        assert plain.keys() == divided.keys()
        assert [name for name in plain if name != "rows" and not torch.equal(plain[name], divided[name])] == []
        assert torch.equal(plain["rows"][:, :3], divided["rows"][:, :3]), (
            "all but the norm, whose sum has another order"
        )
    weights: dict[str, Tensor] = {}
    for rank in ranks["dualpipe"]:
        for name in (key for key in rank if key.startswith("weight/")):
            assert rank[name].dtype == torch.bfloat16
            assert torch.equal(weights.setdefault(name, rank[name]), rank[name]), name
    alone = ranks["one"][0]
    assert weights.keys() == {name for name in alone if name.startswith("weight/")}
    assert torch.allclose(ranks["dualpipe"][0]["rows"], alone["rows"], rtol=2.0**-8)


@pytest.mark.parametrize(
    ("of", "pp", "ep", "dp", "n", "schedule", "recompute"),
    [
        ("v3", 2, 2, 2, 6, "dualpipe", ()),
        ("v3", 2, 2, 2, 4, "1f1b", ("rmsnorm", "mla_up", "swiglu")),
        ("qwen", 2, 1, 1, 5, "dualpipev", ()),
    ],
)
def test_proven_peak_is_the_measured_one(
    tmp_path: Path,
    segments: Segments,
    of: str,
    pp: int,
    ep: int,
    dp: int,
    n: int,
    schedule: str,
    recompute: tuple[str, ...],
) -> None:
    narrow, wide = (spec(pp, ep, dp, n, of=of, schedule=schedule, precision=p) for p in ("bf16", "fp32"))
    folders = [tmp_path / "narrow", tmp_path / "wide"]
    for folder in folders:
        folder.mkdir()
    peaks = [
        measured_peaks(folder, segments, again(variant, *recompute))
        for folder, variant in zip(folders, (narrow, wide), strict=True)
    ]
    assert all(narrow_peak < wide_peak for narrow_peak, wide_peak in zip(*peaks, strict=True)), peaks


def test_random_rounding_keeps_bf16_numbers() -> None:
    """Random rounding keeps BF16 numbers and rounds others to one of their two neighbours, with the right mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=generator, dtype=torch.float64)
    representable = x.to(torch.bfloat16).double()
    assert torch.equal(at_random(representable, generator), representable)
    draws = torch.stack([at_random(x, generator) for _ in range(400)])
    assert ((draws - x).abs() <= 2.0**-7 * x.abs()).all() and torch.equal(draws.to(torch.bfloat16).double(), draws)
    assert (draws.mean(0) - x).abs().max() <= 5 * 2.0**-8 * x.abs().max() / 400**0.5


def test_the_page_quotes_the_last_results() -> None:
    """The last results of `python -m benchmarks.precision`."""
    root = Path(__file__).parents[3]
    quote = (root / "benchmarks" / "results" / "precision.txt").read_text("utf-8").splitlines()[-1]
    page = (root / "docs" / "precision.md").read_text("utf-8").replace("\n> ", " ")
    assert quote.startswith("after ") and quote in page
