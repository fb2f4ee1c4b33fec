"""Periods of a steady state: legal, under the cap, and as long as they say; with the runs that are made of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V, loop
from compiler.schedule.costs import Costs, parse_costs, shipped
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import simulate
from compiler.schedule.solver import Solver, exact_period, solve
from compiler.schedule.solver.cycle import (
    Period,
    aligned,
    cycle_time,
    fits,
    marked,
    source_of,
    stretched,
    unrolled,
    waves,
)
from compiler.schedule.solver.exact_period import ShortestPeriod, shortest
from compiler.schedule.solver.problem import (
    B,
    F,
    I,
    ScheduleProblem,
    W,
    chunk_of,
    make_problem,
    pair,
    resized,
    schedule_of_slots,
    tokens_of,
)
from tests.compiler.schedule.independent import judge
from tests.compiler.schedule.solver.cases import costs

PAIRED = parse_costs("F=1,I=1,W=1,FB=1.8")
EIGHT = make_problem(BIDIRECTIONAL, 8, 40, PAIRED, 8, folded=True)
SIXTEEN = make_problem(BIDIRECTIONAL, 16, 64, PAIRED, 16, folded=True)


def checked(problem: ScheduleProblem, slots: tuple[tuple[int, ...], ...], table: Costs) -> Fraction:
    """The makespan that the judge finds for slots that are legal and under the cap."""
    schedule: Schedule = schedule_of_slots(problem, slots)
    schedule.check()
    timeline = simulate(schedule, table)
    assert all(peak <= max(problem.caps) for peak in timeline.peak_activations)
    return timeline.makespan


def test_dualpipes_period_is_a_wave() -> None:
    problem = make_problem(BIDIRECTIONAL, 16, 64, PAIRED, 17, folded=True)
    period = next(waves(problem))
    assert cycle_time(problem, period) == 2 * PAIRED.two("BF") / problem.unit


def test_with_one_activation_less_a_micro_batch_takes_two_and_two_fifths() -> None:
    period = next(waves(SIXTEEN))
    assert cycle_time(SIXTEEN, period) == Fraction("4.8") / SIXTEEN.unit  # one of each direction
    runs = [checked(each, unrolled(each, period), PAIRED) for each in (SIXTEEN, resized(SIXTEEN, 42))]
    assert runs[1] - runs[0] == 10 * Fraction("4.8")


def test_v3_is_under_the_best_known_without_a_search_of_fill_and_drain() -> None:
    table = shipped("deepseek-v3-high")
    problem = make_problem(BIDIRECTIONAL, 16, 120, table, 16, folded=True)
    found = [checked(problem, unrolled(problem, period), table) for period in islice(waves(problem), 2)]
    assert min(found) <= 25_918


@settings(max_examples=15)
@given(st.data())
def test_a_run_grows_by_exactly_its_period(data: st.DataObject) -> None:
    """It is legal and holds no more than the cap, whatever the costs; latency is that of messages between ranks."""
    P = data.draw(st.sampled_from([2, 4, 6]))
    placement = data.draw(st.sampled_from([BIDIRECTIONAL, V, ONE_STAGE, loop(3)]))
    table = data.draw(costs(placement.num_stages(P)))
    table = Costs(**{**vars(table), "ranks": (), "latency": Fraction(0)})
    cap = data.draw(st.integers(placement.stages_per_rank, 2 * P + 3))
    folded = placement == BIDIRECTIONAL and data.draw(st.booleans())
    problem = make_problem(placement, P, 40, table, cap, folded)
    for period in islice(waves(problem), 3):
        assert fits(problem, period)
        time = cycle_time(problem, period)
        assert time is not None
        short, long = (resized(problem, count) for count in (60, 120))
        took = [checked(each, unrolled(each, period), table) / problem.unit for each in (short, long)]
        assert took[1] - took[0] == 60 * time
        slots = marked(short, period)
        assert slots and stretched(short, slots, 120) == unrolled(long, period)


def test_rows_that_wait_for_each_other_have_no_period() -> None:
    problem = make_problem(ONE_STAGE, 2, 8, Costs(), 2)
    backward_first = Period(1, ((16, 0), (0, 16)), ((1, 1), (1, 1)), (0, 0))
    assert not fits(problem, backward_first)
    late = Period(1, ((0, 16), (0, 16)), ((0, 0), (1, 0)), (0, 0))  # the second row is ahead of the first
    assert cycle_time(problem, late) is None


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_any_number_of_ranks_has_a_wave_under_the_cap_of_1f1b(num_ranks: int) -> None:
    problem = make_problem(BIDIRECTIONAL, num_ranks, 2 * num_ranks, PAIRED, num_ranks, folded=True)
    period = next(waves(problem))
    assert fits(problem, period) and cycle_time(problem, period) == Fraction("4.8") / problem.unit


@pytest.mark.parametrize(("num_ranks", "cap"), [(1, 6), (2, 11), (4, 22)])
def test_ranks_of_three_stages_have_a_wave_of_pairs_alone(num_ranks: int, cap: int) -> None:
    """Their orders are drawn, for there are too many to try all."""
    problem = make_problem(loop(3), num_ranks, 24, PAIRED, cap)
    period = next(waves(problem))
    assert fits(problem, period) and cycle_time(problem, period) == 3 * PAIRED.two("BF") / problem.unit


# ---------------------------------------------------------------- the shortest one


def least_of_all(problem: ScheduleProblem) -> Fraction:
    """The shortest period of one micro-batch a chunk: of all orders of few rows, and of all micro-batches it can be of.

    What a row has done of each kind when its period begins is counted out, and so are the W that are due then.
    """
    C, rows = problem.num_chunks, range(problem.num_rows)
    best = None
    orders = [sorted(set(_orders_of(problem, row))) for row in rows]
    ahead = range(problem.caps[0] + 2)
    for chosen in product(*orders):
        for done in product(ahead, repeat=2 * C * len(rows)):
            by_row = tuple(done[2 * C * row : 2 * C * (row + 1)] for row in rows)
            period = Period(1, tuple(slots for slots, _ in chosen), by_row, tuple(due for _, due in chosen))
            if min(done) == 0 and fits(problem, period):
                took = _many(problem, period)
                if took is not None and (best is None or took < best):
                    best = took
    assert best is not None
    return best


def _orders_of(problem: ScheduleProblem, row: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Orders that begin with the first chunk's forward, and how many W are due when they do."""
    C = problem.num_chunks
    for split in product((B, I), repeat=C):
        tokens = [F + chunk for chunk in range(1, C)] + [kind + chunk for chunk, kind in enumerate(split)]
        tokens += [W] * split.count(I)
        for order in permutations(tokens):
            lone, due = (F, *order), range(split.count(I) + 1)
            found = [lone]
            for at in range(len(lone) - 1):
                for slots in _with_pair(problem, row, lone, at):
                    found.append(slots)
                    for other in range(at + 1, len(slots) - 1):
                        found += _with_pair(problem, row, slots, other)
            yield from product(found, due)


