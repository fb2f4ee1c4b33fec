"""Random numbers for rounding: what they depend on, their distribution, and the mean of numbers rounded with them."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops import OPS
from runtime.ops.elements import E2M1, magnitudes
from runtime.ops.formats import FORMATS, dequantise_planes
from runtime.ops.hadamard import BLOCK, hadamard
from runtime.ops.stochastic import BITS, thresholds

KEY = torch.tensor([1, 7, 4])
NVFP4 = FORMATS["nvfp4"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_numbers_follow_their_rows() -> None:
    """Another layout of ranks orders rows differently or has other rows beside them."""
    x, order = random(40, 33), torch.randperm(40, generator=torch.Generator().manual_seed(3))
    u = thresholds(x, KEY, 5)
    assert torch.equal(thresholds(x[order][:20], KEY, 5), u[order][:20])
    assert torch.equal(thresholds(x.bfloat16(), KEY, 5), thresholds(x.bfloat16().float(), KEY, 5))


def test_numbers_depend_on_seed_step_tensor_row_and_column() -> None:
    x = random(64, 64)
    u = thresholds(x, KEY, 5)
    moved = x.clone()
    moved[:, 0] = torch.nextafter(moved[:, 0], moved[:, 0] + 1)
    different = (
        thresholds(x, torch.tensor([2, 7, 4]), 5),
        thresholds(x, torch.tensor([1, 8, 4]), 5),
        thresholds(x, torch.tensor([7, 1, 4]), 5),
        thresholds(x, torch.tensor([1, 7, 5]), 5),
        thresholds(x, KEY, 6),
        thresholds(moved, KEY, 5),
        u.roll(1, 0),
        u.roll(1, 1),
    )
    for numbers in different:
        assert (u == numbers).float().mean() < 0.01
        assert torch.corrcoef(torch.stack((u.flatten(), numbers.flatten())))[0, 1].abs() < 5 / 64


def test_numbers_are_uniform() -> None:
    u = thresholds(random(512, 512), KEY, 1)
    scaled = u * 2.0**BITS
    assert torch.equal(scaled, scaled.round()) and u.min() >= 0 and u.max() < 1
    for bins in (256, 16):  # the highest bits, and the lowest
        counts = torch.bincount((scaled.long() >> 16 if bins == 256 else scaled.long() & 15).flatten(), minlength=bins)
        expected = u.numel() / bins
        chi = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi - (bins - 1)) < 5 * (2 * (bins - 1)) ** 0.5


def test_gradients_are_exact_on_average() -> None:
    """The mean over steps is within Bernstein's bound of a gradient, or of 6 scales if the gradient is larger.

    E4M3 may round a scale down, so that numbers saturate. The bound holds for all but one number in e²⁰.
    """
    dy, steps, likely = random(32, 48, seed=4), 400, 20.0
    quantised = [OPS["quantise_both_nvfp4"](dy, True, torch.tensor([1, step, 5])) for step in range(steps)]
    table = torch.tensor(magnitudes(E2M1), dtype=torch.float64)
    for half, source in ((slice(0, 3), dy), (slice(3, 6), hadamard(dy).t())):
        wide = torch.stack([dequantise_planes(planes[half], NVFP4, NVFP4.tile) for planes in quantised]).double()
        _, s, tensor = quantised[0][half]
        unit = s.double().repeat_interleave(16, 1) * tensor.double()
        ratio = (source.double().abs() / unit).clamp(max=6.0)
        above = torch.searchsorted(table, ratio.contiguous()).clamp(min=1)
        low, gap = table[above - 1], table[above] - table[above - 1]
        share = (ratio - low) / gap
        variance = share * (1 - share) * (gap * unit) ** 2 / steps
        off = (wide.mean(0).abs() - ratio * unit).abs()
        assert (off <= (2 * likely * variance).sqrt() + 2 / 3 * likely * gap * unit / steps).all()
        often = share * (1 - share) * steps > 10
        assert 0.85 < (off[often] ** 2 / variance[often]).mean() < 1.15


def test_the_hadamard_transform_is_orthogonal_and_keeps_the_remainder() -> None:
    x, y = ((8 * random(2 * BLOCK + 5, 7, seed=s)).round() for s in (1, 2))
    assert torch.equal(hadamard(x).t() @ hadamard(y), x.t() @ y), "multiples of 1/4 are exact"
    assert torch.equal(hadamard(x)[2 * BLOCK :], x[2 * BLOCK :])
    assert torch.equal((hadamard(torch.eye(BLOCK)) * 4).abs(), torch.ones(BLOCK, BLOCK))
    outlier = torch.zeros(BLOCK, 1)
    outlier[3] = 16.0
    assert (hadamard(outlier).abs() == 4).all()
