"""Attention to a window and to compressed entries: when the Triton kernels apply and how they launch.

Their text is compressed_attention.py.j2 and compressed_attention_dgrad.py.j2, with pieces of attention's.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, LEGS, KernelChoice, power_of_two
from compiler.ir import Buffer
from compiler.model.ops.kernel_shapes import takes_compressed_attention

Sizes = tuple[int, ...]
STREAMS = {"_forward": ("st.global.cs",), "_query_gradient": ("st.global.cs",), "_key_gradient": ("st.global.cs",)}
ADDED_BYTES = 2**28  # of the gradients of chosen entries that a batch of tokens writes
MIN_TOKENS = 8  # of a part


def _choose(
    name: str, sms: int, kv: Buffer, entries: Buffer, chosen: Buffer | None, sinks: Buffer | None, sizes: Sizes
) -> KernelChoice | None:
    """Choose the kernel; sizes: sequence, heads, window, rate.

    Heads of 512 columns take these numbers of registers and bytes of shared memory on Triton 3.9 for sm_90:

                 rows   keys   registers   shared bytes    alternatives
        forward   64     32       244         163840       64 keys: 64 bytes spilled
        dq        64     16       210         188416       32 keys do not fit on sm_100
        dk        16     64       246         164096       32 rows: 448 bytes spilled

    Tensor cores of sm_90 multiply 64 rows at least, so in the forward and for dk both halves of the warps compute all
    scores, and then each half of the columns of the results.
    """
    S, H, window, rate = sizes
    T, C = (int(extent) for extent in kv.shape)
    dtype, block = kv.dtype, max(16, power_of_two(C))
    if entries.dtype != dtype or not T or not takes_compressed_attention(C, dtype):
        return None
    if sinks is not None and sinks.dtype not in BYTES:
        return None
    rows = 64 if dtype == "bfloat16" else 16
    stages = 3 if dtype == "bfloat16" else 1
    K = int(chosen.shape[1]) if chosen is not None else 0
    constants = {"S": S, "H": H, "C": C, "WINDOW": min(window, S), "RATE": rate, "E": S // rate}
    constants |= {"K": K} if K else {}
    constants |= {"SCALE": C**-0.5, "BLOCK_C": block}
    suffix = (f"_k{K}" if K else "") + (f"_sinks_{sinks.dtype}" if sinks else "")
    return KernelChoice(
        name=f"{name}_s{S}_h{H}_c{C}_w{window}_r{rate}_{dtype}{suffix}",
        template=name,
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
            ("QUERIES", {"M": rows, "N": 16, "num_warps": 8, "num_stages": stages, **FUSION}),
            ("KEYS", {"BLOCK_C": block, "M": 16, "N": rows, "num_warps": 8, "num_stages": stages, **FUSION}),
            ("KEY_PARTS", _parts(sms, T, rows, min(window, S))),
            ("ENTRY_PARTS", _parts(sms, int(entries.shape[0]), rows, S)),
            ("BATCH", max(1, ADDED_BYTES // (max(1, K) * C * BYTES[dtype]))),
            ("DELTAS", {"COUNT": max(1, 8192 // block), "BLOCK_C": block, "num_warps": 8, **FUSION}),
            ("SUMS", {"COLUMNS": min(block, 256), "COUNT": 8, "num_warps": 4, **FUSION}),
        ),
    )


def _parts(sms: int, num_keys: int, rows: int, tokens: int) -> int:
    """In how many parts programs share the `tokens` tokens that see a key, so that each SM has about two programs."""
    return max(1, min(tokens // MIN_TOKENS, 2 * sms * rows // max(1, num_keys)))


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "compressed_attention": lambda sms, q, kv, entries, chosen, sinks, *sizes: _choose(
        "compressed_attention", sms, kv, entries, chosen, sinks, sizes
    ),
    "compressed_attention_dgrad": lambda sms, do, q, kv, entries, chosen, o, lse, *sizes: _choose(
        "compressed_attention_dgrad", sms, kv, entries, chosen, None, sizes
    ),
}
