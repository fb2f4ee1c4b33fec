"""Samples of several sources: after every sample, each source is within one sample of its weight, and in its order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsl.facts.shares import integer_weights
from runtime.build.build import Build
from runtime.checkpoint.publish import LoadedCheckpoint
from runtime.contract import BlendSource, DataRecipe, TrainedTokenizer
from runtime.data.blend import Blend, SourceShare
from runtime.data.order import Order
from runtime.data.position import Move, Position
from runtime.run.starting_position import order_of, resume_position
from tests.runtime.plans import small_plan

WEIGHTS = st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any)
SAME: Move = partial(Position.convert_to, same_text=True)


def blend(weights: Sequence[int], windows: Sequence[int] | int = 50, **changes: int) -> Blend:
    sizes = [windows] * len(weights) if isinstance(windows, int) else windows
    orders = [replace(Order(8, size, seed=1), **changes) for size in sizes]  # type: ignore[arg-type]
    shares = (
        SourceShare(f"s{k}", weight, order) for k, (weight, order) in enumerate(zip(weights, orders, strict=True))
    )
    return Blend(tuple(shares))


def walk(position: Position, sizes: Sequence[int]) -> tuple[Position, list[tuple[str, int]]]:
    """The position after steps of these sizes, and (source, window) of each sample. The position is saved and
    loaded after each step."""
    windows: list[tuple[str, int]] = []
    for size in sizes:
        position = Position.from_json(json.loads(json.dumps(position.to_json())))
        assert isinstance(position.order, Blend)
        drawn = position.draw(size)
        for index in drawn.tolist():
            number, of_source = position.order.place(index)
            share = position.order.shares[number]
            windows.append((share.name, int(share.order.window(of_source))))
        position = position.after(drawn, 8)
    return position, windows


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A build with three sources of the same text, 100 windows of 8 tokens. `tmp_path` is their prepared folder."""
    names = ("web", "code", "again")
    sources = tuple(BlendSource(name, "text.txt", 1) for name in names)
    counts = {name: {split: {"tokens": 802} for split in ("train", "validation")} for name in names}
    (tmp_path / "meta.json").write_text(json.dumps({"sources": counts}), "utf-8")
    plan = small_plan(data=DataRecipe(None, TrainedTokenizer(300), 0.0, sources=sources))
    return cast(Build, SimpleNamespace(plan=replace(plan, train=replace(plan.train, sequence=8, seed=1))))


def test_sources_of_equal_text_have_different_orders(build: Build, tmp_path: Path) -> None:
    """The seeds are pinned: a change would give resumed runs other samples."""
    order = order_of(build, tmp_path)
    assert isinstance(order, Blend)
    drawn = {share.name: tuple(share.order.window(i) for i in range(100)) for share in order.shares}
    assert all(sorted(windows) == [*range(100)] for windows in drawn.values()) and len({*drawn.values()}) == 3
    assert [share.order.seed for share in order.shares] == [7266844446678, 156469784453624, 81107898825837]


def test_a_run_whose_sources_had_one_order_goes_on(build: Build, tmp_path: Path) -> None:
    """A checkpoint of a version that used the run's seed for all sources: no window is repeated within an epoch."""
    order = order_of(build, tmp_path)
    assert isinstance(order, Blend)
    shares = (replace(share, order=replace(share.order, seed=1)) for share in order.shares)
    before, windows = walk(Position(order=replace(order, shares=tuple(shares))), [8] * 15)
    checkpoint = cast(LoadedCheckpoint, SimpleNamespace(meta={"position": before.to_json()}))
    position, notes = resume_position(checkpoint, build, order, same_text=True)
    assert notes == ["sources have other orders: samples not yet used in this epoch come first"]
    windows += walk(position, [8] * 22 + [4])[1]
    assert len(windows) == 300 == len({*windows})


@given(WEIGHTS, st.integers(0, 10_000))
@settings(deadline=None, max_examples=200)
def test_each_source_is_within_one_sample_of_its_weight(weights: list[int], far: int) -> None:
    """After each prefix. Each source gives its samples in order, and any sample can be computed alone."""
    order, total = blend(weights), sum(weights)
    given_so_far = [0] * len(weights)
    for index in range(2 * total + 3):
        assert order.counts(index) == tuple(given_so_far)
        number, of_source = order.place(index)
        assert of_source == given_so_far[number]
        given_so_far[number] += 1
        for count, weight in zip(given_so_far, weights, strict=True):
            assert abs(count - Fraction(weight * (index + 1), total)) < 1
    number, of_source = order.place(far)
    assert of_source == order.counts(far)[number]
    assert sum(order.counts(far)) == far


@given(st.lists(st.decimals(0, 1, places=2), min_size=1, max_size=5).filter(any))
def test_integer_weights_have_the_written_proportions(weights: list[object]) -> None:
    written = [float(str(weight)) for weight in weights]
    integers = integer_weights(written)
    total = sum(Fraction(repr(weight)) for weight in written)
    assert [Fraction(integer, sum(integers)) for integer in integers] == [
        Fraction(repr(weight)) / total for weight in written
    ]
    assert sum(integers) <= sum(round(100 * weight) for weight in written)


