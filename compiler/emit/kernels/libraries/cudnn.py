"""Grouped-query attention by cuDNN, which torch calls: when it applies. Text: cudnn.py.j2.

It takes BF16, whole sequences without masked documents, and heads of up to 128 columns. RoPE is a pass of torch before
and after it.
"""

from __future__ import annotations

from typing import Any

from compiler.emit.kernels.kernel import Family, KernelChoice
from compiler.ir import Buffer

MAX_WIDTH, ALIGNMENT = 128, 8  # columns of a head


def choose(q: Buffer, k: Buffer, v: Buffer, *sizes: Any) -> KernelChoice | None:
    """Choose the text for q [T, H·C], and k and v [T, G·C]."""
    S, H, G, _theta, *places = sizes
    width = int(q.shape[1]) // H
    if {q.dtype, k.dtype, v.dtype} != {"bfloat16"} or width > MAX_WIDTH or width % ALIGNMENT:
        return None
    if any(place is not None for place in places):
        return None
    return KernelChoice(
        name=f"cudnn_attention_s{S}_h{H}_g{G}_c{width}",
        template="cudnn",
        is_library=True,
        values=(("S", S), ("H", H), ("G", G), ("C", width), ("SCALE", width**-0.5)),
    )


OPS: Family = {
    "gqa_attention": lambda sms, *arguments: choose(*arguments),
    "gqa_attention_dgrad": lambda sms, do, q, k, v, o, lse, *sizes: choose(q, k, v, *sizes),
}
