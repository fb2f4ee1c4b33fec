"""Attention to a window and to compressed entries: when the Triton kernel applies and how it launches.

Its text is compressed_attention.py.j2, with pieces of attention's.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, LEGS, KernelChoice, power_of_two
from compiler.ir import Buffer

STREAMS = {"_forward": ("st.global.cs",)}


def choose(
    sms: int, q: Buffer, kv: Buffer, entries: Buffer, chosen: Buffer | None, sinks: Buffer | None, *sizes: int
) -> KernelChoice | None:
    """Choose the kernel; sizes: sequence, heads, window, rate.

    Heads of 512 columns take 244 registers and 163840 bytes of shared memory on Triton 3.9; with 64 keys in a block
    they spill 64 bytes. Tensor cores of sm_90 multiply 64 rows at least, so both halves of the warps compute all
    scores, and then each half of the columns of the results.
    """
    S, H, window, rate = sizes
    C, dtype = int(kv.shape[1]), q.dtype
    block = max(16, power_of_two(C))
    widest = 512 if dtype == "bfloat16" else 64  # in FP32, 128 columns spill 112 bytes on 3.6
    if {kv.dtype, entries.dtype} != {dtype} or dtype not in BYTES or block > widest or not q.shape[0]:
        return None
    if sinks is not None and sinks.dtype not in BYTES:
        return None
    rows = 64 if dtype == "bfloat16" else 16
    stages = 3 if dtype == "bfloat16" else 1
    constants = {"S": S, "H": H, "C": C, "WINDOW": min(window, S), "RATE": rate, "E": S // rate}
    constants |= {"K": int(chosen.shape[1])} if chosen is not None else {}
    constants |= {"SCALE": C**-0.5, "BLOCK_C": block}
    suffix = (f"_k{chosen.shape[1]}" if chosen else "") + (f"_sinks_{sinks.dtype}" if sinks else "")
    return KernelChoice(
        name=f"compressed_attention_s{S}_h{H}_c{C}_w{window}_r{rate}_{dtype}{suffix}",
        template="compressed_attention",
        values=(
            *((option, False) for option in ("window", "softcap", "documents")),
            ("chosen", chosen is not None),
            ("sinks", sinks is not None),
            ("S", S),
            ("H", H),
            ("C", C),
            ("WINDOW", window),
            ("RATE", rate),
            ("SIZES", constants),
            ("SPANS", -(-H // rows)),
            ("PROGRAMS", sms),
            ("LEGS", LEGS),
            ("FORWARD", {"M": rows, "N": 32, "num_warps": 8, "num_stages": stages, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {"compressed_attention": choose}
