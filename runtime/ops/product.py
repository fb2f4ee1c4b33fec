"""Products of two matrices. M rows, N columns, K inner extent; either operand may be transposed.

In C++ where there is a library for the processor (`runtime.ops.native`), else by torch, which calls MKL for FP32 and
oneDNN for BF16. GFLOP/s of one core of an EPYC with AVX-512 and its BF16 instructions are in
benchmarks/results/products.txt: 145 to 230 in FP32, where MKL has 90 to 105; in BF16 as many as oneDNN, 220 to 470,
once that has made its kernels.

Without BF16 instructions oneDNN emulates them, and BF16 operands are better widened to FP32, where the product of two
BF16 numbers is exact. Time of dyᵀ·x of 1024 × 256 and 1024 × 512, copies included, as a ratio to `torch.mm` of BF16 in
one interleaved run on that core. oneDNN held to AVX-512F (ONEDNN_MAX_CPU_ISA=AVX512_CORE): 0.38 in C++ for AVX-512,
0.71 in C++ for AVX2, 0.87 by MKL. oneDNN held to AVX2: 0.44 in C++ for AVX2, 0.48 by MKL; of x·wᵀ 0.15 and 0.17.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from runtime.ops.native import ops as native
from runtime.ops.native.library import has_bf16, multiplies

# --- BF16 operands: what an op computes with them, and what it keeps wider
#
# Products of matrices read BF16, add up in FP32 and are rounded once. Every other op computes in FP32 and rounds each
# of its results once. Statistics (of norms, of a softmax), losses, router scores and gate weights, and all that is
# added to over time (gradients of weights, in FP32 buffers) are never BF16. So a result is off by half a unit in its
# last place, 2⁻⁸ of it, beside what FP32 leaves. In FP32 and FP64 nothing here does anything.


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an op computes with operands of `dtype`: FP32 at least."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def wide(x: Tensor) -> Tensor:
    """x in that dtype; x itself where it has it."""
    return x.to(wide_dtype(x.dtype))


# --- product


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

    On CUDA, BF16 operands are added up in `acc` itself where `torch.addmm` takes an FP32 summand, else by way of a
    product in FP32. On a CPU the operands are widened, which is exact. Where there are BF16 instructions and no C++
    that takes them, it takes 0.8 to 2.1 times as long as `torch.mm` of BF16 with C++ for AVX-512, and 1.1 to 4.4 times
    with MKL (measured as above).
    """
    if multiplies(a_MK, b_KN):
        native.product_(acc_MN, a_MK, b_KN, add=True)
    elif acc_MN.dtype == a_MK.dtype:
        acc_MN.addmm_(a_MK, b_KN)
    elif acc_MN.is_cuda and takes_wide_summand():
        torch.addmm(acc_MN, a_MK, b_KN, out_dtype=acc_MN.dtype, out=acc_MN)
    elif acc_MN.is_cuda:
        acc_MN.add_(torch.mm(a_MK, b_KN, out_dtype=acc_MN.dtype))
    else:
        add_product_(acc_MN, wide(a_MK), wide(b_KN))


@cache
def takes_wide_summand() -> bool:
    """Whether `torch.addmm` of BF16 matrices takes an FP32 summand on this GPU: it refused one in torch 2.8."""
    acc, operand = torch.ones(16, 16, device="cuda"), torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        torch.addmm(acc, operand, operand, out_dtype=torch.float32, out=acc)
    except RuntimeError:
        return False
    return bool((acc == 17).all())


def wide_product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a·b in FP32 at least. If b is BF16, a may be BF16 or FP32, and is not rounded.

    On CUDA a product with BF16 operands runs on the tensor cores; elsewhere they are widened, which is exact.
    """
    if not (a_MK.is_cuda and b_KN.dtype == torch.bfloat16):
        return product(wide(a_MK), wide(b_KN))
    if a_MK.dtype == torch.float32:
        a_MK, b_KN = torch.cat(bf16_parts(a_MK), 1), b_KN.repeat(3, 1)
    return torch.mm(a_MK, b_KN, out_dtype=torch.float32)


def bf16_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three BF16 tensors whose sum is x (FP32), exactly if |x| is 0 or in 2⁻¹⁰⁹ … 2¹²⁷: 24 bits are three times 8."""
    high = x.to(torch.bfloat16)
    rest = x - high
    middle = rest.to(torch.bfloat16)
    return high, middle, (rest - middle).to(torch.bfloat16)


def by_onednn(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Whether oneDNN computes `product_`. It makes a kernel for every new shape, in 0.2 to 0.5 ms."""
    return a_MK.dtype == torch.bfloat16 and a_MK.is_cpu and has_bf16() and not multiplies(a_MK, b_KN)
