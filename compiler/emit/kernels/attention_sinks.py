"""The gradient of attention sinks: when the Triton kernels apply and how they launch. Text: attention_sinks.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two
from compiler.ir import Buffer

STREAMS = {"_partial_gradient": ("ld.global.L1::evict_first",)}
TILE = 4096  # columns that a program reads at a time: several heads of several tokens


def choose(sms: int, acc: Buffer, do: Buffer, o: Buffer, lse: Buffer, sinks: Buffer) -> KernelChoice | None:
    """Choose the kernels, which apply if a head fits into a tile. An SM runs about four programs."""
    num_heads, group, sequence = int(sinks.shape[0]), int(lse.shape[3]), int(lse.shape[2])
    columns = int(do.shape[1]) // num_heads
    block = power_of_two(columns)
    if not {do.dtype, sinks.dtype} <= {*BYTES} or block > TILE:
        return None
    heads = min(power_of_two(num_heads), TILE // block)
    launch = {"TOKENS": TILE // (block * heads), "HEADS": heads, "BLOCK": block, "num_warps": 8, **FUSION}
    return KernelChoice(
        name=f"attention_sinks_s{sequence}_h{num_heads}_g{num_heads // group}_c{columns}_{do.dtype}_{sinks.dtype}",
        template="attention_sinks",
        values=(
            ("S", sequence),
            ("H", num_heads),
            ("GROUP", group),
            ("C", columns),
            ("SPLITS", -(-4 * sms // -(-num_heads // heads))),
            ("PARTIAL", launch),
            ("TOTAL", {"BLOCK_P": 128, "BLOCK_D": 32, "num_warps": 4, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {"bounded_attention_wgrad_": choose}
