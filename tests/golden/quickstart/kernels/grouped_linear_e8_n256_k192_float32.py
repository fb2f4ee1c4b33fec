# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""Grouped linear layers of one expert rank: y = x·Wᵀ, its input gradient and its weight gradient.

R rows received · E local experts · N out, K in. Rows lie expert by expert, those of expert e in
[offsets_E[e-1], offsets_E[e]): a tile never mixes experts, and only the last tile of an expert is partly filled.

Programs draw tiles from a queue. Every tile of an output is written by exactly one program, which alone reads and
writes it: no races, and equal bits from run to run, whoever draws which. All sizes are read on the device; the host
never waits.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from runtime.ops.tile_queue import tile_queue

E, N, K = 8, 256, 192
PROGRAMS = 132  # persistent: as many as there are SMs for compute
LEGS = tl.constexpr(4)  # in which a program draws its tiles from a queue
BLOCK_E = 8  # a power of two that holds E
SWIZZLE = 16
FORWARD = {
    'BLOCK_R': 64,
    'BLOCK_OUT': 128,
    'BLOCK_IN': 16,
    'BLOCKS': False,
    'num_warps': 8,
    'num_stages': 3,
    'enable_fp_fusion': True,
}
DGRAD = {
    'BLOCK_R': 64,
    'BLOCK_OUT': 64,
    'BLOCK_IN': 16,
    'BLOCKS': False,
    'num_warps': 8,
    'num_stages': 3,
    'enable_fp_fusion': True,
}
WGRAD = {
    'BLOCK_N': 64,
    'BLOCK_K': 64,
    'BLOCK_R': 16,
    'num_warps': 8,
    'num_stages': 3,
    'enable_fp_fusion': True,
}


def grouped_linear(x_RK, w_ENK, offsets_E):
    """y_RN: every row times the weight of its expert."""
    assert w_ENK.is_contiguous() and w_ENK.shape == (E, N, K)
    assert x_RK.is_contiguous() and offsets_E.shape == (E,)
    y_RN = x_RK.new_empty(x_RK.shape[0], N)
    w = _blocks(w_ENK, FORWARD["BLOCK_OUT"], FORWARD["BLOCK_IN"]) if FORWARD["BLOCKS"] else w_ENK
    _rows_by_weight[(PROGRAMS,)](
        tile_queue(x_RK.device), x_RK, w, y_RN, offsets_E, K, E, BLOCK_E, PROGRAMS, SWIZZLE, K, N, 1, K, **FORWARD
    )
    return y_RN


def grouped_linear_dgrad(dy_RN, w_ENK, offsets_E):
    """dx_RK: the same with the weights transposed."""
    assert w_ENK.is_contiguous() and w_ENK.shape == (E, N, K)
    assert dy_RN.is_contiguous() and offsets_E.shape == (E,)
    dx_RK = dy_RN.new_empty(dy_RN.shape[0], K)
    w = _blocks(w_ENK, DGRAD["BLOCK_IN"], DGRAD["BLOCK_OUT"]) if DGRAD["BLOCKS"] else w_ENK
    _rows_by_weight[(PROGRAMS,)](
        tile_queue(dy_RN.device), dy_RN, w, dx_RK, offsets_E, N, E, BLOCK_E, PROGRAMS, SWIZZLE, N, K, K, 1, **DGRAD
    )
    return dx_RK


def grouped_linear_wgrad_(acc_ENK, dy_RN, x_RK, offsets_E):
    """acc_ENK[e] += dyᵀ·x over the rows of expert e."""
    assert acc_ENK.is_contiguous() and dy_RN.is_contiguous() and x_RK.is_contiguous()
    assert offsets_E.shape == (E,)
    queue = tile_queue(x_RK.device)
    _weight_gradient[(PROGRAMS,)](queue, acc_ENK, dy_RN, x_RK, offsets_E, E, N, K, PROGRAMS, **WGRAD)


def _blocks(w_ENK, block_n, block_k):
    """What loads blocks of the weights of all experts, laid end to end."""
    return TensorDescriptor(w_ENK, [E * N, K], [K, 1], [block_n, block_k])


