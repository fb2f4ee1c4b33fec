"""Elements of few bits: their codes, the rounding of FP32 numbers to them, and back.

A code is a sign, `exponent` bits and `mantissa` bits. Numbers are rounded to the nearest, of two as near to the one
with an even code, or stochastically: up with the probability that makes the mean exact. What is larger than the largest
number becomes that. E4M3 (OCP MX 1.0, FP8) and E5M6 have no infinity, and NaN is the code of ones; E2M1 has neither.

E5M6 is DeepSeek-V3's format for the input of the linear after attention (arXiv 2412.19437, §3.3.3). What its largest
exponent stands for is not published; here it is read as in E4M3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Element:
    """A format of numbers. `nan`: whether the code of ones, without its sign, is no number."""

    exponent: int
    mantissa: int
    nan: bool = True

    @property
    def least(self) -> int:
        """The exponent of the smallest number that is no subnormal one."""
        return 2 - 2 ** (self.exponent - 1)

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 1 << (self.exponent + self.mantissa)

    @property
    def largest(self) -> float:
        """The largest number."""
        return float(magnitudes(self)[-1])


E4M3 = Element(4, 3)
E2M1 = Element(2, 1, nan=False)
E5M6 = Element(5, 6)


@cache
def magnitudes(element: Element) -> tuple[float, ...]:
    """The numbers of all codes without a sign, by code."""
    fractions = 2**element.mantissa
    codes = range(element.sign - element.nan)
    parts = ((max(code // fractions, 1), code % fractions + fractions * (code >= fractions)) for code in codes)
    return tuple(n * 2.0 ** (e - 1 + element.least - element.mantissa) for e, n in parts)


def encode(x: Tensor, element: Element, threshold: Tensor | None = None) -> Tensor:
    """The codes (int32) of FP32 numbers; with thresholds in [0, 1), numbers are rounded up by more than these.

    Uniform thresholds round stochastically. NaN has the code of ones, or in an element without it that of zero.
    """
    a = x.abs().nan_to_num(nan=0.0).clamp_(max=element.largest)
    # the number's binade, and what its unit in the last place is multiplied by to become 1: powers of two, exact
    binade = ((a.view(torch.int32) >> 23) - 127).clamp_(min=element.least)
    units = a * ((element.mantissa - binade + 127) << 23).view(torch.float32)
    if threshold is None:
        units = units.round()
    else:
        whole = units.floor()
        units = whole + (units - whole > threshold)
    # a binade higher, a code is 2^mantissa more; units that fill the binade carry into the next
    codes = ((binade - element.least) << element.mantissa) + units.to(torch.int32)
    if element.nan:
        codes = torch.where(x.isnan(), element.sign - 1, codes)
    return codes + torch.where(x.signbit(), element.sign, 0)


def decode(codes: Tensor, element: Element) -> Tensor:
    """The numbers (FP32) of codes."""
    return _numbers(element).to(codes.device)[codes.to(torch.int64)]


@cache
def _numbers(element: Element) -> Tensor:
    """The numbers of all codes, FP32."""
    found = torch.tensor([*magnitudes(element), *(torch.nan,) * element.nan], dtype=torch.float32)
    return torch.cat((found, -found))


def pairs(codes: Tensor) -> Tensor:
    """Codes of 4 bits [.., C] -> bytes [.., C / 2, rounded up]: the first of a pair in the low bits."""
    even = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    return (even[..., ::2] | even[..., 1::2] << 4).to(torch.uint8)


def unpaired(data: Tensor) -> Tensor:
    """Bytes [.., C / 2] -> codes of 4 bits (int32) [.., C]."""
    wide = data.to(torch.int32)
    return torch.stack((wide & 15, wide >> 4), -1).flatten(-2)
