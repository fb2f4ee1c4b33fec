# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""The gradients of multi-head latent attention: through causal softmax attention and RoPE.

T tokens in sequences of S · H heads; a head's query and key are [NOPE | ROPE] columns, its value VALUE; all heads
share the rope part of the key. DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
"""

# Blocks of M queries and N keys, as in Dao, "FlashAttention-2", 2023; scores and weights are made anew, from the same
# rounded numbers as in the forward. Products read the dtype of the arguments and add up in FP32; weights, and the
# gradients of scores, are rounded to it before the products that read them. What turned is turned back in FP32.
# A tile is a block of queries, or of keys, of one head. Programs draw tiles from a queue. The one that has a tile alone
# writes its results, and sums in a fixed order: no races, and equal bits from run to run, whoever draws which.

import functools
import heapq
import itertools

import torch
import triton
import triton.language as tl

from runtime.ops.causal import angles
from runtime.ops.tile_queue import tile_queue

LOG2_E = tl.constexpr(1.4426950408889634)
S, H, GROUP = 128, 4, 1
NOPE, ROPE, VALUE = 32, 16, 32
SIZES = {
    'S': 128,
    'H': 4,
    'GROUP': 1,
    'SHARED': 4,
    'SCALE': 0.14433756729740643,
    'NOPE': 32,
    'ROPE': 16,
    'VALUE': 32,
    'BLOCK_NOPE': 32,
    'BLOCK_ROPE': 16,
    'BLOCK_VALUE': 32,
}  # the same for the kernels, and powers of two that hold the widths
PROGRAMS = 132  # persistent: as many as there are SMs for compute
LEGS = tl.constexpr(4)  # in which a program draws its tiles from a queue
BAND = 512  # heads that are worked on at one time: what their tiles share stays in L2
TURN_Q = {'TOKENS': 32, 'HEADS': 4, 'num_warps': 4, 'enable_fp_fusion': True}
TURN_K = {'TOKENS': 128, 'HEADS': 1, 'num_warps': 4, 'enable_fp_fusion': True}


def _queue(num_heads, rows, rising, band, device):
    """What programs draw tickets from, the tiles of all tickets, and where those of each begin."""
    return tile_queue(device), *_legs(num_heads, rows, rising, band, device)


@functools.lru_cache(maxsize=16)
def _legs(num_heads, rows, rising, band, device):
    """(tiles of all tickets, where those of each ticket begin): a tile is head · blocks of `rows` + block.

    A block of queries has the more keys the later it is, one of keys the more queries the earlier. The next longest
    tile of a band of heads goes to the lane that will be free first. How long tiles take in proportion is known, so
    this is settled once, on the host: at 4096 tokens and 128 heads, 132 lanes wait 0.1% of the time, 112 0.4%.
    Lanes are cut into LEGS legs: half of a lane's tiles, half of the rest …, and all that is left then. A ticket is one
    lane of one leg. So a program that gets its SM late finds its share done by others.
    """
    blocks = triton.cdiv(S, rows)
    lanes = [[] for _ in range(PROGRAMS)]
    free = [(0, lane) for lane in range(PROGRAMS)]
    for start in range(0, num_heads, band):
        for length in range(blocks, 0, -1):
            for head in range(start, min(start + band, num_heads)):
                time, lane = free[0]
                heapq.heapreplace(free, (time + 2 * length + 1, lane))
                lanes[lane].append(head * blocks + (length - 1 if rising else blocks - length))
    legs = [
        lane[len(lane) - (len(lane) >> leg) : len(lane) - (len(lane) >> leg + 1 if leg + 1 < LEGS.value else 0)]
        for leg in range(LEGS.value)
        for lane in lanes
    ]
    tickets = [0, *itertools.accumulate(map(len, legs))]
    tiles = [tile for leg in legs for tile in leg]
    return tuple(torch.tensor(numbers, dtype=torch.int32).to(device) for numbers in (tiles, tickets))


# ---------------------------------------------------------------- rotation


def _table(theta, device):
    """[S, ROPE/2, 2]: cosine and sine of position · theta^(−2i/ROPE), found in FP64 and rounded to FP32."""
    return torch.view_as_real(angles(S, ROPE, theta, torch.float32, device))


def _turned(x, heads, still, theta, launch, *starts):
    """The last ROPE columns of each head of x [T, heads · (still + ROPE)], turned, as [T, heads · ROPE]."""
    assert x.stride(1) == 1 and x.shape[1] == heads * (still + ROPE)
    y = x.new_empty(x.shape[0], heads * ROPE)
    grid = (triton.cdiv(x.shape[0], launch["TOKENS"]), triton.cdiv(heads, launch["HEADS"]))
    block = SIZES["BLOCK_ROPE"]
    table, sizes = _table(theta, x.device), (heads, still, S, ROPE, block)
    _turn[grid](x, x.stride(0), table, y, x.shape[0], *starts, *sizes, **launch)
    return y


@triton.jit
def _turn(
    x, stride_x, table, y, num_tokens,
    NUM_HEADS: tl.constexpr, STILL: tl.constexpr, S: tl.constexpr,
    ROPE: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Pairs (x₀, x₁), (x₂, x₃) … turned by the angles of their positions; of HEADS heads with one read of these."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, BLOCK)
    inside_TR = (t < num_tokens)[:, None] & (c < ROPE)[None, :]
    inside = inside_TR[:, None, :] & (h < NUM_HEADS)[None, :, None]
    position = t % S
    angle = tl.load(table + position[:, None] * ROPE + c[None, :], mask=inside_TR, other=0.0)
    cos, sin = tl.split(tl.reshape(angle, (TOKENS, 1, BLOCK // 2, 2)))
    at = x + t[:, None, None] * stride_x + ((h * (STILL + ROPE) + STILL)[None, :, None] + c[None, None, :])
    pairs = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    x0, x1 = tl.split(tl.reshape(pairs, (TOKENS, HEADS, BLOCK // 2, 2)))
    turned = tl.reshape(tl.join(x0 * cos - x1 * sin, x0 * sin + x1 * cos), (TOKENS, HEADS, BLOCK))
    at = y + t[:, None, None] * (NUM_HEADS * ROPE) + ((h * ROPE)[None, :, None] + c[None, None, :])
    tl.store(at, turned.to(y.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------- tiles


@triton.jit
def _draw(queue):
    """(the next ticket, whether there was one). Who draws the last of all leaves the queue as it was: 0."""
    ticket = tl.atomic_add(queue, 1, sem="relaxed")
    if ticket == (LEGS + 1) * tl.num_programs(0) - 1:
        tl.store(queue, 0)
    return ticket, ticket < LEGS * tl.num_programs(0)


@triton.jit
def _read(
    x, row, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    S: tl.constexpr, WHOLE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """x[row : row + ROWS, : WIDTH] of S rows in BLOCK columns, 0 outside. WHOLE: all its rows are inside."""
    r, c = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = x + tl.cast(row, tl.int64) * stride + (r[:, None] * stride + c[None, :])
    if WHOLE and WIDTH == BLOCK:
        return tl.load(at, eviction_policy=POLICY)
    else:
        inside = ((row + r < S) | WHOLE)[:, None] & (c < WIDTH)[None, :]
        return tl.load(at, mask=inside, other=0.0, eviction_policy=POLICY)


@triton.jit
def _write(x, row, stride, values, WIDTH: tl.constexpr, S: tl.constexpr):
    """The inverse of `_read`. What is written is not read again here."""
    r, c = tl.arange(0, values.shape[0]), tl.arange(0, values.shape[1])
    at = x + tl.cast(row, tl.int64) * stride + (r[:, None] * stride + c[None, :])
    inside = (row + r < S)[:, None] & (c < WIDTH)[None, :]
    tl.store(at, values.to(x.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def _by_rows(x, y):
    """x · yᵀ. FP32 operands of a product wait in registers, so there 16 columns are multiplied at a time."""
    ROWS_X: tl.constexpr = x.shape[0]
    ROWS_Y: tl.constexpr = y.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    if x.dtype == tl.float32 and WIDTH > 16:
        x0, x1 = tl.split(tl.permute(tl.reshape(x, (ROWS_X, 2, WIDTH // 2)), (0, 2, 1)))
        y0, y1 = tl.split(tl.permute(tl.reshape(y, (ROWS_Y, 2, WIDTH // 2)), (0, 2, 1)))
        return _by_rows(x0, y0) + _by_rows(x1, y1)
    else:
        return tl.dot(x, tl.trans(y), input_precision="ieee")


@triton.jit
def _lse_at(lse, head, s, S: tl.constexpr, GROUP: tl.constexpr):
    """Where lse [.., S, GROUP] has queries of a head."""
    return lse + (head // GROUP).to(tl.int64) * (S * GROUP) + s * GROUP + head % GROUP


ROWS = {'COUNT': 128, 'num_warps': 4, 'enable_fp_fusion': True}
QUERIES = {'M': 32, 'N': 16, 'num_warps': 8, 'num_stages': 1, 'enable_fp_fusion': True}
KEYS = {
    'DK': True,
    'DV': True,
    'M': 16,
    'N': 32,
    'num_warps': 8,
    'num_stages': 1,
    'enable_fp_fusion': True,
}
VALUES = None  # a launch of its own, if the sums of keys and values do not fit in the registers together
TOTAL = {'TOKENS': 32, 'HEADS': 4, 'num_warps': 4, 'enable_fp_fusion': True}


def mla_attention_dgrad(do, q, kv, k_rope, o, lse, sequence, heads, nope, rope, value, theta, *places):
    """dq, dkv, dk_rope, shaped like q, kv, k_rope, which may be a view of some columns of a wider tensor."""
    return _gradients(do, q, kv, k_rope, (o,), lse, (sequence, heads, nope, rope, value), theta, places)


def _gradients(do, q, kv, k_rope, o, lse, sizes, theta, places, *pow2):
    """The tensors of dq, dkv and dk_rope. o: one tensor, or three of E5M6."""
    assert sizes == (S, H, NOPE, ROPE, VALUE)
    assert all(x.is_contiguous() for x in (do, q, kv, *o, lse))
    table = _table(theta, q.device)
    num_tokens = kv.shape[0]
    q_turned, k_turned = _turned(q, H, NOPE, theta, TURN_Q, *places), _turned(k_rope, 1, 0, theta, TURN_K, *places)
    dq, dk_rope = torch.empty_like(q), k_rope.new_empty(num_tokens, ROPE)
    dkv = (torch.empty_like(kv),)
    lse2, delta = _of_rows(do, o, lse)
    queue = _queue(num_tokens // S * H, QUERIES["M"], True, BAND, q.device)
    given = q_turned, k_turned, do, lse2, delta
    _query_gradient[(PROGRAMS,)](q, kv, dq, *given, table, S, *queue, *places, **SIZES, **QUERIES)
    ends = [*map(_ends, places)]
    dk_HTR = torch.empty(H, num_tokens, ROPE, dtype=torch.float32, device=q.device)
    for launch in (VALUES, KEYS) if VALUES else (KEYS,):
        queue = _queue(num_tokens // S * H, launch["N"], False, BAND, q.device)
        ahead = q, dk_HTR, num_tokens, kv, *dkv, *pow2
        _key_gradient[(PROGRAMS,)](*ahead, *given, S, *queue, *ends, **SIZES, **launch)
    grid = (triton.cdiv(num_tokens, TOTAL["TOKENS"]),)
    _total_key_gradient[grid](dk_HTR, table, dk_rope, num_tokens, *places, S, H, ROPE, SIZES["BLOCK_ROPE"], **TOTAL)
    return dq, *dkv, dk_rope


# ---------------------------------------------------------------- rows


def _of_rows(do, o, lse):
    """Two numbers per query and head, each [B·H, S]: lse in base 2, and delta = Σ do·o. o: the tensors that it is."""
    lse2, delta = torch.empty(2, lse.numel(), dtype=torch.float32, device=lse.device)
    grid = (triton.cdiv(lse.numel(), ROWS["COUNT"]),)
    _row_values[grid](do, *o, lse, lse2, delta, lse.numel(), S, H, GROUP, VALUE, SIZES["BLOCK_VALUE"], **ROWS)
    return lse2, delta


def _ends(starts):
    """The end of each token's document in its sequence, behind its last token: [T], of `starts` [T]."""
    by_sequence = starts.view(-1, S)
    token = torch.arange(S, dtype=torch.int32, device=starts.device).repeat(len(by_sequence), 1)
    return torch.searchsorted(by_sequence, token, right=True, out_int32=True)


