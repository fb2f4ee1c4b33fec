# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""The balance loss of each sequence, Σ_i f_i·P_i summed over the sequences, and its gradient.

T tokens in B sequences · E experts · K choices of a token · C blocks of tokens of a sequence. f_i = E/(K·S) · choices
of expert i in a sequence of S tokens, P_i = mean of i's share of its token's scores. A program sums over a block of
tokens, and one that follows over the blocks in their order: no atomics, and equal bits from run to run. In FP32.
"""

import torch
import triton
import triton.language as tl

E, K = 4, 2
SOFTMAX = False
BLOCK_T = 32  # tokens of a block
LAUNCH = {'BLOCK_E': 4, 'ROWS': 32, 'num_warps': 8, 'enable_fp_fusion': True}
TOTAL = {'BLOCK_E': 4, 'ROWS': 1024, 'num_warps': 8, 'enable_fp_fusion': True}


def sequence_balance(logits_TE, expert_TK, sequence, softmax):
    """loss []."""
    num_sequences, blocks = _blocks(logits_TE, expert_TK, sequence)
    counts_BCE, shares_BCE = _partial(logits_TE, expert_TK, sequence, True)
    loss = torch.empty((), dtype=torch.float32, device=logits_TE.device)
    _total[(1,)](shares_BCE, counts_BCE, loss, num_sequences, blocks, sequence, E, K, **TOTAL)
    return loss


def sequence_balance_dgrad(dloss, logits_TE, expert_TK, sequence, softmax):
    """dlogits_TE."""
    num_sequences, blocks = _blocks(logits_TE, expert_TK, sequence)
    counts_BCE, _ = _partial(logits_TE, expert_TK, sequence, False)
    dlogits_TE = torch.empty_like(logits_TE)
    _gradient[(num_sequences * blocks,)](
        dloss, logits_TE, counts_BCE, dlogits_TE, blocks, BLOCK_T, sequence, E, K, SOFTMAX, **LAUNCH
    )
    return dlogits_TE


def _blocks(logits_TE, expert_TK, sequence):
    assert logits_TE.is_contiguous() and expert_TK.is_contiguous() and logits_TE.shape[0] % sequence == 0
    return logits_TE.shape[0] // sequence, triton.cdiv(sequence, BLOCK_T)


def _partial(logits_TE, expert_TK, sequence, with_shares):
    """(counts_BCE, shares_BCE or None), sums over each block of tokens."""
    num_sequences, blocks = _blocks(logits_TE, expert_TK, sequence)
    shape = (num_sequences, blocks, E)
    counts_BCE = torch.empty(shape, dtype=torch.int32, device=logits_TE.device)
    shares_BCE = torch.empty(shape, dtype=torch.float32, device=logits_TE.device) if with_shares else None
    _sums[(num_sequences * blocks,)](
        logits_TE, expert_TK, counts_BCE, shares_BCE, blocks, BLOCK_T, sequence, E, K, SOFTMAX, **LAUNCH
    )
    return counts_BCE, shares_BCE


@triton.jit
def _sums(
    logits_TE, expert_TK, counts_BCE, shares_BCE, blocks, block_tokens, sequence,
    E: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)[None, :]
    counts = tl.zeros((ROWS, BLOCK_E), tl.int32)
    shares = tl.zeros((ROWS, BLOCK_E), tl.float32)
    for first in tl.range(0, block_tokens, ROWS):
        t, is_token = _tokens(first, blocks, block_tokens, sequence, ROWS)
        for k in tl.static_range(K):
            counts += (e == tl.load(expert_TK + t * K + k, mask=is_token, other=E)).to(tl.int32)
        if shares_BCE is not None:
            share, _ = _share(logits_TE, t, is_token, E, SOFTMAX, BLOCK_E)
            shares += tl.where(is_token, share, 0.0)
    at = tl.program_id(0).to(tl.int64) * E + tl.arange(0, BLOCK_E)
    tl.store(counts_BCE + at, tl.sum(counts, 0), mask=tl.arange(0, BLOCK_E) < E)
    if shares_BCE is not None:
        tl.store(shares_BCE + at, tl.sum(shares, 0), mask=tl.arange(0, BLOCK_E) < E)


@triton.jit
def _total(
    shares_BCE, counts_BCE, loss, num_sequences, blocks, sequence,
    E: tl.constexpr, K: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, BLOCK_E)[None, :]
    total = tl.zeros((BLOCK_E,), tl.float32)
    for b in tl.range(num_sequences):
        counts = tl.zeros((ROWS, BLOCK_E), tl.int32)
        shares = tl.zeros((ROWS, BLOCK_E), tl.float32)
        for first in tl.range(0, blocks, ROWS):
            c = first + tl.arange(0, ROWS)[:, None]
            at, inside = (b * blocks + c).to(tl.int64) * E + e, (c < blocks) & (e < E)
            counts += tl.load(counts_BCE + at, mask=inside, other=0)
            shares += tl.load(shares_BCE + at, mask=inside, other=0.0)
        total += tl.sum(counts, 0).to(tl.float32) * (E / (K * sequence)) * (tl.sum(shares, 0) / sequence)
    tl.store(loss, tl.sum(total))


@triton.jit
def _gradient(
    dloss, logits_TE, counts_BCE, dlogits_TE, blocks, block_tokens, sequence,
    E: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """With p the shares, s the scores and dp = f · dloss / S: dlogits = (dp − Σ dp·p) · p, of a sigmoid times 1 − s."""
    e = tl.arange(0, BLOCK_E)[None, :]
    counts = tl.zeros((ROWS, BLOCK_E), tl.int32)
    for first in tl.range(0, blocks, ROWS):
        c = first + tl.arange(0, ROWS)[:, None]
        at = (tl.program_id(0) // blocks * blocks + c).to(tl.int64) * E + e
        counts += tl.load(counts_BCE + at, mask=(c < blocks) & (e < E), other=0)
    frequency = tl.sum(counts, 0).to(tl.float32) * (E / (K * sequence))
    dshare = (frequency * (tl.load(dloss) / sequence))[None, :]
    for first in tl.range(0, block_tokens, ROWS):
        t, is_token = _tokens(first, blocks, block_tokens, sequence, ROWS)
        share, score = _share(logits_TE, t, is_token, E, SOFTMAX, BLOCK_E)
        dlogits = (dshare - tl.sum(share * dshare, 1)[:, None]) * share
        if not SOFTMAX:
            dlogits *= 1.0 - score
        tl.store(dlogits_TE + t * E + e, dlogits, mask=is_token & (e < E))


@triton.jit
def _tokens(first, blocks, block_tokens, sequence, ROWS: tl.constexpr):
    """The next tokens of this program's block, and which of them are of its sequence."""
    in_sequence = tl.program_id(0) % blocks * block_tokens + first + tl.arange(0, ROWS)[:, None]
    t = (tl.program_id(0) // blocks).to(tl.int64) * sequence + in_sequence
    return t, in_sequence < sequence


@triton.jit
def _share(logits_TE, t, is_token, E: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK_E: tl.constexpr):
    """(s / Σ s, s) of the experts of each token, 0 where there is no expert."""
    e = tl.arange(0, BLOCK_E)[None, :]
    logits = tl.load(logits_TE + t * E + e, mask=is_token & (e < E), other=float("-inf"))
    score = tl.exp(logits - tl.max(logits, 1)[:, None]) if SOFTMAX else tl.sigmoid(logits)
    return score / tl.sum(score, 1)[:, None], score
