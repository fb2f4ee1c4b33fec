"""Formats in C++ are bit-identical to the torch ops: every code, every rounding, tiles of any shape and layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.ops import OPS
from runtime.ops.elements import E2M1, E4M3, Element, encode, magnitudes
from runtime.ops.formats import COMPILED, FORMATS, Format, pack_planes, unpack_planes
from runtime.ops.native import library, ops
from runtime.ops.stochastic import thresholds
from tests.runtime.ops.native.test_quantise import of_any_bits

KEY = torch.tensor([2**63 - 1, -5, 11])
ELEMENTS = pytest.mark.parametrize("element", COMPILED, ids=["e4m3", "e2m1"])
FORMS = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
some = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
pytestmark = pytest.mark.usefixtures("instructions")


def by_torch(function: Any, *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_functions", dict)
        return function(*args)


def same(found: Tensor, wanted: Tensor) -> None:
    """Assert that bits are equal, except the payload of FP32 NaN."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if found.dtype == torch.float32:
        assert torch.equal(found.isnan(), wanted.isnan())
        numbers = ~wanted.isnan()
        assert torch.equal(found[numbers].view(torch.int32), wanted[numbers].view(torch.int32))
    else:
        assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def same_planes(x: Tensor, form: Format, tile: tuple[int, int], threshold: Tensor | None = None) -> None:
    planes = pack_planes(x, form, tile, threshold)
    for plane, expected in zip(planes, by_torch(pack_planes, x, form, tile, threshold), strict=True):
        same(plane, expected)
    same(unpack_planes(planes, form, tile), by_torch(unpack_planes, planes, form, tile))


def test_the_library_computes_them(instructions: str) -> None:
    """The tests below compare two different paths."""
    names = {(name, dtype) for name, dtype in library.functions(instructions) if name in ("encode", "decode")}
    assert names == {(name, dtype) for name in ("encode", "decode") for dtype in COMPILED.values()}


@FORMS
@some
@given(st.integers(0, 2**31), st.integers(0, 150), st.integers(1, 150), st.booleans(), st.booleans(), st.booleans())
def test_any_size_and_layout(
    form: Format, seed: int, rows: int, columns: int, turned: bool, of_weight: bool, half: bool
) -> None:
    generator = np.random.default_rng(seed)
    x = of_any_bits(generator, rows, columns, torch.bfloat16 if half else torch.float32)
    u = torch.from_numpy((generator.integers(0, 2**24, x.shape) * 2.0**-24).astype(np.float32))
    x, u = (x.t(), u.t()) if turned else (x, u)
    tile = form.weight_tile if of_weight else form.tile
    same_planes(x, form, tile)
    same_planes(x, form, tile, u)


@FORMS
@pytest.mark.parametrize("shape", [(2, 3, 130), (3, 130, 5), (1, 16, 48), (2, 0, 7)])
def test_experts(form: Format, shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    w[0, :1] = torch.nan
    for experts in (w, w.bfloat16(), w.transpose(1, 2)):
        same_planes(experts, form, form.weight_tile)


@ELEMENTS
def test_every_rounding(element: Element) -> None:
    """Numbers, midpoints, and their neighbours, in a tile with scale 1; with thresholds, too."""
    table = torch.tensor(magnitudes(element), dtype=torch.float64)
    points = torch.cat((table, (table[1:] + table[:-1]) / 2, table[1:] / 2**20, table[-1:] * 2)).float()
    near = torch.cat((points, torch.nextafter(points, points + 1), torch.nextafter(points, points - 1)))
    x = torch.cat((near, -near, torch.tensor([torch.nan, -torch.nan, 2.0**-149, 3e38, -3e38])))[None]
    scale, parts = torch.ones(1, -(-x.shape[1] // 16)), (0.0, 2.0**-24, 0.25, 0.5, 1 - 2.0**-24)
    for u in (None, *(torch.full_like(x, part) for part in parts)):
        codes = library_codes(x, element, scale, u)
        same(codes, by_torch(encode, x, element, u)[0].to(torch.uint8))


def library_codes(x: Tensor, element: Element, inverse: Tensor, threshold: Tensor | None) -> Tensor:
    """The codes of one row."""
    data = ops.encode(x, (1, 16), inverse, threshold, COMPILED[element])[0].view(torch.uint8)
    if element == E4M3:
        return data
    assert element == E2M1
    return torch.stack((data & 15, data >> 4), -1).flatten()[: x.shape[1]]


@some
@given(st.integers(0, 2**31), st.integers(0, 70), st.integers(1, 70), st.booleans(), st.integers(0, 3))
def test_random_numbers(seed: int, rows: int, columns: int, turned: bool, salt: int) -> None:
    x = of_any_bits(np.random.default_rng(seed), rows, columns, torch.float32)
    x = x.t() if turned else x
    for operand in (x, x.bfloat16()):
        same(thresholds(operand, KEY, salt), by_torch(thresholds, operand, KEY, salt))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_operands_that_only_torch_takes(name: str) -> None:
    """FP64 gradients have the same result."""
    x = torch.randn(40, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    arguments = (True, KEY) if name == "nvfp4" else ()
    for plane, expected in zip(
        OPS[f"quantise_both_{name}"](x, *arguments),
        by_torch(OPS[f"quantise_both_{name}"], x, *arguments),
        strict=True,
    ):
        same(plane, expected)
