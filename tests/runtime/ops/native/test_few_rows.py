"""Products of few rows: a row has the bits that it has in a product of many rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.ops.native import library
from runtime.ops.product import multiplies_natively, product, product_, wide
from tests.runtime.ops.native.guarded import fenced_call
from tests.runtime.ops.native.test_ops import Calls
from tests.runtime.ops.source import Source

MANY = 20
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SIZE = st.one_of(st.integers(1, 70), st.integers(250, 530))


@DTYPES
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, library.FEW), st.integers(0, 9), SIZE, SIZE, st.integers(0, 5), st.integers(0, 2**31))
def test_few_rows_have_the_bits_of_many(
    instructions: str, dtype: torch.dtype, rows: int, first: int, N: int, K: int, more: int, seed: int
) -> None:
    source = Source(dtype, seed)
    x_MK, w_NK = source.normal(MANY, K + more)[:, :K], source.normal(N, K)
    few = slice(first, first + rows)
    wider = torch.empty((rows, N + more), dtype=dtype)
    product_(wider[:, :N], x_MK[few], w_NK.t())
    assert torch.equal(wider[:, :N], product(x_MK, w_NK.t())[few])


def test_bf16_is_not_widened_in_memory(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without BF16 instructions, few rows are multiplied by the weight as it is."""
    calls = Calls(monkeypatch)
    x_MK, w_NK = (Source(torch.bfloat16, 0).normal(rows, 33) for rows in (3, 50))
    y_MN = product(x_MK, w_NK.t())
    assert calls.names == ["product" if multiplies_natively(x_MK, w_NK.t()) else "few_rows"]
    if calls.names == ["few_rows"]:
        assert torch.equal(y_MN, product(wide(x_MK), wide(w_NK).t()).to(torch.bfloat16))


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize(("rows", "N", "K"), [(1, 1, 1), (2, 17, 33), (8, 50, 300), (9, 16, 16), (3, 40, 7)])
def test_products_keep_to_their_operands(instructions: str, rows: int, N: int, K: int, at_end: bool) -> None:
    for name, dtype, result in (
        ("few_rows", torch.float32, torch.float32),
        ("few_rows", torch.bfloat16, torch.bfloat16),
        ("few_rows_wide", torch.bfloat16, torch.float32),
    ):
        source = Source(dtype, rows)
        x_MK, w_NK, y_MN = source.normal(rows, K + 3)[:, 1 : K + 1], source.normal(N, K), torch.empty(rows, N + 2)
        y_MN = y_MN.to(result)[:, 1 : N + 1]
        fenced_call(at_end, name, dtype, rows, N, K, x_MK, w_NK, y_MN)
        exact, sizes = x_MK.double() @ w_NK.double().t(), x_MK.double().abs() @ w_NK.double().abs().t()
        unit = 2.0**-8 if result == torch.bfloat16 else 0.0
        assert ((y_MN.double() - exact).abs() <= unit * exact.abs() + (K + 2) * 2.0**-23 * sizes).all()
