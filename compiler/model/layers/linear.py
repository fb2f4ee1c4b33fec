"""Products with a weight of a segment and, where it has one, a bias: `up` and `up_bias`."""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.model.layers.builder import Place


def linear(ops: Any, p: Any, name: str, x_TK: Any, biased: bool) -> Any:
    """x·W, and the bias of each column."""
    y_TN = ops.linear(x_TK, getattr(p, name))
    return ops.add_bias(y_TN, getattr(p, bias_of(name))) if biased else y_TN


def grouped_linear(ops: Any, p: Any, name: str, x_RK: Any, offsets_E: Any, biased: bool, gate_R: Any = None) -> Any:
    """x·W of each row's expert, and the bias of that, times the row's gate weight if there is one."""
    y_RN = ops.grouped_linear(x_RK, getattr(p, name), offsets_E)
    return ops.add_grouped_bias(y_RN, getattr(p, bias_of(name)), offsets_E, gate_R) if biased else y_RN


def weights(place: Place, name: str, rows: int, columns: int, biased: bool, stack: int = 0) -> tuple[ir.Param, ...]:
    """The parameters of a product: W, and the bias of its rows."""
    weight = place.weight(name, rows, columns, stack=stack)
    return (weight, place.vector(bias_of(name), rows, stack=stack)) if biased else (weight,)


def bias_of(name: str) -> str:
    """The name of the bias that goes with a weight."""
    return f"{name}_bias"


def named(paths: dict[str, str], *names: str) -> dict[str, str]:
    """Paths of parameters, and of the biases that go with those of `names`."""
    return paths | {bias_of(name): bias_of(paths[name]) for name in names}
