"""Products of two matrices. M rows, N columns, K inner extent; either operand may be transposed.

In C++ where there is a library for the processor (`runtime.native`). Otherwise by torch, which calls MKL for FP32, and
oneDNN for BF16. GFLOP/s of one core of an EPYC with AVX-512 and its BF16 instructions are in
benchmarks/results/products.txt: 145 to 230 in FP32, where MKL has 90 to 105; in BF16 as many as oneDNN, 220 to 470,
once that has made its kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.native import ops as native
from runtime.native.library import multiplies


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a·b, contiguous."""
    c_MN = a_MK.new_empty((a_MK.shape[0], b_KN.shape[1]))
    product_(c_MN, a_MK, b_KN)
    return c_MN


def product_(c_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """c = a·b, into rows of adjacent elements."""
    if multiplies(a_MK, b_KN):
        native.product_(c_MN, a_MK, b_KN)
    else:
        torch.mm(a_MK, b_KN, out=c_MN)


def add_product_(acc_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """acc += a·b; acc is FP32 at least.

    Of BF16 operands torch has products in FP32 on CUDA alone (`torch.mm` with `out_dtype`, since 2.8; that of
    `torch.addmm` would save a pass, but took no FP32 summand at first). On a CPU they are rounded, then added.
    """
    if multiplies(a_MK, b_KN):
        native.product_(acc_MN, a_MK, b_KN, add=True)
    elif acc_MN.dtype == a_MK.dtype:
        acc_MN.addmm_(a_MK, b_KN)
    elif acc_MN.is_cuda:
        acc_MN.add_(torch.mm(a_MK, b_KN, out_dtype=acc_MN.dtype))
    else:
        acc_MN.add_(torch.mm(a_MK, b_KN))


def by_onednn(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Whether it is oneDNN that makes a product, which makes a kernel for every new shape, in 0.2 to 0.5 ms."""
    return a_MK.dtype == torch.bfloat16 and not multiplies(a_MK, b_KN)