@triton.jit
def _row_values(
    do, o, lse, lse2, delta, num_rows, S: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr,
    VALUE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row, c = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT), tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (c < VALUE)[None, :]
    at = row[:, None] * VALUE + c[None, :]
    do_rows = tl.load(do + at, mask=inside, other=0.0).to(tl.float32)
    o_rows = tl.load(o + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    head, s = row // H // S * H + row % H, row // H % S
    tl.store(delta + head * S + s, tl.sum(do_rows * o_rows, 1), mask=row < num_rows)
    lse_rows = tl.load(_lse_at(lse, head, s, S, GROUP), mask=row < num_rows, other=0.0)
    tl.store(lse2 + head * S + s, lse_rows * LOG2_E, mask=row < num_rows)


@triton.jit
def _read_rows(x, head, s, S: tl.constexpr, WHOLE: tl.constexpr):
    at = x + head.to(tl.int64) * S + s
    return tl.load(at) if WHOLE else tl.load(at, mask=s < S, other=0.0)


@triton.jit
def _turned_back(y, table, position, ROWS: tl.constexpr, S: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of turned columns y [ROWS, BLOCK] at `position` -> those of what was turned."""
    c = tl.arange(0, BLOCK)
    inside = (position < S)[:, None] & (c < ROPE)[None, :]
    angle = tl.load(table + position[:, None] * ROPE + c[None, :], mask=inside, other=0.0)
    cos, sin = tl.split(tl.reshape(angle, (ROWS, BLOCK // 2, 2)))
    y0, y1 = tl.split(tl.reshape(y, (ROWS, BLOCK // 2, 2)))
    return tl.reshape(tl.join(y0 * cos + y1 * sin, y1 * cos - y0 * sin), (ROWS, BLOCK))


# ---------------------------------------------------------------- queries


@triton.jit
def _query_gradient(
    q,
    kv, dq, q_turned, k_turned, do, lse2, delta, table, end, queue, tiles, tickets,
    S: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, SCALE: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_VALUE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dq. A tile is M queries of a head, with all keys up to the last of them.

    Not two buffers for each sum: Triton 3.6 would keep more operands than sm_100 has room for.
    """
    BLOCKS: tl.constexpr = (S + M - 1) // M
    WHOLE: tl.constexpr = S % M == 0
    ticket, drawn = _draw(queue)
    while drawn:
        for i in tl.range(tl.load(tickets + ticket), tl.load(tickets + ticket + 1), disable_licm=True):
            tile = tl.load(tiles + i)
            first, start, head = tile % BLOCKS * M, (tile // BLOCKS // H).to(tl.int64) * S, tile // BLOCKS % H
            m = first + tl.arange(0, M)
            q_start = start * (H * (NOPE + ROPE)) + head * (NOPE + ROPE)
            q_still = _read(q + q_start, first, H * (NOPE + ROPE), M, NOPE, BLOCK_NOPE, S, WHOLE, "evict_first")
            dq_still = tl.zeros((M, BLOCK_NOPE), tl.float32)
            q_at = q_turned + start * (H * ROPE) + head * ROPE
            q_moved = _read(q_at, first, H * ROPE, M, ROPE, BLOCK_ROPE, S, WHOLE, "evict_first")
            dq_moved = tl.zeros((M, BLOCK_ROPE), tl.float32)
            do_at = do + start * (H * VALUE) + head * VALUE
            do_rows = _read(do_at, first, H * VALUE, M, VALUE, BLOCK_VALUE, S, WHOLE, "evict_first")
            lse_rows = _read_rows(lse2, tile // BLOCKS, m, S, WHOLE)
            delta_rows = _read_rows(delta, tile // BLOCKS, m, S, WHOLE)
            kv_at = kv + start * (H // GROUP * (NOPE + VALUE)) + head // GROUP * (NOPE + VALUE)
            k_at = k_turned + start * (H // SHARED * ROPE) + head // SHARED * ROPE

            last = tl.minimum(first + M, end)
            for n in tl.range(0, last, N, disable_licm=True, disallow_acc_multi_buffer=True):
                k_moved = _read(k_at, n, H // SHARED * ROPE, N, ROPE, BLOCK_ROPE, S, WHOLE, "")
                scores = _by_rows(q_moved, k_moved)
                k_still = _read(kv_at, n, H // GROUP * (NOPE + VALUE), N, NOPE, BLOCK_NOPE, S, WHOLE, "")
                scores += _by_rows(q_still, k_still)
                v = _read(kv_at + NOPE, n, H // GROUP * (NOPE + VALUE), N, VALUE, BLOCK_VALUE, S, WHOLE, "")
                dweights = _by_rows(do_rows, v)
                weights = tl.exp2(scores * (SCALE * LOG2_E) - lse_rows[:, None])
                if n + N > first:
                    weights = tl.where(m[:, None] >= (n + tl.arange(0, N))[None, :], weights, 0.0)
                dscores = (weights * (dweights - delta_rows[:, None])).to(v.dtype)
                dq_moved = tl.dot(dscores, k_moved, dq_moved, input_precision="ieee")
                dq_still = tl.dot(dscores, k_still, dq_still, input_precision="ieee")
            _write(dq + q_start, first, H * (NOPE + ROPE), dq_still * SCALE, NOPE, S)
            dq_moved = _turned_back(dq_moved * SCALE, table, m, M, S, ROPE, BLOCK_ROPE)
            _write(dq + q_start + NOPE, first, H * (NOPE + ROPE), dq_moved, ROPE, S)
        ticket, drawn = _draw(queue)


# ---------------------------------------------------------------- keys and values


@triton.jit
def _key_gradient(
    q, dk_HTR, num_tokens,
    kv, dkv, q_turned, k_turned, do, lse2, delta, end, queue, tiles, tickets,
    S: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, SCALE: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_VALUE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """dk if DK, dv if DV. A tile is N keys of a head of theirs, with all queries from the first of them on of its
    GROUP heads.
    """
    BLOCKS: tl.constexpr = (S + N - 1) // N
    G: tl.constexpr = H // GROUP
    WHOLE: tl.constexpr = S % N == 0
    ticket, drawn = _draw(queue)
    while drawn:
        for i in tl.range(tl.load(tickets + ticket), tl.load(tickets + ticket + 1), disable_licm=True):
            tile = tl.load(tiles + i)
            first, start, kv_head = tile % BLOCKS * N, (tile // BLOCKS // G).to(tl.int64) * S, tile // BLOCKS % G
            n = first + tl.arange(0, N)
            kv_start = start * (G * (NOPE + VALUE)) + kv_head * (NOPE + VALUE)
            k_still = _read(kv + kv_start, first, G * (NOPE + VALUE), N, NOPE, BLOCK_NOPE, S, WHOLE, "evict_first")
            dk_still = tl.zeros((N, BLOCK_NOPE), tl.float32)
            k_at = k_turned + start * (H // SHARED * ROPE) + kv_head * GROUP // SHARED * ROPE
            once: tl.constexpr = "evict_first" if SHARED == GROUP else ""
            k_moved = _read(k_at, first, H // SHARED * ROPE, N, ROPE, BLOCK_ROPE, S, WHOLE, once)
            dk_moved = tl.zeros((N, BLOCK_ROPE), tl.float32)
            if DK:
                v_at = kv + kv_start + NOPE
                v = _read(v_at, first, G * (NOPE + VALUE), N, VALUE, BLOCK_VALUE, S, WHOLE, "evict_first")
            dv = tl.zeros((N, BLOCK_VALUE), tl.float32)
            for member in tl.range(0, GROUP, disable_licm=True):
                head, pair = kv_head * GROUP + member, tile // BLOCKS * GROUP + member
                q_start = start * (H * (NOPE + ROPE)) + head * (NOPE + ROPE)
                q_at = q_turned + start * (H * ROPE) + head * ROPE
                do_at = do + start * (H * VALUE) + head * VALUE
                for f in tl.range(first, end, M, disable_licm=True, disallow_acc_multi_buffer=True):
                    m = f + tl.arange(0, M)
                    q_moved = _read(q_at, f, H * ROPE, M, ROPE, BLOCK_ROPE, S, S % M == 0, "")
                    scores = _by_rows(k_moved, q_moved)
                    q_still = _read(q + q_start, f, H * (NOPE + ROPE), M, NOPE, BLOCK_NOPE, S, S % M == 0, "")
                    scores += _by_rows(k_still, q_still)
                    do_rows = _read(do_at, f, H * VALUE, M, VALUE, BLOCK_VALUE, S, S % M == 0, "")
                    # Rows past the end weigh 1, but their do and delta are 0.
                    weights = tl.exp2(scores * (SCALE * LOG2_E) - _read_rows(lse2, pair, m, S, S % M == 0)[None, :])
                    if f < first + N:
                        weights = tl.where(n[:, None] <= m[None, :], weights, 0.0)
                    if DV:
                        dv = tl.dot(weights.to(do_rows.dtype), do_rows, dv, input_precision="ieee")
                    if DK:
                        dweights = _by_rows(v, do_rows) - _read_rows(delta, pair, m, S, S % M == 0)[None, :]
                        dscores = (weights * dweights).to(do_rows.dtype)
                        dk_moved = tl.dot(dscores, q_moved, dk_moved, input_precision="ieee")
                        dk_still = tl.dot(dscores, q_still, dk_still, input_precision="ieee")
            if DV:
                _write(dkv + kv_start + NOPE, first, G * (NOPE + VALUE), dv, VALUE, S)
            if DK:
                _write(dkv + kv_start, first, G * (NOPE + VALUE), dk_still * SCALE, NOPE, S)
                dk_at = dk_HTR + (kv_head.to(tl.int64) * num_tokens + start) * ROPE
                _write(dk_at, first, ROPE, dk_moved * SCALE, ROPE, S)
        ticket, drawn = _draw(queue)


@triton.jit
def _total_key_gradient(
    dk_HTR, table, dk_rope, num_tokens,
    S: tl.constexpr, H: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The gradient of the key that all heads share: the sum over them, turned back."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    h, c = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    inside = (t < num_tokens)[:, None] & (c < ROPE)[None, :]
    at = dk_HTR + (h.to(tl.int64) * num_tokens)[:, None, None] * ROPE + (t[:, None] * ROPE + c[None, :])[None, :, :]
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for first in tl.range(0, H, HEADS):
        mask = inside[None, :, :] & (first + h < H)[:, None, None]
        ahead = tl.cast(first, tl.int64) * num_tokens * ROPE
        total += tl.sum(tl.load(at + ahead, mask=mask, other=0.0, eviction_policy="evict_first"), 0)
    position = t % S
    total = _turned_back(total, table, position, TOKENS, S, ROPE, BLOCK)
    tl.store(dk_rope + t[:, None] * ROPE + c[None, :], total.to(dk_rope.dtype.element_ty), mask=inside)
