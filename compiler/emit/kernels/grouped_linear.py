"""Grouped linear layers: when the Triton kernels apply and how they launch. Their text is grouped_linear.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, LEGS, KernelChoice, power_of_two
from compiler.ir import Buffer

STREAMS = {
    "_rows_by_weight": ("st.global.cs",),
    "_weight_gradient": ("ld.global.L1::evict_first", "st.global.cs"),
}

# The most outputs of a tile in FP32. With 128, the input gradient spills 8 to 16 bytes on 3.6, with 4 or 8 warps.
FORWARD_TILE, DGRAD_TILE = 128, 64


def choose(experts: int, out_features: int, in_features: int, dtype: str, num_sms: int) -> KernelChoice | None:
    """Choose the kernels for weights [experts, out_features, in_features]."""
    if dtype not in BYTES:
        return None
    return KernelChoice(
        name=f"grouped_linear_e{experts}_n{out_features}_k{in_features}_{dtype}",
        template="grouped_linear",
        values=(
            ("E", experts),
            ("N", out_features),
            ("K", in_features),
            ("PROGRAMS", num_sms),
            ("BLOCK_E", power_of_two(experts)),
            ("LEGS", LEGS),
            ("SWIZZLE", 16),
            ("FORWARD", _rows_by_weight(out_features, in_features, dtype, widest=FORWARD_TILE)),
            ("DGRAD", _rows_by_weight(in_features, out_features, dtype, widest=DGRAD_TILE)),
            ("WGRAD", _weight_gradient(out_features, in_features, dtype)),
        ),
    )


def _rows_by_weight(out_features: int, in_features: int, dtype: str, widest: int) -> dict[str, int]:
    """The launch of y[rows, out] = x[rows, in] · w. If `out_features` is large, eight warps, each with 64 × 256 / 4
    outputs."""
    if dtype == "float32":
        block = _extent(out_features, widest)
        tile = {"BLOCK_R": 64, "BLOCK_OUT": block, "BLOCK_IN": 16}
        # With 32 outputs, eight warps or three stages spill 8 bytes on 3.9; with 64, four warps do on 3.6.
        warps, stages = (8, 3) if block > 32 else (4, 2)
        return tile | {"BLOCKS": False, "num_warps": warps, "num_stages": stages, **FUSION}
    if _is_ragged(out_features, in_features, dtype):
        tile = {"BLOCK_R": 64, "BLOCK_OUT": 64, "BLOCK_IN": 32, "BLOCKS": False}
        return tile | {"num_warps": 4, "num_stages": 2, **FUSION}
    block = _extent(out_features, 256)
    tile = {"BLOCK_R": 128, "BLOCK_OUT": block, "BLOCK_IN": 64, "BLOCKS": in_features % 64 == 0}
    return tile | {"num_warps": 8 if block == 256 else 4, "num_stages": 4, **FUSION}


def _weight_gradient(out_features: int, in_features: int, dtype: str) -> dict[str, int]:
    """The launch of acc[out, in] += dyᵀ · x."""
    if dtype == "float32":
        block = _extent(in_features, 128)
        tile = {"BLOCK_N": 64, "BLOCK_K": block, "BLOCK_R": 16}
        # With 64 columns, four warps spill 8 bytes on 3.6 for sm_100.
        return tile | {"num_warps": 8 if block == 64 else 4, "num_stages": 3, **FUSION}
    if _is_ragged(out_features, in_features, dtype):
        return {"BLOCK_N": 64, "BLOCK_K": 64, "BLOCK_R": 32, "num_warps": 4, "num_stages": 2, **FUSION}
    block = _extent(in_features, 256)
    tile = {"BLOCK_N": 128, "BLOCK_K": block, "BLOCK_R": 64}
    return tile | {"num_warps": 8 if block == 256 else 4, "num_stages": 4, **FUSION}


def _is_ragged(out_features: int, in_features: int, dtype: str) -> bool:
    """Whether rows are not aligned to 16 bytes: copies of single elements need many addresses, so tiles must be
    small."""
    return bool(out_features * BYTES[dtype] % 16 or in_features * BYTES[dtype] % 16)


def _extent(size: int, largest: int) -> int:
    """The largest tile extent, halved while that saves more than an eighth of the computed columns."""
    extent = largest
    while extent > 32 and -(-size // (extent // 2)) * (extent // 2) * 8 < -(-size // extent) * extent * 7:
        extent //= 2
    return extent


def _choose(experts: Buffer, rows: Buffer, operand: Buffer, num_sms: int) -> KernelChoice | None:
    """`experts` has shape [E, N, K]. `rows` and `operand` are multiplied, so their dtypes must agree."""
    E, N, K = (int(extent) for extent in experts.shape)
    if rows.dtype != operand.dtype:
        return None
    return choose(E, N, K, rows.dtype, num_sms)


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "grouped_linear": lambda sms, x, w, offsets: _choose(w, x, w, sms),
    "grouped_linear_dgrad": lambda sms, dy, w, offsets: _choose(w, dy, w, sms),
    "grouped_linear_wgrad_": lambda sms, acc, dy, x, offsets: _choose(acc, dy, x, sms),
}
