"""Padding rows after conversations and completions, which must not change the training result.

Attention is causal, so no token sees the padding after it. But two results of attention are reduced over all rows,
padding included: the largest logits, and the loss of an indexer. Before such attention the residual stream of padding
rows is set to zero. Their queries and logits are then zero, and both distributions that the loss compares are uniform.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from compiler import ir
from compiler.model.layers import indexer, qk_clip
from compiler.model.layers.builder import Place, index

ENTRANCES = ("attention", "project", "enter")  # kinds of segments that begin at the residual stream


def real_rows(place: Place) -> tuple[ir.Input, ...]:
    """Return the input that says which rows are tokens, [T], if some may be padding."""
    return (index("real", place.T, dtype="int32"),) if place.spec.data.pads_rows else ()


def around(place: Place, plain: ir.Segment) -> ir.Segment:
    """Return a segment that first sets padding rows to zero, if attention reduces something over all rows."""
    sums = qk_clip.is_clipped(place) or indexer.indexer_of(place) is not None
    real = real_rows(place)
    if plain.kind not in ENTRANCES or place.is_tensor_shard or not sums or not real:
        return plain
    return replace(
        plain,
        function=partial(_around, plain.function),
        inputs=(*plain.inputs, *real),
        constants=(*plain.constants, ("blanked", True)),
    )


def _around(function: Any, ops: Any, p: Any, h_TN: Any, *arguments: Any) -> tuple[Any, ...]:
    *inputs, real_T = arguments
    return tuple(function(ops, p, ops.blank_rows(h_TN, real_T), *inputs))
