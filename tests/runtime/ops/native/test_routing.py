"""The C++ of routing, embeddings and fused norms against torch's ops: equal choices and rows, gates within bounds."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.ops import OPS
from tests.runtime.ops import cases
from tests.runtime.ops.cases import Source, as_tuple
from tests.runtime.ops.native.bounds import U
from tests.runtime.ops.native.paths import TORCH

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
some = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEED = st.integers(0, 2**31)
pytestmark = pytest.mark.usefixtures("instructions")


def on_torch(op: str, *args: Any) -> tuple[Tensor, ...]:
    with pytest.MonkeyPatch.context() as patch:
        TORCH.take(patch)
        return as_tuple(OPS[op](*args))


def same(op: str, *args: Any) -> None:
    """Assert equal bits."""
    for index, (found, wanted) in enumerate(zip(as_tuple(OPS[op](*args)), on_torch(op, *args), strict=True)):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, (op, index)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=f"{op}, result {index}")


def near(found: Tensor, wanted: Tensor, terms: int) -> None:
    """Assert that results differ by the rounding of `terms` operations."""
    off = (found.double() - wanted.double()).abs()
    assert (off <= terms * U * wanted.double().abs() + 2.0**-120).all(), off.max()


@some
@given(
    *(SEED, st.integers(0, 40), st.integers(1, 5), st.integers(1, 9), st.integers(1, 8), st.booleans()),
    *(st.booleans(), st.sampled_from(["numbers", "ties", "nan"]), st.integers(1, 5)),
)
def test_choices(
    seed: int, T: int, groups: int, each: int, top_k: int, softmax: bool, normalize: bool, kind: str, top_groups: int
) -> None:
    """Experts as torch chooses them, with ties and NaN too; gate weights within the rounding of their sum."""
    source, E, top_groups = Source(torch.float32, seed), groups * each, min(top_groups, groups)
    top_k = min(top_k, top_groups * each)
    logits_TE, bias_E = source.normal(T, E), source.normal(E)
    if kind == "ties":
        logits_TE, bias_E = logits_TE.round(), torch.zeros(E)
    if kind == "nan":
        logits_TE[source.below(4, T, E) == 0] = torch.nan
    args = (logits_TE, bias_E if seed % 2 else None, softmax, groups, top_groups, top_k, normalize, 2.5)
    gate_TK, expert_TK = OPS["route"](*args)
    wanted_TK, wanted_expert_TK = on_torch("route", *args)
    assert torch.equal(expert_TK, wanted_expert_TK)
    known = ~wanted_TK.isnan()
    assert torch.equal(known, ~gate_TK.isnan())
    near(gate_TK[known], wanted_TK[known], 2 * top_k + 6)
    weighed_TK = OPS["weigh_chosen"](logits_TE, expert_TK, softmax, normalize, 2.5)
    torch.testing.assert_close(weighed_TK, gate_TK, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("expert", [3, -1])
def test_an_expert_that_is_none_is_refused(expert: int) -> None:
    with pytest.raises(IndexError, match=rf"experts 0 to 2, not {expert}"):
        OPS["weigh_chosen"](torch.ones(2, 3), torch.tensor([[0, expert], [2, 1]]), False, False, 1.0)


@some
@given(SEED, st.integers(0, 40), st.integers(1, 20), st.integers(1, 8), st.booleans(), st.booleans())
def test_gradients_of_gates(seed: int, T: int, E: int, top_k: int, softmax: bool, normalize: bool) -> None:
    source, top_k = Source(torch.float32, seed), min(top_k, E)
    logits_TE, expert_TK, dgate_TK = source.normal(T, E), source.choices(T, E, top_k), source.normal(T, top_k)
    for op, scores_TE, options in (
        ("route_dgrad", logits_TE, (softmax, normalize, 2.5)),
        ("route_scores_dgrad", logits_TE.sigmoid(), (normalize, 2.5)),
    ):
        found_TE = OPS[op](dgate_TK, scores_TE, expert_TK, *options)
        exact_TE = OPS[op](dgate_TK.double(), scores_TE.double(), expert_TK, *options)
        if op == "route_scores_dgrad" or not softmax:
            assert not found_TE.scatter(1, expert_TK, 0).any(), "an expert that was not chosen has a gradient"
        torch.testing.assert_close(found_TE.double(), exact_TE, rtol=1e-4, atol=1e-5)


@DTYPES
@some
@given(SEED, st.integers(0, 40), st.integers(1, 70), st.integers(1, 9), st.integers(1, 6), st.booleans())
def test_rows(dtype: torch.dtype, seed: int, T: int, D: int, E: int, top_k: int, more: bool) -> None:
    """Permuting takes the same rows. Adding them up, in the order of choices, rounds their FP32 sum once."""
    source, top_k = Source(dtype, seed), min(top_k, E)
    x_TD, gate_TK = source.normal(T, D), Source(torch.float32, seed).normal(T, top_k)
    expert_TK = source.choices(T, E, top_k)
    slots_E = torch.randperm(E, generator=source.generator)
    same("permute", x_TD, gate_TK, expert_TK, E)
    same("permute", x_TD.to(torch.float8_e4m3fn).view(torch.uint8), gate_TK, expert_TK, E)
    same("permute_placed", x_TD, gate_TK, expert_TK, slots_E)
    rows_SD, order_S = source.normal(T * top_k, D), source.order(T, E, top_k)
    same("unpermute_dgrad", x_TD, order_S, top_k)
    wide_TKD = torch.empty(T * top_k, D).index_copy_(0, order_S, rows_SD.float()).view(T, top_k, D)
    sum_TD = reduce(torch.add, wide_TKD.unbind(1)).to(dtype)
    assert torch.equal(OPS["unpermute"](rows_SD, order_S, top_k), sum_TD)
    other_TD = source.normal(T, D) if more else None
    with_other_TD = x_TD if other_TD is None else x_TD + other_TD
    assert torch.equal(OPS["unpermute_add"](x_TD, other_TD, rows_SD, order_S, top_k), with_other_TD + sum_TD)
    last_TD = x_TD + sum_TD if other_TD is None else x_TD + sum_TD + other_TD
    assert torch.equal(OPS["permute_dgrad_add"](rows_SD, order_S, top_k, x_TD, other_TD), last_TD)


@DTYPES
@some
@given(SEED, st.integers(0, 40), st.integers(1, 130), st.integers(1, 5), st.booleans())
def test_fused_norms(dtype: torch.dtype, seed: int, T: int, D: int, top_k: int, more: bool) -> None:
    """Each fused op has the bits of its parts, run one after the other."""
    source = Source(dtype, seed)
    h_TD, x_TD, a_TD, b_TD, w_D = *(source.normal(T, D) for _ in range(4)), source.normal(D)
    sum_TD, y_TD, rstd_T = OPS["add_rmsnorm"](h_TD, x_TD, w_D, 1e-6)
    assert torch.equal(sum_TD, h_TD + x_TD)
    assert all(map(torch.equal, (y_TD, rstd_T), OPS["rmsnorm"](sum_TD, w_D, 1e-6)))
    dx_TD = OPS["rmsnorm_dgrad"](a_TD, x_TD, w_D, rstd_T)
    assert torch.equal(OPS["rmsnorm_dgrad_add"](a_TD, x_TD, w_D, rstd_T, h_TD), dx_TD + h_TD)
    dy_TD, found_TD = OPS["sum_rmsnorm_dgrad_add"](a_TD, b_TD, x_TD, w_D, rstd_T, h_TD)
    assert torch.equal(dy_TD, a_TD + b_TD)
    assert torch.equal(found_TD, OPS["rmsnorm_dgrad"](dy_TD, x_TD, w_D, rstd_T) + h_TD)
    rows = source.normal(T * top_k, D), source.order(T, max(top_k, 4), top_k), top_k, a_TD, b_TD if more else None
    dy_TD, found_TD = OPS["permuted_rmsnorm_dgrad_add"](*rows, x_TD, w_D, rstd_T, h_TD)
    assert torch.equal(dy_TD, OPS["permute_dgrad_add"](*rows))
    assert torch.equal(found_TD, OPS["rmsnorm_dgrad"](dy_TD, x_TD, w_D, rstd_T) + h_TD)


@DTYPES
@some
@given(SEED, st.integers(0, 40), st.integers(1, 20), st.integers(1, 70))
def test_embeddings(dtype: torch.dtype, seed: int, T: int, V: int, D: int) -> None:
    source = Source(dtype, seed)
    tokens_T, w_VD = cases.embedding(source, T, V, D)
    same("embedding", tokens_T, w_VD)
    same("embedding_wgrad", source.normal(T, D), tokens_T, V)


def test_a_token_that_the_table_lacks_is_refused() -> None:
    with pytest.raises(IndexError, match="table of 2 tokens has no token 2"):
        OPS["embedding"](torch.tensor([0, 2, -1]), torch.ones(2, 3))


@DTYPES
@some
@given(SEED, st.integers(0, 90), st.integers(1, 40), st.integers(1, 40), st.integers(1, 5))
def test_groups(dtype: torch.dtype, seed: int, R: int, K: int, N: int, E: int) -> None:
    """The products of all experts in one call have the bits of one product for each, also for views of columns."""
    source = Source(dtype, seed)
    x_RK, w_ENK, ends_E = cases.grouped_linear(source, R, K, N, E)
    wider_RK, dy_RN = torch.nn.functional.pad(x_RK, (2, 3))[:, 2 : 2 + K], source.normal(R, N)
    y_RN, dx_RK = OPS["grouped_linear"](wider_RK, w_ENK, ends_E), OPS["grouped_linear_dgrad"](dy_RN, w_ENK, ends_E)
    acc_ENK = torch.ones(E, N, K)
    OPS["grouped_linear_wgrad_"](acc_ENK, dy_RN, wider_RK, ends_E)
    for e, (start, end) in enumerate(zip([0, *ends_E.tolist()], ends_E.tolist(), strict=False)):
        assert torch.equal(y_RN[start:end], OPS["linear"](wider_RK[start:end], w_ENK[e]))
        assert torch.equal(dx_RK[start:end], OPS["linear_dgrad"](dy_RN[start:end], w_ENK[e]))
        one_NK = torch.ones(N, K)
        OPS["linear_wgrad_"](one_NK, dy_RN[start:end], wider_RK[start:end])
        assert torch.equal(acc_ENK[e], one_NK)