def _with_pair(problem: ScheduleProblem, row: int, slots: tuple[int, ...], at: int) -> Iterator[tuple[int, ...]]:
    a, b = slots[at : at + 2]
    if max(a, b) < W and pair(a, b) in problem.offered[row]:
        yield (*slots[:at], pair(a, b), *slots[at + 2 :])


def _many(problem: ScheduleProblem, period: Period) -> Fraction | None:
    """The time a period takes after many, by running them: a slot starts when its row and all it waits for are through.

    None where rows wait for each other for ever.
    """
    C, ends, now = problem.num_chunks, {}, [0] * problem.num_rows
    at, times = [0] * problem.num_rows, []
    rounds, moved = 40, True
    while moved:
        moved = False
        for row, slots in enumerate(period.rows):
            while at[row] < rounds * len(slots):
                begun, place = divmod(at[row], len(slots))
                kinds = [chunk_of(token) + C * (token >= B) for token in tokens_of(slots[place]) if token < W]
                start = now[row]
                for kind in kinds:
                    if (source := source_of(problem, row, kind)) is None:
                        continue
                    number = begun + period.done[row][kind]
                    if number >= period.done[source[0]][source[1]]:  # those before are there at the start
                        if (*source, number) not in ends:
                            break
                        start = max(start, ends[*source, number] + problem.delays[source[0]][source[1]])
                else:
                    now[row] = start + problem.times[row][slots[place]]
                    for kind in kinds:
                        ends[row, kind, begun + period.done[row][kind]] = now[row]
                    at[row] += 1
                    moved = True
                    if place == len(slots) - 1 and row == 0:
                        times.append(now[row])
                    continue
                break
    return Fraction(times[-1] - times[-13], 12) if len(times) == rounds else None


@pytest.mark.parametrize("table", ["F=1", "FB=1.8", "F=2,I=3,W=1,FB=4.5"])
@pytest.mark.parametrize(
    ("placement", "num_ranks", "cap"), [(ONE_STAGE, 2, 1), (ONE_STAGE, 2, 2), (BIDIRECTIONAL, 2, 2), (V, 1, 2)]
)
def test_no_period_is_shorter(placement: StagePlacement, num_ranks: int, cap: int, table: str) -> None:
    problem = make_problem(placement, num_ranks, 8, parse_costs(table), cap, placement == BIDIRECTIONAL)
    found = shortest(problem, 1, work=5)
    assert found.period is not None and fits(problem, found.period)
    assert cycle_time(problem, found.period) == found.bound == least_of_all(problem)


def test_under_a_smaller_cap_rows_run_different_orders() -> None:
    """No wave fits; what is found is proven the shortest, and runs of it are legal."""
    problem = make_problem(BIDIRECTIONAL, 4, 40, PAIRED, 2, folded=True)
    assert next(waves(problem), None) is None
    found = shortest(problem, 1, work=5)
    assert (
        found.period
        and found.bound * problem.unit == Fraction("7.8") == cycle_time(problem, found.period) * problem.unit
    )
    runs = [checked(each, unrolled(each, found.period), PAIRED) for each in (problem, resized(problem, 30))]
    assert runs[1] - runs[0] == 10 * Fraction("7.8")


