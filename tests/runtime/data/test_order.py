"""The order of samples with growing sequences: each token of an epoch's pieces is read once, by whichever phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from runtime.data import permutation
from runtime.data.order import Order
from runtime.data.position import Position

PIECE = 64
# ([(sequence, tokens) of each phase, the last one endless], pieces of an epoch)
RUNS = [
    ([(16, 640), (32, 448), (64, 1000)], 40),  # within one epoch
    ([(16, 640), (32, 448), (64, 1000)], 7),  # the first phase has an epoch and a half, the second ends in the third
    ([(64, 128), (16, 3 * 64), (32, 2000)], 5),  # a sequence may shrink
    ([(32, 64), (32, 64), (64, 64)], 1),  # a phase is an epoch
]


def orders(phases: Sequence[tuple[int, int]], pieces: int, seed: int) -> list[Order]:
    phase_orders, first = [], 0
    for index, (sequence, tokens) in enumerate(phases):
        end = first + tokens if index + 1 < len(phases) else None
        phase_orders.append(Order(sequence, pieces * PIECE // sequence, seed, PIECE, first, end))
        first += tokens
    return phase_orders


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("phases", "pieces"), RUNS)
def test_phases_read_each_token_of_an_epoch_once(phases: list[tuple[int, int]], pieces: int, seed: int) -> None:
    position, read = Position(), list[int]()
    for order, (sequence, tokens) in zip(orders(phases, pieces, seed), phases, strict=True):
        position = position.convert_to(order, same_text=True) if position.order else replace(position, order=order)
        assert not position.cuts and position.next * sequence == order.first, "it goes on without a seam"
        drawn = position.draw(tokens // sequence)
        position = position.after(drawn, sequence)
        assert Position.from_json(position.to_json()) == position
        for index in drawn.tolist():
            read += range(*order.tokens_of(index))
            assert order.index(order.window(index), index // order.windows) == index
    epoch = pieces * PIECE
    for begin in range(0, len(read), epoch):
        part = read[begin : begin + epoch]
        assert len({*part}) == len(part), "no token twice"
        assert len(part) < epoch or sorted(part) == [*range(epoch)], "none is left out"


def test_windows_of_a_phase_are_mixed_over_its_pieces() -> None:
    """Neighbouring samples are not consecutive parts of one piece."""
    order, *_ = orders([(16, 64 * 100), (64, 64)], 200, seed=1)
    pieces = [order.tokens_of(index)[0] // PIECE for index in range(400)]
    assert len({*pieces}) == 100
    assert sum(a == b for a, b in pairwise(pieces)) < 20


def test_a_run_with_skipped_samples_continues_with_unseen_ones() -> None:
    """With skipped samples, the first phase reads beyond its end; the samples read there are not repeated."""
    first, second = orders([(16, 640), (64, 10_000)], 40, seed=5)
    position = Position(order=first).skipping([(3, 5)])
    drawn = position.draw(40)
    position = position.after(drawn, 16)
    assert position.tokens == 640 and position.next == 42
    read_tokens = {token for index in drawn.tolist() for token in range(*first.tokens_of(index))}
    after = position.convert_to(second, same_text=True)
    spans = [second.tokens_of(int(index)) for index in after.draw(20)]
    assert after.cuts and all(2 * len(read_tokens & {*range(*span)}) <= 64 for span in spans)


def test_a_run_computes_each_result_of_the_permutation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time or many at once: both use the results that the other computed."""
    computed, round_of = [], permutation._round
    monkeypatch.setattr(permutation, "_round", lambda *given: computed.append(given) or round_of(*given))
    order = Order(8, 5000, seed=77)
    one_by_one = [order.window(index) for index in range(1000)]
    assert 0 < len(computed) == len({*computed}) <= 6 * 128
    num_computed = len(computed)
    assert order.windows_of(np.arange(1000)).tolist() == one_by_one
    assert [order.window(index) for index in range(1000)] == one_by_one
    assert len(computed) == num_computed


def test_an_order_that_phases_do_not_have_is_refused() -> None:
    order = Order(16, 40, 1, 64, 128, 256).to_json()
    for wrong in ({"piece": 65}, {"first": 100}, {"end": 128}, {"end": 200}, {"windows": 41}):
        with pytest.raises(ValueError, match="no position"):
            Position.from_json(Position(order=Order(16, 40, 1)).to_json() | {"order": order | wrong})
