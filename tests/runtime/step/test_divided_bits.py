"""Levels of `zero` that sum gradients in the same order train to the same bits."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import AdamW, Spec
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import spec

WORLD = 3


def trained(folder: Path, segments: Segments, specs: dict[str, Spec]) -> dict[str, list[dict[str, Tensor]]]:
    """The results of each rank after the steps of each spec."""
    for name, chosen in specs.items():
        write_build(folder / "builds" / name, compile_spec(chosen, segments=segments).files)
    run_module("tests.runtime.step.ranks", folder, WORLD, "memory")
    ranks = range(WORLD)
    return {name: [load_file(folder / "out" / name / f"rank_{rank}.safetensors") for rank in ranks] for name in specs}


def chosen(zero: int, num_micro_batches: int) -> Spec:
    """Only data parallelism, without MTP, so that one segment reads each tensor. Without clipping, since the order of
    the norm's sum depends on buckets."""
    base = spec(1, 1, WORLD, num_micro_batches, 3, zero, of="llama", schedule="1f1b", precision="fp32")
    train = base.train.model_copy(update={"optimizer": AdamW(weight_decay=0.1)})
    return base.model_copy(update={"train": train})


def differing(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> list[str]:
    return [
        name
        for first, second in zip(one, other, strict=True)
        for name in first
        if name.startswith(("gradient/", "weight/", "bias/")) and not torch.equal(first[name], second[name])
    ]


def test_bits_of_the_levels(tmp_path: Path, segments: Segments) -> None:
    """With one micro-batch all levels are bit-identical. With several, levels 2 and 3 sum over data ranks first, 0 and
    1 over micro-batches first, and each pair is bit-identical."""
    results = trained(tmp_path, segments, {f"{zero} of {n}": chosen(zero, n) for n in (1, 3) for zero in range(4)})
    for zero in (1, 2, 3):
        assert differing(results["0 of 1"], results[f"{zero} of 1"]) == [], zero
    assert differing(results["0 of 3"], results["1 of 3"]) == []
    assert differing(results["2 of 3"], results["3 of 3"]) == []
    assert differing(results["1 of 3"], results["2 of 3"]) != [], "else the page need not say so"
