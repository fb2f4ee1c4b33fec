"""The dtypes and widths that kernels of attention and of its indexers take. Torch computes these ops for others.

Plans ask here what a GPU will run, and so do the choices of kernels (compiler/emit/kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

BF16 = "bfloat16"
DTYPES = (BF16, "float32")


def takes_chosen_attention(nope: int, rope: int, value: int, dtype: str) -> bool:
    """Whether there is a kernel of attention to chosen keys for heads of these widths."""
    return dtype in DTYPES and nope > 0 and max(nope, rope, value) <= 128 and min(nope, rope) <= 64


def takes_compressed_attention(width: int, dtype: str) -> bool:
    """Whether there is a kernel of attention to a window and to entries. In FP32, heads of 128 columns spill."""
    return dtype in DTYPES and width <= (512 if dtype == BF16 else 64)


def takes_choices(columns: int, keys: int, dtype: str) -> bool:
    """Whether there is a kernel of an indexer's choice among `keys` keys of `columns` columns."""
    return dtype in DTYPES and keys > 0 and columns <= 256


def takes_indexer_loss(columns: int, nope: int, rope: int, keys: int, dtype: str) -> bool:
    """Whether there is a kernel of an indexer's loss. A tile has fewer than 2³¹ numbers."""
    fits = columns <= 128 and nope <= 128 and (rope <= 128 or rope % 128 == 0)
    return dtype in DTYPES and 0 < keys < 2**24 and fits


def takes_delta_rule(key: int, dtype: str) -> bool:
    """Whether there is a kernel of the delta rule for keys of this width."""
    return dtype in DTYPES and key <= 256


def _chosen(n: SimpleNamespace, dtype: str) -> bool:
    return takes_chosen_attention(n.nope, n.rope, n.value, dtype)


def _compressed(n: SimpleNamespace, dtype: str) -> bool:
    return takes_compressed_attention(n.kv[1], dtype)


def _delta(n: SimpleNamespace, dtype: str) -> bool:
    return takes_delta_rule(n.q[1] // n.key_heads, dtype)


# Op → whether its kernel takes an op of these extents, whose first operand has this dtype.
TAKES: Mapping[str, Callable[[SimpleNamespace, str], bool]] = {
    "select_keys": lambda n, dtype: takes_choices(n.k[1], n.sequence // n.rate, dtype),
    "chosen_attention": _chosen,
    "chosen_attention_dgrad": _chosen,
    "compressed_attention": _compressed,
    "compressed_attention_dgrad": _compressed,
    "indexer_loss": lambda n, dtype: takes_indexer_loss(n.k[1], n.nope, n.k_rope[1], n.sequence // n.rate, dtype),
    "delta_rule": _delta,
    "delta_rule_dgrad": _delta,
}
