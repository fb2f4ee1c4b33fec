"""`auto` is legal, under the cap, never longer than a named schedule, and optimal where the optimum is known."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, V, loop
from compiler.program.proof import prove
from compiler.schedule import SCHEDULES
from compiler.schedule.bound import lower_bound
from compiler.schedule.costs import Costs, parse_costs, shipped_costs, with_every_pair_gaining
from compiler.schedule.simulate import peak_activations, simulate
from compiler.schedule.solver import Solution, Solver, core, default_cap
from compiler.schedule.solver.moves import FoundSlots
from compiler.schedule.solver.problem import ScheduleProblem, Slots, make_problem
from tests.compiler.program.proof.programs import lowered, small_plan
from tests.compiler.schedule.solver.cases import costs, named

PAIRED = parse_costs("F=1,I=1,W=1,FB=1.8")
QUICK, LEAST = 0.02, 0.003  # effort


def checked(solution: Solution, table: Costs, cap: Fraction | int | None) -> Solution:
    """A solution, checked against its own figures; costs and cap are for 1/P of the model."""
    schedule = solution.schedule
    schedule.check()
    parts = schedule.num_stages // schedule.num_ranks
    assert solution.costs == table.recut(schedule.num_ranks, schedule.num_ranks * parts)
    timeline = simulate(schedule, solution.costs)
    assert timeline.makespan == solution.makespan >= solution.lower_bound
    assert cap is None or max(timeline.peak_activations) <= int(cap * parts) == solution.cap
    assert schedule.name == "auto"
    return solution


@pytest.mark.parametrize("num_ranks", [4, 6, 3, 5, 2, 1])
@settings(max_examples=10)
@given(st.data())
def test_never_worse_than_a_named_schedule(num_ranks: int, data: st.DataObject) -> None:
    num_micro_batches = data.draw(st.integers(1, 12))
    table = data.draw(costs(num_ranks))
    cap = data.draw(st.none() | st.integers(2, 16).map(lambda halves: Fraction(halves, 2)))
    chunks = data.draw(st.sampled_from([2, 2, 3, 5]))
    solution = checked(Solver(table, cap, effort=LEAST).solve(num_ranks, num_micro_batches, chunks=chunks), table, cap)
    assert solution.schedule.num_ranks == num_ranks
    assert solution.schedule.num_micro_batches == num_micro_batches
    for name, makespan in named(num_ranks, num_micro_batches, table, cap, chunks).items():
        assert solution.makespan <= makespan, name


@settings(max_examples=20)
@given(st.data())
def test_weights_of_the_stages_of_a_placement(data: st.DataObject) -> None:
    """A V searched with a weight for each of its stages, beside costs of 1/P of the model, is that of its own costs."""
    num_ranks, num_micro_batches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    weights = st.lists(st.integers(1, 4).map(Fraction), min_size=2 * num_ranks, max_size=2 * num_ranks)
    table = replace(data.draw(costs(num_ranks)), stages=tuple(data.draw(weights)))
    found = Solver(table, num_ranks, effort=LEAST).solve(num_ranks, num_micro_batches, placement=V)
    checked(found, table, num_ranks)
    own_costs = table.recut(num_ranks, 2 * num_ranks)
    assert found.costs == own_costs and own_costs.stages == table.stages
    assert found.lower_bound == lower_bound(V, num_ranks, num_micro_batches, own_costs, 2 * num_ranks)
    alone = Solver(own_costs, 2 * num_ranks, effort=LEAST).solve_on(V, num_ranks, num_micro_batches)
    assert (found.makespan, found.schedule) == (alone.makespan, alone.schedule)


@settings(max_examples=25)
@given(st.data())
def test_found_schedules_are_proven_on_every_placement(data: st.DataObject) -> None:
    """The program of a small model with all parts is proven, and is no longer than named schedules of the placement."""
    num_ranks, num_micro_batches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    held_by = data.draw(st.sampled_from([V, ONE_STAGE, loop(3), *[BIDIRECTIONAL] * (num_ranks % 2 == 0)]))
    stages = held_by.num_stages(num_ranks)
    table, cap = data.draw(costs(stages)), data.draw(st.none() | st.integers(stages // num_ranks, 6))
    table = replace(table, ranks=table.ranks[:num_ranks])
    solution = Solver(table, cap, effort=LEAST).solve_on(held_by, num_ranks, num_micro_batches)
    timeline = simulate(solution.schedule, table)
    assert solution.costs == table and timeline.makespan == solution.makespan >= solution.lower_bound
    assert cap is None or max(timeline.peak_activations) <= cap
    for row in SCHEDULES.values():
        if row.has_size(num_ranks, num_micro_batches) and held_by.supports(row.stage_placement(), num_ranks):
            named_timeline = simulate(row.generate(num_ranks, num_micro_batches), table)
            if cap is None or max(named_timeline.peak_activations) <= cap:
                assert solution.makespan <= named_timeline.makespan
    prove(lowered(solution.schedule, held_by), small_plan(num_ranks, held_by))


@pytest.mark.parametrize(("num_ranks", "num_micro_batches", "cap", "most"), [(4, 4, 1, "26.5"), (2, 4, 1, "16.5")])
def test_a_v_under_the_tightest_cap(num_ranks: int, num_micro_batches: int, cap: int, most: str) -> None:
    solution = Solver(Costs(), cap, effort=0.2).solve(num_ranks, num_micro_batches, placement=V)
    assert checked(solution, Costs(), cap).makespan <= Fraction(most)


def test_several_stages_a_rank_with_pairs_and_with_split_backwards() -> None:
    """Published figures of other schedules, each on one copy."""
    for P, N, chunks, table, cap, limit in (
        (16, 32, 4, shipped_costs("deepseek-v3-low"), 20, Fraction(5952)),
        (8, 40, 6, PAIRED, 10, Fraction("83.94")),
        (8, 24, 4, Costs(), 8, Fraction("73.75")),
    ):
        solution = Solver(table, cap, effort=LEAST).solve(P, N, placement=loop(chunks))
        assert checked(solution, table, cap).makespan <= limit


@settings(max_examples=15)
@given(st.data())
def test_caps_of_each_rank_and_one_copy(data: st.DataObject) -> None:
    """Each rank keeps to its cap, from the smallest cap up, and every placement is legal."""
    P, N = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    caps = tuple(Fraction(halves, 2) for halves in data.draw(st.lists(st.integers(2, 8), min_size=P, max_size=P)))
    placement = data.draw(st.sampled_from([None, V, ONE_STAGE, loop(2), loop(3)]))
    table = data.draw(costs(P))
    solution = Solver(table, caps, effort=LEAST).solve(P, N, copies=1, placement=placement)
    schedule = solution.schedule
    schedule.check()
    parts = schedule.num_stages // P
    timeline = simulate(schedule, solution.costs)
    assert timeline.makespan == solution.makespan >= solution.lower_bound and schedule.stage_placement.copies == 1
    assert all(peak <= cap * parts for peak, cap in zip(timeline.peak_activations, caps, strict=True))


def test_a_list_of_caps_needs_one_per_rank() -> None:
    with pytest.raises(ValueError, match="a cap for each of 4 ranks, got 3"):
        Solver(Costs(), (2, 2, 2)).solve(4, 4)


def test_an_odd_number_of_ranks_has_two_stages_each() -> None:
    solution = checked(Solver(Costs(), 4).solve(3, 7, placement=V), Costs(), 4)
    assert solution.makespan == solution.lower_bound == 22 and solution.schedule.stage_placement == V  # zb1p: 23
    solution = checked(Solver(PAIRED, 8, effort=0.1).solve(7, 20, placement=V), PAIRED, 8)
    assert solution.makespan <= Fraction("49") and solution.lower_bound < Fraction("47.2")  # one stage a rank: 65.4


def test_the_better_placement_is_taken_where_micro_batches_are_odd() -> None:
    solution = checked(Solver(PAIRED, 5, effort=0.1).solve(4, 9), PAIRED, 5)  # lower effort for `v`
    sides = [
        Solver(PAIRED.recut(4, 8), 10, effort=0.06).solve_on(V, 4, 9),
        Solver(PAIRED, 5, effort=0.1).solve_on(BIDIRECTIONAL, 4, 9),
    ]
    assert solution.makespan <= min(side.makespan for side in sides)
    assert solution.lower_bound <= min(side.lower_bound for side in sides)


def test_another_placement_is_chosen_if_it_is_better() -> None:
    """Many small stages, with almost no fill and drain time, beat the search, which has one stage per rank."""
    solution = checked(Solver(Costs(), effort=QUICK).solve(4, 8, chunks=16), Costs(), None)
    assert solution.origin == "interleaved_zb" and solution.schedule.stage_placement == loop(16)
    assert solution.makespan == named(4, 8, Costs(), None, 16)["interleaved_zb"] < 25


def test_ties_prefer_fewer_copies() -> None:
    """One micro-batch without deferred work takes the same time everywhere."""
    table = Costs(W=Fraction(0))
    assert Solver(table, 5, effort=QUICK).solve_on(BIDIRECTIONAL, 4, 1).makespan == 8
    solution = checked(Solver(table, 5, effort=QUICK).solve(4, 1), table, 5)
    assert solution.makespan == solution.lower_bound == 8 and solution.schedule.stage_placement == ONE_STAGE


def test_sizes_too_large_for_a_search_use_a_named_schedule() -> None:
    solution = Solver(Costs(), 100, effort=QUICK).solve(112, 6)
    assert solution.origin != "search" and solution.makespan <= min(named(112, 6, Costs(), 100).values())


def test_the_least_of_no_gain_at_the_cap_of_1f1b() -> None:
    solution = checked(Solver(Costs(), 8).solve(8, 20, placement=BIDIRECTIONAL), Costs(), 8)
    assert solution.makespan == solution.lower_bound == 63


def test_dualpipe_is_beaten_where_pairs_gain() -> None:
    """Figures for a tenth of the search effort; `benchmarks.solver` has those of the full search."""
    assert checked(Solver(PAIRED, 9, effort=0.2).solve(8, 20, placement=BIDIRECTIONAL), PAIRED, 9).makespan <= Fraction(
        "49.8"
    )  # DualPipe: 50.4
    table = with_every_pair_gaining(PAIRED)
    assert checked(Solver(table, 9, effort=0.2).solve(8, 20, placement=BIDIRECTIONAL), table, 9).makespan <= Fraction(
        "48.8"
    )
    assert checked(Solver(PAIRED, 5).solve(4, 8, placement=BIDIRECTIONAL), PAIRED, 5).makespan == Fraction("20.4")


@pytest.mark.parametrize("table", ["W=0,FB=1.5", "I=0,FI=0.5", "W=0,BW=0.5"])
def test_actions_that_take_no_time(table: str) -> None:
    times = parse_costs(table)
    checked(Solver(times, 3, effort=QUICK).solve(2, 5), times, 3)


def test_fewer_micro_batches_than_dualpipe_allows() -> None:
    solution = checked(Solver(PAIRED, 9, effort=0.2).solve(8, 10, placement=BIDIRECTIONAL), PAIRED, 9)
    assert solution.makespan <= Fraction("32.6")


def test_an_odd_number_of_a_long_run_starts_from_the_even_one() -> None:
    """If a removed backward is split, the following W is removed: others may belong to other backwards."""
    solution = Solver(parse_costs("F=10,I=10,W=10"), 5, effort=0.02).solve_on(BIDIRECTIONAL, 8, 25)
    solution.schedule.check()
    assert solution.makespan == simulate(solution.schedule, solution.costs).makespan <= 890
    assert max(peak_activations(solution.schedule)) <= 5


@pytest.mark.parametrize("num_micro_batches", [1, 7, 21])
def test_an_odd_number_is_no_longer_than_the_even_one_after_it(num_micro_batches: int) -> None:
    odd = Solver(PAIRED, 5, effort=QUICK).solve_on(BIDIRECTIONAL, 4, num_micro_batches)
    even = Solver(PAIRED, 5, effort=QUICK).solve_on(BIDIRECTIONAL, 4, num_micro_batches + 1)
    assert odd.makespan <= even.makespan


def test_a_search_takes_no_more_work_than_its_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if the search first looks for a better steady state."""
    efforts: list[float] = []
    length = 0

    def annealed(problem: ScheduleProblem, start: Slots, work: float, *_: object) -> FoundSlots:
        nonlocal length
        length = max(length, sum(map(len, start)))
        efforts.append(work)
        return FoundSlots(0, 0, start)

    monkeypatch.setattr(core, "anneal", annealed)
    problem = make_problem(V, 1, 8, PAIRED, 3)
    assert core.solve_core(problem, 0.1, lambda count: 0, True, lambda share: None) is not None
    assert len(efforts) > 3 and sum(efforts) <= 0.1 * core._WORK_A_SLOT * length