@triton.jit
def _below(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Whether an index of a row of blocks is inside; a compile-time yes where the blocks fit, so the mask vanishes."""
    if SIZE % BLOCK == 0:
        return tl.full(index.shape, 1, tl.int1)
    else:
        return index < SIZE


@triton.jit
def _leg(queue, num_tiles, PROGRAMS: tl.constexpr):
    """(first tile, end, whether there was one) of what comes next in the queue: tiles that are PROGRAMS apart.

    Rounds of PROGRAMS tiles make LEGS legs: half of all rounds, half of the rest …, and all that is left then. A ticket
    is one lane of one leg. So a program that gets its SM late finds its share done by others. Each program draws until
    nothing is left, and who draws the last of all tickets leaves the queue as it was: 0.
    """
    ticket = tl.atomic_add(queue, 1, sem="relaxed")
    rounds = tl.cdiv(num_tiles, PROGRAMS)
    leg, lane = ticket // PROGRAMS, ticket % PROGRAMS
    left = tl.where(leg < LEGS, rounds >> leg, 0)
    after = tl.where(leg < LEGS - 1, left // 2, 0)
    if (left == 0) & (lane == PROGRAMS - 1):
        tl.store(queue, 0)
    return (rounds - left) * PROGRAMS + lane, tl.minimum((rounds - after) * PROGRAMS, num_tiles), left > 0


@triton.jit
def _rows_by_weight(
    queue, x, w, y, offsets_E, end_in,
    E: tl.constexpr, BLOCK_E: tl.constexpr, PROGRAMS: tl.constexpr, SWIZZLE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, STRIDE_IN: tl.constexpr, STRIDE_OUT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """y[r, out] = Σ_in x[r, in] · w[expert of r, out, in]; tiles of BLOCK_R × BLOCK_OUT, expert by expert.

    `w` loads by blocks if BLOCKS; then IN is a multiple of BLOCK_IN, for what lies behind IN is the next expert's.
    `end_in` is IN at run time: a loop of known length, if short, is unrolled whole and spills.
    """
    expert_E = tl.arange(0, BLOCK_E)
    end_E = tl.load(offsets_E + expert_E, mask=expert_E < E, other=0)
    start_E = tl.load(offsets_E + expert_E - 1, mask=(expert_E > 0) & (expert_E < E), other=0)
    tiles_out: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    tiles_E = tl.cdiv(end_E - start_E, BLOCK_R) * tiles_out
    last_E = tl.cumsum(tiles_E, 0)
    low, high, more = _leg(queue, tl.sum(tiles_E), PROGRAMS)
    while more:
        for tile in tl.range(low, high, PROGRAMS):
            expert = tl.sum((last_E <= tile).to(tl.int32))
            start = tl.sum(tl.where(expert_E == expert, start_E, 0))
            end = tl.sum(tl.where(expert_E == expert, end_E, 0))
            within = tile - tl.sum(tl.where(expert_E == expert, last_E - tiles_E, 0))
            # Bands of SWIZZLE row tiles, column by column: what runs at one time shares rows and weights in L2.
            band = within // (SWIZZLE * tiles_out)
            height = tl.minimum(tl.cdiv(end - start, BLOCK_R) - band * SWIZZLE, SWIZZLE)
            within -= band * SWIZZLE * tiles_out
            position = start + (band * SWIZZLE + within % height) * BLOCK_R + tl.arange(0, BLOCK_R)
            # Past the end the first row stands in: its products land in rows of the tile that are not stored.
            row = tl.where(position < end, position, start).to(tl.int64)
            first_out = within // height * BLOCK_OUT
            out = first_out + tl.arange(0, BLOCK_OUT)
            inside_out = _below(out, OUT, BLOCK_OUT)
            if not BLOCKS:
                w_expert = w + expert.to(tl.int64) * (IN * OUT)

            total = tl.zeros((BLOCK_R, BLOCK_OUT), tl.float32)
            for first in tl.range(0, end_in, BLOCK_IN):
                i = first + tl.arange(0, BLOCK_IN)
                inside_in = _below(i, IN, BLOCK_IN)
                x_tile = tl.load(x + row[:, None] * IN + i[None, :], mask=inside_in[None, :], other=0.0)
                if not BLOCKS:
                    w_tile = tl.load(
                        w_expert + i[:, None] * STRIDE_IN + out[None, :] * STRIDE_OUT,
                        mask=inside_in[:, None] & inside_out[None, :],
                        other=0.0,
                    )
                elif STRIDE_IN == 1:
                    w_tile = w.load([expert * OUT + first_out, first]).T
                else:
                    w_tile = w.load([expert * IN + first, first_out])
                total = tl.dot(x_tile, w_tile, total, input_precision="ieee")
            # Streamed: what L2 holds of x and w is read again, y is not.
            tl.store(
                y + row[:, None] * OUT + out[None, :],
                total.to(y.dtype.element_ty),
                mask=(position < end)[:, None] & inside_out[None, :],
                cache_modifier=".cs",
            )
        low, high, more = _leg(queue, tl.sum(tiles_E), PROGRAMS)


@triton.jit
def _weight_gradient(
    queue, acc, dy, x, offsets_E,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """acc[e, n, k] += Σ_r dy[r, n] · x[r, k]; tiles of BLOCK_N × BLOCK_K, each summing over its expert's rows."""
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    low, high, more = _leg(queue, E * tiles_n * tiles_k, PROGRAMS)
    while more:
        for tile in tl.range(low, high, PROGRAMS):
            expert = tile // (tiles_n * tiles_k)
            n = tile // tiles_k % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
            k = tile % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
            inside_n = _below(n, N, BLOCK_N)
            inside_k = _below(k, K, BLOCK_K)
            start = tl.load(offsets_E + expert - 1, mask=expert > 0, other=0)
            end = tl.load(offsets_E + expert)

            total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
            for first in tl.range(start, end, BLOCK_R):
                position = first + tl.arange(0, BLOCK_R)
                inside = position < end
                row = position.to(tl.int64)
                inside_dy, inside_x = inside[None, :] & inside_n[:, None], inside[:, None] & inside_k[None, :]
                dy_tile = tl.load(dy + row[None, :] * N + n[:, None], mask=inside_dy, other=0.0)
                x_tile = tl.load(x + row[:, None] * K + k[None, :], mask=inside_x, other=0.0)
                total = tl.dot(dy_tile, x_tile, total, input_precision="ieee")
            # By halves: a whole tile of sums beside a whole tile of `acc` does not fit in the registers.
            left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_N, 2, BLOCK_K // 2)), (0, 2, 1)))
            acc_tile = acc + tl.full((), N * K, tl.int64) * expert + n[:, None] * K
            half = tile % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K // 2)
            _add(acc_tile + half[None, :], left, inside_n[:, None] & (half < K)[None, :])
            half += BLOCK_K // 2
            _add(acc_tile + half[None, :], right, inside_n[:, None] & (half < K)[None, :])
        low, high, more = _leg(queue, E * tiles_n * tiles_k, PROGRAMS)


@triton.jit
def _add(at, values, inside):
    before = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    tl.store(at, before + values.to(at.dtype.element_ty), mask=inside, cache_modifier=".cs")
