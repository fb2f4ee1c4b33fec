"""Each moment of a rank belongs to one part of its step, and only the first step waits for its samples."""

from __future__ import annotations

import json
import random
import resource
from collections import Counter
from statistics import fmean
from typing import Any

import pytest
import torch

from compiler.emit.folder import write_build
from compiler.emit.segment_cache import Segments
from compiler.pipeline import compile_spec
from runtime.step.step_time import COMMUNICATION, NUMBERS, OF_ROLLOUTS, PARTS, Part, StepTime, count_as
from tests.runtime.step.processes import run_module
from tests.runtime.step.specs import spec as small
from tests.runtime.step_times import SLOW, SLOW_S, STEPS

RANKS = 3

USUAL = tuple(part for part in PARTS if part not in OF_ROLLOUTS)  # of a run that does not learn from rewards


class Clock:
    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        return self.now


def spent(time: StepTime, world: int = 1) -> dict[str, Any]:
    square, *numbers = time.pack_numbers(torch.tensor(4.0, dtype=torch.float64)).tolist()
    assert square == 4.0 and len(numbers) == world * NUMBERS
    return time.row(numbers)


@pytest.mark.parametrize("seed", range(10))
def test_parts_that_are_entered_in_any_order_sum_to_the_time(seed: int) -> None:
    """Every nanosecond of a history is counted once: parts within parts, and whole ones within which none count."""
    draw, clock = random.Random(seed), Clock()
    time = StepTime(clock=clock)
    expected: Counter[str] = Counter()

    def pass_time(part: str) -> None:
        lasts = draw.randint(0, 10**9)
        expected[part] += lasts
        clock.now += lasts

    def run(part: Part, depth: int, of: str | None) -> None:
        is_whole = of is None and draw.random() < 0.3
        inside = of or (part if is_whole else None)
        with (time.count_block if is_whole else time.measure)(part):
            for _ in range(draw.randint(0, 3) if depth else 0):
                pass_time(inside or part)
                run(draw.choice(PARTS), depth - 1, inside)
            pass_time(inside or part)

    clock.now += 10**9  # before the first step
    for _ in range(4):
        expected.clear()
        for _ in range(draw.randint(1, 5)):
            run(draw.choice(PARTS), 3, None)
            pass_time("other")
        row = spent(time)
        reported = [
            part
            for part in PARTS
            if part not in OF_ROLLOUTS or any(expected[rollout_part] for rollout_part in OF_ROLLOUTS)
        ]
        assert row["spent_s"] == {part: pytest.approx(expected[part] / 1e9, abs=1e-6) for part in reported}
        assert row["spent_s"] == row["spent_most_s"] and row["slowest_rank"] == 0


def test_time_of_a_marked_method_counts_even_if_it_fails() -> None:
    class Works:
        def __init__(self, time: StepTime) -> None:
            self.time = time

        @count_as("message")
        def fail(self, ns: int) -> None:
            clock.now += ns
            raise OSError

    clock = Clock()
    works = Works(StepTime(clock=clock))
    with works.time.measure("compute"), pytest.raises(OSError):
        works.fail(3 * 10**9)
    assert spent(works.time)["spent_s"] == dict.fromkeys(USUAL, 0.0) | {"message": 3.0}


def test_a_repeated_step_keeps_the_time_of_both_attempts() -> None:
    """A skipped batch has no row: its time is part of the next row."""
    clock = Clock()
    time = StepTime(clock=clock)
    for _ in range(2):
        with time.measure("compute"):
            clock.now += 10**9
        _, *seconds = time.pack_numbers(torch.zeros((), dtype=torch.float64)).tolist()
    assert time.row(seconds)["spent_s"]["compute"] == 2.0


def test_rows_average_over_all_ranks() -> None:
    clock = Clock()
    ranks = [StepTime(rank, 3, clock=clock) for rank in range(3)]
    total = torch.zeros(1 + 3 * NUMBERS, dtype=torch.float64)
    for rank, time in enumerate(ranks):
        with time.measure("compute"):
            clock.now += (1 + rank % 2) * 10**9
        total += time.pack_numbers(torch.ones((), dtype=torch.float64))
    square, *numbers = total.tolist()
    assert square == 3.0
    row = ranks[0].row(numbers)
    assert row["spent_s"]["compute"] == pytest.approx(4 / 3, abs=1e-6)
    assert row["spent_most_s"]["compute"] == 2.0 and row["slowest_rank"] == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 >= row["process_bytes"] > 1 << 20
    assert "memory_bytes" not in row, "these are of a device"


