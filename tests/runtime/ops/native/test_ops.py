"""Every C++ op against the torch op in float64 on the same numbers, for any size, within derived bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.ops import OPS
from runtime.ops.native import library
from runtime.ops.product import add_product_
from runtime.ops.product import product_ as set_product_
from tests.runtime.ops import cases
from tests.runtime.ops.cases import FORWARD, Source, as_tuple, gradient_arguments, widened
from tests.runtime.ops.native.bounds import BOUNDS, SECOND, SMALLEST, U
from tests.runtime.ops.test_ops import ACCUMULATIONS, TOLERANCE, assert_pure, compare

Args = tuple[Any, ...]

ROUNDED = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}  # relative error of storing a result
NATIVE = sorted({op for op in BOUNDS if op in FORWARD})
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# All examples of a test share the library.
some = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
SEED = st.integers(0, 2**31)


class Calls:
    """Records the functions that run in C++, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        call = library.call
        from runtime.ops.native import ops

        def counted(name: str, *args: Any) -> None:
            self.names.append(name)
            call(name, *args)

        monkeypatch.setattr(ops, "call", counted)


@pytest.fixture
def calls(instructions: str, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def raised(args: Args) -> Args:
    return tuple(arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)


def strided(args: Args, source: Source) -> Args:
    """The arguments with matrices replaced by views of columns of wider ones, starting at any column."""

    def view(x: Tensor) -> Tensor:
        before, after = source.below(20, 2).tolist()
        wider = source.normal(x.shape[0], before + x.shape[1] + after).to(x.dtype)
        columns = wider[:, before : before + x.shape[1]]
        return columns.copy_(x)

    return tuple(view(x) if isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point() else x for x in args)


def within(op: str, args: Args, found: tuple[Tensor, ...], before: float = 0.0) -> None:
    """`before`: the largest magnitude in the accumulator before the results were added."""
    exact, bounds = as_tuple(OPS[op](*raised(args))), BOUNDS[op](*raised(args))
    for index, (result, wanted, bound) in enumerate(zip(found, exact, bounds, strict=True)):
        assert result.shape == wanted.shape, (op, index)
        bound = SECOND * bound + ROUNDED[result.dtype] * (wanted.abs() + bound) + SMALLEST
        if before:
            bound += U * (before + wanted.abs()) * (9 + len(args[0]) // 64)
        worst = (
            ((result.double() - before - wanted).abs() / bound).nan_to_num(nan=torch.inf).amax()
            if wanted.numel()
            else 0.0
        )
        assert worst <= 1, f"{op}, result {index}: {worst:.3g} times the bound"


def check(op: str, args: Args, seed: int, dtype: torch.dtype, calls: Calls, views: bool) -> None:
    """Check a forward op and its gradients, all in C++."""
    source = Source(dtype, seed)
    args = args if op == "cross_entropy" else widened(op, args)  # it takes logits of either dtype
    gradients = gradient_arguments(op, args, source)
    for name, given_to in [(op, args), *gradients]:
        chosen = strided(given_to, source) if views else given_to
        calls.names.clear()
        results = as_tuple(OPS[name](*chosen))
        within(name, given_to, results)
        assert calls.names or (op == "grouped_linear" and not len(args[0])), f"{name} ran where it should not"
        if name.endswith("wgrad"):
            acc = torch.full(results[0].shape, 64.0)
            OPS[f"{name}_"](acc, *(arg for arg in chosen if isinstance(arg, Tensor)))
            within(name, given_to, (acc,), before=64.0)


@DTYPES
@pytest.mark.parametrize("op", NATIVE)
def test_usual_arguments(op: str, dtype: torch.dtype, calls: Calls) -> None:
    args = widened(op, FORWARD[op](Source(dtype, seed=0)))
    check(op, args, 1, dtype, calls, views=False)
    assert_pure(op, args)
    for name, given_to in gradient_arguments(op, args, Source(dtype, seed=1)):
        assert_pure(name, given_to)


@DTYPES
@some
@given(SEED, st.integers(0, 70), st.integers(1, 130), st.booleans())
def test_rows_of_any_size(calls: Calls, dtype: torch.dtype, seed: int, rows: int, columns: int, views: bool) -> None:
    source = Source(dtype, seed)
    check("rmsnorm", cases.rmsnorm(source, rows, columns), seed, dtype, calls, views)
    check("swiglu", cases.swiglu(source, rows, columns), seed, dtype, calls, views)
    check("gated_swiglu", cases.gated_swiglu(source, rows, columns), seed, dtype, calls, views)
    check("cross_entropy", cases.cross_entropy(source, rows, columns), seed, dtype, calls, views)


@DTYPES
@some
@given(SEED, st.integers(0, 120), st.integers(1, 300), st.integers(1, 150), st.integers(1, 4), st.booleans())
def test_products_of_any_size(
    calls: Calls, dtype: torch.dtype, seed: int, T: int, K: int, N: int, E: int, views: bool
) -> None:
    source = Source(dtype, seed)
    check("linear_wide", cases.linear(source, T, K, N), seed, dtype, calls, views)
    check("linear", cases.linear(source, T, K, N), seed, dtype, calls, views)
    check("grouped_linear", cases.grouped_linear(source, T, K, N, E), seed, dtype, calls, views)


@DTYPES
@some
@given(
    *(SEED, st.integers(1, 130), st.integers(1, 600), st.integers(1, 140)),
    *(st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 900), st.booleans()),
)
def test_products_of_any_layout(
    calls: Calls,
    dtype: torch.dtype,
    seed: int,
    M: int,
    K: int,
    N: int,
    a_turned: bool,
    b_turned: bool,
    before: int,
    after: int,
    add: bool,
) -> None:
    """Each operand transposed or not, all views of columns starting anywhere; added to c, or not."""
    source = Source(dtype, seed)

    def operand(rows: int, columns: int, turned: bool) -> Tensor:
        x = source.normal(columns, rows) if turned else source.normal(rows, columns)
        wider = torch.nn.functional.pad(x, (before, after if columns < 200 else 1))
        x = wider[:, before : before + x.shape[1]]
        return x.t() if turned else x

    a_MK, b_KN = operand(M, K, a_turned), operand(K, N, b_turned)
    start = Source(torch.float32, seed).normal(M, N + 7) if add else torch.full((M, N + 7), 7.0, dtype=dtype)
    buffer = start.clone()
    product_ = add_product_ if add else set_product_
    product_(buffer[:, 3 : N + 3], a_MK, b_KN)
    assert calls.names and set(calls.names) <= {"product", "few_rows"}
    exact, sizes_MN = a_MK.double() @ b_KN.double(), a_MK.double().abs() @ b_KN.double().abs()
    if add:
        exact, sizes_MN = exact + start[:, 3 : N + 3], sizes_MN + start[:, 3 : N + 3].abs()
    off = (buffer[:, 3 : N + 3].double() - exact).abs()
    assert (off <= ROUNDED[buffer.dtype] * exact.abs() + SECOND * (K + 4) * U * sizes_MN + SMALLEST).all()
    buffer[:, 3 : N + 3] = start[:, 3 : N + 3]
    assert torch.equal(buffer, start), "written beside the result"


@DTYPES
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("N", [199, 208])
@pytest.mark.parametrize(("a_turned", "b_turned"), [(False, False), (False, True), (True, False), (True, True)])
def test_products_in_blocks(
    dtype: torch.dtype, a_turned: bool, b_turned: bool, N: int, add: bool, calls: Calls
) -> None:
    """Several blocks of rows, inner extent and columns, each with a smaller last block; odd and even extents."""
    M, K, source = 601, 1030 + N % 2, Source(dtype, 0)
    a_MK = source.normal(K, M).t() if a_turned else source.normal(M, K)
    b_KN = source.normal(N, K).t() if b_turned else source.normal(K, N)
    c_MN = Source(torch.float32, 1).normal(M, N).to(torch.float32 if add else dtype)
    exact, sizes_MN = a_MK.double() @ b_KN.double(), a_MK.double().abs() @ b_KN.double().abs()
    if add:
        exact, sizes_MN = exact + c_MN, sizes_MN + c_MN.abs()
    (add_product_ if add else set_product_)(c_MN, a_MK, b_KN)
    assert calls.names == ["product"]
    bound = ROUNDED[c_MN.dtype] * exact.abs() + SECOND * (K + 4) * U * sizes_MN + SMALLEST
    assert ((c_MN.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("add", [False, True])
def test_a_product_without_an_inner_extent(add: bool, instructions: str) -> None:
    c_MN = torch.ones(3, 5)
    (add_product_ if add else set_product_)(c_MN, torch.zeros(3, 0), torch.zeros(0, 5))
    assert (c_MN == (1.0 if add else 0.0)).all()


@DTYPES
@some
@given(
    *(SEED, st.integers(1, 3), st.integers(1, 100), st.integers(1, 4)),
    *(st.integers(0, 40), st.integers(1, 20), st.integers(1, 40), st.booleans(), st.booleans()),
)
def test_mla_attention_of_any_size(
    calls: Calls,
    dtype: torch.dtype,
    seed: int,
    B: int,
    S: int,
    H: int,
    nope: int,
    pairs: int,
    value: int,
    views: bool,
    documents: bool,
) -> None:
    args = cases.mla_attention(Source(dtype, seed), B, S, H, nope, 2 * pairs, value, 100.0, documents)
    check("mla_attention", args, seed, dtype, calls, views)
    check("mla_attention_peaks", args, seed, dtype, calls, views)


@DTYPES
@some
@given(
    *(SEED, st.integers(1, 3), st.integers(1, 100), st.integers(1, 3)),
    *(st.integers(1, 4), st.integers(1, 33), st.booleans(), st.booleans()),
)
def test_gqa_attention_of_any_size(
    calls: Calls,
    dtype: torch.dtype,
    seed: int,
    B: int,
    S: int,
    G: int,
    share: int,
    pairs: int,
    views: bool,
    documents: bool,
) -> None:
    args = cases.gqa_attention(Source(dtype, seed), B, S, G, share, 2 * pairs, 100.0, documents)
    check("gqa_attention", args, seed, dtype, calls, views)
    check("gqa_attention_peaks", args, seed, dtype, calls, views)


@DTYPES
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("sequence", [1, 15, 16, 17, 31, 32, 33, 64, 65, 300])
def test_attention_at_the_ends_of_blocks(sequence: int, documents: bool, dtype: torch.dtype, calls: Calls) -> None:
    args = cases.mla_attention(Source(dtype, sequence), 1, sequence, 2, 17, 6, 33, documents=documents)
    check("mla_attention", args, sequence, dtype, calls, views=True)
    check("mla_attention_peaks", args, sequence, dtype, calls, views=True)


def test_a_sequence_whose_blocks_have_fewer_rows(calls: Calls) -> None:
    """The sequence is so long that 32 rows of scores exceed a block."""
    args = cases.mla_attention(Source(torch.float32, 0), 1, 2500, 1, 2, 2, 3)
    check("mla_attention", args, 0, torch.float32, calls, views=False)


def test_no_rows_at_all(instructions: str) -> None:
    for op in ("mla_attention", "gqa_attention"):
        for name, args in [(op, FORWARD[op](Source(torch.float32, 0))), *_gradients(op)]:
            of_none = (x[:0] if isinstance(x, Tensor) else x for x in args)
            assert not any(len(result) for result in as_tuple(OPS[name](*of_none)))


def _gradients(op: str) -> list[tuple[str, Args]]:
    return gradient_arguments(op, FORWARD[op](Source(torch.float32, 0)), Source(torch.float32, 1))


@pytest.mark.parametrize("op", NATIVE)
def test_rough_results_exceed_the_bounds(op: str, instructions: str) -> None:
    """The bounds are tight: an op with inputs rounded to 16 bits of precision exceeds them."""
    args = widened(op, FORWARD[op](Source(torch.float32, seed=5)))
    rough = tuple(
        (x.view(torch.int32) & ~0xFF).view(torch.float32) if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in args
    )
    with pytest.raises(AssertionError, match="times the bound"):
        within(op, args, as_tuple(OPS[op](*rough)))


# ---------------------------------------------------------------- torch, without a library


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("op", NATIVE)
def test_ops_on_torch_pass_the_checks(op: str) -> None:
    compare(op, FORWARD[op](Source(torch.float32, seed=0)), torch.float32)


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("op", ACCUMULATIONS)
def test_ops_on_torch_accumulate(op: str) -> None:
    acc, *args = cases.arguments(op, torch.float32)
    wanted = acc + OPS[op.removesuffix("_")](*cases.arguments(op.removesuffix("_"), torch.float32))
    OPS[op](acc, *args)
    torch.testing.assert_close(acc, wanted, rtol=TOLERANCE[torch.float32], atol=TOLERANCE[torch.float32])
