"""The gated delta rule against its ops in Triton's interpreter. The checks are in checks_delta_rule.py.

A chunk has 64 rows in BF16, 16 in FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiler.emit.kernels import emit_kernel
from compiler.ir import Buffer
from tests.compiler.emit.kernels.gate import SM_90, SM_100, Gate, Target
from tests.compiler.emit.kernels.shapes import describe

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_delta_rule"
BF16, FP32 = torch.bfloat16, torch.float32

dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
decays = pytest.mark.parametrize("by_column", [False, True], ids=["by_head", "by_column"])


DOCUMENTS = {BF16: (3, 64, 100, 127, 128, 140), FP32: (3, 16, 25, 31, 32, 40)}  # within and at borders of chunks
ROWS = {BF16: 200, FP32: 51}  # no whole number of chunks


@dtypes
@decays
@pytest.mark.parametrize("rows", [1, 9])
def test_less_than_a_chunk(interpret: Interpret, dtype: torch.dtype, by_column: bool, rows: int) -> None:
    """Two sequences, and two heads of keys with two heads of values each."""
    interpret(CHECKS, "near", dtype, {"sequences": 2, "rows": rows, "key_heads": 2, "by_column": by_column})


@dtypes
@decays
@pytest.mark.parametrize("documents", [False, True])
def test_several_chunks(interpret: Interpret, dtype: torch.dtype, by_column: bool, documents: bool) -> None:
    begins = DOCUMENTS[dtype] if documents else ()
    interpret(CHECKS, "near", dtype, {"rows": ROWS[dtype], "by_column": by_column, "begins": begins})


@dtypes
@decays
def test_whole_chunks(interpret: Interpret, dtype: torch.dtype, by_column: bool) -> None:
    rows = 128 if dtype == BF16 else 32
    interpret(CHECKS, "near", dtype, {"sequences": 2, "rows": rows, "share": 1, "by_column": by_column})


@decays
def test_widths_of_published_models(interpret: Interpret, by_column: bool) -> None:
    widths = {"key": 128, "value": 128}
    interpret(CHECKS, "near", BF16, {"rows": 130, "share": 1, "by_column": by_column, **widths})


@dtypes
@decays
@pytest.mark.parametrize("documents", [False, True])
def test_strong_decays(interpret: Interpret, dtype: torch.dtype, by_column: bool, documents: bool) -> None:
    """States decay by more than e^-1000 in a chunk, at some rows hardly."""
    begins = DOCUMENTS[dtype] if documents else ()
    values = {"rows": ROWS[dtype], "decay": 20.0, "share": 1, "by_column": by_column, "begins": begins}
    interpret(CHECKS, "near", dtype, values)


@dtypes
@decays
def test_lasting_states(interpret: Interpret, dtype: torch.dtype, by_column: bool) -> None:
    """Hardly a decay, and β near 1: rows replace what they read."""
    values = {"rows": ROWS[dtype], "decay": 0.001, "logit": 4.0, "by_column": by_column}
    interpret(CHECKS, "near", dtype, values)


@decays
def test_no_rows(interpret: Interpret, by_column: bool) -> None:
    interpret(CHECKS, "nothing", by_column)


@dtypes
@decays
def test_bits_are_equal(interpret: Interpret, dtype: torch.dtype, by_column: bool) -> None:
    interpret(CHECKS, "bits_are_equal", dtype, {"rows": ROWS[dtype] // 2, "by_column": by_column})


@dtypes
@decays
def test_no_bit_crosses_a_border(interpret: Interpret, dtype: torch.dtype, by_column: bool) -> None:
    begins = (30, 70, 80) if dtype == BF16 else (10, 20, 30)
    values = {"rows": ROWS[dtype] // 2, "share": 1, "by_column": by_column, "begins": begins}
    interpret(CHECKS, "no_bit_crosses_a_border", dtype, values)


@dtypes
def test_a_lost_state_shows(interpret: Interpret, dtype: torch.dtype) -> None:
    interpret(CHECKS, "a_lost_state_shows", dtype, {"rows": 30})


# ---------------------------------------------------------------- machine code


def arguments(op: str, dtype: torch.dtype, by_column: bool, documents: bool) -> tuple[Any, ...]:
    """Meta tensors of Qwen3-Next, or of Kimi Linear if decays are by column: 32 heads of values, widths of 128."""

    def tensor(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    T, H, K, G = 8192, 32, 128, 32 if by_column else 16
    qkv, beta, decay = tensor(T, (2 * G + H) * K), tensor(T, H, of=FP32), tensor(T, H * K if by_column else H, of=FP32)
    starts = tensor(T, of=torch.int32) if documents else None
    args = *qkv.split([G * K, G * K, H * K], dim=1), beta, decay, 4096, G, starts
    return (tensor(T, H * K), *args) if op.endswith("_dgrad") else args


@pytest.mark.parametrize(
    ("target", "documents"), [(SM_90, False), (SM_90, True), (SM_100, True)], ids=["sm_90", "sm_90-documents", "sm_100"]
)
@decays
def test_code_of_published_models(by_column: bool, target: Target, documents: bool) -> None:
    """No launch spills. Those of the forward are among those of the gradient, but for the last one."""
    gate = Gate(target)
    for op in ("delta_rule", "delta_rule_dgrad"):
        args = arguments(op, BF16, by_column, documents)
        file = emit_kernel(op, describe(args), 132)
        assert file
        for verdict in gate.verdicts(file, op, args):
            assert not verdict.failures, verdict


def test_where_no_kernel_applies() -> None:
    """FP64, keys wider than 256, and another dtype of the gradient."""

    def kernel(dtype: str, width: int, of_gradient: str = "") -> Any:
        q, beta, decay = (
            Buffer("q", (64, 2 * width), dtype),
            Buffer("beta", (64, 2), "float32"),
            Buffer("decay", (64, 2), "float64" if dtype == "float64" else "float32"),
        )
        args = q, q, q, beta, decay, 64, 2
        if of_gradient:
            return emit_kernel("delta_rule_dgrad", (Buffer("do", q.shape, of_gradient), *args), 132)
        return emit_kernel("delta_rule", args, 132)

    assert kernel("bfloat16", 128) and kernel("bfloat16", 128, "bfloat16") and kernel("float32", 256)
    assert kernel("float64", 128) is None and kernel("bfloat16", 257) is None
    assert kernel("bfloat16", 128, "float32") is None
