# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""Gradients of the gate weights of rows in the order of experts back to their tokens.

T tokens · K choices of a token · S = T·K rows. Row j holds choice order_S[j] = t·K + k, each choice once: no atomics.
"""

import triton
import triton.language as tl

LAUNCH = {'BLOCK_S': 256, 'num_warps': 4, 'enable_fp_fusion': True}


def permute_gate_dgrad(dgate_S, order_S, top_k):
    """dgate_TK."""
    assert dgate_S.is_contiguous() and order_S.is_contiguous()
    num_rows = order_S.shape[0]
    dgate_TK = dgate_S.new_empty(num_rows // top_k, top_k)
    _scatter[(triton.cdiv(num_rows, LAUNCH["BLOCK_S"]),)](dgate_S, order_S, dgate_TK, num_rows, **LAUNCH)
    return dgate_TK


@triton.jit
def _scatter(dgate_S, order_S, dgate_TK, num_rows, BLOCK_S: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = j < num_rows
    choice = tl.load(order_S + j, mask=inside)
    tl.store(dgate_TK + choice, tl.load(dgate_S + j, mask=inside), mask=inside)