def test_no_micro_batch_is_added_where_one_more_takes_no_longer() -> None:
    """Pairs that take no longer than their longer action: the fourth micro-batch comes with the third."""
    table = parse_costs("FF=1,FB=2,BB=2,FI=1,FW=1,II=1,IW=1,WW=1,BI=2,BW=2")
    three, four = (Solver(table, 5, effort=QUICK).solve_on(BIDIRECTIONAL, 2, N) for N in (3, 4))
    assert three.makespan == four.makespan
    assert (three.schedule.num_micro_batches, four.schedule.num_micro_batches) == (3, 4)


def test_a_long_run_is_a_short_one_with_more_periods() -> None:
    solver = Solver(PAIRED, 5, effort=QUICK)
    runs = [checked(solver.solve(4, n, placement=BIDIRECTIONAL), PAIRED, 5) for n in (40, 42, 60)]
    assert len(solver.cores) == 1
    period = 2 * PAIRED.pair_time("BF")
    assert [run.makespan - runs[0].makespan for run in runs] == [0, period, 10 * period]
    assert runs[0].makespan < min(named(4, 40, PAIRED, 5).values())


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_other_numbers_of_ranks(num_ranks: int) -> None:
    solution = checked(Solver(PAIRED, 6, effort=QUICK).solve(num_ranks, 9), PAIRED, 6)
    if num_ranks == 1:  # the first F and the last B are single, the rest in pairs
        assert solution.makespan == 8 * PAIRED.pair_time("BF") + 3


