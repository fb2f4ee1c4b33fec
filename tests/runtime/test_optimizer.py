"""The norm of gradients, against float64, and which code updates weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.state.optimizer import NORM_ROW, square_sum
from runtime.state.optimizers import update_of
from runtime.state.optimizers.adamw import adamw


@pytest.mark.parametrize("elements", [0, 1, NORM_ROW - 1, NORM_ROW, 5 * NORM_ROW + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_of_squares_equals_float64(elements: int, dtype: torch.dtype) -> None:
    flat = torch.randn(elements, dtype=dtype, generator=torch.Generator().manual_seed(elements))
    total, expected = square_sum(flat), flat.double().square().sum()
    assert total.dtype == torch.float64
    # error of a squared row norm: at most this many roundings, usually far fewer
    bound = 2 * NORM_ROW * torch.finfo(dtype).eps
    torch.testing.assert_close(total, expected, rtol=bound, atol=0.0)
    if dtype == torch.float64:
        torch.testing.assert_close(total, expected, rtol=1e-14, atol=0.0)


def test_one_huge_gradient_is_not_lost_among_many_small_ones() -> None:
    flat = torch.full((1 << 20,), 1e-3)
    flat[12345] = 1e6
    torch.testing.assert_close(square_sum(flat), flat.double().square().sum(), rtol=1e-6, atol=0.0)
    flat[12345] = 1e30  # its square exceeds float32
    torch.testing.assert_close(square_sum(flat), flat.double().square().sum(), rtol=1e-12, atol=0.0)
    flat[0] = torch.nan
    assert square_sum(flat).isnan()


def test_a_build_with_a_kernel_updates_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel updates on CUDA, simulated by the interpreter; on the CPU the op updates."""
    emitted = tmp_path / "kernels" / "adamw.py"
    assert update_of("adamw", None) is adamw
    (tmp_path / "kernels").mkdir()
    emitted.write_text("def adamw(master, *rest):\n    master.fill_(len(rest))\n")
    weights = torch.ones(3)
    if not torch.cuda.is_available():
        assert update_of("adamw", emitted) is adamw
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    numbers = (1.0, 1e-3, 0.9, 0.95, 1e-8, 0.1, 1)
    update_of("adamw", emitted)(weights, weights.clone(), weights.clone(), weights.clone(), None, *numbers)
    assert weights.tolist() == [11.0, 11.0, 11.0]
