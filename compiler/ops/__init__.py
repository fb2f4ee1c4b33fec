"""One torch-free rule per op of `runtime.ops`."""

from __future__ import annotations

from compiler.ops.activation import GATED_SWIGLU, SWIGLU
from compiler.ops.attention import GQA_ATTENTION, MLA_ATTENTION
from compiler.ops.linear import GROUPED_LINEAR, LINEAR, LINEAR_WIDE
from compiler.ops.norm import HEAD_RMSNORM, RMSNORM
from compiler.ops.plain import ADD, CAT2, SPLIT2
from compiler.ops.routing import PERMUTE, PERMUTE_PLACED, ROUTE, SEQUENCE_BALANCE, UNPERMUTE
from compiler.ops.rule import Extent, Gradient, Rule, Shape, Tensor
from compiler.ops.vocabulary import CROSS_ENTROPY, EMBEDDING

__all__ = ["RULES", "Extent", "Gradient", "Rule", "Shape", "Tensor"]

RULES: dict[str, Rule] = {
    "add": ADD,
    "cat2": CAT2,
    "cross_entropy": CROSS_ENTROPY,
    "embedding": EMBEDDING,
    "gated_swiglu": GATED_SWIGLU,
    "gqa_attention": GQA_ATTENTION,
    "grouped_linear": GROUPED_LINEAR,
    "head_rmsnorm": HEAD_RMSNORM,
    "linear": LINEAR,
    "linear_wide": LINEAR_WIDE,
    "mla_attention": MLA_ATTENTION,
    "permute": PERMUTE,
    "permute_placed": PERMUTE_PLACED,
    "rmsnorm": RMSNORM,
    "route": ROUTE,
    "sequence_balance": SEQUENCE_BALANCE,
    "split2": SPLIT2,
    "swiglu": SWIGLU,
    "unpermute": UNPERMUTE,
}
