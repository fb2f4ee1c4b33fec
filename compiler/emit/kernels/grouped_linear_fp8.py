"""FP8 grouped linear layers: when the Triton kernels apply and how they launch. Text: grouped_linear_fp8.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import LEGS, KernelChoice, power_of_two
from compiler.emit.kernels.linear_fp8 import FP8, STREAMS, WGRAD, rows_by_weight, transpose_weight
from compiler.ir import Buffer

__all__ = ["OPS", "STREAMS", "choose"]


def choose(experts: int, out_features: int, in_features: int, num_sms: int) -> KernelChoice | None:
    """Choose the kernels for weights [experts, out_features, in_features]. Rows must be aligned to 16 bytes."""
    if out_features % 16 or in_features % 16:
        return None
    return KernelChoice(
        name=f"grouped_linear_fp8_e{experts}_n{out_features}_k{in_features}",
        template="grouped_linear_fp8",
        values=(
            ("E", experts),
            ("N", out_features),
            ("K", in_features),
            ("PROGRAMS", num_sms),
            ("BLOCK_E", power_of_two(experts)),
            ("LEGS", LEGS),
            ("SWIZZLE", 16),
            ("FORWARD", rows_by_weight(out_features, gathered=True)),
            ("DGRAD", rows_by_weight(in_features, gathered=True)),
            ("WGRAD", WGRAD),
        ),
    )


def _choose(weights: Buffer, rows: Buffer, num_sms: int) -> KernelChoice | None:
    """`weights` has shape [E, N, K]."""
    E, N, K = (int(extent) for extent in weights.shape)
    return choose(E, N, K, num_sms) if rows.dtype == FP8 else None


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "grouped_linear_fp8": lambda sms, x, xs, w, ws, offsets: _choose(w, x, sms),
    "grouped_linear_fp8_dgrad": lambda sms, dy, dys, w, ws, offsets: _choose(transpose_weight(w), dy, sms),
    "grouped_linear_fp8_wgrad_": lambda sms, acc, dy, dys, x, xs, offsets: _choose(acc, x, sms),
}
