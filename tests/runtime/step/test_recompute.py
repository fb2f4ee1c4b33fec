"""Recompute, in real processes: it changes memory, but no bit of the results."""

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

V3 = ("rmsnorm", "mla_up", "swiglu")  # what DeepSeek-V3 recomputes
WHOLE = ("attention", "dense", "router", "shared", "experts")


def again(of: Spec, *names: str) -> Spec:
    return of.model_copy(update={"recompute": names})


@pytest.mark.parametrize(
    ("of", "schedule", "pp", "ep", "dp", "choices"),
    [
        ("v3", "dualpipe", 2, 2, 2, (*((name,) for name in V3), V3, WHOLE)),
        ("v3", "1f1b", 2, 1, 1, (*((name,) for name in V3), V3, WHOLE)),
        ("v3", "zb1p", 2, 2, 2, (V3, WHOLE)),
        ("qwen", "zbv", 2, 2, 2, (("rmsnorm", "swiglu"), ("attention", "router", "experts"))),
        ("llama", "dualpipe", 2, 1, 1, (("rmsnorm", "swiglu"), ("rmsnorm", "swiglu", "qkv", "up"))),
        ("v4", "1f1b", 2, 1, 1, (("rmsnorm",), ("mla_up",), ("attention",))),
    ],
)
def test_training_is_equal_to_the_bit(
    tmp_path: Path,
    segments: Segments,
    of: str,
    schedule: str,
    pp: int,
    ep: int,
    dp: int,
    choices: tuple[tuple[str, ...], ...],
) -> None:
    """Training equals autograd like every run; gradients, weights, biases and losses equal the run that keeps all."""
    plain = spec(pp, ep, dp, 2 * pp, STEPS, of=of, schedule=schedule)
    check(tmp_path, segments, {"none": plain} | {"_".join(names): again(plain, *names) for names in choices}, pp * dp)
    for rank in range(pp * dp):
        expected = load_file(tmp_path / "out" / "none" / f"rank_{rank}.safetensors")
        for names in choices:
            results = load_file(tmp_path / "out" / "_".join(names) / f"rank_{rank}.safetensors")
            assert results.keys() == expected.keys()
            assert [name for name in results if not torch.equal(results[name], expected[name])] == []


@pytest.mark.parametrize(
    ("of", "schedule", "pp", "ep", "dp", "n", "names"),
    [
        ("v3", "dualpipe", 2, 2, 2, 6, V3),
        ("v3", "1f1b", 2, 2, 2, 4, V3),
        ("v3", "zb1p", 2, 2, 2, 6, WHOLE),
        ("qwen", "zbv", 2, 2, 2, 3, ("rmsnorm", "swiglu")),
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
    names: tuple[str, ...],
) -> None:
    plain = spec(pp, ep, dp, n, of=of, schedule=schedule)
    folders = [tmp_path / "kept", tmp_path / "again"]
    for folder in folders:
        folder.mkdir()
    peaks = measured_peaks(folders[0], segments, plain)
    lower = measured_peaks(folders[1], segments, again(plain, *names))
    assert all(lower_peak < peak for lower_peak, peak in zip(lower, peaks, strict=True)), (lower, peaks)
