"""The lower bound, compared with known numbers, the literature's simpler bound, brute force, and named schedules."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement, V, loop
from compiler.schedule import SCHEDULES, bound
from compiler.schedule.bound import least, lower_bound
from compiler.schedule.costs import PAIR_KINDS, Costs, parse_costs, shipped_costs, with_every_pair_gaining
from compiler.schedule.measure import measure
from compiler.schedule.simulate import simulate
from compiler.schedule.waits import Waits
from tests.compiler.schedule.test_simulate import random_costs
from tests.compiler.schedule.tiny import best_makespan

GAIN = parse_costs("F=1,I=1,W=1,FB=1.8")


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "costs", "cap", "bound"),
    [
        (8, 20, Costs(), 8, "63"),  # reached by a schedule
        (8, 20, parse_costs("F=10,I=10,W=10"), 9, "630"),
        (8, 20, replace(parse_costs("F=10,I=10,W=10"), latency=Fraction(1)), 9, "633"),
        (8, 20, Costs(stages=(Fraction(9, 10), *[Fraction(1)] * 6, Fraction(13, 10))), 9, "66"),  # reached
        (4, 8, parse_costs("F=2,I=3,W=2"), 5, "58"),  # reached; the simpler form of the bound gives 59, which is wrong
        (8, 20, GAIN, 9, "48.2"),
        (4, 8, GAIN, 5, "20.2"),  # the best is 20.4
        (8, 10, GAIN, 9, "30.2"),
        (16, 32, GAIN, 17, "83"),
        (8, 20, with_every_pair_gaining(GAIN), 9, "43.2"),
        (16, 120, shipped_costs("deepseek-v3-low"), 17, "17375.5216"),
        (16, 120, shipped_costs("deepseek-v3-high"), 17, "18114.7216"),
    ],
)
def test_bidirectional(ranks: int, micro_batches: int, costs: Costs, cap: int, bound: str) -> None:
    assert lower_bound(BIDIRECTIONAL, ranks, micro_batches, costs, cap) == Fraction(bound)


def test_less_memory_cannot_help() -> None:
    bounds = [lower_bound(BIDIRECTIONAL, 8, 20, GAIN, cap) for cap in (*range(1, 12), None)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > bounds[-1]


def test_an_action_shortens_one_other_at_most() -> None:
    """A paired W halves the time of an F or an I; a rank runs 40 of these, and 20 W, each in one pair."""
    work = 20 * Fraction(1, 2) + 20
    assert work < lower_bound(BIDIRECTIONAL, 8, 20, parse_costs("FW=0.5,IW=0.5"), 9) < work + 7


def test_waits_assume_at_most_two_actions_per_step() -> None:
    """The third forward starts after the first two, at 10; it takes 20 to the last rank, and 1 + 2 back."""
    waits = Waits(loop(1), 2, 3, parse_costs("F=10,I=1,W=1,FF=10"), None)
    assert waits.longest() == 10 + 20 + 3


def test_the_slower_way_of_a_micro_batch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one direction it takes a stage of 1 on three ranks and of 81 on three more; in the other, six stages of 9.

    No rank has as much work; in a large pipeline, whose waits are not followed, this is the bound.
    """
    monkeypatch.setattr(bound, "_MOST_WAITS", 0)
    nines = (*[Fraction(1)] * 3, *[Fraction(9)] * 3)
    costs = replace(parse_costs("F=1,I=1,W=1"), stages=nines, ranks=nines)
    round_trip = 2 * (3 * 1 + 3 * 81)
    assert lower_bound(BIDIRECTIONAL, 6, 2, costs) == round_trip + 1, "the first stage ends with its weight gradient"


# ---------------------------------------------------------------- against the bound of shares


def test_a_cap_that_is_never_reached_takes_no_time() -> None:
    """The work of a bound does not grow with the cap (a cap of 10^8 once took that many steps)."""
    assert lower_bound(BIDIRECTIONAL, 4, 8, GAIN, 10**8) == lower_bound(BIDIRECTIONAL, 4, 8, GAIN, 8)


def bound_of_shares(ranks: int, micro_batches: int, costs: Costs, cap: int) -> Fraction:
    """Uniform stages, bidirectional: work in shares of pairs' times, best corner of all shares; nothing of draining."""
    limits = [({kind: 1}, costs.lone_time(kind)) for kind in "FIW"] + [({"I": 1, "W": 1}, costs.lone_time("B"))]
    for a, b in PAIR_KINDS:
        row: dict[str, int] = {}
        for kind in (a + b).replace("B", "IW"):
            row[kind] = row.get(kind, 0) + 1
        limits.append((row, costs.pair_time(a + b)))
    planes = [([row.get(kind, 0) for kind in "FIW"], limit) for row, limit in limits]
    planes += [([int(kind == axis) for kind in "FIW"], Fraction(0)) for axis in "FIW"]
    best = Fraction(0)
    for corner in corners(planes):
        if min(corner) < 0 or any(dot(row, corner) > limit for row, limit in planes[: len(limits)]):
            continue
        for near in range(ranks // 2):
            fill = near * (costs.F + costs.latency)
            hops = (ranks - 1) + near
            first = ranks * costs.F + near * min(costs.I, costs.lone_time("B")) + hops * costs.latency
            work = micro_batches * sum(corner)
            times = [
                max(first, fill + k * corner[0]) + work - k * corner[0] for k in range(min(cap, micro_batches) + 1)
            ]
            best = max(best, min(times))
    return best


def corners(planes: list[tuple[list[int], Fraction]]) -> set[tuple[Fraction, ...]]:
    """Points in which three planes meet, by Cramer's rule."""
    points = set()
    for three in combinations(planes, 3):
        rows, limits = [row for row, _ in three], [limit for _, limit in three]
        if denominator := determinant(rows):
            matrices = [[[limits[r] if c == k else rows[r][c] for c in range(3)] for r in range(3)] for k in range(3)]
            points.add(tuple(Fraction(determinant(matrix)) / denominator for matrix in matrices))
    return points


def determinant(m: list[list[int]] | list[list[Fraction | int]]) -> Fraction | int:
    return (
        m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
        - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
        + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0])
    )