def test_a_slow_rank_gets_its_own_order() -> None:
    table = replace(PAIRED, ranks=tuple(map(Fraction, (1, 1, 1, 2))))
    solution = checked(Solver(table, 5, effort=0.1).solve(4, 8), table, 5)
    assert solution.makespan < min(named(4, 8, table, 5).values())


def test_under_the_tightest_cap_one_micro_batch_goes_at_a_time() -> None:
    assert Solver(Costs(), 1, effort=QUICK).solve_on(BIDIRECTIONAL, 4, 3).makespan == 3 * 4 * 3
    halves = Costs().recut(4, 8)  # the next begins when half of the first is back
    assert Solver(halves, 2, effort=QUICK).solve_on(V, 4, 3).makespan == Fraction("20.5")


def test_too_small_caps_suggest_the_smallest_valid_one() -> None:
    with pytest.raises(ValueError, match="use cap = 1"):
        Solver(Costs(), 0).solve(4, 8)
    with pytest.raises(ValueError, match="use cap = 2"):
        Solver(Costs(), 1).solve_on(V, 3, 8)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_zero_ranks_or_micro_batches_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 rank and 1 micro-batch"):
        Solver(Costs()).solve(*sizes)


def test_weights_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="weights of 3 stages"):
        Solver(Costs(stages=(Fraction(1),) * 3)).solve(4, 8)


