"""Attention by FlashAttention-3 (the package `flash_attn_3`, for Hopper GPUs): when it applies. Text: flash_attn.py.j2.

It takes BF16 and whole sequences without masked documents. A head has a multiple of 8 columns, and in a deterministic
backward at most 192. If keys and values differ in width, its kernels have 192 columns of keys and 128 of values, or at
most 64 of keys. RoPE is a pass of torch before and after it.
"""

from __future__ import annotations

from typing import Any

from compiler.emit.kernels.kernel import Family, KernelChoice
from compiler.ir import Buffer

MAX_WIDTH, ALIGNMENT = 192, 8  # columns of a head
# Widths of keys and values that may differ: more than the first number, at most the second.
WIDE_KEYS, NARROW_VALUES, NARROW_KEYS = (128, 192), (96, 128), 64


def takes(key: int, value: int) -> bool:
    """Whether there are kernels for heads with these columns of keys and values."""
    if max(key, value) > MAX_WIDTH or key % ALIGNMENT or value % ALIGNMENT:
        return False
    is_latent = WIDE_KEYS[0] < key <= WIDE_KEYS[1] and NARROW_VALUES[0] < value <= NARROW_VALUES[1]
    return key == value or is_latent or key <= NARROW_KEYS


def choose_groups(q: Buffer, k: Buffer, v: Buffer, *sizes: Any) -> KernelChoice | None:
    """Choose the text for q [T, H·C], and k and v [T, G·C]."""
    S, H, G, _theta, *places = sizes
    width = int(q.shape[1]) // H
    if not _are_plain(places, q, k, v) or not takes(width, width):
        return None
    return KernelChoice(
        name=f"flash_attn_s{S}_h{H}_g{G}_c{width}",
        template="flash_attn",
        is_library=True,
        values=(("is_latent", False), ("S", S), ("H", H), ("G", G), ("C", width), ("SCALE", width**-0.5)),
    )


def choose_latent(q: Buffer, kv: Buffer, k_rope: Buffer, *sizes: Any) -> KernelChoice | None:
    """Choose the text for q [T, H·(nope + rope)], kv [T, H·(nope + value)] and k_rope [T, rope]."""
    S, H, nope, rope, value, _theta, *places = sizes
    # values are a view of the columns of `kv` that follow `nope`, which begin at a multiple of 16 bytes
    if not _are_plain(places, q, kv, k_rope) or nope % ALIGNMENT or not takes(nope + rope, value):
        return None
    return KernelChoice(
        name=f"flash_attn_s{S}_h{H}_n{nope}_r{rope}_v{value}",
        template="flash_attn",
        is_library=True,
        values=(
            ("is_latent", True),
            ("S", S),
            ("H", H),
            ("N", nope),
            ("P", rope),
            ("V", value),
            ("SCALE", (nope + rope) ** -0.5),
        ),
    )


def _are_plain(places: list[Any], *inputs: Buffer) -> bool:
    """Whether inputs are BF16, and neither documents nor some rows of a sequence are named."""
    return {x.dtype for x in inputs} == {"bfloat16"} and all(place is None for place in places)


OPS: Family = {
    "gqa_attention": lambda sms, *arguments: choose_groups(*arguments),
    "gqa_attention_dgrad": lambda sms, do, q, k, v, o, lse, *sizes: choose_groups(q, k, v, *sizes),
    "mla_attention": lambda sms, *arguments: choose_latent(*arguments),
    "mla_attention_dgrad": lambda sms, do, q, kv, k_rope, o, lse, *sizes: choose_latent(q, kv, k_rope, *sizes),
}