@given(WEIGHTS, st.lists(st.integers(1, 9), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_no_window_twice_within_an_epoch_of_its_source(weights: list[int], sizes: list[int]) -> None:
    order = blend(weights, [3 + k for k in range(len(weights))])
    position, windows = walk(Position().continue_in_blend(order, SAME), sizes)
    epochs_read(order, windows)
    assert isinstance(position.order, Blend)
    drawn = Counter(name for name, _ in windows)
    assert position.order.epochs(position.next) == {s.name: drawn[s.name] / s.order.windows for s in order.shares}


def epochs_read(order: Blend, found: Sequence[tuple[str, int]]) -> None:
    """Assert that each source gives all its windows in each whole epoch, and none twice in the last."""
    for share in order.shares:
        windows = [window for name, window in found if name == share.name]
        for begin in range(0, len(windows), share.order.windows):
            epoch = windows[begin : begin + share.order.windows]
            assert len({*epoch}) == len(epoch)


@given(WEIGHTS, st.randoms(use_true_random=False), st.integers(1, 40), st.integers(1, 90))
@settings(deadline=None, max_examples=80)
def test_other_weights_go_on_with_each_source(weights: list[int], random: object, before: int, after: int) -> None:
    """Each source continues with its next sample, at its new weight, as in a next phase or a resume."""
    new_weights = [*weights]
    random.shuffle(new_weights)  # type: ignore[attr-defined]
    first, second = blend(weights, 7), blend(new_weights, 7)
    position, earlier = walk(Position().continue_in_blend(first, SAME), [1] * before)
    position = position.continue_in_blend(second, SAME)
    position, later = walk(position, [1] * after)
    epochs_read(first, [*earlier, *later])
    since = later if new_weights != weights else [*earlier, *later]  # equal weights continue within their period
    counts = Counter(name for name, _ in since)
    for share in second.shares:
        assert abs(counts[share.name] - Fraction(share.weight * len(since), sum(new_weights))) < 1


def test_added_sources_begin_and_removed_ones_are_dropped() -> None:
    position, _ = walk(Position().continue_in_blend(blend([2, 1]), SAME), [9])
    order = blend([1, 1, 2])
    position = position.continue_in_blend(replace(order, shares=order.shares[1:]), SAME)
    assert isinstance(position.order, Blend)
    assert position.order.nexts(position.next) == {"s1": 3, "s2": 0}


@pytest.mark.parametrize("seed", [2, 3])
def test_another_seed_skips_windows_already_seen_in_the_epoch(seed: int) -> None:
    """The weights still hold, since a source continues with windows that it has not given yet."""
    first, second = blend([3, 1], 40), blend([3, 1], 40, seed=seed)
    position, earlier = walk(Position().continue_in_blend(first, SAME), [4] * 9)
    position, later = walk(position.continue_in_blend(second, SAME), [4] * 20)
    epochs_read(first, [*earlier, *later])
    counts = Counter(name for name, _ in later)
    assert counts == {"s0": 60, "s1": 20}


def test_an_equal_blend_keeps_the_position() -> None:
    position, _ = walk(Position().continue_in_blend(blend([2, 3]), SAME), [4, 4])
    assert position.continue_in_blend(blend([2, 3]), SAME) is position


@pytest.mark.parametrize("weights", [(7, 3), (1, 1, 1), (5, 0, 2)])
def test_phases_of_other_sequences_read_no_token_twice(weights: tuple[int, ...]) -> None:
    """A phase has whole pieces of each source; the rest of its last piece is skipped."""
    piece, pieces, read = 32, 60, {f"s{k}": list[int]() for k in range(len(weights))}
    position, num_tokens = Position(), 0
    for phase, (sequence, samples) in enumerate([(8, 50), (16, 33), (32, 12), (8, 25)], 1):
        order = Order(sequence, pieces * piece // sequence, 1, piece)
        shares = tuple(SourceShare(f"s{k}", weight, order) for k, weight in enumerate(weights))
        position = position.continue_in_blend(Blend(shares, 0, samples if phase < 4 else None, phase), SAME)
        assert isinstance(position.order, Blend)
        for index in position.draw(samples).tolist():
            number, of_source = position.order.place(index)
            share = position.order.shares[number]
            read[share.name] += range(*share.order.tokens_of(of_source))
            num_tokens += sequence
        position = position.after(position.draw(samples), sequence)
        assert Position.from_json(json.loads(json.dumps(position.to_json()))) == position
    for tokens in read.values():
        assert len({*tokens}) == len(tokens)
    assert sum(map(len, read.values())) == num_tokens


@pytest.mark.parametrize("change", [{"first": -1}, {"shares": []}, {"samples": "2"}, {"more": 1}, {"first": 9}])
def test_an_invalid_blend_is_refused(change: dict[str, object]) -> None:
    value = Position().continue_in_blend(blend([1, 2]), SAME).to_json()
    value["order"] |= change
    with pytest.raises(ValueError, match="no position in the data"):
        Position.from_json(value)
