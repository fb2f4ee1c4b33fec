# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""Multi-head latent attention after its projections: RoPE and causal softmax attention.

T tokens in sequences of S · H heads; a head's query and key are [NOPE | ROPE] columns, its value VALUE; all heads
share the rope part of the key. DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
"""

# Blocks of M queries and N keys, as in Dao, "FlashAttention-2", 2023. What turns is turned first, by a kernel of its
# own, and rounded to the dtype of the arguments. Products read that dtype and add up in FP32. Scores are scaled and
# made weights in FP32; weights are rounded before they meet the values.
# A tile is a block of queries of one head. Programs draw tiles from a queue. The one that has a tile alone writes its
# results, and sums in a fixed order: no races, and equal bits from run to run, whoever draws which.

import functools
import heapq
import itertools

import torch
import triton
import triton.language as tl

from runtime.ops.causal import angles
from runtime.ops.tile_queue import tile_queue

LOG2_E = tl.constexpr(1.4426950408889634)
S, H, GROUP = 16, 2, 1
NOPE, ROPE, VALUE = 8, 4, 8
SIZES = {
    'S': 16,
    'H': 2,
    'GROUP': 1,
    'SHARED': 2,
    'SCALE': 0.28867513459481287,
    'NOPE': 8,
    'ROPE': 4,
    'VALUE': 8,
    'BLOCK_NOPE': 16,
    'BLOCK_ROPE': 16,
    'BLOCK_VALUE': 16,
}  # the same for the kernels, and powers of two that hold the widths
PROGRAMS = 132  # persistent: as many as there are SMs for compute
LEGS = tl.constexpr(4)  # in which a program draws its tiles from a queue
BAND = 16384  # heads that are worked on at one time: what their tiles share stays in L2
TURN_Q = {'TOKENS': 64, 'HEADS': 2, 'num_warps': 4, 'enable_fp_fusion': True}
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


FORWARD = {'M': 32, 'N': 32, 'num_warps': 8, 'num_stages': 1, 'enable_fp_fusion': True}


def mla_attention(q, kv, k_rope, sequence, heads, nope, rope, value, theta, *places):
    """o [T, H·VALUE], lse [B, H, S]. k_rope may be a view of some columns of a wider tensor."""
    assert (sequence, heads, nope, rope, value) == (S, H, NOPE, ROPE, VALUE)
    assert q.is_contiguous() and kv.is_contiguous()
    num_tokens = q.shape[0]
    q_turned, k_turned = _turned(q, H, NOPE, theta, TURN_Q, *places), _turned(k_rope, 1, 0, theta, TURN_K, *places)
    o = q.new_empty(num_tokens, H * VALUE)
    lse = torch.empty(num_tokens // S, H, S, dtype=torch.float32, device=q.device)
    queue = _queue(num_tokens // S * H, FORWARD["M"], True, BAND, q.device)
    _forward[(PROGRAMS,)](q, kv, q_turned, k_turned, o, lse, S, *queue, *places, **SIZES, **FORWARD)
    return o, lse


@triton.jit
def _forward(
    q,
    kv, q_turned, k_turned, o, lse, end, queue, tiles, tickets,
    S: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, SCALE: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_VALUE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A tile's rows see their first key, and so a finite score, in its first block.

    `end` is S at run time: a loop of known length, if short, is unrolled whole and its loads do not overlap.
    Offsets are not to be hoisted out of the loop over tiles, where they would cost 40 to 80 registers.
    """
    BLOCKS: tl.constexpr = (S + M - 1) // M
    WHOLE: tl.constexpr = S % M == 0
    ticket, drawn = _draw(queue)
    while drawn:
        for i in tl.range(tl.load(tickets + ticket), tl.load(tickets + ticket + 1), disable_licm=True):
            tile = tl.load(tiles + i)
            first, start, head = tile % BLOCKS * M, (tile // BLOCKS // H).to(tl.int64) * S, tile // BLOCKS % H
            m = first + tl.arange(0, M)
            kv_at = kv + start * (H // GROUP * (NOPE + VALUE)) + head // GROUP * (NOPE + VALUE)
            k_at = k_turned + start * (H // SHARED * ROPE) + head // SHARED * ROPE
            q_at = q_turned + start * (H * ROPE) + head * ROPE
            q_moved = _read(q_at, first, H * ROPE, M, ROPE, BLOCK_ROPE, S, WHOLE, "evict_first")
            q_at = q + start * (H * (NOPE + ROPE)) + head * (NOPE + ROPE)
            q_still = _read(q_at, first, H * (NOPE + ROPE), M, NOPE, BLOCK_NOPE, S, WHOLE, "evict_first")
            top = tl.full((M,), float("-inf"), tl.float32)
            total = tl.zeros((M,), tl.float32)
            mean = tl.zeros((M, BLOCK_VALUE), tl.float32)
            last = tl.minimum(first + M, end)
            for n in tl.range(0, last, N, disable_licm=True, disallow_acc_multi_buffer=True):
                block = n
                k_moved = _read(k_at, block, H // SHARED * ROPE, N, ROPE, BLOCK_ROPE, S, WHOLE, "")
                next_scores = _by_rows(q_moved, k_moved)
                k_still = _read(kv_at, block, H // GROUP * (NOPE + VALUE), N, NOPE, BLOCK_NOPE, S, WHOLE, "")
                next_scores += _by_rows(q_still, k_still)
                scores = next_scores
                if n + N > first:
                    scores = tl.where(m[:, None] >= (n + tl.arange(0, N))[None, :], scores, float("-inf"))
                higher = tl.maximum(top, tl.max(scores, 1))
                weights = tl.exp2(scores * (SCALE * LOG2_E) - (higher * (SCALE * LOG2_E))[:, None])
                shrink = tl.exp2((top - higher) * (SCALE * LOG2_E))
                total = total * shrink + tl.sum(weights, 1)
                v = _read(kv_at + NOPE, n, H // GROUP * (NOPE + VALUE), N, VALUE, BLOCK_VALUE, S, WHOLE, "")
                mean = tl.dot(weights.to(v.dtype), v, mean * shrink[:, None], input_precision="ieee")
                top = higher
            o_at = o + start * (H * VALUE) + head * VALUE
            _write(o_at, first, H * VALUE, mean * (1.0 / total)[:, None], VALUE, S)
            tl.store(_lse_at(lse, tile // BLOCKS, m, S, GROUP), top * SCALE + tl.log(total), mask=m < S)
        ticket, drawn = _draw(queue)
