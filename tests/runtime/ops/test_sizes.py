"""Random and extreme sizes: empty groups, no rows at all, one head, several blocks, ties, void targets."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.model.ops import RULES
from runtime.ops import OPS, cross_entropy, cross_entropy_dgrad, mla_attention, permute, route, unpermute
from runtime.ops.activation import BLOCK
from runtime.ops.causal import BLOCK_BYTES, BLOCK_ROWS
from runtime.ops.compressed_attention import BLOCK_BYTES as BYTES_OF_COMPRESSED
from runtime.ops.compressed_attention import FEW_POSITIONS
from tests.runtime.ops import cases, compress_cases, references
from tests.runtime.ops.cases import Source
from tests.runtime.ops.test_ops import compare

SMALL = st.integers(1, 9)
SEED = st.integers(0, 2**31)
few = settings(max_examples=25)


@few
@given(SEED, st.integers(0, 9), SMALL, SMALL)
def test_linear_and_rmsnorm(seed: int, T: int, K: int, N: int) -> None:
    compare("linear", cases.linear(Source(torch.float64, seed), T, K, N), torch.float64)
    compare("rmsnorm", cases.rmsnorm(Source(torch.float64, seed), T, K, eps=10.0**-N), torch.float64)


@few
@given(SEED, st.integers(0, 40), SMALL, SMALL, st.integers(1, 8))
def test_experts(seed: int, R: int, K: int, N: int, E: int) -> None:
    source = Source(torch.float64, seed)
    compare("grouped_linear", cases.grouped_linear(source, R, K, N, E), torch.float64)
    compare("gated_swiglu", cases.gated_swiglu(source, R, N), torch.float64)


@few
@given(SEED, st.integers(1, 3), st.integers(1, 20), st.integers(1, 4), SMALL, st.integers(1, 4), SMALL)
def test_mla_attention(seed: int, B: int, S: int, H: int, nope: int, pairs: int, value: int) -> None:
    args = cases.mla_attention(Source(torch.float64, seed), B, S, H, nope, 2 * pairs, value, theta=100.0)
    compare("mla_attention", args, torch.float64)


@pytest.mark.parametrize("sizes", list(product((1, 2), repeat=5)))
def test_mla_attention_with_every_size_one_or_two(sizes: tuple[int, ...]) -> None:
    """With a dimension of one, copies become views; random sizes seldom hit the critical combination."""
    B, S, H, nope, value = sizes
    args = cases.mla_attention(Source(torch.float64, 0), B, S, H, nope, 2, value)
    compare("mla_attention", args, torch.float64)


@few
@given(SEED, st.integers(1, 3), st.integers(1, 40), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))
def test_gqa_attention(seed: int, B: int, S: int, G: int, r: int, pairs: int) -> None:
    args = cases.gqa_attention(Source(torch.float64, seed), B, S, G, r, 2 * pairs, theta=100.0)
    compare("gqa_attention", args, torch.float64)


@pytest.mark.parametrize("sizes", list(product((1, 2), repeat=4)))
def test_gqa_attention_with_every_size_one_or_two(sizes: tuple[int, ...]) -> None:
    compare("gqa_attention", cases.gqa_attention(Source(torch.float64, 0), *sizes, C=2), torch.float64)


@few
@given(SEED, st.integers(0, 9), SMALL, SMALL)
def test_head_rmsnorm(seed: int, T: int, H: int, C: int) -> None:
    compare("head_rmsnorm", cases.head_rmsnorm(Source(torch.float64, seed), T, H, C, eps=10.0**-T), torch.float64)


@pytest.mark.parametrize("biased", [True, False], ids=["biased", "without bias"])
@pytest.mark.parametrize("softmax", [False, True], ids=["sigmoid", "softmax"])
@few
@given(SEED, st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.data(), st.booleans())
def test_route(
    softmax: bool, biased: bool, seed: int, T: int, groups: int, members: int, data: st.DataObject, normalize: bool
) -> None:
    """Including groups of one expert, which have no two best."""
    top_groups = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, top_groups * members))
    source = Source(torch.float64, seed)
    args = cases.route(source, T, groups, members, top_groups, top_k, normalize, 1.5, softmax, biased)
    compare("route", args, torch.float64)
    assert torch.equal(route(*args)[1], references.route(*args)[1])


@few
@given(SEED, st.integers(1, 3), SMALL, st.integers(1, 8), st.data(), st.booleans())
def test_rows_of_choices(seed: int, B: int, S: int, E: int, data: st.DataObject, softmax: bool) -> None:
    K = data.draw(st.integers(1, E))
    source = Source(torch.float64, seed)
    compare("sequence_balance", cases.sequence_balance(source, B, S, E, K, softmax), torch.float64)
    args = cases.permute(source, B * S, 3, E, K)
    compare("permute", args, torch.float64)
    compare("unpermute", cases.unpermute(source, B * S, 3, E, K), torch.float64)
    rows_SD, _, order_S, counts_E = permute(*args)
    assert counts_E.sum() == B * S * K
    torch.testing.assert_close(unpermute(rows_SD, order_S, K), K * args[0])


@few
@given(SEED, SMALL, SMALL, SMALL)
def test_ends_of_the_model(seed: int, T: int, V: int, D: int) -> None:
    source = Source(torch.float64, seed)
    compare("embedding", cases.embedding(source, T, V, D), torch.float64)
    compare("cross_entropy", cases.cross_entropy(source, T, V), torch.float64)
    compare("swiglu", cases.swiglu(source, T, D), torch.float64)


@pytest.mark.parametrize("sequence", [BLOCK_ROWS, 2 * BLOCK_ROWS + 3])
def test_attention_over_several_blocks_of_rows_and_heads(sequence: int) -> None:
    heads = BLOCK_BYTES // (BLOCK_ROWS * sequence * 8) // 2 + 1  # two sequences fill more than one block
    args = cases.mla_attention(Source(torch.float64, 3), 2, sequence, heads, nope=2, rope=2, value=2)
    compare("mla_attention", args, torch.float64)


@pytest.mark.parametrize("r", [3, 4 * BLOCK_ROWS])
def test_grouped_attention_over_several_blocks(r: int) -> None:
    """Rows of several positions in a block; a position with more rows than a block; several blocks of heads."""
    S = BLOCK_ROWS + 3
    groups = BLOCK_BYTES // (max(1, 2 * BLOCK_ROWS // r) * r * S * 8) // 2 + 1
    args = cases.gqa_attention(Source(torch.float64, 3), 2, S, groups, r, C=2)
    compare("gqa_attention", args, torch.float64)


@few
@given(
    SEED,
    st.integers(1, 2),
    st.integers(1, 40),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(0, 45),
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
)
def test_bounded_attention(seed: int, B: int, S: int, G: int, r: int, window: int, softcap: float, sinks: bool) -> None:
    args = cases.bounded_attention(Source(torch.float64, seed), B, S, G, r, 2, 0.0, window, softcap, sinks)
    compare_bounded(args, sinks)


@pytest.mark.parametrize("window", [1, 5, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 2, 0])
@pytest.mark.parametrize("r", [1, 3])
def test_bounded_attention_over_several_blocks(r: int, window: int) -> None:
    """Windows that end within a block, at its edges, and after several blocks."""
    args = cases.bounded_attention(Source(torch.float64, 3), 1, 2 * BLOCK_ROWS + 3, 2, r, 2, 100.0, window, 2.0)
    compare_bounded(args, sinks=True)


SOME = {
    "mla_attention": cases.mla_attention,
    "gqa_attention": cases.gqa_attention,
    "bounded_attention": cases.bounded_attention,
    "rotate": cases.rotate,
}


@few
@given(SEED, st.sampled_from([*SOME]), st.integers(1, 3), st.integers(1, 40))
def test_ops_of_documents_compute_each_by_itself(seed: int, op: str, B: int, S: int) -> None:
    args = SOME[op](Source(torch.float64, seed), B, S, documents=True)
    compare(op, args, torch.float64)


@pytest.mark.parametrize("op", ["mla_attention", "gqa_attention", "bounded_attention"])
def test_documents_over_several_blocks(op: str) -> None:
    args = SOME[op](Source(torch.float64, 3), 2, 2 * BLOCK_ROWS + 3, documents=True)
    compare(op, args, torch.float64)


@few
@given(SEED, st.sampled_from([*SOME]), st.integers(1, 3), st.integers(4, 40), st.booleans())
def test_ops_of_some_rows_of_each_sequence(seed: int, op: str, B: int, S: int, documents: bool) -> None:
    """Queries at some positions see all keys of their sequence at or before them."""
    of_one = 1 if op == "rotate" else B
    args = SOME[op](Source(torch.float64, seed), of_one, S, documents=documents, some=True)
    compare(op, args, torch.float64)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("op", ["mla_attention", "gqa_attention", "bounded_attention"])
def test_some_rows_over_several_blocks(op: str, documents: bool) -> None:
    args = SOME[op](Source(torch.float64, 3), 2, 4 * BLOCK_ROWS + 3, documents=documents, some=True)
    compare(op, args, torch.float64)


def test_tokens_of_other_documents_change_nothing() -> None:
    """Bit-identical: hidden keys have a weight of 0, in both directions."""
    for op, case in SOME.items():
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            args = case(Source(dtype, 0), B=1, S=50, documents=True)
            begins = sorted({*args[RULES[op].args.index("starts")].tolist()})
            first, end = begins[1], [*begins, 50][2]
            changed = tuple(x.clone() if isinstance(x, torch.Tensor) and x.dim() == 2 else x for x in args)
            for x in changed:
                if isinstance(x, torch.Tensor) and x.dim() == 2:
                    x[:first], x[end:] = 7, 7
            before, after = (cases.as_tuple(OPS[op](*operands))[0][first:end] for operands in (args, changed))
            assert torch.equal(before, after), (op, dtype)


def compare_bounded(args: tuple[Any, ...], sinks: bool) -> None:
    """The op and its gradients against the reference; without sinks it has none for them."""
    if sinks:
        compare("bounded_attention", args, torch.float64)
        return
    inputs = [tensor.requires_grad_() for tensor in args[:3]]
    o = references.bounded_attention(*args)
    do = torch.randn(o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(o, inputs, do)
    with torch.no_grad():
        output, lse = OPS["bounded_attention"](*args)
        gradients = OPS["bounded_attention_dgrad"](do, *args[:3], output, lse, *args[4:])
    for result, expected in zip((output, *gradients), (o, *wanted), strict=True):
        torch.testing.assert_close(result, expected.detach(), rtol=1e-12, atol=1e-12)


@few
@given(
    SEED, st.integers(1, 20), st.integers(1, 3), st.integers(0, 2), st.integers(0, 3), st.integers(0, 2), st.booleans()
)
def test_rotate(seed: int, S: int, H: int, first: int, pairs: int, behind: int, turns: bool) -> None:
    behind += not (first or pairs or behind)
    args = cases.rotate(Source(torch.float64, seed), 2, S, H, first, 2 * pairs, behind, 20.0 * turns)
    compare("rotate", args, torch.float64)


@few
@given(SEED, st.integers(1, 20), st.integers(1, 3), st.integers(1, 3), st.sampled_from([-3, -2, -1, 2, 3]))
def test_rotate_rows_that_are_apart(seed: int, S: int, H: int, pairs: int, stride: int) -> None:
    args = cases.rotate(Source(torch.float64, seed), 2, S + 2, H, 1, 2 * pairs, 1, stride=stride)
    compare("rotate", args, torch.float64)


@few
@given(SEED, st.integers(1, 3), st.integers(1, 20), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_compress(seed: int, B: int, S: int, rate: int, C: int, overlap: bool) -> None:
    """Sequences with one entry and with more, and tokens after the last entry."""
    args = compress_cases.compress(Source(torch.float64, seed), B, rate + S - 1, rate, C, overlap)
    compare("compress", args, torch.float64)


@few
@given(
    *(SEED, st.integers(1, 2), st.integers(1, 24), st.integers(1, 3), st.integers(1, 9), st.integers(2, 5)),
    *(st.integers(0, 4), st.booleans()),
)
def test_compressed_attention(
    seed: int, B: int, S: int, H: int, window: int, rate: int, top_k: int, sinks: bool
) -> None:
    S += rate - 1
    args = compress_cases.compressed_attention(Source(torch.float64, seed), B, S, H, 2, window, rate, top_k, sinks)
    compare_compressed(args, sinks)


@few
@given(SEED, st.integers(1, 3), st.integers(1, 24), st.integers(2, 5), st.integers(0, 4))
def test_loss_of_an_indexer_of_entries(seed: int, B: int, S: int, rate: int, top_k: int) -> None:
    """Queries before the first entry see none."""
    args = compress_cases.entry_loss(Source(torch.float64, seed), B, S + rate - 1, rate=rate, top_k=top_k)
    compare("indexer_loss", args, torch.float64)


@pytest.mark.parametrize("top_k", [0, 2])
def test_a_short_sequence_has_no_entry(top_k: int) -> None:
    source = Source(torch.float64, 0)
    x, bias, *options = compress_cases.compress(source, 2, 3, 4)
    assert OPS["compress"](x, bias, *options)[0].shape == (0, 4)
    args = compress_cases.compressed_attention(source, S=3, rate=4, top_k=top_k)
    q, kv, _, _, sinks, sequence, heads, window, _ = args
    alone = OPS["bounded_attention"](q, kv, kv, sinks, sequence, heads, 1, 0.0, window, 0.0)
    for result, expected in zip(OPS["compressed_attention"](*args), alone, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("window", [1, FEW_POSITIONS, 40])
@pytest.mark.parametrize("top_k", [0, 3])
def test_compressed_attention_over_several_blocks(window: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BYTES_OF_COMPRESSED, "cpu", 2**13)
    args = compress_cases.compressed_attention(Source(torch.float64, 3), 2, 70, 3, 2, window, 4, top_k)
    compare_compressed(args, sinks=True)


def compare_compressed(args: tuple[Any, ...], sinks: bool) -> None:
    """The op and its gradients against the reference; without sinks it has none for them."""
    if sinks:
        compare("compressed_attention", args, torch.float64)
        return
    inputs = [tensor.requires_grad_() for tensor in args[:3]]
    o = references.compressed_attention(*args)
    do = torch.randn(o.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(o, inputs, do)
    with torch.no_grad():
        output, lse = OPS["compressed_attention"](*args)
        gradients = OPS["compressed_attention_dgrad"](do, *args[:4], output, lse, *args[5:])
    for result, expected in zip((output, *gradients), (o, *wanted), strict=True):
        torch.testing.assert_close(result, expected.detach(), rtol=1e-12, atol=1e-12)


def test_gated_swiglu_over_several_blocks_of_rows() -> None:
    args = cases.gated_swiglu(Source(torch.float64, 9), R=230, I=BLOCK // 100)
    compare("gated_swiglu", args, torch.float64)


def test_attention_with_large_scores_and_float32_stays_exact() -> None:
    q, kv, k_rope, *sizes = cases.mla_attention(Source(torch.float32, 4), S=70)
    o, lse = mla_attention(100 * q, 100 * kv, k_rope, *sizes)
    exact, exact_lse = mla_attention(100 * q.double(), 100 * kv.double(), k_rope.double(), *sizes)
    torch.testing.assert_close(o.double(), exact, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_lse_is_the_logarithm_of_the_softmax_denominator() -> None:
    logits_TV, targets_T = cases.cross_entropy(Source(torch.float64, 5), T=300, V=2000)  # several blocks of rows
    loss, lse_T = cross_entropy(1000 * logits_TV, targets_T)
    torch.testing.assert_close(lse_T, torch.logsumexp(1000 * logits_TV, dim=-1))
    assert loss.isfinite() and cross_entropy_dgrad(loss, 1000 * logits_TV, targets_T, lse_T).isfinite().all()


def test_only_void_targets_give_no_loss_and_no_gradient() -> None:
    logits_TV = Source(torch.float64, 6).normal(4, 5)
    targets_T = torch.full((4,), -1)
    loss, lse_T = cross_entropy(logits_TV, targets_T)
    assert loss == 0
    assert not cross_entropy_dgrad(torch.tensor(3.0, dtype=torch.float64), logits_TV, targets_T, lse_T).any()


def test_bias_steers_the_choice_and_not_the_weights() -> None:
    logits_TE = Source(torch.float64, 7).normal(5, 8)
    bias_E = torch.zeros(8, dtype=torch.float64)
    bias_E[6] = 10.0
    gate_TK, expert_TK = route(logits_TE, bias_E, False, 1, 1, 2, True, 1.0)
    assert (expert_TK[:, 0] == 6).all()
    torch.testing.assert_close(gate_TK.sum(1), torch.ones(5, dtype=torch.float64))
    score_TK = torch.sigmoid(logits_TE).gather(1, expert_TK)
    torch.testing.assert_close(gate_TK[:, 0] / gate_TK[:, 1], score_TK[:, 0] / score_TK[:, 1])


def test_group_scores_use_the_best_expert_with_softmax_and_the_two_best_with_sigmoid() -> None:
    """The first group has the best expert, the second has the best two."""
    logits_TE = torch.tensor([[3.0, -9.0, 2.0, 2.0]], dtype=torch.float64)
    assert route(logits_TE, None, True, 2, 1, 1, False, 1.0)[1].tolist() == [[0]]
    assert route(logits_TE, None, False, 2, 1, 2, False, 1.0)[1].sort().values.tolist() == [[2, 3]]


def test_softmax_covers_all_experts_unless_normalized() -> None:
    logits_TE = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64).log()
    plain, expert_TK = route(logits_TE, None, True, 1, 1, 2, False, 16.0)
    assert expert_TK.tolist() == [[3, 2]]
    torch.testing.assert_close(plain, torch.tensor([[6.4, 4.8]], dtype=torch.float64))
    normalized, _ = route(logits_TE, None, True, 1, 1, 2, True, 7.0)
    torch.testing.assert_close(normalized, torch.tensor([[4.0, 3.0]], dtype=torch.float64))


@pytest.mark.parametrize("op", ["grouped_linear_wgrad", "grouped_linear_wgrad_"])
def test_no_rows_leave_the_weight_gradient_untouched(op: str) -> None:
    source = Source(torch.float64, 8)
    acc_ENK, offsets_E = source.normal(2, 3, 4), torch.zeros(2, dtype=torch.int32)
    if op.endswith("_"):
        before = acc_ENK.clone()
        OPS[op](acc_ENK, source.normal(0, 3), source.normal(0, 4), offsets_E)
        assert torch.equal(acc_ENK, before)
    else:
        assert not OPS[op](source.normal(0, 3), source.normal(0, 4), offsets_E, 2).any()
