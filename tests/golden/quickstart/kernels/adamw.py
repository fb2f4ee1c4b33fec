# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""AdamW with decoupled decay, of a flat part of a bucket, in one pass over memory.

A program owns BLOCK elements: it reads each operand once and writes each result once, 30 bytes an element with FP32
moments and the BF16 copy of the weights, 22 with BF16 moments. Everything is computed in FP32. Moments in BF16 are
rounded to nearest when they are stored; the weights of this step see them unrounded.
"""

import triton
import triton.language as tl

BLOCK = 2048  # elements
LOAD, STORE = tl.constexpr('evict_first'), tl.constexpr('.cs')  # once each: no cache is to keep them
LAUNCH = {'num_warps': 8, 'enable_fp_fusion': True}


def adamw(master, gradients, moment1, moment2, rounded, factor, rate, beta1, beta2, eps, decay, step):
    """One update by `factor` times the gradients; `rounded`, if there is one, becomes the weights in BF16."""
    size = master.numel()
    tensors = master, gradients, moment1, moment2, rounded
    assert all(x is None or (x.is_contiguous() and x.numel() == size) for x in tensors)
    # What does not depend on the element is computed here, in FP64.
    numbers = factor, 1 - rate * decay, rate / (1 - beta1**step), (1 - beta2**step) ** -0.5
    betas = beta1, 1 - beta1, beta2, 1 - beta2, eps
    _update[(triton.cdiv(size, BLOCK),)](*tensors, size, *numbers, *betas, rounded is not None, BLOCK, **LAUNCH)


@triton.jit
def _update(
    master, gradients, moment1, moment2, rounded, size, factor, keep, scale, root, beta1, fresh1, beta2, fresh2, eps,
    ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """moment = beta · moment + fresh · g or g², weight = keep · weight − scale · moment1 / (√moment2 · root + eps)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    gradient = tl.load(gradients + i, mask=inside, other=0.0, eviction_policy=LOAD).to(tl.float32) * factor
    first = tl.load(moment1 + i, mask=inside, other=0.0, eviction_policy=LOAD).to(tl.float32)
    second = tl.load(moment2 + i, mask=inside, other=0.0, eviction_policy=LOAD).to(tl.float32)
    weight = tl.load(master + i, mask=inside, other=0.0, eviction_policy=LOAD)
    first = first * beta1 + gradient * fresh1
    second = second * beta2 + gradient * gradient * fresh2
    weight = weight * keep - tl.div_rn(first * scale, tl.sqrt_rn(second) * root + eps)
    tl.store(moment1 + i, first.to(moment1.dtype.element_ty), mask=inside, cache_modifier=STORE)
    tl.store(moment2 + i, second.to(moment2.dtype.element_ty), mask=inside, cache_modifier=STORE)
    tl.store(master + i, weight, mask=inside, cache_modifier=STORE)
    if ROUND:
        tl.store(rounded + i, weight.to(rounded.dtype.element_ty), mask=inside, cache_modifier=STORE)