def test_the_same_arguments_give_the_same_schedule() -> None:
    first, second = (Solver(with_every_pair_gaining(PAIRED), 5, effort=QUICK).solve(4, 10) for _ in range(2))
    assert first == second


def test_the_bound_uses_the_placement_and_the_cap() -> None:
    solution = Solver(PAIRED, 5, effort=QUICK).solve(4, 8, placement=BIDIRECTIONAL)
    assert solution.lower_bound == lower_bound(BIDIRECTIONAL, 4, 8, PAIRED, 5)


def test_the_bound_knows_the_cap_of_each_rank() -> None:
    caps = (1, 3, 3, 3)  # the first rank alone sets the pace
    bounds = [Solver(Costs(), cap, effort=LEAST).solve_on(ONE_STAGE, 4, 8).lower_bound for cap in (caps, 3)]
    assert bounds[0] == lower_bound(ONE_STAGE, 4, 8, Costs(), caps) > 2 * bounds[1]


def test_without_a_cap_a_rank_holds_as_much_as_under_dualpipe() -> None:
    assert default_cap(8) == max(peak_activations(SCHEDULES["dualpipe"].generate(8, 16)))


def test_progress_is_reported_up_to_1() -> None:
    shares: list[float] = []
    for num_micro_batches in (8, 9):
        shares.clear()
        Solver(PAIRED, 5, effort=QUICK, report=shares.append).solve(4, num_micro_batches)
        assert shares == sorted(shares) and 0 < shares[0] < shares[-1] == 1
