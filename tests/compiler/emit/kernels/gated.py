"""A small emitted kernel file: the gate accepts it unchanged, and refuses it with any of the inserted faults."""

import triton
import triton.language as tl

TILE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}
TILE_8 = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3, "enable_fp_fusion": True}
COPY = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": True}
SPECIALISED = False


def multiply(a_MK, b_KN, c_MN):
    M, K, N = *a_MK.shape, b_KN.shape[1]
    _multiply[(M // TILE["BLOCK_M"], N // TILE["BLOCK_N"])](a_MK, b_KN, c_MN, M, N, K, **TILE)


def multiply_tiles(a_MK, b_NK, c_MN):
    from triton.tools.tensor_descriptor import TensorDescriptor

    M, K, N, BLOCK_M, BLOCK_N, BLOCK_K = *a_MK.shape, b_NK.shape[0], *list(TILE_8.values())[:3]
    blocks = ((a_MK, [BLOCK_M, BLOCK_K]), (b_NK, [BLOCK_N, BLOCK_K]), (c_MN, [BLOCK_M, BLOCK_N]))
    descriptors = [TensorDescriptor.from_tensor(tensor, block) for tensor, block in blocks]
    _multiply_tiles[(M // BLOCK_M, N // BLOCK_N)](*descriptors, c_MN, N, K, SPECIALISED, **TILE_8)


def copy(x, y):
    _copy[(triton.cdiv(x.numel(), COPY["BLOCK"]),)](x, y, x.numel(), **COPY)


@triton.jit
def _multiply(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a_tile = tl.load(a + m[:, None] * K + k[None, :])
        b_tile = tl.load(b + k[:, None] * N + n[None, :])
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
    tl.store(c + m[:, None] * N + n[None, :], total.to(c.dtype.element_ty))


@triton.jit
def _multiply_tiles(
    a, b, c, c_MN, N, K,
    SPECIALISED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALISED):
        total += tl.dot(a.load([m, first]), b.load([n, first]).T)
    c.store([m, n], total.to(c.dtype))


@triton.jit
def _copy(x, y, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < size, eviction_policy="evict_first")
    tl.store(y + i, values, mask=i < size, cache_modifier=".cs")
