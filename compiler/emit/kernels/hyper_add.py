"""The sum of a part's output into residual streams that a matrix mixes: when the Triton kernels apply and how they
launch. Their text is hyper_add.py.j2.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.hyper_mix import MOST_STREAMS, tile_of
from compiler.emit.kernels.kernel import BYTES, KernelChoice
from compiler.ir import Buffer

STREAMS = {
    "_forward": ("ld.global.L1::evict_first", "st.global.cs"),
    "_input_gradient": ("ld.global.L1::evict_first", "st.global.cs"),
}


def choose(h: Buffer, y: Buffer, post: Buffer) -> KernelChoice | None:
    """Choose the kernels for streams as wide as y."""
    n, D = int(post.shape[1]), int(y.shape[1])
    if h.dtype not in BYTES or y.dtype != h.dtype or post.dtype != "float32" or n > MOST_STREAMS:
        return None
    return KernelChoice(
        name=f"hyper_add_n{n}_d{D}_{h.dtype}",
        template="hyper_add",
        values=(("n", n), ("D", D), ("LAUNCH", tile_of(D, n))),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "hyper_add": lambda sms, h, y, post, comb: choose(h, y, post),
    "hyper_add_dgrad": lambda sms, dout, h, y, post, comb: choose(h, y, post),
}
