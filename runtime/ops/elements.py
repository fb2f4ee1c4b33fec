"""Low-bit floating-point elements: their codes, and conversion from and to FP32.

A code is a sign, `exponent` bits and `mantissa` bits. Numbers are rounded to nearest, ties to the even code, or
stochastically: up with the probability that makes the mean exact. Larger numbers saturate at the largest one. E4M3
(OCP MX 1.0, FP8) and E5M6 have no infinity, and their code of all ones is NaN; E2M1 has neither infinity nor NaN.

E5M6 is DeepSeek-V3's format for the input of the linear after attention (arXiv 2412.19437, §3.3.3). The paper does not
say what its largest exponent stands for; here it is read as in E4M3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Element:
    """A format of numbers. `nan`: whether the code of all ones (sign aside) is NaN."""

    exponent: int
    mantissa: int
    nan: bool = True

    @property
    def least(self) -> int:
        """The exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent - 1)

    @property
    def sign(self) -> int:
        """The sign bit of a code."""
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
    """Return the numbers of all non-negative codes, indexed by code."""
    fractions = 2**element.mantissa
    codes = range(element.sign - element.nan)
    parts = ((max(code // fractions, 1), code % fractions + fractions * (code >= fractions)) for code in codes)
    return tuple(n * 2.0 ** (e - 1 + element.least - element.mantissa) for e, n in parts)


def encode(x: Tensor, element: Element, threshold: Tensor | None = None) -> Tensor:
    """Return the codes (int32) of FP32 numbers.

    With thresholds in [0, 1), a number is rounded up if its fractional part is above its threshold: uniform thresholds
    round stochastically. NaN gets the code of all ones, or the code of zero in an element without NaN.
    """
    a = x.abs().nan_to_num(nan=0.0).clamp_(max=element.largest)
    # the number's binade; scaled by a power of two (exact) so that its unit in the last place becomes 1
    binade = ((a.view(torch.int32) >> 23) - 127).clamp_(min=element.least)
    units = a * ((element.mantissa - binade + 127) << 23).view(torch.float32)
    if threshold is None:
        units = units.round()
    else:
        floor = units.floor()
        units = floor + (units - floor > threshold)
    # one binade up, codes are 2^mantissa larger; units that fill the binade carry into the next
    codes = ((binade - element.least) << element.mantissa) + units.to(torch.int32)
    if element.nan:
        codes = torch.where(x.isnan(), element.sign - 1, codes)
    return codes + torch.where(x.signbit(), element.sign, 0)


def decode(codes: Tensor, element: Element) -> Tensor:
    """Return the numbers (FP32) of codes."""
    return _numbers(element).to(codes.device)[codes.to(torch.int64)]


@cache
def _numbers(element: Element) -> Tensor:
    """Return the numbers of all codes, FP32."""
    positive = torch.tensor([*magnitudes(element), *(torch.nan,) * element.nan], dtype=torch.float32)
    return torch.cat((positive, -positive))


def pairs(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [.., C] into bytes [.., ⌈C / 2⌉]; the first code of a pair is in the low bits."""
    even = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    return (even[..., ::2] | even[..., 1::2] << 4).to(torch.uint8)


def unpack_pairs(data: Tensor) -> Tensor:
    """Unpack bytes [.., C / 2] into 4-bit codes (int32) [.., C]."""
    wide = data.to(torch.int32)
    return torch.stack((wide & 15, wide >> 4), -1).flatten(-2)
