"""Quantising casts, which storage puts in and no layer calls: their results have the dtypes that storage says."""

from __future__ import annotations

from compiler.model.ops.rule import Rule, Tensor


def _infer(*_: object) -> tuple[Tensor, ...]:
    raise AssertionError("the results of a quantising cast have the dtype of the place where it is put in")


QUANTISE = Rule(args=("x",), outputs=("y",), infer=_infer, kernel_class="quantise")
REQUANTISE = Rule(args=("q",), outputs=("y",), infer=_infer, kernel_class="quantise")  # tiles of rows to columns
QUANTISE_BOTH = Rule(args=("x",), outputs=("y", "by_columns"), infer=_infer, kernel_class="quantise")

QUANTISE_COLUMNS = Rule(args=("x",), outputs=("y",), infer=_infer, kernel_class="quantise")
DEQUANTISE = Rule(args=("q",), outputs=("y",), infer=_infer, kernel_class="quantise")

CASTS = {
    "dequantise": DEQUANTISE,
    "quantise": QUANTISE,
    "quantise_both": QUANTISE_BOTH,
    "quantise_columns": QUANTISE_COLUMNS,
    "requantise": REQUANTISE,
}
