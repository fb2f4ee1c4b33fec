# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""Choosing experts, and a row for each choice of each token, sorted stably by the place of its expert.

T tokens · E experts in GROUPS groups of M · K choices of a token · S = T·K rows · D columns · B scales of a row · N
blocks of tokens. The first launch scores, chooses, and counts the choices of each block. The second reads these counts:
what comes before a block is the sum over earlier experts and, of the same expert, over earlier blocks. So each program
knows where its rows go; it reads every row once and writes it K times. No atomics; the order is that of a stable sort.

Scores and gate weights are FP32. Of equal scores the expert, or the group, with the lower number comes first; NaN
comes before all numbers. So a row of NaN chooses experts 0 to K-1, and no choice ever is outside of 0 to E-1.
"""

import torch
import triton
import triton.language as tl

E, K, D = 16, 4, 192
B = 0  # scales of a row; 0: none
GROUPS, TOP_GROUPS = 4, 2
SOFTMAX, NORMALIZE = False, True
ROWS = 32  # tokens that are routed at a time
BLOCK_T, BLOCKS = 32, 256  # tokens of a block, and how many blocks there are before they grow
PARTS = 1  # of the columns: programs that share a block of tokens
ROUTE = {'BLOCK_G': 4, 'BLOCK_M': 4, 'BLOCK_K': 4, 'num_warps': 4, 'enable_fp_fusion': True}
PLACE = {
    'BLOCK_E': 16,
    'BLOCK_K': 4,
    'BLOCK_D': 256,
    'BLOCK_B': 1,
    'TOKENS': 4,
    'OTHERS': 128,
    'BLOCKS': 256,
    'num_warps': 8,
    'enable_fp_fusion': True,
}


def route_permute(logits_TE, bias_E, x_TD, slots_E, softmax, groups, top_groups, top_k, normalize, scale):
    """(gate_TK, expert_TK, rows_SD, gate_S, order_S, counts_E); with expert e in place slots[e] if there are slots."""
    assert top_k == K
    return _routed(logits_TE, bias_E, x_TD, None, slots_E, scale)


def _routed(logits_TE, bias_E, x_TD, scales_TB, slots_E, scale):
    assert logits_TE.is_contiguous() and logits_TE.shape[1] == E
    num_tokens = logits_TE.shape[0]
    gate_TK = logits_TE.new_empty(num_tokens, K)
    expert_TK = torch.empty(num_tokens, K, dtype=torch.int64, device=logits_TE.device)
    block = _tokens_of_a_block(num_tokens)
    counts_NE = _table(logits_TE, num_tokens, block)
    _route[(counts_NE.shape[0],)](
        logits_TE, bias_E, slots_E, gate_TK, expert_TK, counts_NE, num_tokens, scale,
        block, E, K, GROUPS, TOP_GROUPS, SOFTMAX, NORMALIZE, ROWS, **ROUTE,
    )  # fmt: skip
    return gate_TK, expert_TK, *_placed(x_TD, scales_TB, gate_TK, expert_TK, slots_E, counts_NE, block)


def _tokens_of_a_block(num_tokens):
    """A block has more tokens where there would be too many blocks: every program reads the counts of all."""
    block = BLOCK_T
    while block * BLOCKS < num_tokens:
        block *= 2
    return block


def _table(like, num_tokens, block):
    """counts_NE, of at least one block: with no tokens there still are counts to write."""
    blocks = max(1, triton.cdiv(num_tokens, block))
    return torch.empty(blocks, E, dtype=torch.int16, device=like.device)


def _placed(x_TD, scales_TB, gate_TK, expert_TK, slots_E, counts_NE, block):
    assert x_TD.is_contiguous() and x_TD.shape[1] == D and gate_TK.is_contiguous() and expert_TK.is_contiguous()
    num_tokens, num_rows = x_TD.shape[0], x_TD.shape[0] * K
    rows_SD, gate_S = x_TD.new_empty(num_rows, D), gate_TK.new_empty(num_rows)
    order_S, counts_E = expert_TK.new_empty(num_rows), expert_TK.new_empty(E)
    scales_SB, strides = None, (0, 0)
    from_TD, to_SD = x_TD, rows_SD
    _place[(counts_NE.shape[0], PARTS)](
        from_TD, gate_TK, expert_TK, slots_E, counts_NE, to_SD, gate_S, order_S, counts_E, scales_TB, scales_SB,
        *strides, num_tokens, block, E, K, D, B, PARTS, **PLACE,
    )  # fmt: skip
    return rows_SD, gate_S, order_S, counts_E


@triton.jit
def _place_of(expert_TK, slots_E, t, k, num_tokens, E: tl.constexpr, K: tl.constexpr):
    """The place of the expert that is token t's choice k, and E where there is no such choice."""
    inside = (t < num_tokens) & (k < K)
    expert = tl.load(expert_TK + t * K + k, mask=inside, other=E)
    if slots_E is not None:
        expert = tl.load(slots_E + expert, mask=inside, other=E)
    return expert.to(tl.int32)


