"""Products of two matrices. M rows, N columns, K inner extent; either operand may be transposed.

In C++ where there is a library for the processor (`runtime.native`), else by torch, which calls MKL for FP32 and oneDNN
for BF16. GFLOP/s of one core of an EPYC with AVX-512 and its BF16 instructions are in benchmarks/results/products.txt:
145 to 230 in FP32, where MKL has 90 to 105; in BF16 as many as oneDNN, 220 to 470, once that has made its kernels.

Without BF16 instructions oneDNN emulates them, and BF16 operands are better widened to FP32, where the product of two
BF16 numbers is exact. Time of dyᵀ·x of 1024 × 256 and 1024 × 512, copies included, as a ratio to `torch.mm` of BF16 in
one interleaved run on that core. oneDNN held to AVX-512F (ONEDNN_MAX_CPU_ISA=AVX512_CORE): 0.38 in C++ for AVX-512,
0.71 in C++ for AVX2, 0.87 by MKL. oneDNN held to AVX2: 0.44 in C++ for AVX2, 0.48 by MKL; of x·wᵀ 0.15 and 0.17.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.native import ops as native
from runtime.native.library import has_bf16, multiplies
from runtime.ops.wide import wide


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a·b, contiguous."""
    c_MN = a_MK.new_empty((a_MK.shape[0], b_KN.shape[1]))
    product_(c_MN, a_MK, b_KN)
    return c_MN


def product_(c_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """c = a·b, into rows of adjacent elements. BF16 operands are added up in FP32 and rounded once."""
    if multiplies(a_MK, b_KN):
        native.product_(c_MN, a_MK, b_KN)
    elif a_MK.dtype == torch.bfloat16 and a_MK.is_cpu and not has_bf16():
        c_MN.copy_(product(wide(a_MK), wide(b_KN)))
    else:
        torch.mm(a_MK, b_KN, out=c_MN)


def add_product_(acc_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """acc += a·b; acc is FP32 at least. No product is rounded to BF16 before it is added.

    Of BF16 operands torch has products in FP32 on CUDA alone (`torch.mm` with `out_dtype`, since 2.8; that of
    `torch.addmm` would save a pass, but took no FP32 summand at first). On a CPU the operands are widened, which is
    exact. Where there are BF16 instructions and no C++ that takes them, it takes 0.8 to 2.1 times as long as `torch.mm`
    of BF16 with C++ for AVX-512, and 1.1 to 4.4 times with MKL (measured as above).
    """
    if multiplies(a_MK, b_KN):
        native.product_(acc_MN, a_MK, b_KN, add=True)
    elif acc_MN.dtype == a_MK.dtype:
        acc_MN.addmm_(a_MK, b_KN)
    elif acc_MN.is_cuda:
        acc_MN.add_(torch.mm(a_MK, b_KN, out_dtype=acc_MN.dtype))
    else:
        add_product_(acc_MN, wide(a_MK), wide(b_KN))


def by_onednn(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Whether oneDNN computes `product_`. It makes a kernel for every new shape, in 0.2 to 0.5 ms."""
    return a_MK.dtype == torch.bfloat16 and a_MK.is_cpu and has_bf16() and not multiplies(a_MK, b_KN)
