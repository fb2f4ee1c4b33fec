"""Formats against exact rounding in FP64, tile by tile, and products of their operands against FP64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from runtime.ops import OPS
from runtime.ops.formats import FORMATS, Format, dequantise_planes, pack_planes, unpack_planes
from runtime.ops.hadamard import hadamard
from tests.runtime.ops.test_elements import nearest, numbers

U, HALF = 2.0**-24, 2.0**-8  # units of FP32 and BF16
ALL = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
MULTIPLIED = pytest.mark.parametrize("name", [name for name in FORMATS if name != "e5m6"])
KEY = torch.tensor([1, 2, 3])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole_scale(x: Tensor, form: Format) -> float:
    largest = x.double().abs().amax().item() if x.numel() else 0.0
    return largest / (6 * 448) if form.scale == "e4m3" and largest else 1.0


def tile_scale(tile: Tensor, form: Format, whole: float) -> float:
    """The exact scale of a tile, before it is rounded to FP32 or E4M3."""
    largest = tile.double().abs().amax().item()
    if largest == 0:
        return 0.0 if form.scale == "e4m3" else 1.0
    if form.scale == "e8m0":
        exponent = math.frexp(largest / numbers(form.element)[-1].item())
        return 2.0 ** (exponent[1] - (exponent[0] == 0.5))
    return largest / numbers(form.element)[-1].item() / whole


def check(planes: tuple[Tensor, ...], x: Tensor, form: Format, tile: tuple[int, int]) -> None:
    """Assert that every number of x is rounded to a nearest one, and that every scale is right for its tile."""
    s = planes[form.planes - 1 - (form.scale == "e4m3")]
    tensor_scale = whole_scale(x, form)
    if form.scale == "e4m3":
        assert abs(planes[-1].item() - tensor_scale) <= 2 * U * tensor_scale
    wide = unpack_planes(planes, form, tile)[:, : x.shape[1]]
    assert s.shape == (-(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1]))
    for r in range(s.shape[0]):
        for c in range(s.shape[1]):
            block = slice(r * tile[0], (r + 1) * tile[0]), slice(c * tile[1], (c + 1) * tile[1])
            scale, exact = s[r, c].double().item(), tile_scale(x[block], form, tensor_scale)
            error = {"fp32": 2 * U * exact, "e8m0": 0.0, "e4m3": max(2.0**-4 * exact, 2.0**-10) * (1 + 8 * U)}
            assert abs(scale - exact) <= error[form.scale]
            if scale:
                ratio = x[block].double() / (scale * (planes[-1].double() if form.scale == "e4m3" else 1.0))
                best = numbers(form.element)[nearest(ratio, form.element) % form.element.sign]
                magnitude = wide[block].double().abs() / scale
                assert ((magnitude - ratio.abs()).abs() - (best - ratio.abs()).abs() <= 8 * U * ratio.abs()).all()
                assert (wide[block].sign() * x[block].sign() >= 0).all()
            else:
                assert not wide[block].any()


@ALL
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 128), (33, 300), (5, 47), (15, 31), (16, 33), (17, 127), (31, 129), (32, 16)]
)
def test_tiles_are_rounded_to_the_nearest(form: Format, shape: tuple[int, int]) -> None:
    x = random(*shape) * 2.0 ** (torch.arange(shape[0]) % 20 - 10)[:, None]
    x[-1, : shape[1] // 2] = 0
    check(pack_planes(x, form, form.tile), x, form, form.tile)
    check(pack_planes(x.bfloat16(), form, form.weight_tile), x.bfloat16(), form, form.weight_tile)


@pytest.mark.parametrize("name", ["mxfp8", "e5m6"])
def test_every_power_of_two_is_a_scale(name: str) -> None:
    """largest · 2^e has the scale 2^e, the next number twice that; the scale is 2⁻¹²⁶ below 2⁻¹²⁶, and 1 for zero."""
    form, largest = FORMATS[name], FORMATS[name].element.largest
    exponents = torch.arange(-126, 128 - math.ceil(math.log2(largest)))
    values = (largest * 2.0 ** exponents.double()).float()
    for x, wanted in ((values, exponents), (torch.nextafter(values, values * 2), exponents + 1)):
        *_, s = pack_planes(x[:, None], form, form.tile)
        assert s.dtype == torch.float8_e8m0fnu and (s.view(torch.uint8)[:, 0].long() - 127 == wanted).all()
    *_, s = pack_planes(torch.tensor([[0.0], [2.0**-149]]), form, form.tile)
    assert s.float().flatten().tolist() == [1.0, 2.0**-126]


def test_numbers_of_every_e8m0_scale() -> None:
    form = FORMATS["mxfp8"]
    codes = torch.arange(1, 255, dtype=torch.uint8)[:, None].expand(254, 8)
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).expand(254, 256)
    wide = unpack_planes((data, codes.contiguous().view(torch.float8_e8m0fnu)), form, form.tile)
    exact = data.double() * 2.0 ** (codes[:, :1].double() - 127)
    assert torch.equal(wide.nan_to_num(nan=7), exact.float().nan_to_num(nan=7))


def test_numbers_of_every_e4m3_scale() -> None:
    """All 16 codes with each of the 127 scales, exact without a tensor scale."""
    form = FORMATS["nvfp4"]
    s = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    data = torch.tensor([[16 * (2 * i + 1) + 2 * i for i in range(8)]], dtype=torch.uint8).expand(127, 8)
    table = torch.cat((numbers(form.element), -numbers(form.element)))
    wide = unpack_planes((data, s, torch.tensor(3.0)), form, form.tile)
    assert torch.equal(wide.double(), table * s.double())
    assert torch.equal(dequantise_planes((data, s, torch.tensor(3.0)), form, form.tile), wide * 3)


@ALL
def test_nan_and_infinity(form: Format) -> None:
    rows, columns = form.tile
    x = random(4 * rows, 4 * columns)
    x[0, 3], x[rows, columns + 1], x[2 * rows : 3 * rows] = torch.nan, -torch.inf, 0
    wide = dequantise_planes(pack_planes(x, form, form.tile), form, form.tile)
    assert wide[rows : 2 * rows, columns : 2 * columns].isnan().all() and not wide[2 * rows : 3 * rows].any()
    lost = wide.isnan()
    lost[rows : 2 * rows, columns : 2 * columns] = False
    if form.element.nan:
        assert lost.nonzero().tolist() == [[0, 3]]
    else:
        assert lost.nonzero().tolist() == [[r, c] for r in range(rows) for c in range(columns)]


@ALL
def test_nothing_and_zero(form: Format) -> None:
    for x in (torch.zeros(0, 40), torch.zeros(3, 40)):
        wide = dequantise_planes(pack_planes(x, form, form.tile), form, form.tile)
        assert wide.shape == x.shape and not wide.any()


def test_bytes_are_exact() -> None:
    x = random(64, 256)
    num_bytes = {name: sum(p.nbytes for p in pack_planes(x, form, form.tile)) for name, form in FORMATS.items()}
    assert num_bytes == {
        "fp8_blocks": 64 * 256 + 2 * 4,
        "mxfp8": 64 * 256 + 64 * 8,
        "nvfp4": 64 * 128 + 64 * 16 + 4,
        "e5m6": 64 * 256 * 3 // 2 + 64 * 2,
    }


def wide(planes: tuple[Tensor, ...], form: Format, tile: tuple[int, int]) -> Tensor:
    return dequantise_planes(planes, form, tile).double()


def within(found: Tensor, expected: Tensor, magnitude: Tensor, terms: int) -> None:
    """Assert errors of FP32 sums of products, rounded once if the result is BF16."""
    stored = HALF if found.dtype == torch.bfloat16 else 0.0
    bound = stored * expected.abs() + (terms + 8) * U * magnitude
    assert found.shape == expected.shape and ((found.double() - expected).abs() <= bound).all()


@MULTIPLIED
@pytest.mark.parametrize(
    ("rows", "out", "inner"), [(1, 1, 1), (5, 130, 301), (140, 64, 128), (0, 3, 5), (31, 127, 129)]
)
def test_products_equal_those_of_dequantised_operands(name: str, rows: int, out: int, inner: int) -> None:
    form = FORMATS[name]
    n = form.planes
    x, dy, w = random(rows, inner, seed=1), random(rows, out, seed=2), random(out, inner, seed=3)
    rounding = (False, None) if name == "mxfp8" else (True, KEY)
    xq, wq, dyq = (
        OPS[f"quantise_{name}"](x),
        OPS[f"quantise_blocks_{name}"](w),
        OPS[f"quantise_both_{name}"](dy, *rounding),
    )
    x64 = wide(xq, form, form.tile)[:, :inner]
    dy64 = wide(dyq[:n], form, form.tile)[:, :out]
    w64, wt64 = (wide(planes, form, form.weight_tile) for planes in (wq[:n], wq[n:]))
    w64, wt64 = w64[:, :inner], wt64[:, :out]
    if form.weight_tile[0] == form.weight_tile[1]:
        assert torch.equal(w64, wt64.t()), "square tiles of a weight are those of the transposed one"
    y = OPS[f"linear_{name}"](*xq, *wq[:n])
    assert y.dtype == torch.bfloat16
    within(y, x64 @ w64.t(), x64.abs() @ w64.abs().t(), inner)
    within(OPS[f"linear_{name}_dgrad"](*dyq[:n], *wq[n:]), dy64 @ wt64.t(), dy64.abs() @ wt64.abs().t(), out)
    xc, acc = OPS[f"quantise_columns_{name}"](x, rounding[0]), torch.ones(out, inner)
    a, b = (wide(planes, form, form.tile)[:, :rows] for planes in (dyq[n:], xc))
    assert OPS[f"linear_{name}_wgrad_"](acc, *dyq[n:], *xc) is None
    within(acc, 1 + a @ b.t(), 1 + a.abs() @ b.abs().t(), rows)


@MULTIPLIED
def test_columns_are_the_transposed_rows(name: str) -> None:
    x = random(64, 48)
    for transform, turned in ((False, x.t()), (True, hadamard(x).t())):
        rows, columns = OPS[f"quantise_{name}"](turned), OPS[f"quantise_columns_{name}"](x, transform)
        all_planes = OPS[f"quantise_both_{name}"](x, transform)
        for a, b, c in zip(rows, columns, all_planes[len(rows) :], strict=True):
            assert (
                a.dtype == b.dtype == c.dtype
                and torch.equal(a.float(), b.float())
                and torch.equal(a.float(), c.float())
            )


@MULTIPLIED
@pytest.mark.parametrize("sizes", [(0, 0), (3, 5), (128, 0, 16, 1), (0, 300)])
def test_groups_meet_their_experts(name: str, sizes: tuple[int, ...]) -> None:
    form, E, N, K, rows = FORMATS[name], len(sizes), 20, 140, sum(sizes)
    n, offsets = form.planes, torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, dy, w = random(rows, K, seed=1), random(rows, N, seed=2), random(E, N, K, seed=3)
    rounding = (False, None) if name == "mxfp8" else (True, KEY)
    xq, wq, dyq = (
        OPS[f"quantise_{name}"](x),
        OPS[f"quantise_blocks_{name}"](w),
        OPS[f"quantise_both_{name}"](dy, *rounding),
    )
    xc, acc, total = OPS[f"quantise_columns_{name}"](x, rounding[0]), torch.ones(E, N, K), torch.ones(E, N, K).double()
    y = OPS[f"grouped_linear_{name}"](*xq, *wq[:n], offsets)
    dx = OPS[f"grouped_linear_{name}_dgrad"](*dyq[:n], *wq[n:], offsets)
    OPS[f"grouped_linear_{name}_wgrad_"](acc, *dyq[n:], *xc, offsets)
    a, b = (wide(planes, form, form.tile)[:, :rows] for planes in (dyq[n:], xc))
    x64, dy64 = (wide(planes, form, form.tile)[:, :size] for planes, size in ((xq, K), (dyq[:n], N)))
    w64, wt64 = (wide(planes, form, form.weight_tile) for planes in (wq[:n], wq[n:]))
    magnitude, start = total.clone(), 0
    for e, end in enumerate(offsets.tolist()):
        mine = slice(start, end)
        for result, left, right in ((y, x64, w64[e, :, :K]), (dx, dy64, wt64[e, :, :N])):
            within(result[mine], left[mine] @ right.t(), left[mine].abs() @ right.abs().t(), K)
        total[e] += a[:, mine] @ b[:, mine].t()
        magnitude[e] += a[:, mine].abs() @ b[:, mine].abs().t()
        start = end
    within(acc, total, magnitude, rows + 2 * len(sizes))


def test_e5m6_round_trips_within_half_a_unit() -> None:
    x = random(20, 300)
    back = OPS["dequantise_e5m6"](*OPS["quantise_e5m6"](x))
    assert back.dtype == torch.bfloat16, "E5M6 times a power of two has no more bits than BF16"
    scale = pack_planes(x, FORMATS["e5m6"], (1, 128))[-1].double().repeat_interleave(128, 1)[:, :300]
    assert ((back.double() - x.double()).abs() <= 2.0**-7 * x.double().abs() + 2.0**-21 * scale).all()
    assert torch.equal(OPS["dequantise_e5m6"](*OPS["quantise_e5m6"](back)), back)
