"""Rows of padding go to as many experts as tokens do, evenly, in as few groups as their choices need."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.ops.padding import real_balance, real_counts, spread_padding
from runtime.ops.sequence_balance import sequence_balance
from tests.runtime.ops.cases import Source


@settings(max_examples=100)
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 6), st.integers(1, 60), st.data())
def test_padding_is_spread(seed: int, groups: int, size: int, T: int, data: st.DataObject) -> None:
    experts = groups * size
    top_k = data.draw(st.integers(1, experts))
    source = Source(torch.float64, seed)
    chosen_TK, real_T = source.choices(T, experts, top_k), source.below(2, T).to(torch.int32)
    found_TK = spread_padding(chosen_TK, real_T, experts, groups)
    assert torch.equal(found_TK[real_T == 1], chosen_TK[real_T == 1])
    spread = found_TK[real_T == 0]
    for row in spread.tolist():
        assert len({*row}) == top_k and min(row) >= 0 and max(row) < experts
        assert len({expert // size for expert in row}) <= -(-top_k // size)
    if top_k <= size and len(spread):
        loads = torch.bincount(spread.flatten(), minlength=experts).view(groups, size)[:, : size // top_k * top_k]
        assert loads.max() - loads.min() <= 1, "each block of neighbours in turn"


@pytest.mark.parametrize("softmax", [False, True])
def test_without_padding_the_loss_equals_that_of_whole_sequences(softmax: bool) -> None:
    source = Source(torch.float64, 1)
    logits_TE, chosen_TK = source.normal(24, 6), source.choices(24, 6, 2)
    real_T = torch.ones(24, dtype=torch.int32)
    counts_BE = real_counts(chosen_TK, real_T, None, 6, 8)
    loss = real_balance(logits_TE, counts_BE, real_T, 8, 2, softmax)
    torch.testing.assert_close(loss, sequence_balance(logits_TE, chosen_TK, 8, softmax))


def test_a_sequence_of_padding_alone_has_no_loss() -> None:
    """The last batch of a validation is padded with such sequences."""
    source = Source(torch.float64, 1)
    logits_TE, real_T = source.normal(8, 6), torch.zeros(8, dtype=torch.int32)
    counts_BE = real_counts(source.choices(8, 6, 2), real_T, None, 6, 8)
    assert counts_BE.sum() == 0 and real_balance(logits_TE, counts_BE, real_T, 8, 2, False) == 0
