"""The ops of every layer, as plain functions: what emitted code calls, and on the CPU what it runs.

An op has a forward, a gradient of its activations (`_dgrad`) and of its weight (`_wgrad`), and the latter added to a
buffer (`_wgrad_`). What is BF16 and what is not is in `wide`. Activations are row-major [rows, columns]; indices are
int64, offsets int32. Results are contiguous and never share storage with an argument; the same arguments give the same
bits. `library` gives the same ops to torch's dispatcher, for tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.ops.add_rmsnorm import add_rmsnorm, rmsnorm_dgrad_add
from runtime.ops.cross_entropy import cross_entropy, cross_entropy_dgrad
from runtime.ops.embedding import embedding, embedding_wgrad, embedding_wgrad_
from runtime.ops.gated_swiglu import gated_swiglu, gated_swiglu_dgrad
from runtime.ops.gqa_attention import gqa_attention, gqa_attention_dgrad
from runtime.ops.grouped_linear import grouped_linear, grouped_linear_dgrad, grouped_linear_wgrad, grouped_linear_wgrad_
from runtime.ops.grouped_linear_fp8 import (
    grouped_linear_fp8,
    grouped_linear_fp8_dgrad,
    grouped_linear_fp8_wgrad_,
)
from runtime.ops.head_rmsnorm import head_rmsnorm, head_rmsnorm_dgrad, head_rmsnorm_wgrad, head_rmsnorm_wgrad_
from runtime.ops.linear import linear, linear_dgrad, linear_wgrad, linear_wgrad_
from runtime.ops.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_dgrad,
    linear_cross_entropy_wgrad,
    linear_cross_entropy_wgrad_,
)
from runtime.ops.linear_fp8 import linear_fp8, linear_fp8_dgrad, linear_fp8_wgrad_
from runtime.ops.linear_wide import linear_wide, linear_wide_dgrad, linear_wide_wgrad, linear_wide_wgrad_
from runtime.ops.mla_attention import mla_attention, mla_attention_dgrad
from runtime.ops.permute import permute, permute_dgrad, permute_dgrad_add, permute_gate_dgrad, permute_placed
from runtime.ops.permute_fp8 import (
    permute_fp8,
    permute_placed_fp8,
    route_permute_fp8,
    unpermute_dgrad_quantise,
    unpermute_fp8_dgrad,
)
from runtime.ops.quantise import (
    quantise,
    quantise_blocks,
    quantise_both,
    quantise_columns,
    quantise_requantise,
    requantise,
)
from runtime.ops.rmsnorm import rmsnorm, rmsnorm_dgrad, rmsnorm_wgrad, rmsnorm_wgrad_
from runtime.ops.rmsnorm_quantise import (
    add_rmsnorm_quantise,
    add_rmsnorm_quantise_wide,
    rmsnorm_quantise,
    rmsnorm_quantise_wide,
)
from runtime.ops.route import route, route_dgrad
from runtime.ops.route_permute import route_permute
from runtime.ops.sequence_balance import sequence_balance, sequence_balance_dgrad
from runtime.ops.swiglu import swiglu, swiglu_dgrad
from runtime.ops.swiglu_fp8 import (
    gated_swiglu_fp8,
    gated_swiglu_fp8_dgrad,
    gated_swiglu_fp8_quantise_requantise,
    swiglu_fp8,
    swiglu_fp8_dgrad,
    swiglu_fp8_quantise_requantise,
)
from runtime.ops.swiglu_quantise import (
    gated_swiglu_dgrad_quantise_both,
    gated_swiglu_fp8_dgrad_quantise_both,
    gated_swiglu_quantise,
    gated_swiglu_quantise_kept,
    swiglu_dgrad_quantise_both,
    swiglu_fp8_dgrad_quantise_both,
    swiglu_quantise,
    swiglu_quantise_kept,
)
from runtime.ops.unpermute import unpermute, unpermute_dgrad
from runtime.ops.unpermute_add import unpermute_add

OPS: dict[str, Callable[..., Any]] = {
    "add_rmsnorm": add_rmsnorm,
    "add_rmsnorm_quantise": add_rmsnorm_quantise,
    "add_rmsnorm_quantise_wide": add_rmsnorm_quantise_wide,
    "cross_entropy": cross_entropy,
    "cross_entropy_dgrad": cross_entropy_dgrad,
    "embedding": embedding,
    "embedding_wgrad": embedding_wgrad,
    "embedding_wgrad_": embedding_wgrad_,
    "gated_swiglu": gated_swiglu,
    "gated_swiglu_dgrad": gated_swiglu_dgrad,
    "gated_swiglu_dgrad_quantise_both": gated_swiglu_dgrad_quantise_both,
    "gated_swiglu_fp8": gated_swiglu_fp8,
    "gated_swiglu_fp8_dgrad": gated_swiglu_fp8_dgrad,
    "gated_swiglu_fp8_dgrad_quantise_both": gated_swiglu_fp8_dgrad_quantise_both,
    "gated_swiglu_fp8_quantise_requantise": gated_swiglu_fp8_quantise_requantise,
    "gated_swiglu_quantise": gated_swiglu_quantise,
    "gated_swiglu_quantise_kept": gated_swiglu_quantise_kept,
    "gqa_attention": gqa_attention,
    "gqa_attention_dgrad": gqa_attention_dgrad,
    "grouped_linear": grouped_linear,
    "grouped_linear_dgrad": grouped_linear_dgrad,
    "grouped_linear_fp8": grouped_linear_fp8,
    "grouped_linear_fp8_dgrad": grouped_linear_fp8_dgrad,
    "grouped_linear_fp8_wgrad_": grouped_linear_fp8_wgrad_,
    "grouped_linear_wgrad": grouped_linear_wgrad,
    "grouped_linear_wgrad_": grouped_linear_wgrad_,
    "head_rmsnorm": head_rmsnorm,
    "head_rmsnorm_dgrad": head_rmsnorm_dgrad,
    "head_rmsnorm_wgrad": head_rmsnorm_wgrad,
    "head_rmsnorm_wgrad_": head_rmsnorm_wgrad_,
    "linear": linear,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_cross_entropy_dgrad": linear_cross_entropy_dgrad,
    "linear_cross_entropy_wgrad": linear_cross_entropy_wgrad,
    "linear_cross_entropy_wgrad_": linear_cross_entropy_wgrad_,
    "linear_dgrad": linear_dgrad,
    "linear_fp8": linear_fp8,
    "linear_fp8_dgrad": linear_fp8_dgrad,
    "linear_fp8_wgrad_": linear_fp8_wgrad_,
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
    "permute_dgrad_add": permute_dgrad_add,
    "permute_fp8": permute_fp8,
    "permute_gate_dgrad": permute_gate_dgrad,
    "permute_placed": permute_placed,
    "permute_placed_fp8": permute_placed_fp8,
    "quantise": quantise,
    "quantise_blocks": quantise_blocks,
    "quantise_both": quantise_both,
    "quantise_columns": quantise_columns,
    "quantise_requantise": quantise_requantise,
    "requantise": requantise,
    "rmsnorm": rmsnorm,
    "rmsnorm_dgrad": rmsnorm_dgrad,
    "rmsnorm_dgrad_add": rmsnorm_dgrad_add,
    "rmsnorm_quantise": rmsnorm_quantise,
    "rmsnorm_quantise_wide": rmsnorm_quantise_wide,
    "rmsnorm_wgrad": rmsnorm_wgrad,
    "rmsnorm_wgrad_": rmsnorm_wgrad_,
    "route": route,
    "route_dgrad": route_dgrad,
    "route_permute": route_permute,
    "route_permute_fp8": route_permute_fp8,
    "sequence_balance": sequence_balance,
    "sequence_balance_dgrad": sequence_balance_dgrad,
    "swiglu": swiglu,
    "swiglu_dgrad": swiglu_dgrad,
    "swiglu_dgrad_quantise_both": swiglu_dgrad_quantise_both,
    "swiglu_fp8": swiglu_fp8,
    "swiglu_fp8_dgrad": swiglu_fp8_dgrad,
    "swiglu_fp8_dgrad_quantise_both": swiglu_fp8_dgrad_quantise_both,
    "swiglu_fp8_quantise_requantise": swiglu_fp8_quantise_requantise,
    "swiglu_quantise": swiglu_quantise,
    "swiglu_quantise_kept": swiglu_quantise_kept,
    "unpermute": unpermute,
    "unpermute_add": unpermute_add,
    "unpermute_dgrad": unpermute_dgrad,
    "unpermute_dgrad_quantise": unpermute_dgrad_quantise,
    "unpermute_fp8_dgrad": unpermute_fp8_dgrad,
}
