"""The position in the data: the right samples are drawn next, whatever changed."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dsl.closed_forms.ramp import ramp
from dsl.schema import Batch
from runtime.contract.rate import batch_at, last_step, tokens_after
from runtime.data.order import Order
from runtime.data.permutation import permute, unpermute
from runtime.data.position import Position

TOKENS = 1000  # of the text


def order(sequence: int, seed: int = 1) -> Order:
    return Order(sequence, TOKENS // sequence, seed)


def walk(position: Position, sizes: list[int]) -> tuple[Position, list[int]]:
    """The position after steps of these sizes, and the drawn samples. It is saved and loaded after each step."""
    drawn: list[int] = []
    for size in sizes:
        position = Position.from_json(json.loads(json.dumps(position.to_json())))
        samples = position.draw(size)
        drawn += samples.tolist()
        assert position.order is not None
        position = position.after(samples, position.order.sequence)
    return position, drawn


def times_seen(order: Order, drawn: list[int]) -> np.ndarray:
    """[token]: the number of times that these samples contain it."""
    counts = np.zeros(TOKENS, dtype=np.int64)
    for index in drawn:
        first, end = order.tokens_of(index)
        counts[first:end] += 1
    return counts


@pytest.mark.parametrize("num", [1, 2, 3, 5, 16, 17, 100, 1000])
def test_the_permutation_has_an_inverse(num: int) -> None:
    for epoch in range(3):
        assert [unpermute(permute(i, num, 7, epoch), num, 7, epoch) for i in range(num)] == [*range(num)]


def test_another_batch_continues_with_the_next_sample() -> None:
    for sizes in ([8] * 5 + [16] * 3, [8] * 5 + [4] * 7, [3, 1, 7, 2]):
        position, drawn = walk(Position(order=order(10)), sizes)
        assert drawn == [*range(sum(sizes))]
        assert (position.samples, position.tokens) == (sum(sizes), 10 * sum(sizes))


@pytest.mark.parametrize("begun", [37, 100 + 63])
def test_windows_that_divide_earlier_ones_skip_and_repeat_nothing(begun: int) -> None:
    """20 → 10 → 5 tokens within an epoch: at its end every token has been seen exactly once."""
    first, second, third = order(20), order(10), order(5)
    begun %= first.windows
    position, first_drawn = walk(Position(order=first, next=50, samples=50, tokens=1000), [begun])
    position = position.convert_to(second, same_text=True)
    assert position.unavoidable_tokens() == (0, 0)
    remaining = 2 * (first.windows - begun)
    position, second_drawn = walk(position, [remaining // 2])
    position = position.convert_to(third, same_text=True)
    assert position.unavoidable_tokens() == (0, 0)
    position, third_drawn = walk(position, [2 * (remaining - remaining // 2)])
    counts = times_seen(first, first_drawn) + times_seen(second, second_drawn) + times_seen(third, third_drawn)
    assert (counts == 1).all()
    assert position.tokens == 1000 + TOKENS
    _, following = walk(position, [third.windows])
    assert following == [*range(2 * third.windows, 3 * third.windows)], "the next epoch is whole again"


@pytest.mark.parametrize("sequence", [30, 40, 7, 125])
def test_no_choice_of_windows_skips_and_repeats_less(sequence: int) -> None:
    before, after = order(20), order(sequence)
    position, drawn = walk(Position(order=before), [19])
    counts = times_seen(before, drawn)
    position = position.convert_to(after, same_text=True)
    skipped, repeated = position.unavoidable_tokens() or (-1, -1)
    following: list[int] = []
    while True:
        position, drawn = walk(position, [1])
        if drawn[0] >= after.windows:
            break
        following += drawn
    again = times_seen(after, following)
    covered = after.windows * after.sequence  # no window has the remaining tokens
    assert int(((counts == 0) & (again == 0))[:covered].sum()) == skipped
    assert int(((counts == 1) & (again == 1)).sum()) == repeated
    best = 0
    for window in range(after.windows):
        part = counts[window * sequence : (window + 1) * sequence]
        best += min(int(part.sum()), int((part == 0).sum()))
    assert skipped + repeated == best > 0


def test_samples_that_are_left_out_are_never_drawn() -> None:
    position = Position(order=order(10)).skipping([(8, 16)]).skipping([(14, 20), (40, 41)])
    position, drawn = walk(position, [4, 8, 8, 16])
    assert drawn == [i for i in range(60) if not (8 <= i < 20 or i == 40)][:36]
    assert (position.samples, position.skip) == (36, ())
    assert position.skipping([(0, position.next)]) == position, "what has passed is not remembered"


def test_samples_left_out_stay_out_when_windows_are_cut_anew() -> None:
    position, drawn = walk(Position(order=order(20)).skipping([(6, 9)]), [4])
    position = position.convert_to(order(10), same_text=True)
    _, remaining = walk(position, [2 * (order(20).windows - 4 - 3)])
    counts = times_seen(order(20), [*drawn, 6, 7, 8]) + times_seen(order(10), remaining)
    assert (counts == 1).all()


def test_another_text_keeps_only_the_place() -> None:
    position, _ = walk(Position(order=order(20)).skipping([(60, 70)]), [30])
    moved = position.convert_to(Order(20, 400, 1), same_text=False)
    assert (moved.next, moved.cuts, moved.skip, moved.tokens) == (30, (), (), 600)
    assert position.convert_to(Order(10, 400, 1), same_text=False).next == 60


def test_sizes_of_a_ramp_follow_from_tokens() -> None:
    """Sizes equal the compiler's for an unchanged run, and reach the end from any number of tokens."""
    choose = random.Random(0)
    for _ in range(300):
        start = choose.randint(1, 9)
        grown = Batch.model_construct(
            start=start, end=start + choose.randint(0, 40), over_tokens=choose.randint(0, 3000)
        )
        sequence, total = choose.randint(1, 9), choose.randint(1, 5000)
        expected = ramp(grown, sequence, quantum=choose.randint(1, 6))
        batches = [(size.first_step, size.batch) for size in expected.sizes]
        tokens = 0
        for step in range(60):
            assert tokens == tokens_after(batches, sequence, step) == expected.tokens_at(step)
            assert last_step(batches, sequence, step, tokens, total) == max(step, expected.steps_for(total))
            tokens += batch_at(batches, sequence, tokens) * sequence
        step, tokens = 7, choose.randint(0, 4000)
        end = last_step(batches, sequence, step, tokens, total)
        while tokens < total:
            tokens, step = tokens + batch_at(batches, sequence, tokens) * sequence, step + 1
        assert step == end


def test_invalid_positions_are_refused() -> None:
    position, _ = walk(Position(order=order(20)).skipping([(33, 36)]), [30])
    good = position.convert_to(order(10), same_text=True).skipping([(80, 90)]).to_json()
    assert Position.from_json(good).to_json() == good
    choose = random.Random(1)
    junk: list[Any] = [None, -1, 1.5, "x", [], {}, True, 1 << 70, [[2, 1]], [[1, 2], [0, 1]], [[1]], float("nan")]
    refused = 0
    for _ in range(2000):
        bad = json.loads(json.dumps(good))
        node, key = choose.choice([*places(bad)])
        node[key] = choose.choice(junk)
        try:
            position = Position.from_json(bad)
        except ValueError:
            refused += 1
        else:
            position.draw(3)
    assert refused > 1000


def places(value: Any) -> Any:
    """(container, key) of all values nested in a JSON value."""
    for key, element in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(element, dict | list):
            yield from places(element)


def test_ranges_are_ascending() -> None:
    position = Position(order=order(10)).skipping([(50, 60), (10, 20), (20, 30), (55, 70)])
    assert position.skip == ((10, 30), (50, 70))
    assert all(a[1] < b[0] for a, b in pairwise(position.skip))