def dot(row: list[int], point: tuple[Fraction, ...]) -> Fraction:
    return sum((a * b for a, b in zip(row, point, strict=True)), Fraction(0))


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "costs", "cap", "shares"),
    [
        (8, 20, Costs(), 8, 63),
        (8, 20, GAIN, 9, 47),
        (4, 8, GAIN, 5, "19.4"),
        (16, 32, GAIN, 17, "80.6"),
        (8, 20, with_every_pair_gaining(GAIN), 9, "41.6"),
        (8, 10, GAIN, 9, 29),
    ],
)
def test_at_least_the_bound_of_shares(ranks: int, micro_batches: int, costs: Costs, cap: int, shares: str) -> None:
    assert bound_of_shares(ranks, micro_batches, costs, cap) == Fraction(shares)  # as published
    assert lower_bound(BIDIRECTIONAL, ranks, micro_batches, costs, cap) >= Fraction(shares)


def test_v3_is_above_the_bound_of_shares() -> None:
    for table, shares in (("deepseek-v3-low", 16_808), ("deepseek-v3-high", 17_252)):
        assert lower_bound(BIDIRECTIONAL, 16, 120, shipped_costs(table), 17) > shares


# ---------------------------------------------------------------- it is a bound

TINY = [(BIDIRECTIONAL, 2, 2), (loop(1), 2, 2), (V, 1, 2), (loop(2), 1, 2), (loop(1), 1, 3), (V, 2, 1)]


@pytest.mark.parametrize("seed", range(4))
def test_no_schedule_at_all_is_shorter(seed: int) -> None:
    rng, reached = random.Random(seed), 0
    for placement, ranks, micro_batches in TINY * 2:
        costs = random_costs(rng, placement.num_stages(ranks), ranks)
        cap = rng.randint(2, 4)
        best = best_makespan(placement, ranks, micro_batches, costs, cap)
        assert best is not None
        bound = lower_bound(placement, ranks, micro_batches, costs, cap)
        assert bound <= best, (placement, ranks, micro_batches, costs, cap)
        reached += bound == best
    assert reached  # the bound is not trivial


def test_no_schedule_of_three_micro_batches_is_shorter() -> None:
    for costs, cap in product((Costs(), parse_costs("F=2,I=3,W=1,FB=4")), (1, 2)):
        best = best_makespan(loop(1), 2, 3, costs, cap)
        assert best is not None and lower_bound(loop(1), 2, 3, costs, cap) <= best


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_named_schedule_is_shorter(name: str) -> None:
    rng = random.Random(name)
    for ranks, micro_batches in ((2, 4), (4, 8), (4, 14), (6, 12)):
        schedule = SCHEDULES[name].generate(ranks, micro_batches)
        stages = schedule.stage_placement.num_stages(ranks)
        for costs in (Costs(), GAIN, with_every_pair_gaining(GAIN), random_costs(rng, stages, ranks)):
            measured = measure(schedule, costs)
            assert measured.lower_bound <= measured.makespan, costs
            assert measured.gap >= 0


@pytest.mark.parametrize("placement", [BIDIRECTIONAL, V, loop(1), loop(3)], ids=str)
def test_any_size_has_one(placement: StagePlacement) -> None:
    for ranks, micro_batches in ((2, 1), (2, 2), (6, 3), (4, 1)):
        assert lower_bound(placement, ranks, micro_batches, GAIN, 1) > 0


def test_many_weights_on_a_rank() -> None:
    """Too large for the linear program, so the bound is the work alone."""
    weights = tuple(Fraction(k + 1, 5) for k in range(10))
    schedule = SCHEDULES["interleaved"].generate(2, 6, 5)
    costs = replace(GAIN, stages=weights)
    bound = lower_bound(schedule.stage_placement, 2, 6, costs)
    assert 6 * Fraction(9, 5) * sum(weights[1::2]) < bound < simulate(schedule, costs).makespan


# ---------------------------------------------------------------- linear programs


def test_least_of_a_linear_program() -> None:
    one, two, three = Fraction(1), Fraction(2), Fraction(3)
    # x + y >= 2, x + 3y >= 3: corners (0, 2), (3/2, 1/2), (3, 0)
    rows = [({0: one, 1: one}, two), ({0: one, 1: three}, three)]
    assert least([two, three], rows) == Fraction(9, 2)
    assert least([Fraction(0), one], rows) == 0
    assert least([one, one], []) == 0
    assert least([one], [({0: one}, two), ({0: -one}, -one)]) is None  # 2 <= x <= 1


@pytest.mark.parametrize("seed", range(3))
def test_least_agrees_with_all_corners(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        rows = [([rng.randint(-1, 4) for _ in range(3)], Fraction(rng.randint(-3, 6))) for _ in range(4)]
        costs = [Fraction(rng.randint(0, 5)) for _ in range(3)]
        planes = [*rows, *(([int(k == axis) for k in range(3)], Fraction(0)) for axis in range(3))]
        inside = [p for p in corners(planes) if min(p) >= 0 and all(dot(row, p) >= limit for row, limit in rows)]
        expected = min(
            (dot([1] * 3, tuple(a * b for a, b in zip(costs, p, strict=True))) for p in inside), default=None
        )
        optimum = least(costs, [({k: Fraction(a) for k, a in enumerate(row)}, limit) for row, limit in rows])
        assert optimum == expected
