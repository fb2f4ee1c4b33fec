"""Planned and measured: reading a run's trace, judging its actions, fitting costs, and the command that shows them."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.commands import inspect
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.program.lower import Lowering
from compiler.program.lower.scheduler import Scheduler
from compiler.schedule.costs import Costs, costs_of_json
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import simulate
from compiler.tools.picture.recorded import (
    OrderError,
    TraceError,
    fit_costs,
    json_of_costs,
    measure,
    programs_of,
    read_trace,
    steps_of_current_programs,
)
from dsl.load import load
from tests import copies
from tests.compiler.tools.picture.conftest import COSTS, make_measured, schedule_of, trace_lines

ROOT = Path(__file__).parents[4]
UNEVEN = Costs(
    F=Fraction(2), I=Fraction(3), W=Fraction("1.5"), B=Fraction("4.4"), pairs=(("BF", Fraction("5.1")),),
    latency=Fraction("0.25"), stages=tuple(Fraction(w) for w in ("1.25", "1", "1", "0.8")),
)  # fmt: skip


def write_run(folder: Path, lines: list[dict[int, dict[str, Any]]]) -> Path:
    (folder / "trace").mkdir(parents=True)
    for rank, steps in enumerate(lines):
        text = "".join(json.dumps(line) + "\n" for line in steps.values())
        (folder / "trace" / f"rank_{rank}.jsonl").write_text(text, "utf-8")
    return folder


def test_measured_times_are_medians_over_steps_and_data_ranks() -> None:
    schedule = schedule_of("1f1b", 2, 3)
    lines = trace_lines(schedule, COSTS, steps=3) + trace_lines(schedule, COSTS, factor=3, steps=3)
    columns = [lines[0], lines[2], lines[1], lines[3]]  # world ranks: two data ranks a pipeline rank
    slow = [trace_lines(schedule, COSTS, factor=9, steps=3)[rank] for rank in (0, 0, 1, 1)]
    for ranks, slow_steps in zip(columns, slow, strict=True):
        ranks[2] = slow_steps[2]  # one odd step
    measured = measure(schedule, columns, "train_3")
    assert measured.num_steps == 3
    starts = [start for start, _ in measured.spans[0]]
    assert starts == [1000 * 3 * float(s) for s, _ in simulate(schedule, COSTS).spans[0]]  # between x1 and x9
    assert all(len(times) == 6 for rank in measured.samples for times in rank)


def test_the_first_of_many_steps_is_left_out() -> None:
    schedule = schedule_of("1f1b", 2, 3)
    lines = trace_lines(schedule, COSTS, steps=8)
    for rank, slow_steps in zip(lines, trace_lines(schedule, COSTS, factor=50, steps=8), strict=True):
        rank |= {1: slow_steps[1], 2: slow_steps[2]}
    measured = measure(schedule, lines, "train_3")
    assert measured.num_steps == 6 and measured.makespan == 1000 * simulate(schedule, COSTS).makespan


@pytest.mark.parametrize(("name", "P", "N"), [("dualpipe", 4, 10), ("1f1b", 4, 6), ("zb1p", 4, 8)])
def test_fitted_costs_recover_those_of_the_trace(name: str, P: int, N: int, tmp_path: Path) -> None:
    schedule = schedule_of(name, P, N)
    measured = measure(schedule, trace_lines(schedule, UNEVEN), f"train_{N}")
    read = costs_of_json(json_of_costs(fit_costs(schedule, measured)))
    assert read == fit_costs(schedule, measured)
    kinds = {action for rank in schedule.actions for step in rank for action in str(step) if action in "FBIW"}
    for kind in kinds:
        assert float(read.lone_time(kind)) == pytest.approx(float(UNEVEN.lone_time(kind)), rel=2e-3)
    assert [float(w) for w in read.stages] == pytest.approx([float(w) for w in UNEVEN.stages], rel=2e-3)
    assert float(read.latency) == pytest.approx(0.25, abs=2e-3)
    if name == "dualpipe":
        assert float(read.pair_time("FB")) == pytest.approx(5.1, rel=5e-3)
    planned, actual = simulate(schedule, read), simulate(schedule, UNEVEN)
    assert float(planned.makespan) == pytest.approx(float(actual.makespan), rel=5e-3)


def test_every_action_is_judged_against_its_plan() -> None:
    picture = make_measured(1.25)
    (panel,) = picture.panels
    assert [row.track for row in panel.rows[:2]] == ["planned", "measured"]
    for row in panel.rows:
        for cell in row.cells:
            assert cell.error == (pytest.approx(0.25) if row.track == "measured" else None)
    assert dict(panel.facts)["measured"] == "36.25 ms (+25%)" and picture.given_table is not None
    rows = {row[0]: row for row in picture.given_table.rows}
    assert rows["F0"] == ("F0", "1", "1.25", "1.25 – 1.25", "+25%", rows["F0"][5])
    assert "F0 | B3" in rows and all(row[4] == "+25%" for row in rows.values())


def test_another_order_is_named() -> None:
    schedule = schedule_of("1f1b", 2, 3)
    lines = trace_lines(schedule, COSTS)
    actions: Any = lines[1][2]["actions"]
    actions[1][0], actions[2][0] = actions[2][0], actions[1][0]
    with pytest.raises(OrderError, match=r"rank 1, step 2: F1.1 ran where B1.0 was planned, at position 1"):
        measure(schedule, lines, "train_3")
    lines = trace_lines(schedule, COSTS)
    lines[0][3]["actions"].pop()  # type: ignore[attr-defined]
    with pytest.raises(OrderError, match=r"rank 0, step 3: nothing ran where B0.2 was planned, at position 5"):
        measure(schedule, lines, "train_3")


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[" * 100_000,
        "[]",
        '{"step": 1}',
        '{"step": 1, "program": "train_3", "actions": [["F0.0", 1]]}',
        '{"step": 1, "program": "train_3", "actions": [["F0.0", 2, 1]]}',
        '{"step": 1, "program": "train_3", "actions": [["F0.0", 0, 5], ["F0.1", 4, 6]]}',
        '{"step": 1, "program": "train_3", "actions": [["F0.0", NaN, 5]]}',
        '{"step": 1, "program": "train_3", "actions": [["F0.0", 1e400, 1e401]]}',
    ],
)
def test_damaged_traces_are_named(line: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, trace_lines(schedule_of("1f1b", 1, 3), COSTS))
    with (folder / "trace" / "rank_0.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(TraceError, match=r"rank_0\.jsonl:4"):
        read_trace(folder, 1)


def test_a_rank_without_a_trace_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, trace_lines(schedule_of("1f1b", 1, 3), COSTS))
    with pytest.raises(TraceError, match=r"has no readable trace: .*rank_1\.jsonl"):
        read_trace(folder, 2)


def test_half_a_line_at_the_end_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path, trace_lines(schedule_of("1f1b", 1, 3), COSTS))
    with (folder / "trace" / "rank_0.jsonl").open("a") as file:
        file.write('{"step": 9, "prog')
    assert list(read_trace(folder, 1)[0]) == [1, 2, 3]


# ---------------------------------------------------------------- several plans in one run


def test_steps_of_other_programs_are_left_out(tmp_path: Path) -> None:
    schedule, gpipe = schedule_of("1f1b", 2, 3), schedule_of("gpipe", 2, 3)
    lines, gpipe_lines = trace_lines(schedule, COSTS, steps=6), trace_lines(gpipe, COSTS, steps=2)
    for rank in lines:
        for line in rank.values():
            line["of"] = "a" * 64
    for rank, before in zip(lines, gpipe_lines, strict=True):
        rank |= {3: {**before[1], "of": "b" * 64}, 4: before[2]}  # the second is of a time without digests
    with pytest.raises(OrderError):
        measure(schedule, lines, "train_3")
    assert steps_of_current_programs(tmp_path, lines) == (lines, 0), "without a digest all are of one"
    (tmp_path / "program.sha256").write_text("a" * 64 + "\n")
    matching, left_out = steps_of_current_programs(tmp_path, lines)
    assert [list(rank) for rank in matching] == [[1, 2, 5, 6]] * 2 and left_out == 2
    assert measure(schedule, matching, "train_3").num_steps == 3
    (tmp_path / "program.sha256").write_text("c" * 64)
    with pytest.raises(TraceError, match="no step of the present plan was traced yet, only 6 of the plan"):
        steps_of_current_programs(tmp_path, lines)
    (tmp_path / "program.sha256").write_text("c\x1b")
    with pytest.raises(TraceError, match="is not a digest"):
        steps_of_current_programs(tmp_path, lines)


# ---------------------------------------------------------------- the command


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    return inspect.run(parser.parse_args(words))


def traced(folder: Path) -> tuple[Path, Schedule]:
    """A run folder of the quickstart with a trace of its schedule."""
    folder.mkdir()
    copies.copy(ROOT / "tests" / "golden" / "quickstart" / "spec.resolved", folder)
    spec = load(folder / "spec.resolved")
    plan = make_plan(spec)
    schedule = Scheduler(spec, Lowering(plan, rank_rates(spec))).schedule(4)
    lines = [rank for rank in trace_lines(schedule, replace(UNEVEN, stages=()), 2.0) for _ in range(plan.mesh.dp)]
    return write_run(folder, lines), schedule


def test_inspect_draws_a_run_and_writes_its_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would be broken over lines
    folder, schedule = traced(Path("run"))
    assert run(str(folder)) == 0
    stdout = capsys.readouterr().out
    assert "rank 0 planned" in stdout and "rank 1 measured" in stdout and "traced steps 3" in stdout
    costs, page = Path("costs.json"), Path("page.html")
    assert run(str(folder), "--format", "html", "-o", str(page), "--write-costs", str(costs)) == 0
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert float(costs_of_json(costs.read_text("utf-8")).F) == pytest.approx(4, rel=1e-2)
    simulate(schedule, costs_of_json(costs.read_text("utf-8")))
    capsys.readouterr()
    assert run(str(folder), "--costs", str(costs)) == 0
    assert f"Planned from {costs}." in capsys.readouterr().out.replace("\n", " ")
    assert run(str(folder), "--costs", "plan") == 0
    assert "Planned from the plan's predictions." in capsys.readouterr().out


def test_inspect_reports_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "none")) == 2
    assert capsys.readouterr().err.startswith("error: there is no folder ")
    assert run(str(tmp_path)) == 2
    assert "cannot be inspected" in capsys.readouterr().err
    folder, _ = traced(tmp_path / "run")
    assert run(str(folder), "--program", "train_77") == 2
    assert "use one of train_4" in capsys.readouterr().err
    assert run(str(folder), "--costs", str(tmp_path)) == 2  # nor a pipe, which would be waited for
    assert f"{tmp_path} is not a regular file, but a folder" in capsys.readouterr().err
    path = folder / "trace" / "rank_0.jsonl"
    path.write_text(path.read_text("utf-8").replace("F0.1", "F0.9"), "utf-8")
    assert run(str(folder)) == 1
    assert "F0.9 ran where F0.1 was planned" in capsys.readouterr().err
    path.write_text(path.read_text("utf-8").replace("F0.9", "\\u001b[2J"), "utf-8")
    assert run(str(folder)) == 1
    assert "\x1b" not in capsys.readouterr().err


def test_programs_are_ordered_by_size() -> None:
    lines = {
        i: {"step": i, "program": name, "actions": []} for i, name in enumerate(("train_8", "train_10", "evaluate_10"))
    }
    assert programs_of([lines]) == ("evaluate_10", "train_8", "train_10")
    with pytest.raises(TraceError, match="not the name of a program"):
        programs_of([{1: {"step": 1, "program": "train_x", "actions": []}}])
