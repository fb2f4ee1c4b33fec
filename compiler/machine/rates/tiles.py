"""How well products and attention of a shape fill a device: the share of its rate that tiles and waves leave.

A product is cut into tiles, of which each SM computes one at a time; all that run at once are a wave. What lies beyond
the edges of a matrix is computed in vain, and in the last wave SMs are idle (NVIDIA, Matrix Multiplication Background,
DU-09799-001, sections 2 and 3). Where tiles are few, the sum is split among SMs. The first part of a sum waits for its
operands, as nothing is loaded ahead of it. So a rate that was measured at one shape says what full tiles reach, and
that says the rates of other shapes. Products of 8 bits have rows of many shapes, and kernels with tiles of their own.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from compiler.machine.rates.kernel_classes import FLOPS

TILES = ((256, 128), (128, 256), (128, 128))  # the fastest of cuBLAS, the same guide, section 2.3; the best is taken
SPLITS = (1, 2, 4, 8)  # of the sum: the powers of two that cuBLAS and CUTLASS are asked for
STEP = 64  # of the sum: what is loaded at a time, CUTLASS's default for 16 bits
BLOCK = 128  # rows and columns of attention that are computed together: FlashAttention-2 and 3


@cache
def filled(kind: str, dtype: str, shape: tuple[int, ...], sms: int | None) -> float:
    """The share, above 0 and at most 1, of the rate of full tiles that a kernel of this shape reaches on so many SMs.

    1 where the shape or the number of SMs is not known, for classes that are bound by memory, and for 8 bits and less.
    """
    if kind not in FLOPS or not shape or sms is None or dtype in ("e4m3", "e2m1"):
        return 1.0
    if kind.startswith("attention"):
        sequence = shape[1]
        return sequence / (sequence + BLOCK)  # blocks on the diagonal are computed whole
    groups, m, n, k = shape if len(shape) == 4 else (1, *shape)
    return max(_of_tiles(groups * split, m, n, k / split, tile, sms) for tile in TILES for split in SPLITS)


def _of_tiles(groups: int, m: int, n: int, k: float, tile: tuple[int, int], sms: int) -> float:
    tiles = groups * ceil(m / tile[0]) * ceil(n / tile[1])
    return groups * m * n / (ceil(tiles / sms) * sms * tile[0] * tile[1]) * k / (k + STEP)