def test_two_micro_batches_a_period_are_no_longer_than_two_periods() -> None:
    problem = make_problem(BIDIRECTIONAL, 4, 40, PAIRED, 4, folded=True)
    one = next(waves(problem))
    twice = Period(2, tuple(row * 2 for row in one.rows), one.done, one.due)
    assert cycle_time(problem, twice) == 2 * (cycle_time(problem, one) or 0)
    found = shortest(problem, 2, work=0.3, start=twice).period
    assert found and fits(problem, found) and (cycle_time(problem, found) or 0) <= 2 * (cycle_time(problem, one) or 0)
    short, long = (checked(each, unrolled(each, found), PAIRED) for each in (problem, resized(problem, 60)))
    assert long - short == 20 * (cycle_time(problem, found) or 0) * problem.unit


@pytest.fixture(scope="module")
def two() -> Period:
    """The shortest period of two micro-batches of each direction on eight ranks with a cap of 8."""
    found = shortest(EIGHT, 2, work=1, below=2 * Fraction("4.8") / EIGHT.unit).period
    assert found is not None
    return found


def test_two_micro_batches_take_less_than_two_periods(two: Period) -> None:
    """One of each direction takes 4.6 then and not 4.8, and runs of any length grow by that."""
    assert fits(EIGHT, two) and two.size == 2
    assert cycle_time(EIGHT, two) == Fraction("9.2") / EIGHT.unit
    short, long = resized(EIGHT, 31), resized(EIGHT, 61)
    assert checked(long, unrolled(long, two), PAIRED) - checked(short, unrolled(short, two), PAIRED) == 15 * Fraction(
        "9.2"
    )
    slots = marked(short, two)
    assert slots and stretched(short, slots, 61, 2) == unrolled(long, two)


def test_where_a_time_is_too_hard_to_decide_a_longer_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a period is found where the proof of any much shorter one would take all the work there is."""
    problem = make_problem(BIDIRECTIONAL, 4, 40, PAIRED, 4, folded=True)
    quick, *_, slow = sorted(waves(problem), key=lambda wave: cycle_time(problem, wave) or 0)
    longest = cycle_time(problem, slow) or 0

    def answered(problem: ScheduleProblem, size: int, time: int, *_: object) -> tuple[Period | None, bool, float]:
        return (quick if time == longest - 1 else None), False, 0.1

    monkeypatch.setattr(exact_period, "_asked", answered)
    found = shortest(problem, 1, work=5, start=slow)
    assert found == ShortestPeriod(quick, 1) and (cycle_time(problem, quick) or 0) < longest


def test_what_is_below_the_shortest_is_refuted() -> None:
    problem = make_problem(BIDIRECTIONAL, 4, 40, PAIRED, 4, folded=True)
    assert shortest(problem, 2, work=5, below=2 * Fraction("4.8") / problem.unit) == ShortestPeriod(None, 48)


@pytest.mark.parametrize("num_micro_batches", [80, 87])
def test_a_run_around_a_period_of_two_is_legal_and_shorter(
    two: Period, num_micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the micro-batches are a whole number of periods."""
    took = []
    for period in (None, two):
        monkeypatch.setattr(solve, "period_of_several", lambda *_, period=period: period)
        found = Solver(PAIRED, 8, effort=0.02).solve(8, num_micro_batches, placement=BIDIRECTIONAL)
        judged = judge(found.schedule.to_text(), {kind: PAIRED.one(kind) for kind in "FBIW"} | dict(PAIRED.pairs))
        assert judged.makespan == found.makespan and max(judged.peaks) <= 8
        took.append(found.makespan)
    assert took[1] < took[0]


def test_slots_of_an_aligned_period_start_within_it() -> None:
    period = next(waves(SIXTEEN))
    moved, starts, time = aligned(SIXTEEN, period)
    assert fits(SIXTEEN, moved) and cycle_time(SIXTEEN, moved) == time == cycle_time(SIXTEEN, period)
    assert all(row == sorted(row) and row[0] >= 0 and row[-1] < time for row in starts)
    assert checked(SIXTEEN, unrolled(SIXTEEN, moved), PAIRED) == checked(SIXTEEN, unrolled(SIXTEEN, period), PAIRED)


def test_equal_arguments_give_equal_schedules_whatever_the_hash_seed() -> None:
    program = (
        "from compiler.schedule.solver import Solver; from compiler.schedule.costs import parse_costs;"
        "from compiler.ir.stage_placement import BIDIRECTIONAL, V, loop;"
        "print(Solver(parse_costs('FB=1.8'), 3, effort=0.02).solve(4, 40).schedule.to_text());"
        "solver = Solver(parse_costs('FB=1.8,FF=1.9'), 3, effort=0.02);"
        "[print(solver.solve(2, 7, placement=p).schedule.to_text()) for p in (V, loop(2), loop(3), BIDIRECTIONAL)]"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    text = texts.pop()
    assert not texts and "ranks=4 micro_batches=40" in text
    assert all(f"placement={each}\n" in text for each in ("v", "loop(2)", "loop(3)", "bidirectional"))
