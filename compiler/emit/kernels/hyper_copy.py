"""Copies of the embeddings into residual streams: when the Triton kernels apply and how they launch.

Their text is hyper_copy.py.j2.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.hyper_mix import MOST_STREAMS, tile_of
from compiler.emit.kernels.kernel import BYTES, KernelChoice

STREAMS = {
    "_forward": ("ld.global.L1::evict_first", "st.global.cs"),
    "_input_gradient": ("ld.global.L1::evict_first", "st.global.cs"),
}


def choose(columns: int, dtype: str, streams: int) -> KernelChoice | None:
    """Choose the kernels for rows of `columns` and this many streams."""
    if dtype not in BYTES or streams > MOST_STREAMS:
        return None
    return KernelChoice(
        name=f"hyper_copy_n{streams}_d{columns}_{dtype}",
        template="hyper_copy",
        values=(("n", streams), ("D", columns), ("LAUNCH", tile_of(columns, streams))),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "hyper_copy": lambda sms, x, streams: choose(int(x.shape[1]), x.dtype, streams),
    "hyper_copy_dgrad": lambda sms, dy, streams: choose(int(dy.shape[1]) // streams, dy.dtype, streams),
}
