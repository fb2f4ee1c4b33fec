"""FP8 linear layers: when the Triton kernels apply and how they launch. Their text is linear_fp8.py.j2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from compiler.emit.kernels.kernel import FUSION, LEGS, KernelChoice
from compiler.ir import Buffer

FP8 = "float8_e4m3fn"
STREAMS = {
    "_rows_by_weight": ("st.global.cs",),
    "_weight_gradient": ("ld.global.L1::evict_first", "st.global.cs"),
}

# SM clocks per tile of 128 rows and this many columns, for 128 terms, by a model that was not confirmed on a GPU: the
# tensor core multiplies 4096 pairs per clock and waits while two warps of each scheduler scale and add their sums; L2
# delivers about 42 bytes per clock to an SM. Tiles of 64 and 128 columns are bound by L2, 192 by the sums.
CLOCKS = {64: 585, 128: 780, 192: 1060}


def choose(out_features: int, in_features: int, num_sms: int) -> KernelChoice | None:
    """Choose the kernels for weights [out_features, in_features].

    Rows of E4M3 must be aligned to 16 bytes, as descriptors require.
    """
    if out_features % 16 or in_features % 16:
        return None
    return KernelChoice(
        name=f"linear_fp8_n{out_features}_k{in_features}",
        template="linear_fp8",
        values=(
            ("N", out_features),
            ("K", in_features),
            ("PROGRAMS", num_sms),
            ("LEGS", LEGS),
            ("SWIZZLE", 16),
            ("FORWARD", rows_by_weight(out_features)),
            ("DGRAD", rows_by_weight(in_features)),
            ("WGRAD", WGRAD),
        ),
    )


def rows_by_weight(out_features: int, gathered: bool = False) -> dict[str, int | bool]:
    """The launch of y[rows, out] = x · wᵀ, with the tile that takes the fewest clocks for a row tile of y.

    Compiled for sm_90 with Triton 3.6 and 3.9, eight warps: 128 × 128 takes 181 registers per thread, 128 + 64 columns
    236 to 246, and 256 columns or rows spill, because both halves of the tensor core's new sums stay in registers
    besides the totals. Four warps with 64 × 128 would leave room for three programs per SM but need twice the L2
    bandwidth; sixteen warps with 128 × 256 spill as well. Warp specialisation does not compile on 3.9 (its copies to
    two groups of warps disagree with the descriptor), and a cluster of two would load everything twice, without
    multicast. `FLATTEN` starts the loads of a tile while the previous one is stored. With 128 columns the scales are
    loaded one block ahead, or the loop would wait for them; with 192 they arrive while the tensor core works, and there
    are no registers left for more.

    With `gathered` rows, the addresses take the registers that a tile of 192 columns has left: 128 columns take 232.
    """
    sizes = [columns for columns in CLOCKS if columns < 192 or not gathered]
    columns = min(sizes, key=lambda columns: (-(-out_features // columns) * CLOCKS[columns], columns))
    wide, narrow = (128, 64) if columns == 192 else (columns, 0)
    tile = {"BLOCK_R": 128, "WIDE": wide, "NARROW": narrow, "FLATTEN": bool(narrow)}
    return tile | {"num_warps": 8, "num_stages": 4, **FUSION}


# At most 218 registers, 32 of them for scales of x, as a thread's sums are in 32 columns. Scales are loaded when the
# tensor core starts; one block ahead they would take 30 more registers, and spill on sm_100. Four warps spill, and a
# flattened loop takes 255.
WGRAD = {"BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 5, **FUSION}


def _choose(weight: Buffer, rows: Buffer, num_sms: int) -> KernelChoice | None:
    """`weight` has shape [N, K]."""
    N, K = (int(extent) for extent in weight.shape)
    return choose(N, K, num_sms) if rows.dtype == FP8 else None


def transpose_weight(weight: Buffer) -> Buffer:
    """The weight [.., N, K] for a transposed copy [.., K, N]."""
    return replace(weight, shape=(*weight.shape[:-2], weight.shape[-1], weight.shape[-2]))


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "linear_fp8": lambda sms, x, xs, w, ws: _choose(w, x, sms),
    "linear_fp8_dgrad": lambda sms, dy, dys, w, ws: _choose(transpose_weight(w), dy, sms),
    "linear_fp8_wgrad_": lambda sms, acc, dy, dys, x, xs: _choose(acc, x, sms),
}
