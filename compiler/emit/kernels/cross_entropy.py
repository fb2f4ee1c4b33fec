"""Cross entropy of logits: when the Triton kernels apply and how they launch. Their text is cross_entropy.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two
from compiler.ir import Buffer

# The most logits of a tile, 32 per thread of 4 warps: 90 registers forward and 48 backward on sm_90, so 5 and 10
# programs per SM, with 40 and 80 KiB of BF16 in flight. Tiles of half and twice the size have 36 and 48 KiB in flight
# forward, and 8 warps have less than 4.
BLOCK = 4096

STREAMS = {
    "_forward": ("ld.global.L1::evict_first",),
    "_gradient": ("ld.global.L1::evict_first", "st.global.cs"),
}


def choose(vocab: int, dtype: str, part: bool = False) -> KernelChoice | None:
    """Choose the kernels for rows of `vocab` logits, of the whole vocabulary or a shard (`part`).

    A program handles whole rows, in blocks.
    """
    if dtype not in BYTES:
        return None
    block = min(BLOCK, power_of_two(vocab))
    rows = max(1, 1024 // block)
    return KernelChoice(
        name=f"cross_entropy_{'part_' if part else ''}v{vocab}_{dtype}",
        template="cross_entropy",
        values=(
            ("part", part),
            ("V", vocab),
            ("BLOCK_V", block),
            ("ROWS", rows),
            ("LAUNCH", {"num_warps": 4, **FUSION}),
            ("TOTAL", {"num_warps": 4, **FUSION}),
        ),
    )


def _choose(logits: Buffer, part: bool = False) -> KernelChoice | None:
    return choose(int(logits.shape[1]), logits.dtype, part)


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "cross_entropy": lambda sms, logits, targets: _choose(logits),
    "cross_entropy_dgrad": lambda sms, dloss, logits, targets, lse: _choose(logits),
    "cross_entropy_part": lambda sms, logits, targets: _choose(logits, part=True),
    "cross_entropy_part_dgrad": lambda sms, dlse, dpicked, logits, targets, lse: _choose(logits, part=True),
}
