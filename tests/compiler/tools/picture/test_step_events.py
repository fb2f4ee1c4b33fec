"""A traced step as Chrome trace events: every action of every rank once, at its time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiler.cli import main as cli
from compiler.tools.picture.recorded import TraceError
from compiler.tools.picture.trace_events import ranks_of, step_of
from tests.compiler.tools.picture.conftest import COSTS, schedule_of, trace_lines
from tests.compiler.tools.picture.test_run import write_run

STEPS, SPENT = 3, {"compute": 0.5, "message": 0.25}


@pytest.fixture
def lines() -> list[dict[int, dict[str, Any]]]:
    return trace_lines(schedule_of("dualpipe", 4, 8), COSTS, steps=STEPS)


@pytest.fixture
def run(tmp_path: Path, lines: list[dict[int, dict[str, Any]]]) -> Path:
    folder = write_run(tmp_path / "mine", lines)
    rows = [{"step": step, "loss": 2.0 + step, "spent_s": SPENT} for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder


def traced(run: Path, step: int, out: Path) -> dict[str, Any]:
    assert cli.main(["trace", str(run), str(step), "-o", str(out)]) == 0
    document: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return document


def test_every_action_appears_once_at_its_time(
    run: Path, lines: list[dict[int, dict[str, Any]]], tmp_path: Path
) -> None:
    document = traced(run, 2, tmp_path / "step.json")
    begin = min(rank[2]["actions"][0][1] for rank in lines)
    for rank, steps in enumerate(lines):
        events = [event for event in document["traceEvents"] if event["pid"] == rank and event["ph"] == "X"]
        actions = [[event["name"], event["ts"] + begin, event["ts"] + begin + event["dur"]] for event in events]
        assert actions == [list(action) for action in steps[2]["actions"]]
    names = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert names == [f"rank {rank}" for rank in range(4)]
    pairs = [event for event in document["traceEvents"] if event["name"].startswith("(")]
    assert pairs and all(len(event["args"]["micro_batches"]) == 2 for event in pairs)
    assert document["otherData"]["one clock"] and document["otherData"]["spent_s"] == SPENT
    assert document["otherData"]["title"] == "mine, step 2" and document["otherData"]["loss"] == 4.0


def test_ranks_of_other_clocks_begin_at_zero(run: Path, lines: list[dict[int, dict[str, Any]]], tmp_path: Path) -> None:
    late = [
        {**line, "actions": [[name, a + 1e9, b + 1e9] for name, a, b in line["actions"]]} for line in lines[3].values()
    ]
    (run / "trace" / "rank_3.jsonl").write_text("".join(json.dumps(line) + "\n" for line in late), "utf-8")
    document = traced(run, 1, tmp_path / "step.json")
    assert document["otherData"]["one clock"] is False
    for rank in range(4):
        assert min(e["ts"] for e in document["traceEvents"] if e["pid"] == rank and e["ph"] == "X") == 0


def test_missing_steps_and_traces_are_reported(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["trace", str(run), "50"]) == 2
    stderr = capsys.readouterr().err
    assert "step 50 was not traced; the nearest traced step is 3" in stderr and "64, 128, 256" in stderr
    assert cli.main(["trace", str(tmp_path / "none"), "1"]) == 2
    assert cli.main(["trace", str(tmp_path), "1"]) == 2
    assert "lacks rank_0.jsonl" in capsys.readouterr().err
    (run / "trace" / "rank_0.1.jsonl").write_text("", "utf-8")  # put aside by a resume
    assert ranks_of(run) == 4
    (run / "trace" / "rank_2.jsonl").unlink()
    with pytest.raises(TraceError, match=r"lacks rank_2\.jsonl"):
        step_of(run, 1)


def test_a_run_without_metrics_has_its_step_all_the_same(run: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").unlink()
    document = traced(run, 3, tmp_path / "step.json")
    assert "spent_s" not in document["otherData"] and len(document["traceEvents"]) > 8
