"""Low-rank adapters: W x + factor · B (A x), where only A and B are trained. Hu et al., LoRA, arXiv 2106.09685.

A layer is defined without adapters. An op table that wraps its own adds the adapter's output to each product of a
weight with an adapter, so the graph has adapters as ordinary products. A frozen weight has no gradient in the graph,
and nothing is saved for one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

from compiler import ir
from dsl.schema import Lora
from runtime.contract.weights import A, B

ATTENTION = ("q", "q_down", "q_up", "kv_down", "kv_up", "qkv", "out")
# By kind of segment: the weights that may have an adapter, and their names in the spec's `on`.
ON: dict[str, dict[str, str]] = {
    "attention": {name: name for name in ATTENTION},
    "project": {name: name for name in ATTENTION},
    "attend": {name: name for name in ATTENTION},
    "dense": {name: name for name in ("up", "down")},
    "shared": {name: name for name in ("up", "down")},
    "experts": {"up": "expert_up", "down": "expert_down"},
    "mtp_input": dict.fromkeys(("projection", "embedding_projection", "hidden_projection"), "projection"),
}


def add_adapters(segment: ir.Segment, lora: Lora) -> ir.Segment:
    """The segment with frozen weights, and with adapters for the weights that `lora` names."""
    targets = ON.get(segment.kind, {})
    frozen = tuple(
        replace(param, grad=False, role="frozen") if param.role == "parameter" else param for param in segment.params
    )
    pairs = {param.name: _pair(param, lora.rank) for param in frozen if targets.get(param.name) in lora.on}
    if not pairs:
        return replace(segment, params=frozen)
    return replace(
        segment,
        function=partial(_call_with_adapters, segment.function, names=tuple(pairs), factor=lora.factor),
        params=(*frozen, *(param for pair in pairs.values() for param in pair)),
        constants=(*segment.constants, ("adapter_factor", lora.factor)),
    )


def _pair(weight: ir.Param, rank: int) -> tuple[ir.Param, ir.Param]:
    """A [rank, in] and B [out, rank] of a weight [out, in]. A is initialized as in PEFT, Kaiming-uniform with a = √5:
    uniform in ±1/√in, with standard deviation 1/√(3 in). B is initialized to 0, so a run starts from the given model.

    If the weight is sharded over tensor ranks, one of the two is sharded likewise: the rows of B or the columns of A.
    The other is replicated, and its gradient is the sum of those of the ranks."""
    *stack, rows, columns = weight.shape
    in_columns = weight.split is not None and weight.split.dimension == 1
    all_columns = columns * weight.split.ranks if weight.split and in_columns else columns
    deviation = 1 / sqrt(3 * all_columns) if all_columns else 0.0  # without shared experts the width is 0
    split_a, split_b = (weight.split, None) if in_columns else (None, weight.split)
    base = replace(weight, grad=True, role="parameter", decay=True)
    return (
        replace(
            base,
            name=f"{weight.name}{A}",
            shape=(*stack, rank, columns),
            init=deviation,
            uniform=True,
            split=split_a,
            matrices=(rank,),
        ),
        replace(base, name=f"{weight.name}{B}", shape=(*stack, rows, rank), init=0.0, uniform=False, split=split_b),
    )


def _call_with_adapters(
    function: Callable[..., tuple[Any, ...]], ops: Any, p: Any, *inputs: Any, names: tuple[str, ...], factor: float
) -> tuple[Any, ...]:
    """Call a layer's function with an op table that adds the outputs of adapters."""
    return function(_AdapterOps(ops, p, names, factor), p, *inputs)


@dataclass(frozen=True)
class _AdapterOps:
    """An op table that adds an adapter's output to each product of its weight."""

    _ops: Any
    _p: Any
    _names: tuple[str, ...]
    _factor: float

    def __getattr__(self, op: str) -> Any:
        return getattr(self._ops, op)

    def linear(self, x_TK: Any, w_NK: Any) -> Any:
        return self._product(self._ops.linear, x_TK, w_NK)

    def grouped_linear(self, x_RK: Any, w_ENK: Any, offsets_E: Any) -> Any:
        return self._product(self._ops.grouped_linear, x_RK, w_ENK, offsets_E)

    def _product(self, product: Callable[..., Any], x: Any, w: Any, *offsets: Any) -> Any:
        y = product(x, w, *offsets)
        name = next((name for name in self._names if getattr(self._p, name) is w), None)
        if name is None:
            return y
        low = product(x, getattr(self._p, f"{name}{A}"), *offsets)
        low = low if self._factor == 1 else self._ops.scale(low, self._factor)
        return self._ops.add(y, product(low, getattr(self._p, f"{name}{B}"), *offsets))
