"""The sum of residual streams that a part of a layer reads, and the weights by which streams are mixed: when the Triton
kernels apply and how they launch. Their text is hyper_mix.py.j2.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Any

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two
from compiler.ir import Buffer

STREAMS = {
    "_forward": ("ld.global.L1::evict_first", "st.global.cs"),
    "_input_gradient": ("ld.global.L1::evict_first", "st.global.cs"),
}
# The text has a copy of its steps for each stream. With 8 streams, threads of the gradients hold half as many columns.
MOST_STREAMS = 8
MOST_ROUNDS = 32  # The gradient holds the result of each division in registers: two a round.


def choose(h: Buffer, logits: Buffer, rounds: int = 0) -> KernelChoice | None:
    """Choose the kernels for the logits of `pre` alone, or of all weights if there are rounds."""
    N, M = int(h.shape[1]), int(logits.shape[1])
    n = isqrt(M + 1) - 1 if rounds else M
    if h.dtype not in BYTES or logits.dtype != "float32" or n > MOST_STREAMS or rounds > MOST_ROUNDS:
        return None
    P = power_of_two(n)
    return KernelChoice(
        name=f"hyper_{'mix' if rounds else 'collapse'}_n{n}_d{N // n}_{h.dtype}",
        template="hyper_mix",
        values=(
            ("mixes", rounds > 0),
            ("n", n),
            ("D", N // n),
            ("M", M),
            ("P", P),
            ("MATRICES", max(1, 128 // (P * P))),
            ("LAUNCH", tile_of(N // n, n)),
            ("SMALL", {"num_warps": 4, **FUSION}),
        ),
    )


def tile_of(columns: int, streams: int) -> dict[str, Any]:
    """The launch of programs that own tiles of all streams. A thread of 4 warps has 8 columns of each stream, or 4 of
    more than 4 streams; narrow rows share a program."""
    size = 1024 if streams <= 4 else 512
    block = max(8, min(size, power_of_two(columns)))
    return {"ROWS": size // block, "BLOCK_D": block, "num_warps": 4, **FUSION}


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "hyper_mix": lambda sms, h, logits, rounds, eps: choose(h, logits, rounds),
    "hyper_mix_dgrad": lambda sms, dx, dpost, dcomb, h, logits, rounds, eps: choose(h, logits, rounds),
    "hyper_collapse": lambda sms, h, logits, eps: choose(h, logits),
    "hyper_collapse_dgrad": lambda sms, dx, h, logits, eps: choose(h, logits),
}
