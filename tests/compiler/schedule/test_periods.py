"""Schedules that are timed by their periods, against the simulation of every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V, loop
from compiler.schedule import SCHEDULES
from compiler.schedule.costs import Costs, parse_costs
from compiler.schedule.measure import measure
from compiler.schedule.numbering import SlotRow, name_weights, number_micro_batches
from compiler.schedule.one_f_one_b import gpipe, interleaved
from compiler.schedule.periods import Totals, time_by_periods
from compiler.schedule.schedule import Schedule, ScheduleError
from compiler.schedule.simulate import simulate
from compiler.schedule.slots import B0, F0, I0, I1, W0, W1, Slot, Token, W, homes
from tests.compiler.schedule.test_simulate import random_costs

PLACEMENTS = (ONE_STAGE, loop(2), loop(3), V, BIDIRECTIONAL)


def check_against_simulation(schedule: Schedule, costs: Costs) -> Totals:
    """The totals by periods, which equal those of all steps."""
    totals, timeline = time_by_periods(schedule, costs), simulate(schedule, costs)
    assert totals is not None
    assert (totals.makespan, totals.idle) == (timeline.makespan, timeline.idle)
    assert totals.peak_activations == timeline.peak_activations
    return totals


# ---------------------------------------------------------------- equal to the simulation


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_small_size(name: str) -> None:
    rng = random.Random(name)
    row = SCHEDULES[name]
    for ranks in range(1, 5):
        for micro_batches in range(1, 26):
            if row.has_size(ranks, micro_batches):
                schedule = row.generate(ranks, micro_batches, rng.randint(2, 4))
                check_against_simulation(schedule, whole_costs(rng, schedule))


@pytest.mark.parametrize("name", SCHEDULES)
def test_long_schedules_at_random_costs(name: str) -> None:
    rng = random.Random(name)
    row, share = SCHEDULES[name], []
    for number in range(8):
        ranks, micro_batches = 2 * rng.randint(1, 4), 2 * rng.randint(60, 150)
        schedule = row.generate(ranks, micro_batches, rng.randint(2, 4))
        costs = whole_costs(rng, schedule) if number % 2 else random_costs(rng, schedule.num_stages, ranks)
        totals = check_against_simulation(schedule, replace(costs, keeps=Fraction(rng.randint(0, 3), 3)))
        share.append(totals.steps_run / sum(map(len, schedule.actions)))
    assert min(share) < 0.4  # periods were found


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_random_orders_that_repeat(placement: StagePlacement) -> None:
    """Ranks run a random legal order of some micro-batches again and again, with random orders before and behind."""
    rng = random.Random(str(placement))
    skipped = 0
    for _ in range(25):
        ranks = 2 * rng.randint(1, 3)
        orders = [random_order(rng, placement, ranks, rng.randint(1, 3)) for _ in range(3)]
        times = (1, rng.randint(1, 60), rng.randint(0, 2))
        rows = [[slot for order, n in zip(orders, times, strict=True) for slot in order[r] * n] for r in range(ranks)]
        forwards = sum(slot.count(F0) for slot in rows[0])
        micro_batches = 2 * forwards if placement == BIDIRECTIONAL else forwards
        schedule = number_micro_batches("random", ranks, micro_batches, placement, rows.__getitem__)
        schedule.check()
        totals = check_against_simulation(schedule, whole_costs(rng, schedule))
        skipped += totals.steps_run < sum(map(len, rows))
    assert skipped > 10


def whole_costs(rng: random.Random, schedule: Schedule) -> Costs:
    """Random whole numbers: of kinds, pairs, messages, and sometimes weights of stages."""
    F, I, W, FB, latency = (rng.randint(least, 9) for least in (1, 1, 0, 1, 0))
    stages = tuple(Fraction(rng.randint(1, 3)) for _ in range(schedule.num_stages * rng.randint(0, 1)))
    return replace(parse_costs(f"F={F},I={I},W={W},FB={FB}"), latency=Fraction(latency), stages=stages)


def random_order(rng: random.Random, placement: StagePlacement, num_ranks: int, count: int) -> list[list[Slot]]:
    """By rank, random slots that run `count` micro-batches of each direction, in an order that can be run."""
    last = placement.num_stages(num_ranks) - 1
    rows: list[list[Slot]] = [[] for _ in range(num_ranks)]
    done: Counter[tuple[str, int, int]] = Counter()  # kind, stage, direction
    any_weight = rng.random() < 0.5
    while True:
        choices: list[tuple[int, Token, str, tuple[int, int]]] = []
        for rank in range(num_ranks):
            for chunk, (stage, direction) in enumerate(homes(placement, num_ranks, rank)):
                home = stage, direction
                forward_limit = done["F", stage - 1, direction] if stage else count
                back_limit = done["B", stage + 1, direction] if stage < last else count
                if done["F", *home] < forward_limit:
                    choices.append((rank, ("F", chunk), "F", home))
                if done["B", *home] < min(back_limit, done["F", *home]):
                    choices += [(rank, (kind, chunk), "B", home) for kind in ("B", "I")]
                if done["W", *home] < done["I", *home]:
                    choices.append((rank, ("W", chunk), "W", home))
        if not choices:
            return [[(("W", -1),) if any_weight and slot[0][0] == "W" else slot for slot in row] for row in rows]
        rank, token, kind, home = rng.choice(choices)
        rows[rank].append((token,))
        done[kind, *home] += 1
        done["I", *home] += token[0] == "I"


# ---------------------------------------------------------------- long schedules take few steps


@pytest.mark.parametrize(
    ("name", "makespan"),
    [  # simulated in full once, but that of 1f1b: (N + P - 1) (F + B)
        ("gpipe", 12_477),
        ("1f1b", 12_477),
        ("interleaved", 24_765),
        ("interleaved_zb", 24_639),
        ("vmin", 24_827),
        ("zbv", 24_639),
        ("dualpipev", Fraction("14987.4")),
    ],
)
def test_64_ranks_and_4096_micro_batches(name: str, makespan: Fraction) -> None:
    schedule = SCHEDULES[name].generate(64, 4096)
    totals = time_by_periods(schedule, parse_costs("FB=1.8"))
    assert totals is not None and totals.makespan == makespan
    assert totals.steps_run < 0.26 * sum(map(len, schedule.actions))
    assert not any("steps" in vars(row) for row in schedule.actions)  # no actions were made


def test_two_sizes_of_groups_are_two_periods() -> None:
    schedule = interleaved(8, 8 * 60 + 30, 2)  # 30 groups of 9, then 30 of 8
    totals = check_against_simulation(schedule, Costs())
    assert totals.steps_run < 0.5 * sum(map(len, schedule.actions))


def test_activations_may_grow_from_period_to_period() -> None:
    schedule = gpipe(3, 500)
    totals = check_against_simulation(schedule, Costs())
    assert totals.steps_run < 1000 and max(totals.peak_activations) == 500


def test_the_last_period_may_hold_most() -> None:
    """Every period keeps one more activation, and holds two at its middle. Afterwards only backwards run."""
    rows: list[Sequence[Slot]] = [[(F0,), (F0,), (B0,)] * 200 + [(B0,)] * 200] * 2
    schedule = number_micro_batches("mine", 2, 400, ONE_STAGE, rows.__getitem__)
    totals = check_against_simulation(schedule, Costs())
    assert totals.steps_run < 400 and max(totals.peak_activations) == 201


def test_ranks_of_unequal_pace_have_no_period() -> None:
    """Rank 1 falls behind rank 0 more and more, so every forward is run."""
    schedule = gpipe(2, 100)
    totals = check_against_simulation(schedule, Costs(stages=(Fraction(1), Fraction(2))))
    assert totals.steps_run >= 2 * 100


# ---------------------------------------------------------------- what has no periods


def test_unequal_micro_batches_are_simulated() -> None:
    schedule = gpipe(2, 3)
    assert time_by_periods(schedule, Costs(micro_batches=(Fraction(1), Fraction(2), Fraction(3)))) is None


def test_actions_of_a_file_are_simulated() -> None:
    schedule = gpipe(2, 3)
    read = Schedule.from_text(schedule.to_text())
    assert time_by_periods(read, Costs()) is None
    assert measure(read, Costs()).makespan == measure(schedule, Costs()).makespan


def test_a_circle_of_waits_is_reported() -> None:
    rows: list[Sequence[Slot]] = [((F0,), (B0,)) * 2, ((F0,), (F0,), (B0,), (B0,))]
    schedule = number_micro_batches("mine", 2, 2, ONE_STAGE, rows.__getitem__)
    assert time_by_periods(schedule, Costs()) is None
    with pytest.raises(ScheduleError, match=r"rank 0, B0\.0: waits for ever"):
        measure(schedule, Costs())


def test_costs_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="weights of 3 stages, but the schedule has 2"):
        time_by_periods(gpipe(2, 4), Costs(stages=(Fraction(1),) * 3))


# ---------------------------------------------------------------- rows of slots


def test_a_row_is_equal_to_its_steps() -> None:
    row = gpipe(2, 2).actions[0]
    assert isinstance(row, SlotRow) and row == tuple(row) and tuple(row) == row and hash(row) == hash(tuple(row))
    assert len(row) == 4 and row[1:3] == (row[1], row[2]) and row != (row[0],)


def test_a_weight_gradient_takes_the_oldest_of_any_chunk() -> None:
    slots = [(I1,), (I0,), (W,), (I1, W), (W1,)]
    assert list(name_weights(slots)) == [(I1,), (I0,), (W1,), (I1, W0), (W1,)]