def test_uneven_work_and_rows_of_experts_are_known_of_each_rank() -> None:
    """An update of whole matrices counts as computation, but not where ranks are compared; nor do rows of a
    validation."""
    clocks = [Clock(), Clock()]
    ranks = [StepTime(rank, 2, clock=clock) for rank, clock in enumerate(clocks)]

    def pack(rank: int) -> torch.Tensor:
        time, clock = ranks[rank], clocks[rank]
        with time.measure("compute"):
            clock.now += 10**9
            with time.count_uneven():
                clock.now += rank * 10**9
                with time.measure("sum"):
                    clock.now += 5 * 10**9
        time.count_expert_rows(7 + rank)
        with time.count_block("validation"):
            time.count_expert_rows(100)
        return time.pack_numbers(torch.zeros((), dtype=torch.float64))

    for _ in range(2):  # each row counts anew
        _, *numbers = (pack(0) + pack(1)).tolist()
        for time in ranks:
            assert time.row(numbers)["spent_most_s"]["compute"] == 2.0
            assert [work.compute_s for work in time.works] == [1.0, 1.0]
            assert [work.wall_s for work in time.works] == [6.0, 7.0]
            assert [work.expert_rows for work in time.works] == [7, 8]


def test_a_row_of_a_gpu_has_the_bytes_of_tensors_and_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the maximum over ranks. What is reserved beyond the tensors is lost to fragmentation."""
    times = [StepTime(rank, 2) for rank in range(2)]
    total = torch.zeros(1 + 2 * NUMBERS, dtype=torch.float64)
    for time, allocated, reserved in zip(times, (5, 7), (9, 8), strict=True):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _, allocated=allocated: allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _, reserved=reserved: reserved)
        time._on_cpu = False
        with monkeypatch.context() as unpinned:  # there is no device whose memory is pinned
            unpinned.setattr(torch, "empty", lambda *sizes, pin_memory, **named: torch.zeros(*sizes, **named))
            total += time.pack_numbers(torch.zeros((), dtype=torch.float64))
    row = times[0].row(total.tolist()[1:])
    assert (row["memory_bytes"], row["reserved_bytes"]) == (7, 9) and "process_bytes" not in row


def test_parts_of_communication_are_not_distinguished_on_a_gpu() -> None:
    clock = Clock()
    time = StepTime(clock=clock)
    time._on_cpu = False
    with time.measure("compute"):
        with time.measure("exchange"):
            clock.now += 10**9
        with time.measure("data"):
            clock.now += 10**9
    time.enter("other")
    row = time.row([*(elapsed_ns / 1e9 for elapsed_ns in time._ns.values()), 0.0, 0.0, 0.0, 0.0])
    assert not set(COMMUNICATION) & row["spent_s"].keys()
    assert row["spent_s"] == {"compute": 1.0, "data": 1.0, "validation": 0.0, "checkpoint": 0.0, "other": 0.0}


# ---------------------------------------------------------------- a pipeline


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, segments: Segments) -> list[dict[str, Any]]:
    """Results of real steps on three pipeline ranks."""
    folder = tmp_path_factory.mktemp("steps")
    chosen = small(RANKS, 1, 1, 6, schedule="1f1b", precision="fp32")
    write_build(folder / "build", compile_spec(chosen, segments=segments).files)
    run_module("tests.runtime.step_times", folder, RANKS)
    return [json.loads((folder / f"rank_{rank}.json").read_text("utf-8")) for rank in range(RANKS)]


def test_no_step_but_the_first_waits_for_data_and_middle_ranks_read_none(ranks: list[dict[str, Any]]) -> None:
    first, middle, last = ranks
    assert middle["read"] == 0 and middle["asks"] == []
    for rank in (first, last):
        assert rank["waits"] == 1 and rank["read"] > rank["read_by_trainer"][0] > 0
        assert len(set(rank["read_by_trainer"])) == 1, "the thread that trains reads in the first step alone"


def test_rows_sum_to_the_time_of_the_ranks(ranks: list[dict[str, Any]]) -> None:
    for step in range(STEPS):
        row = ranks[0]["rows"][step]
        wall = fmean(rank["wall"][step] for rank in ranks)
        assert sum(row["spent_s"].values()) == pytest.approx(wall, rel=0.02, abs=2e-3)
        for rank in ranks:
            for key in ("spent_s", "spent_most_s", "slowest_rank"):
                assert rank["rows"][step][key] == row[key], "all ranks know the same"


def test_a_slow_rank_is_named(ranks: list[dict[str, Any]]) -> None:
    slow, step = SLOW
    row = ranks[0]["rows"][step - 1]
    assert row["slowest_rank"] == slow and row["spent_most_s"]["compute"] > SLOW_S
    assert SLOW_S / RANKS <= row["spent_s"]["compute"] < SLOW_S / 2
    assert 0 < row["spent_most_s"]["message"] < SLOW_S, "ranks wait for one another by clocks of their own"
