"""Adapters of low rank: W x + factor · B (A x), of which A and B alone are trained. Hu et al., LoRA, arXiv 2106.09685.

A layer is stated without them. Its op table gives each product of a weight that has an adapter what that adds, so the
graph has them as any other products; a weight that is not trained has no gradient in it, and nothing is kept for one.
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
# By kind of segment, the names in `on` of the weights that may have an adapter.
ON: dict[str, dict[str, str]] = {
    "attention": {name: name for name in ATTENTION},
    "project": {name: name for name in ATTENTION},
    "attend": {name: name for name in ATTENTION},
    "dense": {name: name for name in ("up", "down")},
    "shared": {name: name for name in ("up", "down")},
    "experts": {"up": "expert_up", "down": "expert_down"},
    "mtp_input": dict.fromkeys(("projection", "embedding_projection", "hidden_projection"), "projection"),
}


def adapted(segment: ir.Segment, lora: Lora) -> ir.Segment:
    """A segment whose weights stay as they are, those that `lora` names with adapters beside them."""
    on = ON.get(segment.kind, {})
    frozen = tuple(
        replace(param, grad=False, role="frozen") if param.role == "parameter" else param for param in segment.params
    )
    pairs = {param.name: _pair(param, lora.rank) for param in frozen if on.get(param.name) in lora.on}
    if not pairs:
        return replace(segment, params=frozen)
    return replace(
        segment,
        function=partial(_with_adapters, segment.function, names=tuple(pairs), factor=lora.factor),
        params=(*frozen, *(each for pair in pairs.values() for each in pair)),
        constants=(*segment.constants, ("adapter_factor", lora.factor)),
    )


def _pair(weight: ir.Param, rank: int) -> tuple[ir.Param, ir.Param]:
    """A and B of a weight [out, in]. A is at first as PEFT has it, Kaiming-uniform with a = √5: even between ±1/√in,
    whose deviation is 1/√(3 in). B is 0, so a run begins with the model that it is given.

    Where ranks have parts of the weight, they have the same parts of one of them: rows of B, or columns of A. The other
    is whole on each, and what each adds to its gradient is a part of the sum."""
    *stack, out, into = weight.shape
    in_columns = weight.split is not None and weight.split.dimension == 1
    all_in = into * weight.split.ranks if weight.split and in_columns else into
    deviation = 1 / sqrt(3 * all_in) if all_in else 0.0  # the width of no shared experts is 0
    of_a, of_b = (weight.split, None) if in_columns else (None, weight.split)
    row = replace(weight, grad=True, role="parameter", decay=True)
    return (
        replace(
            row,
            name=f"{weight.name}{A}",
            shape=(*stack, rank, into),
            init=deviation,
            uniform=True,
            split=of_a,
            matrices=(rank,),
        ),
        replace(row, name=f"{weight.name}{B}", shape=(*stack, out, rank), init=0.0, uniform=False, split=of_b),
    )


def _with_adapters(
    function: Callable[..., tuple[Any, ...]], ops: Any, p: Any, *inputs: Any, names: tuple[str, ...], factor: float
) -> tuple[Any, ...]:
    """What a layer's function returns, given a table that adds what adapters compute."""
    return function(_Adapted(ops, p, names, factor), p, *inputs)


@dataclass(frozen=True)
class _Adapted:
    """An op table whose products of weights that have an adapter add what that computes."""

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
