"""State sharded over the ranks of both pipelines (`zero` 2 and 3 of a mirrored schedule), with options of a run.

Each of the two pipeline ranks with a stage shards it over its data ranks, and both sum the shards after the backward:
with growing batches, in BF16 with and without master weights, and with frozen weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from dsl.schema import Batch, Precision, Spec
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import SEQUENCE, spec
from tests.runtime.step.test_adapters import adapted
from tests.runtime.step.test_differential import STEPS, check
from tests.runtime.step.test_divided_bits import differing
from tests.runtime.step.test_memory import measured_peaks

PP, DP = 2, 2
NARROW = {
    "no master": Precision(name="none", master="bf16"),
    "moments": Precision(name="moments", moments="bf16"),
    "bf16": Precision(name="bf16"),
}


def mirrored(zero: int, of: str = "llama", steps: int = STEPS, n: int = 4, precision: Precision | None = None) -> Spec:
    base = spec(PP, 1, DP, n, steps, zero, of, "dualpipe")
    return base.model_copy(update={"precision": precision}) if precision else base


def growing(chosen: Spec) -> Spec:
    """Steps of 4, of 6, and then three of 8 micro-batches on each data rank."""
    batch = chosen.train.batch.end
    grown = Batch(start=batch, end=2 * batch, over_tokens=2 * batch * SEQUENCE)
    tokens = (2 * batch + batch // 2 + 3 * 2 * batch) * SEQUENCE
    return chosen.model_copy(update={"train": chosen.train.model_copy(update={"batch": grown, "tokens": tokens})})


@pytest.mark.parametrize("of", ["llama", "v3"])
@pytest.mark.parametrize("zero", [2, 3])
def test_batches_that_grow(tmp_path: Path, segments: Segments, of: str, zero: int) -> None:
    """Programs for several numbers of micro-batches train as autograd does."""
    check(tmp_path, segments, {"only": growing(mirrored(zero, of))}, PP * DP)


@pytest.mark.parametrize("name", NARROW)
def test_short_weights_and_moments(tmp_path: Path, segments: Segments, name: str) -> None:
    """Levels 2 and 3 sum in the same order and are bit-identical. Levels 0 and 1 sum in another order, also in FP32:
    gradients differ by the order of sums, weights by at most one BF16 unit, if an update is rounded the other way."""
    for zero in range(4):
        chosen = mirrored(zero, steps=1, precision=NARROW[name])
        write_build(tmp_path / "builds" / f"{zero}", compile_spec(chosen, segments=segments).files)
    run_module("tests.runtime.step.ranks", tmp_path, PP * DP, "memory")
    results: list[list[dict[str, Tensor]]] = [
        [load_file(tmp_path / "out" / f"{zero}" / f"rank_{rank}.safetensors") for rank in range(PP * DP)]
        for zero in range(4)
    ]
    assert differing(results[0], results[1]) == [] and differing(results[2], results[3]) == []
    for before, after in zip(results[1], results[2], strict=True):
        for key, wanted in before.items():
            if key.startswith("gradient/"):
                assert (after[key] - wanted).abs().max() <= 2.0**-18 * wanted.abs().max(), key
            if key.startswith("weight/"):
                off = (after[key].float() - wanted.float()).abs()
                assert (off <= 2.0**-7 * wanted.abs().float()).all() and (off > 0).float().mean() < 0.01, key


@pytest.mark.parametrize(("name", "zero"), [("no master", 2), ("no master", 3), ("grown", 3), ("adapters", 2)])
def test_proven_peak_is_the_measured_one(tmp_path: Path, segments: Segments, name: str, zero: int) -> None:
    chosen = {
        "grown": mirrored(zero, n=6),
        "no master": mirrored(zero, "v3", precision=NARROW["no master"]),
        "adapters": adapted(mirrored(zero, "v3")),
    }[name]
    measured_peaks(tmp_path, segments, chosen)