@triton.jit
def _place(
    x_TD, gate_TK, expert_TK, slots_E, counts_NE, rows_SD, gate_S, order_S, counts_E, scales_TB, scales_SB,
    stride_t, stride_b, num_tokens, block_tokens,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, B: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
    TOKENS: tl.constexpr, OTHERS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rows of a block of tokens to their places, TOKENS at a time; the program of part 0 also writes what is no row."""
    block, part = tl.program_id(0), tl.program_id(1)
    e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    counts, before = _counts(counts_NE, block, tl.num_programs(0), E, BLOCK_E, BLOCKS)
    if (block == 0) & (part == 0):
        tl.store(counts_E + e, counts.to(tl.int64), mask=e < E)
    start = tl.cumsum(counts, 0) - counts + before  # where this block's first row of each place goes

    first_t = block.to(tl.int64) * block_tokens
    for first in tl.range(0, block_tokens, TOKENS):
        t = first_t + first + tl.arange(0, TOKENS)
        place = _place_of(expert_TK, slots_E, t[:, None], k[None, :], num_tokens, E, K)
        at = tl.reshape(tl.minimum(place, E - 1), (TOKENS * BLOCK_K,))
        to = tl.reshape(tl.gather(start, at, 0), (TOKENS, BLOCK_K))
        lane = ((first + tl.arange(0, TOKENS))[:, None] * BLOCK_K + k[None, :])[:, :, None]
        for other in tl.range(0, (first + TOKENS) * BLOCK_K, OTHERS):
            i = other + tl.arange(0, OTHERS)
            others = _place_of(expert_TK, slots_E, first_t + i // BLOCK_K, i % BLOCK_K, num_tokens, E, K)
            to += tl.sum(((place[:, :, None] == others[None, None, :]) & (i[None, None, :] < lane)).to(tl.int32), 2)
        if part == 0:
            s = t[:, None] * K + k[None, :]
            inside = (t < num_tokens)[:, None] & (k < K)[None, :]
            tl.store(order_S + to, s, mask=inside)
            tl.store(gate_S + to, tl.load(gate_TK + s, mask=inside), mask=inside)
            if scales_TB is not None:
                _move(
                    scales_TB, stride_t, stride_b, scales_SB, 1, num_tokens * K,
                    t, to, num_tokens, 0, K, B, B, BLOCK_K, BLOCK_B, "",
                )  # fmt: skip
        _move(
            x_TD, D, 1, rows_SD, D, 1, t, to, num_tokens, part * BLOCK_D, K, D, PARTS * BLOCK_D, BLOCK_K, BLOCK_D, ".cg"
        )


@triton.jit
def _counts(counts_NE, block, num_blocks, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCKS: tl.constexpr):
    """The rows of each place: of all blocks, and of those before a block. Read BLOCKS at a time."""
    e = tl.arange(0, BLOCK_E)[None, :]
    counts = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    for first in tl.range(0, num_blocks, BLOCKS):
        b = first + tl.arange(0, BLOCKS)[:, None]
        inside = (b < num_blocks) & (e < E)
        found = tl.load(counts_NE + b.to(tl.int64) * E + e, mask=inside, other=0).to(tl.int32)
        counts += tl.sum(found, 0)
        before += tl.sum(tl.where(b < block, found, 0), 0)
    return counts, before


@triton.jit
def _move(
    x, stride_t, stride_d, rows, row_stride, column_stride, t, to, num_tokens, first,
    K: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    CACHED: tl.constexpr,
):  # fmt: skip
    """Rows t of x to the rows to[:, 0], …, to[:, K-1], of D columns: from the first on, every STEP, BLOCK_D of them."""
    k = tl.arange(0, BLOCK_K)[None, :]
    for column in tl.range(first, D, STEP):
        d = (column + tl.arange(0, BLOCK_D))[None, :]
        inside = (t < num_tokens)[:, None] & _below(d, D, BLOCK_D)
        moved = tl.load(x + t[:, None] * stride_t + d * stride_d, mask=inside, cache_modifier=CACHED)
        for choice in tl.static_range(K):
            row = tl.sum(tl.where(k == choice, to, 0), 1).to(tl.int64)
            tl.store(rows + row[:, None] * row_stride + d * column_stride, moved, mask=inside, cache_modifier=".cs")


@triton.jit
def _below(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Whether an index of a row of blocks is inside; a compile-time yes where the blocks fit, so the mask vanishes."""
    if SIZE % BLOCK == 0:
        return tl.full(index.shape, 1, tl.int1)
    else:
        return index < SIZE


LOWEST = tl.constexpr(-(2**31))  # the key of experts that are taken, and of lanes without an expert
MINUS_INFINITY = tl.constexpr(-0x7F800001)


@triton.jit
def _route(
    logits_TE, bias_E, slots_E, gate_TK, expert_TK, counts_NE, num_tokens, scale, block_tokens,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Chooses for block_tokens tokens, ROWS at a time; where wanted, counts the choices of each place's expert.

    Scores are compared as integers of the same order, the largest is found K times, and what is taken is lowered.
    """
    M: tl.constexpr = E // GROUPS
    g, m, k = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    lane = tl.arange(0, BLOCK_G * BLOCK_M)
    expert = lane // BLOCK_M * M + lane % BLOCK_M
    is_expert = (lane // BLOCK_M < GROUPS) & (lane % BLOCK_M < M)
    is_expert_GM = ((g < GROUPS)[:, None] & (m < M)[None, :])[None, :, :]
    expert_GM = (g[:, None] * M + m[None, :])[None, :, :]
    counts = tl.zeros((BLOCK_G * BLOCK_M,), tl.int32)
    for first in tl.range(0, block_tokens, ROWS):
        t = tl.program_id(0).to(tl.int64) * block_tokens + first + tl.arange(0, ROWS)
        inside = is_expert_GM & (t < num_tokens)[:, None, None]
        logits = tl.load(logits_TE + t[:, None, None] * E + expert_GM, mask=inside, other=float("-inf"))
        if SOFTMAX:
            largest = tl.max(tl.max(logits, 2), 1)
            total = tl.sum(tl.sum(tl.exp(logits - largest[:, None, None]), 2), 1)
            choice = tl.exp(logits - largest[:, None, None]) / total[:, None, None]
        else:
            choice = tl.sigmoid(logits)
        if bias_E is not None:
            choice += tl.load(bias_E + expert_GM, mask=is_expert_GM, other=0.0).to(tl.float32)
        key = tl.where(is_expert_GM, _ordered(choice), LOWEST)

        if TOP_GROUPS < GROUPS:
            dropped = _dropped(key, GROUPS, TOP_GROUPS, SOFTMAX or M == 1)
            key = tl.where(dropped & is_expert_GM, MINUS_INFINITY, key)
        key = tl.reshape(key, (ROWS, BLOCK_G * BLOCK_M))
        chosen = tl.zeros((ROWS, BLOCK_K), tl.int32)
        for place in tl.range(K):
            best = tl.max(key, 1)
            taken = tl.min(tl.where(key == best[:, None], expert[None, :], E), 1)
            key = tl.where(expert[None, :] == taken[:, None], LOWEST, key)
            chosen = tl.where(k[None, :] == place, taken[:, None], chosen)

        inside = (t < num_tokens)[:, None] & (k < K)[None, :]
        logits = tl.load(logits_TE + t[:, None] * E + chosen, mask=inside, other=0.0)
        gate = tl.exp(logits - largest[:, None]) / total[:, None] if SOFTMAX else tl.sigmoid(logits)
        if NORMALIZE:
            gate /= tl.sum(tl.where((k < K)[None, :], gate, 0.0), 1)[:, None] + 1e-20
        tl.store(gate_TK + t[:, None] * K + k[None, :], gate * scale, mask=inside)
        tl.store(expert_TK + t[:, None] * K + k[None, :], chosen.to(tl.int64), mask=inside)
        if counts_NE is not None:
            counts += tl.sum(((key == LOWEST) & (t < num_tokens)[:, None]).to(tl.int32), 0)
    if counts_NE is not None:
        at = expert
        if slots_E is not None:
            at = tl.load(slots_E + expert, mask=is_expert, other=0)
        tl.store(counts_NE + tl.program_id(0).to(tl.int64) * E + at, counts.to(tl.int16), mask=is_expert)


@triton.jit
def _dropped(key, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_ALONE: tl.constexpr):
    """Which groups are not among the best, of keys [rows, groups, experts of one]; a group's score is that of its best
    expert, or the sum of the two best."""
    g, m = tl.arange(0, key.shape[1]), tl.arange(0, key.shape[2])[None, None, :]
    best = tl.max(key, 2)
    score = _number(best)
    if not BEST_ALONE:
        at = tl.min(tl.where(key == best[:, :, None], m, key.shape[2]), 2)
        score += _number(tl.max(tl.where(m == at[:, :, None], LOWEST, key), 2))
    group = tl.where((g < GROUPS)[None, :], _ordered(score), LOWEST)
    mine, other = group[:, :, None], group[:, None, :]
    ahead = (other > mine) | ((other == mine) & (g[None, :] < g[:, None])[None, :, :])
    return (tl.sum(ahead.to(tl.int32), 2) >= TOP_GROUPS)[:, :, None]


@triton.jit
def _ordered(x):
    """Integers in the order of the FP32 numbers x, with NaN above all."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The FP32 numbers of such integers."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
