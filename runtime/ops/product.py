"""Products of two matrices. M rows, N columns, K inner extent; either operand may be transposed.

They run in C++ if there is a library for the processor (`runtime.ops.native`), else in torch, which calls MKL for FP32
and oneDNN for BF16. benchmarks/results/products.txt has GFLOP/s of one EPYC core with AVX-512 and BF16 instructions:
145 to 230 in FP32, MKL 90 to 105; in BF16 220 to 470, the same as oneDNN once it has compiled its kernels.

oneDNN emulates BF16 instructions on processors without them. There it is faster to widen BF16 operands to FP32, where
the product of two BF16 numbers is exact. A product of few rows widens them in registers. Time of dyᵀ·x of 1024 × 256
and 1024 × 512, copies included, relative to `torch.mm` of BF16, in one interleaved run on that core. oneDNN limited to
AVX-512F (ONEDNN_MAX_CPU_ISA=AVX512_CORE): 0.38 in C++ for AVX-512, 0.71 in C++ for AVX2, 0.87 with MKL. oneDNN limited
to AVX2: 0.44 in C++ for AVX2, 0.48 with MKL; for x·wᵀ 0.15 and 0.17.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from runtime.ops.native import ops as native
from runtime.ops.native.library import has_bf16, multiplies_few_rows, multiplies_natively

# --- BF16 operands: what ops compute in wider dtypes
#
# Matrix products read BF16, accumulate in FP32 and are rounded once. Every other op computes in FP32 and rounds each of
# its results once. Statistics (of norms and softmaxes), losses, router scores, gate weights, and accumulated values
# (weight gradients, in FP32 buffers) are never BF16. So apart from FP32 errors, a result is off by at most half a unit
# in its last place, a relative error of 2⁻⁸. For FP32 and FP64 operands these functions do nothing.


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an op computes with operands of `dtype`: at least FP32."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def wide(x: Tensor) -> Tensor:
    """Return x in its `wide_dtype`; x itself if it has that dtype already."""
    return x.to(wide_dtype(x.dtype))


# --- product


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return a·b, contiguous."""
    c_MN = a_MK.new_empty((a_MK.shape[0], b_KN.shape[1]))
    product_(c_MN, a_MK, b_KN)
    return c_MN


def product_(c_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """c = a·b. Rows of c must be contiguous. BF16 operands accumulate in FP32 and are rounded once."""
    if multiplies_natively(a_MK, b_KN):
        native.product_(c_MN, a_MK, b_KN)
    elif a_MK.dtype == torch.bfloat16 and a_MK.is_cpu and not has_bf16():
        if multiplies_few_rows(a_MK, b_KN):
            return native.few_rows_(c_MN, a_MK, b_KN.t())
        c_MN.copy_(product(wide(a_MK), wide(b_KN)))
    else:
        torch.mm(a_MK, b_KN, out=c_MN)


def add_product_(acc_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """acc += a·b; acc is at least FP32. The product is not rounded to BF16 before it is added.

    On CUDA, BF16 operands accumulate in `acc` itself if `torch.addmm` takes an FP32 summand, else in a temporary FP32
    product. On a CPU the operands are widened, which is exact. On a processor with BF16 instructions that the C++ ops
    do not use, this takes 0.8 to 2.1 times as long as `torch.mm` of BF16 with C++ for AVX-512, and 1.1 to 4.4 times
    with MKL (measured as above).
    """
    if multiplies_natively(a_MK, b_KN):
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
    """Return whether `torch.addmm` of BF16 matrices takes an FP32 summand on this GPU: torch 2.8 refuses one."""
    acc, operand = torch.ones(16, 16, device="cuda"), torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        torch.addmm(acc, operand, operand, out_dtype=torch.float32, out=acc)
    except RuntimeError:
        return False
    return bool((acc == 17).all())


def wide_product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return a·b in at least FP32. If b is BF16, a may be BF16 or FP32, and is not rounded.

    On CUDA a product with BF16 operands runs on the tensor cores; elsewhere they are widened, which is exact.
    """
    if a_MK.dtype == torch.bfloat16 and multiplies_natively(a_MK, b_KN):
        c_MN = a_MK.new_zeros((a_MK.shape[0], b_KN.shape[1]), dtype=torch.float32)
        native.product_(c_MN, a_MK, b_KN, add=True)
        return c_MN
    if not (a_MK.is_cuda and b_KN.dtype == torch.bfloat16):
        return product(wide(a_MK), wide(b_KN))
    if a_MK.dtype == torch.float32:
        a_MK, b_KN = torch.cat(bf16_parts(a_MK), 1), b_KN.repeat(3, 1)
    return torch.mm(a_MK, b_KN, out_dtype=torch.float32)


def bf16_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split x (FP32) into three BF16 tensors of 8 bits each; their sum is exactly x if |x| is 0 or in 2⁻¹⁰⁹ … 2¹²⁷."""
    high = x.to(torch.bfloat16)
    remainder = x - high
    middle = remainder.to(torch.bfloat16)
    return high, middle, (remainder - middle).to(torch.bfloat16)


def uses_onednn(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Return whether oneDNN computes `product_`. It compiles a kernel for every new shape, in 0.2 to 0.5 ms."""
    return a_MK.dtype == torch.bfloat16 and a_MK.is_cpu and has_bf16() and not multiplies_natively(a_MK, b_KN)
