"""The keys that an indexer chooses, attention over them, and its training loss, against a computation by query."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compiler.model.segments.torch_ops import register
from runtime.ops import OPS, indexer
from runtime.ops.indexer import select_keys
from tests.runtime.ops import cases
from tests.runtime.ops.cases import Source
from tests.runtime.ops.test_ops import compare
from tests.runtime.ops.test_sizes import SEED, few


def chosen_one_by_one(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    sequence: int,
    heads: int,
    top_k: int,
    rate: int,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> list[list[int]]:
    """The chosen keys of each query, by comparing every key with every other."""
    keys = sequence // rate
    B = k.shape[0] // keys if keys else q.shape[0] // sequence
    Q, rows = q.shape[0] // B, []
    for t in range(q.shape[0]):
        position = t % Q if positions is None else int(positions[t])
        start = 0 if starts is None else int(starts[t])
        score = {}
        for s in range(keys):
            tokens = range(s * rate, (s + 1) * rate)
            if tokens[0] >= start and tokens[-1] <= position:
                products = [torch.dot(q_C, k[t // Q * keys + s]) for q_C in q[t].double().split(k.shape[1])]
                score[s] = sum(float(w) * max(0.0, float(hit)) for w, hit in zip(weights[t], products, strict=True))
        before = {s: sum(o > mine or (o == mine and r < s) for r, o in score.items()) for s, mine in score.items()}
        best = sorted(s for s, rank in before.items() if rank < top_k)
        rows.append(best + [-1] * (top_k - len(best)))
    return rows


@few
@given(SEED, st.integers(1, 3), st.integers(4, 40), st.integers(1, 12), st.integers(1, 5), st.booleans(), st.booleans())
def test_the_best_keys_are_chosen(
    seed: int, B: int, S: int, top_k: int, rate: int, documents: bool, some: bool
) -> None:
    args = cases.select_keys(Source(torch.float64, seed), B, S, 3, 4, top_k, rate, documents, some)
    keys = select_keys(*args)
    assert keys.dtype == torch.int32 and keys.tolist() == chosen_one_by_one(*args)
    register()
    assert torch.equal(torch.ops.dsc.select_keys(*args), keys)


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("some", [False, True])
def test_blocks_do_not_change_results(monkeypatch: pytest.MonkeyPatch, rate: int, some: bool) -> None:
    args = cases.select_keys(Source(torch.float64, 3), 2, 60, rate=rate, top_k=7, documents=True, some=some)
    unblocked = select_keys(*args)
    monkeypatch.setitem(indexer.BLOCK_BYTES, "cpu", 8 * 3 * (60 // rate) * 5)  # five queries
    assert torch.equal(select_keys(*args), unblocked)


def test_ties_choose_the_earlier_keys() -> None:
    """No head has a positive product with a key, so all scores are 0."""
    q, k, weights = -torch.ones(50, 2 * 4), torch.ones(50, 4), torch.ones(50, 2)
    chosen = select_keys(q, k, weights, 50, 2, 3, 1)
    assert chosen[0].tolist() == [0, -1, -1] and chosen[1].tolist() == [0, 1, -1]
    assert (chosen[2:] == torch.arange(3)).all()


def test_queries_before_the_first_compressed_key_see_none() -> None:
    q, k, weights, S, *options = cases.select_keys(Source(torch.float32, 1), 1, 3, rate=1)
    chosen = select_keys(q, k[:0], weights, S, *options[:2], 4)
    assert chosen.tolist() == [[-1, -1, -1]] * 3


def test_bf16_is_scored_in_fp32() -> None:
    args = cases.select_keys(Source(torch.bfloat16, 5), 2, 40, top_k=6)
    wide = (arg.float() if isinstance(arg, Tensor) else arg for arg in args)
    assert torch.equal(select_keys(*args), select_keys(*wide))


def test_later_keys_and_other_documents_change_nothing() -> None:
    q, k, weights, *options = cases.select_keys(Source(torch.float64, 0), 1, 50, documents=True, top_k=5)
    begins = sorted({*options[-2].tolist()})
    first, end = begins[1], [*begins, 50][2]
    changed = k.clone()
    changed[:first], changed[end:] = 7, 7
    before, after = (select_keys(q, keys, weights, *options)[first:end] for keys in (k, changed))
    assert torch.equal(before, after)


@few
@given(SEED, st.integers(1, 3), st.integers(1, 30), st.integers(1, 12), st.booleans())
def test_attention_over_chosen_keys(seed: int, B: int, S: int, top_k: int, documents: bool) -> None:
    args = cases.chosen_attention(Source(torch.float64, seed), B, S, top_k=top_k, documents=documents)
    compare("chosen_attention", args, torch.float64)


def test_attention_over_all_keys_is_plain_attention() -> None:
    """`mla_attention` without rotation, over several blocks."""
    S = 200
    q, kv, k_rope, *sizes, _, _ = cases.mla_attention(Source(torch.float64, 2), 2, S, theta=0.0)
    chosen = torch.arange(S).expand(S, S).tril() - torch.ones(S, S).triu(1)
    o, lse = OPS["chosen_attention"](q, kv, k_rope, chosen.repeat(2, 1).to(torch.int32), *sizes[:-1])
    wanted = OPS["mla_attention"](q, kv, k_rope, *sizes)
    torch.testing.assert_close((o, lse), wanted, rtol=1e-12, atol=1e-12)


@few
@given(SEED, st.integers(1, 3), st.integers(4, 24), st.integers(0, 9), st.booleans(), st.booleans())
def test_loss_and_gradients_of_an_indexer(seed: int, B: int, S: int, top_k: int, documents: bool, some: bool) -> None:
    """Over the chosen keys; over all with `top_k` = 0."""
    args = cases.indexer_loss(Source(torch.float64, seed), B, S, top_k=top_k, documents=documents, some=some)
    compare("indexer_loss", args, torch.float64)


@pytest.mark.parametrize("top_k", [0, 5])
def test_blocks_add_up_to_the_loss(monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    args = cases.indexer_loss(Source(torch.float64, 3), 2, 40, top_k=top_k, documents=True)
    unblocked = OPS["indexer_loss"](*args)
    monkeypatch.setitem(indexer.BLOCK_BYTES, "cpu", 8 * 3 * 40 * 7)  # seven queries
    torch.testing.assert_close(OPS["indexer_loss"](*args), unblocked, rtol=1e-12, atol=1e-12)


def test_an_indexer_that_agrees_has_no_loss_and_no_gradient() -> None:
    """Its one head is attention's one head: scores that are all hits, and no rope."""
    source = Source(torch.float64, 4)
    k, values, query = source.normal(9, 4).abs(), source.normal(9, 3), source.normal(9, 4).abs()
    none, weights = torch.zeros(9, 2, dtype=torch.float64), torch.ones(9, 1, dtype=torch.float64)
    kv, wider = torch.cat((k, values), dim=1), torch.cat((query, none), dim=1)
    loss, *gradients = OPS["indexer_loss"](query / 6**0.5, k, weights, wider, kv, none, None, 9, 1, 1, 4, 1)
    assert abs(loss) < 1e-14 and all(gradient.abs().max() < 1e-14 for gradient in gradients)
