"""The ops of every layer, as plain functions: what emitted code calls, and on the CPU what it runs.

An op has a forward, a gradient of its activations (`_dgrad`) and of its weight (`_wgrad`), and the latter added to a
buffer (`_wgrad_`). What is BF16 and what is not is in `wide`. Activations are row-major [rows, columns]; indices are
int64, offsets int32. Results are contiguous and never share storage with an argument; the same arguments give the same
bits. `library` gives the same ops to torch's dispatcher, for tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.ops.cross_entropy import cross_entropy, cross_entropy_dgrad
from runtime.ops.embedding import embedding, embedding_wgrad, embedding_wgrad_
from runtime.ops.gated_swiglu import gated_swiglu, gated_swiglu_dgrad
from runtime.ops.gqa_attention import gqa_attention, gqa_attention_dgrad
from runtime.ops.grouped_linear import grouped_linear, grouped_linear_dgrad, grouped_linear_wgrad, grouped_linear_wgrad_
from runtime.ops.head_rmsnorm import head_rmsnorm, head_rmsnorm_dgrad, head_rmsnorm_wgrad, head_rmsnorm_wgrad_
from runtime.ops.linear import linear, linear_dgrad, linear_wgrad, linear_wgrad_
from runtime.ops.linear_wide import linear_wide, linear_wide_dgrad, linear_wide_wgrad, linear_wide_wgrad_
from runtime.ops.mla_attention import mla_attention, mla_attention_dgrad
from runtime.ops.permute import permute, permute_dgrad, permute_placed
from runtime.ops.rmsnorm import rmsnorm, rmsnorm_dgrad, rmsnorm_wgrad, rmsnorm_wgrad_
from runtime.ops.route import route, route_dgrad
from runtime.ops.sequence_balance import sequence_balance, sequence_balance_dgrad
from runtime.ops.swiglu import swiglu, swiglu_dgrad
from runtime.ops.unpermute import unpermute, unpermute_dgrad

OPS: dict[str, Callable[..., Any]] = {
    "cross_entropy": cross_entropy,
    "cross_entropy_dgrad": cross_entropy_dgrad,
    "embedding": embedding,
    "embedding_wgrad": embedding_wgrad,
    "embedding_wgrad_": embedding_wgrad_,
    "gated_swiglu": gated_swiglu,
    "gated_swiglu_dgrad": gated_swiglu_dgrad,
    "gqa_attention": gqa_attention,
    "gqa_attention_dgrad": gqa_attention_dgrad,
    "grouped_linear": grouped_linear,
    "grouped_linear_dgrad": grouped_linear_dgrad,
    "grouped_linear_wgrad": grouped_linear_wgrad,
    "grouped_linear_wgrad_": grouped_linear_wgrad_,
    "head_rmsnorm": head_rmsnorm,
    "head_rmsnorm_dgrad": head_rmsnorm_dgrad,
    "head_rmsnorm_wgrad": head_rmsnorm_wgrad,
    "head_rmsnorm_wgrad_": head_rmsnorm_wgrad_,
    "linear": linear,
    "linear_dgrad": linear_dgrad,
    "linear_wgrad": linear_wgrad,
    "linear_wgrad_": linear_wgrad_,
    "linear_wide": linear_wide,
    "linear_wide_dgrad": linear_wide_dgrad,
    "linear_wide_wgrad": linear_wide_wgrad,
    "linear_wide_wgrad_": linear_wide_wgrad_,
    "mla_attention": mla_attention,
    "mla_attention_dgrad": mla_attention_dgrad,
    "permute": permute,
    "permute_dgrad": permute_dgrad,
    "permute_placed": permute_placed,
    "rmsnorm": rmsnorm,
    "rmsnorm_dgrad": rmsnorm_dgrad,
    "rmsnorm_wgrad": rmsnorm_wgrad,
    "rmsnorm_wgrad_": rmsnorm_wgrad_,
    "route": route,
    "route_dgrad": route_dgrad,
    "sequence_balance": sequence_balance,
    "sequence_balance_dgrad": sequence_balance_dgrad,
    "swiglu": swiglu,
    "swiglu_dgrad": swiglu_dgrad,
    "unpermute": unpermute,
    "unpermute_dgrad": unpermute_dgrad,
}
