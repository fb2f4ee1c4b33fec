"""Recomputed layers, in real processes: memory and exchanges change, but no bit of the results.

Losses and loads are recorded once: they equal plain autograd's, as do all gradients.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compiler.emit.segment_cache import Segments
from dsl.schema import Spec
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import STEPS, check
from tests.runtime.step.test_memory import measured_peaks
from tests.runtime.step.test_nodes import on_nodes


def again(of: Spec, layers: int | None = None, *names: str) -> Spec:
    """The spec with all layers recomputed, or the first ones of each stage, and `names` in the others."""
    return of.model_copy(update={"recompute": ("layer", *names), "recompute_layers": layers})


def with_layout(plain: Spec) -> Spec:
    """The spec with fixed stages: with other layers in a stage, gradients would be summed in another order."""
    return plain.model_copy(update={"parallel": plain.parallel.model_copy(update={"layout": "Ett|ttmL"})})


def equal_to_the_bit(folder: Path, segments: Segments, plain: Spec, others: dict[str, Spec]) -> None:
    """Assert that each spec trains as autograd, and that gradients, weights, biases and losses equal `plain`'s."""
    world = plain.parallel.pipeline * plain.parallel.columns
    check(folder, segments, {"none": plain} | others, world)
    for rank in range(world):
        expected = load_file(folder / "out" / "none" / f"rank_{rank}.safetensors")
        for name in others:
            results = load_file(folder / "out" / name / f"rank_{rank}.safetensors")
            assert results.keys() == expected.keys()
            different = {name for name in results if not torch.equal(results[name], expected[name])}
            assert different <= {"sent", "exchanged"}, (
                "bytes between ranks may differ: those are held to the plan's by `check`"
            )


@pytest.mark.parametrize(
    ("of", "schedule", "pp", "ep", "dp", "zero", "tp"),
    [
        ("v3", "dualpipe", 2, 2, 2, 1, 1),
        ("v3", "zbv", 2, 2, 2, 3, 1),
        ("v3", "1f1b", 2, 1, 1, 0, 2),
        ("qwen", "zb1p", 2, 2, 2, 0, 1),
        ("split", "dualpipe", 2, 1, 1, 1, 2),
        ("llama", "1f1b", 2, 1, 2, 3, 1),
        ("everything", "1f1b", 2, 2, 2, 1, 1),
        ("pattern", "interleaved", 2, 2, 2, 1, 1),
    ],
)
def test_training_is_equal_to_the_bit(
    tmp_path: Path, segments: Segments, of: str, schedule: str, pp: int, ep: int, dp: int, zero: int, tp: int
) -> None:
    plain = spec(pp, ep, dp, 2 * pp, STEPS, zero, of, schedule, tensor=tp)
    plain = with_layout(plain) if of == "split" else plain
    # at zero = 3, norms recomputed by two segments are in another bucket, and squares are summed in another order
    variants = {"all": again(plain), "one": again(plain, 1, *(("rmsnorm",) if zero < 3 else ()), "swiglu")}
    equal_to_the_bit(tmp_path, segments, plain, variants)


def test_sequences_of_context_ranks_are_put_together_again(tmp_path: Path, segments: Segments) -> None:
    plain = with_layout(spec(2, 1, 1, 4, STEPS, 1, "v3", "1f1b", context=2, sequence=8))
    equal_to_the_bit(tmp_path, segments, plain, {"all": again(plain)})


def test_rows_are_routed_by_nodes_again(tmp_path: Path, segments: Segments) -> None:
    plain = on_nodes(spec(1, 4, 4, 3, STEPS), 2)
    assert plain.routes_by_nodes
    equal_to_the_bit(tmp_path, segments, plain, {"all": again(plain)})


@pytest.mark.parametrize(
    ("of", "schedule", "pp", "ep", "dp", "n", "zero", "tp", "layers"),
    [
        ("v3", "dualpipe", 2, 2, 2, 6, 1, 1, None),
        ("v3", "1f1b", 2, 2, 2, 6, 3, 1, 1),
        ("v3", "zbv", 2, 1, 1, 6, 0, 2, None),
        ("split", "1f1b", 2, 1, 1, 6, 1, 2, None),
        ("llama", "1f1b", 2, 1, 1, 8, 0, 1, None),
    ],
)
def test_proven_peak_is_the_measured_one_and_lower(
    tmp_path: Path,
    segments: Segments,
    of: str,
    schedule: str,
    pp: int,
    ep: int,
    dp: int,
    n: int,
    zero: int,
    tp: int,
    layers: int | None,
) -> None:
    plain = spec(pp, ep, dp, n, zero=zero, of=of, schedule=schedule, tensor=tp)
    folders = [tmp_path / "kept", tmp_path / "again"]
    for folder in folders:
        folder.mkdir()
    peaks, lower = (
        measured_peaks(folders[0], segments, plain),
        measured_peaks(folders[1], segments, again(plain, layers)),
    )
    assert max(lower) < max(peaks) and all(lower_peak <= peak for lower_peak, peak in zip(lower, peaks, strict=True)), (
        lower,
        peaks,
    )


def test_forwarded_rows_are_counted_again(tmp_path: Path, segments: Segments) -> None:
    measured_peaks(tmp_path, segments, again(on_nodes(spec(1, 4, 4, 2, precision="fp8_block"), 2)))
