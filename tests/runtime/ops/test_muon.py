"""One update of Muon against singular values, its FLOPs as torch counts them, and its memory as torch allocates it."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from dsl.schema import AdamW, Muon
from runtime.state.optimizers.muon import EXACT, FAST, muon, orthogonal

SHAPES = [(1, 1), (1, 7), (5, 5), (24, 64), (64, 24)]
MOONLIGHT, V4 = Muon(), Muon(newton_schulz=8, polish=2, rms=0.18)


def of_norm_1(rows: int, columns: int, seed: int = 0) -> Tensor:
    """A random float64 matrix with norm 1 whose singular values span two decades."""
    random = torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    u, s, v = torch.linalg.svd(random, full_matrices=False)
    s = torch.logspace(0, -1.9, len(s), dtype=torch.float64)
    return u @ torch.diag(s / s.norm()) @ v


def update(row: Muon, weights: Tensor, gradients: Tensor, momentum: Tensor, dtype: torch.dtype) -> None:
    update_by: Any = muon
    update_by(weights, gradients, momentum, None, 1.0, 1.0, *row.settings().values(), 0.0, 1, dtype)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("row", [MOONLIGHT, V4], ids=["moonlight", "v4"])
def test_the_iteration_is_its_polynomial_of_the_singular_values(row: Muon, rows: int, columns: int) -> None:
    """Singular vectors do not change, and singular values come into the published bands: 0.68 to 1.21, and 1."""
    x = of_norm_1(rows, columns)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    for a, b, c in [FAST] * row.newton_schulz + [EXACT] * row.polish:
        s = a * s + b * s**3 + c * s**5
    result = orthogonal(x, row.newton_schulz, row.polish)
    torch.testing.assert_close(result, u @ torch.diag(s) @ v, rtol=0, atol=1e-11)
    low, high = (0.68, 1.21) if row is MOONLIGHT else (1 - 1e-4, 1 + 6e-4)
    values = torch.linalg.svdvals(result)
    assert low <= values.min() and values.max() <= high


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_in_bf16_stay_near_the_band(rows: int, columns: int) -> None:
    values = torch.linalg.svdvals(orthogonal(of_norm_1(rows, columns).bfloat16(), 5, 0).double())
    assert values.min() >= 0.6 and values.max() <= 1.3


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (24, 64), (64, 24)])
def test_an_update_has_the_root_mean_square_of_adamw(rows: int, columns: int) -> None:
    """The root mean square of U·S'·Vᵀ is √(mean of s'² / longer side): 0.2 after scaling if s' is 1."""
    weights, gradients = torch.zeros(rows, columns, dtype=torch.float64), of_norm_1(rows, columns)
    update(V4, weights, gradients, torch.zeros_like(weights), torch.float64)
    assert weights.square().mean().sqrt() == pytest.approx(V4.rms, rel=1e-3)
    assert (weights * gradients).sum() < 0, "it goes down"


def test_zero_gradients_only_decay_weights() -> None:
    """An expert without tokens has no gradient: its weights decay and stay finite."""
    weights = torch.ones(3, 4)
    muon(weights, torch.zeros(3, 4), torch.zeros(3, 4), None, 1.0, 0.5, 0.95, 1, 5, 0, 0.2, 0.1, 1, torch.float32)
    assert torch.equal(weights, torch.full((3, 4), 1 - 0.5 * 0.1))


@pytest.mark.parametrize("row", [MOONLIGHT, Muon(nesterov=False, momentum=0.8)], ids=["nesterov", "plain"])
def test_weights_and_momentum_in_bf16_are_rounded_once(row: Muon) -> None:
    """They are the BF16 numbers nearest to the results of an FP32 update of the same values."""
    random = torch.Generator().manual_seed(3)
    weights, gradients, momentum = (torch.randn(24, 64, generator=random) for _ in range(3))
    short = weights.bfloat16(), momentum.bfloat16()
    exact = short[0].float(), short[1].float()
    for first, second in (short, exact):
        muon(
            first, gradients, second, None, 0.7, 1e-2, row.momentum, row.nesterov, 5, 0, row.rms, 0.1, 1, torch.float32
        )
    for first, second in zip(short, exact, strict=True):
        assert torch.equal(first, second.bfloat16())


def test_settings_of_the_other_parameters_follow_those_of_muon() -> None:
    """The settings of the optimizer of the other parameters follow a change of Muon's settings."""
    matrices, remaining = MOONLIGHT.rows
    assert MOONLIGHT.rows[1] is remaining and matrices == MOONLIGHT
    changed = MOONLIGHT.model_copy(update={"beta1": 0.5, "weight_decay": 0.3})
    assert changed.rows == (changed, AdamW(beta1=0.5, weight_decay=0.3))
    assert Muon(polish=1).rows[1] == remaining == AdamW() and AdamW().rows == (AdamW(),)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("row", [MOONLIGHT, V4], ids=["moonlight", "v4"])
def test_flops_equal_those_that_torch_counts(row: Muon, rows: int, columns: int) -> None:
    weights, gradients, momentum = (torch.ones(rows, columns) for _ in range(3))
    with FlopCounterMode(display=False) as counted:
        update(row, weights, gradients, momentum, torch.float32)
    assert row.flops((rows, columns)) == counted.get_total_flops()


@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (512, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # BF16 products allocate buffers on CPUs
def test_scratch_memory_equals_the_allocation_of_torch(
    tmp_path: Path, dtype: torch.dtype, rows: int, columns: int
) -> None:
    weights, gradients, momentum = (torch.ones(rows, columns, dtype=dtype) for _ in range(3))
    update(MOONLIGHT, weights, gradients, momentum, dtype)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        update(MOONLIGHT, weights, gradients, momentum, dtype)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    peak = max(accumulate(sizes))
    few = 16 * 64  # norms, and other tensors smaller than a matrix
    planned = MOONLIGHT.scratch_bytes((rows, columns), dtype.itemsize)
    assert planned - few <= peak <= planned + few
