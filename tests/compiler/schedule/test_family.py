"""Every schedule of the table is legal and runs to its end at all sizes; makespan, bubble and peak fit the formulas."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import get_args

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V
from compiler.schedule import AUTO, DEFAULT_CHUNKS, SCHEDULES, schedule_of, stand_in
from compiler.schedule.costs import Costs
from compiler.schedule.one_f_one_b import group_sizes
from compiler.schedule.simulate import Timeline, simulate
from compiler.schedule.zero_bubble import zbv_both_ways
from dsl.facts.schedules import CHUNKED, DEFAULT, EVEN, FACTS, NEEDED, PLAIN, StageForm
from dsl.schema.run import ScheduleName
from runtime.contract.actions import Pair, actions_of

UNIT = Costs()
RANKS = (*range(1, 8), 11, 16)


def timed(name: str, ranks: int, micro_batches: int, costs: Costs = UNIT, chunks: int = 2) -> Timeline:
    return simulate(SCHEDULES[name].generate(ranks, micro_batches, chunks), costs)


def random_costs(seed: int, count: int) -> list[Costs]:
    """F, I > 0 and W >= 0, B = I + W, with and without latency."""
    draw = random.Random(seed)
    return [
        Costs(
            F=Fraction(draw.randint(1, 12)),
            I=Fraction(draw.randint(1, 12)),
            W=Fraction(draw.randint(0, 12)),
            latency=Fraction(draw.choice((0, 0, 1, 3))),
        )
        for _ in range(count)
    ]


# ---------------------------------------------------------------- every size


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_size_is_legal_and_alive(name: str, ranks: int) -> None:
    """N from 1 to beyond 3P, odd and even; `has` is true exactly if `generate` gives a schedule."""
    row = SCHEDULES[name]
    for micro_batches in (*range(1, 3 * min(ranks, 7) + 3), 3 * ranks + 1, 4 * ranks):
        for chunks in (2, 3, 5) if row.facts.is_chunked else (2,):
            if not row.has_size(ranks, micro_batches):
                with pytest.raises(ValueError, match=r"needs"):
                    row.generate(ranks, micro_batches, chunks)
                continue
            schedule = row.generate(ranks, micro_batches, chunks)
            assert (schedule.name, schedule.stage_placement) == (name, row.stage_placement(chunks))
            schedule.check()
            simulate(schedule, UNIT)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(0, 4), (-1, 4), (4, 0), (4, -2)])
def test_no_size_below_one(name: str, ranks: int, micro_batches: int) -> None:
    assert not SCHEDULES[name].has_size(ranks, micro_batches)
    with pytest.raises(ValueError, match=r"at least"):
        SCHEDULES[name].generate(ranks, micro_batches, 2)


def test_one_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 chunks, got 1: use 2, or 1f1b"):
        SCHEDULES["interleaved"].generate(4, 8, 1)


# ---------------------------------------------------------------- makespan and bubble


@pytest.mark.parametrize("ranks", RANKS)
def test_gpipe(ranks: int) -> None:
    """(N+P-1)(F+B), and all N activations on every rank."""
    for micro_batches, costs in zip((1, 2, 5, 16), random_costs(1, 4), strict=True):
        costs = Costs(F=costs.F, I=costs.I, W=costs.W)
        timeline = timed("gpipe", ranks, micro_batches, costs)
        assert timeline.makespan == (micro_batches + ranks - 1) * (costs.F + costs.I + costs.W)
        assert timeline.peak_activations == (micro_batches,) * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_one_f_one_b(ranks: int) -> None:
    """F = I = 1, W = 0: 2(N+P-1). In general (N+P-1)(F+B), bubble (P-1)(F+B); min(N, P-r) activations."""
    for micro_batches in (1, 2, ranks, 3 * ranks + 1):
        without_w = timed("1f1b", ranks, micro_batches, Costs(W=Fraction(0)))
        assert without_w.makespan == 2 * (micro_batches + ranks - 1)
        timeline = timed("1f1b", ranks, micro_batches)
        assert set(timeline.idle) == {3 * (ranks - 1)}
        assert timeline.peak_activations == tuple(min(micro_batches, ranks - rank) for rank in range(ranks))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved(ranks: int, chunks: int) -> None:
    """P divides N: the bubble is (P-1)(F+B)/v, of F and B of all chunks; P(1 + (P-1)/(Pv)) activations of v chunks.

    The costs here are of one chunk, so that the bubble is (P-1)(F+B), and the peak Pv + P - 1.
    """
    for rounds in (1, 2, 5):
        for costs in (UNIT, Costs(F=Fraction(2), I=Fraction(3), W=Fraction(1, 2))):
            timeline = timed("interleaved", ranks, rounds * ranks, costs, chunks)
            assert set(timeline.idle) == {(ranks - 1) * (costs.F + costs.I + costs.W)}
        peak = (rounds > 1) * (ranks - 1) + ranks * chunks
        assert timeline.peak_activations[0] == max(timeline.peak_activations) == peak


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("micro_batches", range(1, 25))
def test_groups_of_interleaved(ranks: int, micro_batches: int) -> None:
    """For any N: groups of at least P if N allows, none larger than the first, in sizes that differ by at most 1."""
    sizes = group_sizes(ranks, micro_batches)
    assert sum(sizes) == micro_batches
    assert sizes[0] == max(sizes) <= min(sizes) + 1
    assert min(sizes) >= ranks or len(sizes) == 1
    if micro_batches % ranks == 0:
        assert set(sizes) == {ranks}


@pytest.mark.parametrize("ranks", range(2, 9))
def test_interleaved_is_shorter_than_1f1b_for_every_number(ranks: int) -> None:
    """Also with odd remainders, the time is never more than that of 1f1b with stages twice as large."""
    for micro_batches in range(1, 4 * ranks + 1):
        double = Costs(F=Fraction(2), I=Fraction(2), W=Fraction(2))
        assert (
            timed("interleaved", ranks, micro_batches).makespan <= timed("1f1b", ranks, micro_batches, double).makespan
        )


@pytest.mark.parametrize("ranks", RANKS)
def test_zb1p(ranks: int) -> None:
    """F = I = W, N >= P: bubble (P-1)(F+B-2W) = P-1; no more than P activations, as the first rank of 1f1b has."""
    for micro_batches in (ranks, ranks + 1, 2 * ranks, 3 * ranks + 2):
        timeline = timed("zb1p", ranks, micro_batches)
        assert set(timeline.idle) == {ranks - 1}
        assert timeline.peak_activations == (ranks,) * ranks
    for micro_batches in range(1, ranks):
        assert max(timed("zb1p", ranks, micro_batches).peak_activations) <= micro_batches
    for costs in random_costs(2, 8):
        for micro_batches in (1, ranks, 3 * ranks):
            assert (
                timed("zb1p", ranks, micro_batches, costs).makespan
                <= timed("1f1b", ranks, micro_batches, costs).makespan
            )


@pytest.mark.parametrize("ranks", RANKS)
def test_zbh2(ranks: int) -> None:
    """F = I = W, N >= 2P-1: rank r waits r for its first micro-batch, then never; 2P-1 activations on every rank."""
    for micro_batches in (2 * ranks - 1, 2 * ranks, 3 * ranks + 2):
        timeline = timed("zbh2", ranks, micro_batches)
        assert [spans[0][0] for spans in timeline.spans] == [*range(ranks)]
        assert all(spans[-1][1] - spans[0][0] == 3 * micro_batches for spans in timeline.spans)
        assert timeline.peak_activations == (2 * ranks - 1,) * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_controllable_memory(ranks: int) -> None:
    """The published peaks, (P+2)//2 and (P+4)//3 micro-batches, each of two activations here, where N >= 2P.

    The published bubbles are about P/2 and 2P/3 micro-batches, of 6 here.
    """
    for micro_batches in range(1, 3 * ranks + 2):
        half, least = (timed(name, ranks, micro_batches) for name in ("vhalf", "vmin"))
        peaks = 2 * ((ranks + 2) // 2), 2 * ((ranks + 4) // 3)
        measured_peaks = tuple(max(timeline.peak_activations) for timeline in (half, least))
        assert measured_peaks == peaks if micro_batches >= 2 * ranks else measured_peaks <= peaks
        if micro_batches >= 2 * ranks > 2:
            assert half.makespan - 6 * micro_batches == (7 * ranks - 8) // 2
            assert least.makespan - 6 * micro_batches == 4 * ranks - 5 + (ranks % 3 == 0)
    assert set(timed("vhalf", ranks, 4 * ranks).peak_activations) == {2 * ((ranks + 2) // 2)}, "even on all ranks"


@pytest.mark.parametrize("ranks", RANKS)
def test_zbv(ranks: int) -> None:
    """F = I = W, N >= 2P-1: rank r waits r for its first micro-batch, then never until it ends: 6N + P - 1 in all."""
    for micro_batches in (2 * ranks - 1, 2 * ranks, 3 * ranks + 2):
        timeline = timed("zbv", ranks, micro_batches)
        assert timeline.makespan == 6 * micro_batches + ranks - 1
        assert set(timeline.idle) == {ranks - 1}
        for rank, spans in enumerate(timeline.spans):
            assert spans[0][0] == rank
            assert spans[-1][1] - spans[0][0] == 6 * micro_batches, "nothing but the fill is waited for"
        assert timeline.peak_activations == (2 * ranks,) * ranks


def test_zbv_of_few_micro_batches() -> None:
    """Below 2P-1 no more than 2P activations, and no longer than any of 1f1b, gpipe and interleaved of such stages."""
    double = Costs(F=Fraction(2), I=Fraction(2), W=Fraction(2))
    for ranks in range(2, 9):
        for micro_batches in range(1, 2 * ranks - 1):
            timeline = timed("zbv", ranks, micro_batches)
            assert max(timeline.peak_activations) <= min(2 * ranks, 2 * micro_batches)
            assert timeline.makespan <= timed("interleaved", ranks, micro_batches).makespan
            assert timeline.makespan <= timed("1f1b", ranks, micro_batches, double).makespan


def test_published_cases_of_dualpipe() -> None:
    for ranks, micro_batches, pair, makespan in (
        (8, 20, Fraction(3), 66),
        (8, 20, Fraction(5, 2), 59),
        (8, 20, Fraction(2), 52),
        (4, 8, Fraction(3), 26),
        (16, 64, Fraction(3), 206),
    ):
        costs = Costs(pairs=(("BF", pair),))
        assert timed("dualpipe", ranks, micro_batches, costs).makespan == makespan
        folded = timed("dualpipev", ranks // 2, micro_batches // 2, costs)
        assert folded.makespan == makespan, "the same list on half the ranks"
    assert timed("dualpipe", 8, 20).idle == (6,) * 8


@pytest.mark.parametrize("ranks", range(1, 17))
@pytest.mark.parametrize("more", [0, 1, 2, 9])
def test_dualpipev(ranks: int, more: int) -> None:
    """Bubble (P-1)(F&B + B - 3W), exact where I = F, W <= I, F&B = F + B; 2P+1 activations. Odd N too."""
    for weight in (Fraction(1), Fraction(1, 2), Fraction(3, 7)):
        timeline = timed("dualpipev", ranks, 2 * ranks + more, Costs(W=weight))
        backward = 1 + weight
        assert set(timeline.idle) == {(ranks - 1) * (1 + backward + backward - 3 * weight)}
        assert timeline.peak_activations == (2 * ranks + 1,) * ranks


# ---------------------------------------------------------------- stand-ins, and the table


@pytest.mark.parametrize("ranks", [2, 4, 6, 10])
def test_stand_in_of_a_bidirectional_plan_for_few_micro_batches(ranks: int) -> None:
    """ZBV, unfolded: at most P activations, and with B = I + W never longer than 1f1b, for any F, I, W and latency."""
    for micro_batches in range(1, 2 * ranks + 2):
        schedule = zbv_both_ways(ranks, micro_batches)
        schedule.check()
        assert schedule.stage_placement == BIDIRECTIONAL
        for costs in (UNIT, *random_costs(100 * ranks + micro_batches, 6)):
            timeline = simulate(schedule, costs)
            assert max(timeline.peak_activations) <= ranks
            assert timeline.makespan <= timed("1f1b", ranks, micro_batches, costs).makespan
        if micro_batches % 2 == 0:
            folded = timed("zbv", ranks // 2, micro_batches // 2)
            assert simulate(schedule, UNIT).makespan == folded.makespan


@pytest.mark.parametrize("placement", [BIDIRECTIONAL, V], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 10])
def test_stand_ins_defer_no_weight_gradient(ranks: int, placement: StagePlacement) -> None:
    for micro_batches in range(1, 2 * ranks + 2):
        schedule = stand_in(placement, ranks, micro_batches)
        schedule.check()
        assert max(simulate(schedule, UNIT).peak_activations) <= (ranks if placement == BIDIRECTIONAL else 2 * ranks)
        for steps in schedule.actions:
            actions = [action for step in steps for action in actions_of(step)]
            assert all(after == replace(action, kind="W") for action, after in pairwise(actions) if action.kind == "I")


def test_zbv_reaches_the_bound_where_dualpipe_does_not() -> None:
    """P = 8, N = 20, no gain: N(F+I+W) + (P/2-1)F = 63, with 8 activations; DualPipe takes 66, with 9."""
    timeline = simulate(zbv_both_ways(8, 20), UNIT)
    assert (timeline.makespan, timeline.peak_activations) == (63, (8,) * 8)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(3, 4), (0, 4), (4, 0)])
def test_sizes_that_zbv_both_ways_refuses(ranks: int, micro_batches: int) -> None:
    with pytest.raises(ValueError, match="even number of ranks"):
        zbv_both_ways(ranks, micro_batches)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_phase_runs_on_the_stages_of_the_plan(name: str, ranks: int) -> None:
    """For any size in a ramp, the schedule is legal, runs to its end, and uses the stages that the ranks hold."""
    for micro_batches in range(1, 2 * ranks + 5):
        if SCHEDULES[name].facts.needs_even and micro_batches % 2 and micro_batches >= 2 * ranks:
            continue  # a rule refuses it
        schedule = schedule_of(name, ranks, micro_batches)
        schedule.check()
        simulate(schedule, UNIT)
        placement = SCHEDULES[name].stage_placement()
        assert placement.supports(schedule.stage_placement, ranks)
        is_few = micro_batches < SCHEDULES[name].facts.fewest_micro_batches * ranks
        fallback = {BIDIRECTIONAL: "zbv", V: "zbv", ONE_STAGE: "zb1p"}
        assert schedule.name == (fallback[placement] if is_few else name), "and its name says so"


def test_the_language_has_the_same_names() -> None:
    assert {*get_args(ScheduleName)} == {*SCHEDULES, AUTO}
    assert {*FACTS} == {*SCHEDULES}
    assert {DEFAULT, PLAIN} < {*SCHEDULES}


@pytest.mark.parametrize("name", SCHEDULES)
def test_facts_match_generated_schedules(name: str) -> None:
    """Placement, stages per rank, copies, pairs and sizes, by the rules alone and without the compiler."""
    row = SCHEDULES[name]
    facts = row.facts
    for chunks in (2, 3) if facts.is_chunked else (DEFAULT_CHUNKS,):
        schedule = row.generate(4, 12, chunks)
        assert (schedule.name, schedule.stage_placement) == (name, row.stage_placement(chunks))
        assert schedule.num_stages // 4 == facts.stages_per_rank(chunks)
        assert (schedule.stages_of(0) == (0, 7)) == facts.is_folded
        assert (schedule.stages_of(0) == (0, 3)) == facts.is_mirrored
        assert any(isinstance(step, Pair) for steps in schedule.actions for step in steps) == facts.overlaps
        all_activations = 12 * facts.stages_per_rank(chunks)
        assert (max(simulate(schedule, UNIT).peak_activations) == all_activations) == facts.holds_all
    roomier = SCHEDULES[facts.roomier]
    assert roomier.facts.fewest_micro_batches == 0 and roomier.facts.multiple == 1, (
        "it has the sizes that this one has not"
    )


def test_facts_of_the_named_schedules() -> None:
    """The rows state the published figures of each schedule. A further schedule has a row of its own."""
    assert {*CHUNKED} >= {"interleaved", "interleaved_pairs", "interleaved_zb"} and "dualpipe" in EVEN
    assert {*NEEDED[2]} >= {"dualpipe", "dualpipev"}
    placements: dict[str, StageForm] = {name: facts.placement for name, facts in FACTS.items()}
    assert {placements[name] for name in ("zbv", "vhalf", "vmin", "dualpipev")} == {"v"}
    assert placements["dualpipe"] == "bidirectional"
    overlapping = {name for name, facts in FACTS.items() if facts.overlaps}
    assert overlapping >= {"dualpipe", "dualpipev", "interleaved_pairs"} and not overlapping & {"1f1b", "zbv", "zb1p"}
