"""Messages whose times depend on the two ranks: simulated, bounded and searched, against all orders of tiny ones."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V, loop
from compiler.schedule import SCHEDULES
from compiler.schedule.bound import lower_bound
from compiler.schedule.costs import Costs, LinkTimes, costs_of_json
from compiler.schedule.measure import measure
from compiler.schedule.simulate import simulate
from compiler.schedule.solver import Solver
from compiler.schedule.solver.problem import make_problem, schedule_of_slots, slots_of_schedule
from compiler.schedule.solver.timing import line_of, timing_of
from tests.compiler.cli.forms import parsed
from tests.compiler.schedule.test_simulate import random_costs
from tests.compiler.schedule.tiny import best_makespan

HEAD = '{"F": 1, "I": 1, "W": 1, "latency": '


def table(rng: random.Random, ranks: int) -> LinkTimes:
    """Random times of links, the same in both directions."""
    times = {(a, b): Fraction(rng.randint(0, 6), 2) for b in range(ranks) for a in range(b)}
    rows = range(ranks)
    return LinkTimes(table=tuple(tuple(times.get((min(a, b), max(a, b)), Fraction(0)) for b in rows) for a in rows))


def test_nodes_and_tables_give_the_same_latencies() -> None:
    nodes = costs_of_json(HEAD + '{"inside": 0.5, "node": 2, "between": 3}}')
    rows = [[0, 0.5, 3, 3], [0.5, 0, 3, 3], [3, 3, 0, 0.5], [3, 3, 0.5, 0]]
    listed = costs_of_json(HEAD + json.dumps({"table": rows}) + "}")
    assert nodes.latency == listed.latency == Fraction(1, 2)
    assert all(nodes.message(a, b) == listed.message(a, b) for a, b in permutations(range(4), 2))
    for name in ("1f1b", "zbv", "dualpipe", "interleaved"):
        schedule = SCHEDULES[name].generate(4, 8)
        from_nodes, from_table = (measure(schedule, costs) for costs in (nodes, listed))
        assert (from_nodes.makespan, from_nodes.lower_bound) == (from_table.makespan, from_table.lower_bound)
        assert from_nodes.makespan >= from_nodes.lower_bound


def test_a_lone_micro_batch_takes_its_links_both_ways() -> None:
    costs = costs_of_json(HEAD + '{"inside": 0.5, "node": 2, "between": 3}}')
    schedule = SCHEDULES["1f1b"].generate(4, 1)
    path = Fraction(1, 2) + 3 + Fraction(1, 2)
    assert simulate(schedule, costs).makespan == 4 * 3 + 2 * path
    assert measure(schedule, costs).lower_bound == 4 + 4 + 1 + 2 * path  # the W of other stages wait for nothing


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"inside": 1, "node": 1.5, "between": 3}', '"node" must be a whole number of ranks'),
        ('{"inside": 1, "between": 3}', '"node" must be a whole number of ranks, 1 or more'),
        ('{"inside": 1, "node": 0, "between": 3}', '"node" must be a whole number of ranks, 1 or more'),
        ('{"table": [[0, 1], [1, 0]], "node": 2}', 'leave "node" and "between" out'),
        ('{"table": [[0, 1], [2, 0]]}', "the same both ways, 0 to itself"),
        ('{"table": [[0, 1]]}', "a time for each rank and rank"),
        ('{"table": [[1]]}', "0 to itself"),
        ('{"near": 1}', '"latency" has an unknown key'),
    ],
)
def test_invalid_latencies_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        costs_of_json(HEAD + text + "}")


def test_tables_of_other_sizes_are_refused() -> None:
    costs = replace(Costs(), links=table(random.Random(0), 3))
    with pytest.raises(ValueError, match="weights of 3 ranks in the table of latency, but the schedule has 4"):
        simulate(SCHEDULES["1f1b"].generate(4, 4), costs)


@pytest.mark.parametrize("placement", [BIDIRECTIONAL, V, ONE_STAGE, loop(2)], ids=str)
def test_times_of_the_search_equal_simulation(placement: StagePlacement) -> None:
    """This holds for all placements; messages within a rank are not in the tables."""
    rng = random.Random(str(placement))
    name = {BIDIRECTIONAL: "dualpipe", V: "zbv", ONE_STAGE: "zb1p", loop(2): "interleaved"}[placement]
    schedule = SCHEDULES[name].generate(4, 8)
    for _ in range(3):
        costs = replace(random_costs(rng, placement.num_stages(4), 4), pairs=(), stages=(), links=table(rng, 4))
        problem = make_problem(placement, 4, 8, costs, 99)
        slots = slots_of_schedule(problem, schedule)
        lines = [line_of(problem, row, row_slots) for row, row_slots in enumerate(slots)]
        timing = timing_of(problem, [line for line in lines if line])
        timeline = simulate(schedule_of_slots(problem, slots), costs)  # pairs without gain were separated
        assert timing is not None and timing.makespan * problem.unit == timeline.makespan


TINY: tuple[tuple[StagePlacement, int, int], ...] = (
    (BIDIRECTIONAL, 2, 2),
    (ONE_STAGE, 2, 2),
    (V, 2, 1),
    (loop(2), 2, 1),
)


@pytest.mark.parametrize("seed", range(2))
def test_no_order_is_below_the_bound_and_none_found_is_below_the_best(seed: int) -> None:
    rng = random.Random(seed)
    for placement, ranks, micro_batches in TINY:
        costs = replace(random_costs(rng, placement.num_stages(ranks), ranks), links=table(rng, ranks))
        best = best_makespan(placement, ranks, micro_batches, costs, 3)
        assert best is not None and lower_bound(placement, ranks, micro_batches, costs, 3) <= best
        solution = Solver(costs, 3, effort=0.02).solve_on(placement, ranks, micro_batches)
        assert solution.makespan == simulate(solution.schedule, costs).makespan >= best >= solution.lower_bound


def test_mirrored_ranks_share_a_list_only_where_links_are_mirrored() -> None:
    lopsided = LinkTimes(table=((0, 1, 1, 1), (1, 0, 2, 1), (1, 2, 0, 9), (1, 1, 9, 0)))  # type: ignore[arg-type]
    costs = replace(Costs(), links=lopsided)
    assert not costs.is_mirrored(4) and replace(costs, links=LinkTimes(2, Fraction(3))).is_mirrored(4)
    solution = Solver(costs, effort=0.02).solve_on(BIDIRECTIONAL, 4, 4)
    assert solution.makespan == simulate(solution.schedule, costs).makespan >= solution.lower_bound


def test_json_costs_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "links.json"
    file.write_text(HEAD + '{"inside": 0.5, "node": 2, "between": 3}}')
    command = ["schedule", "--name", "1f1b", "--ranks", "4", "--micro-batches", "4", "--format", "json", "--costs"]
    assert main([*command, str(file)]) == 0
    value = parsed(capsys.readouterr().out, "simulated")
    assert value["costs"]["latency"] == {"inside": 0.5, "node": 2, "between": 3, "table": []}
    file.write_text(json.dumps(value["costs"]))
    assert main([*command, str(file)]) == 0
    assert parsed(capsys.readouterr().out, "simulated") == value
    assert main([*command, str(file), "--latency", "0"]) == 0  # for all messages
    assert parsed(capsys.readouterr().out, "simulated")["makespan"] == 3 * (4 + 3)
