"""FP8 products by DeepGEMM (the package `deep_gemm`): when it applies. Text: deep_gemm.py.j2.

Rows have a scale for every 128 elements, weights one for 128 × 128, as here. Weight gradients stay with the kernels of
the build, because DeepGEMM needs the rows of each expert on the host.
"""

from __future__ import annotations

from compiler.emit.kernels.kernel import Family, KernelChoice
from compiler.ir import Buffer

OUT_ALIGNMENT, IN_ALIGNMENT = 64, 128  # of the columns of a result, and of those that are summed over


def choose(rows: Buffer, weights: Buffer, num_sms: int) -> KernelChoice | None:
    """Choose the text for rows [R, K] and weights [N, K] or [E, N, K], as they are multiplied."""
    *groups, N, K = (int(extent) for extent in weights.shape)
    if rows.dtype != "float8_e4m3fn" or N % OUT_ALIGNMENT or K % IN_ALIGNMENT:
        return None
    E = groups[0] if groups else 0
    name = f"deep_gemm{f'_e{E}' if groups else ''}_n{N}_k{K}"
    values = ("E", E), ("N", N), ("K", K), ("PROGRAMS", num_sms)
    return KernelChoice(name, "deep_gemm", values, is_library=True)


OPS: Family = {
    "linear_fp8": lambda sms, x, xs, w, ws: choose(x, w, sms),
    "linear_fp8_dgrad": lambda sms, dy, dys, w, ws: choose(dy, w, sms),
    "grouped_linear_fp8": lambda sms, x, xs, w, ws, offsets: choose(x, w, sms),
    "grouped_linear_fp8_dgrad": lambda sms, dy, dys, w, ws, offsets: choose(dy, w, sms),
}
