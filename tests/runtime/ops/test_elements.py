"""Low-bit elements against the table of all their numbers: every code, every BF16 number, ties, expectations."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from runtime.ops.elements import E2M1, E4M3, E5M6, Element, decode, encode, pairs, unpack_pairs
from runtime.ops.stochastic import BITS

ELEMENTS = {"e2m1": E2M1, "e4m3": E4M3, "e5m6": E5M6}
ALL = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)


def numbers(element: Element) -> Tensor:
    """The non-negative numbers (FP64), from the definition of floating-point formats."""
    bias, fractions = 2 ** (element.exponent - 1) - 1, 2**element.mantissa
    values = []
    for exponent in range(2**element.exponent):
        for fraction in range(fractions):
            hidden, power = (1, exponent - bias) if exponent else (0, 1 - bias)
            values.append((hidden + fraction / fractions) * 2.0**power)
    return torch.tensor(values[:-1] if element.nan else values, dtype=torch.float64)


def nearest(x: Tensor, element: Element) -> Tensor:
    """Codes by comparison with all numbers in FP64; ties to even."""
    table = numbers(element)
    after = torch.searchsorted(table, x.abs().double().contiguous()).clamp(max=len(table) - 1)
    before = (after - 1).clamp(min=0)
    below, above = x.abs().double() - table[before], table[after] - x.abs().double()
    up = (above < below) | ((above == below) & (after % 2 == 0))
    return torch.where(up, after, before) + element.sign * x.signbit()


def neighbours(element: Element) -> Tensor:
    """Numbers, midpoints of neighbours, and the adjacent FP32 numbers of each; with both signs."""
    table = numbers(element)
    points = torch.cat((table, (table[1:] + table[:-1]) / 2)).float()
    around = torch.cat((points, torch.nextafter(points, points * 2 + 1), torch.nextafter(points, points * 0)))
    return torch.cat((around, -around))


def test_numbers_equal_the_standards() -> None:
    assert numbers(E2M1).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(decode(codes, E4M3).nan_to_num(nan=-1000), theirs.nan_to_num(nan=-1000))
    assert (E5M6.largest, 1 + E5M6.exponent + E5M6.mantissa) == (2.0**16 * (2 - 2 / 64), 12)


@ALL
def test_every_code_round_trips(element: Element) -> None:
    codes = torch.arange(2 * element.sign)
    wide = decode(codes, element)
    defined = ~wide.isnan()
    assert defined.sum() == 2 * len(numbers(element))
    assert torch.equal(wide[: element.sign][defined[: element.sign]].double(), numbers(element))
    assert torch.equal(encode(wide, element)[defined], codes[defined].int())
    assert (encode(wide, element)[~defined] == codes[~defined]).all()


@ALL
def test_rounding_is_to_the_nearest(element: Element) -> None:
    of_16_bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    random = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * element.largest / 3
    x = torch.cat((of_16_bits[~of_16_bits.isnan()], random, neighbours(element)))
    assert torch.equal(encode(x, element).long(), nearest(x, element))


@ALL
def test_stochastic_rounding_has_no_bias(element: Element) -> None:
    """The share of the 2²⁴ thresholds that round up makes the mean exactly the number."""
    table = numbers(element)
    share = torch.rand(len(table) - 1, generator=torch.Generator().manual_seed(2)).double()
    for x in ((table[:-1] + share * (table[1:] - table[:-1])).float(), neighbours(element)[: 3 * len(table)]):
        x = x[x < element.largest]
        low = torch.searchsorted(table, x.double(), right=True) - 1
        parts = zip(x.tolist(), table[low].tolist(), table[low + 1].tolist(), strict=True)
        fractions = [(Fraction(a) - Fraction(b)) / (Fraction(c) - Fraction(b)) for a, b, c in parts]
        ups = torch.tensor([-(-(f * 2**BITS).numerator // (f * 2**BITS).denominator) for f in fractions])
        exact = torch.tensor([(f * 2**BITS).denominator == 1 for f in fractions])
        assert exact[x >= float(table[2**element.mantissa])].all(), "no threshold lies between"
        for k, wanted in ((ups - 1, low + 1), (ups, low)):  # the last threshold that rounds up, and the next
            inside = (k >= 0) & (k < 2**BITS)
            rounded = encode(x[inside], element, k[inside].float() * 2.0**-BITS)
            assert torch.equal(rounded.long(), wanted[inside])


@ALL
def test_large_numbers_saturate_and_nan_stays(element: Element) -> None:
    x = torch.tensor([element.largest * 1.4, -1e30, torch.inf, -torch.inf, -0.0])
    for threshold in (None, torch.zeros(5)):
        codes = encode(x, element, threshold)
        assert decode(codes, element).tolist() == [element.largest, -element.largest] * 2 + [0.0]
        assert codes[-1] == element.sign
    wide = decode(encode(torch.tensor([torch.nan]), element), element)
    assert wide.isnan().item() == element.nan


@pytest.mark.parametrize("columns", [0, 1, 6, 7])
def test_pairs(columns: int) -> None:
    codes = torch.arange(3 * columns).reshape(3, columns) % 16
    data = pairs(codes)
    assert data.dtype == torch.uint8 and data.shape == (3, -(-columns // 2))
    assert torch.equal(unpack_pairs(data)[:, :columns], codes.int()) and not unpack_pairs(data)[:, columns:].any()
