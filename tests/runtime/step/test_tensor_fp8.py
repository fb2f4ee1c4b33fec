"""FP8 products on tensor ranks, in real processes: errors are those of their roundings, as in test_fp8.py."""

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
from compiler.plan.plan import make_plan
from dsl.schema import Machine, Parallel, Spec
from dsl.schema.run import Fusion
from runtime.checkpoint.loading import cut
from runtime.contract.slices import Slice
from tests.runtime.step.processes import run_module
from tests.runtime.step.test_fp8 import PUBLISHED, SAMPLES, Roundings, off, step
from tests.runtime.step.test_fp8 import chosen as of_one_rank
from tests.runtime.step.test_memory import measured_peaks

RANKS = 2


def chosen(attention: str, precision: str = "fp8_block", recompute: str = "nothing", tensor: int = RANKS) -> Spec:
    base = of_one_rank(attention, precision, recompute)
    node = Machine(devices=tensor, device=base.cluster.node.device)
    return base.model_copy(
        update={
            "model": base.model.model_copy(update={"vocab": 62}),
            "cluster": base.cluster.model_copy(update={"node": node}),
            "parallel": Parallel(data=1, tensor=tensor),
        }
    )


def steps(folder: Path, of: Spec, segments: Segments, *ways: str) -> list[dict[str, dict[str, Tensor]]]:
    """Gradients of the first step of each tensor rank, for each way. Gradients of shared weights are summed here if
    the run did not: it only sums its own, not those in float64."""
    write_build(folder / "build", compile_spec(of, segments=segments).files)
    run_module("tests.runtime.step.wide_ranks", folder, RANKS, *ways)
    split = slices_of(of, 0)
    results: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(RANKS)]
    for way in ways:
        ranks = [load_file(folder / way / f"rank_{rank}.safetensors") for rank in range(RANKS)]
        summed = set() if way == "run" else ranks[0].keys() - split.keys() - {"losses"}
        for mine, result in zip(ranks, results, strict=True):
            result[way] = mine | {name: torch.stack([gradients[name] for gradients in ranks]).sum(0) for name in summed}
    return results


def slices_of(of: Spec, rank: int) -> dict[str, Slice]:
    """The slices that a rank has, by the names of gradients."""
    slices = ((replica.tensor, replica.slice) for replica in make_plan(of).replicas if rank in replica.holders)
    return {tensor.replace(".", "_"): part for tensor, part in slices if part}


@pytest.mark.parametrize(
    ("attention", "recompute"),
    [("mla", PUBLISHED), ("gqa", "nothing"), ("mla", "whole"), ("gqa, everything", "nothing")],
)
def test_a_step_on_tensor_ranks_differs_from_fp64_by_its_roundings(
    tmp_path: Path, segments: Segments, attention: str, recompute: str
) -> None:
    """In float64 without rounding, it equals the step of one rank in FP64."""
    fused = chosen(attention, recompute=recompute)
    samples = [str(seed) for seed in range(SAMPLES)]
    apart = fused.model_copy(update={"unfused": get_args(Fusion)})  # each rounding is between ops
    results = steps(tmp_path / "apart", apart, segments, "run", "exact", "nearest", *samples)
    for mine, separate in zip(steps(tmp_path / "fused", fused, segments, "run"), results, strict=True):
        assert max(off(mine["run"], separate["run"]).values()) == 0.0, "a fused op rounds where its parts do"
    alone = chosen(attention, "fp64", tensor=1)
    write_build(tmp_path / "whole", compile_spec(alone, segments=segments).files)
    full = step(tmp_path / "whole", None)
    for rank, mine in enumerate(results):
        slices = slices_of(fused, rank)
        wanted = {name: cut(value, slices.get(name)) for name, value in full.items()}
        assert max(off(mine["exact"], wanted).values()) < 1e-6  # losses are scaled by constants of FP32
        Roundings(mine["exact"], [mine[seed] for seed in samples], mine["nearest"]).hold(mine["run"])


def test_proven_peak_is_the_measured_one(tmp_path: Path, segments: Segments) -> None:
    measured_peaks(tmp_path, segments, chosen("mla", recompute=PUBLISHED))
