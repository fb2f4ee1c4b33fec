"""Following a run's rows: a resume moves rows out of the file, and every row is returned once."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from runtime.observe.events import Events
from runtime.observe.metrics import MetricsWriter
from runtime.observe.watch import follow
from runtime.observe.watch.follow import FollowedItem, Follower
from runtime.observe.watch.run_state import RunState


class Rows:
    """The rows of a reader that follows a run, without rows of discarded steps."""

    def __init__(self, run: Path) -> None:
        self.follower, self.rows = Follower(run), list[tuple[int, int]]()

    def look(self) -> list[FollowedItem]:
        items = self.follower.poll()
        for item in items:
            if item.kind == "rewind":
                self.rows = [row for row in self.rows if row[0] <= item.step]
            elif item.kind == "row":
                assert not self.rows or self.rows[-1][0] < item.step
                self.rows.append((item.step, item.fields["life"]))
        return items


@pytest.mark.parametrize("seed", range(25))
def test_a_reader_returns_the_current_rows_at_any_time(tmp_path: Path, seed: int) -> None:
    """Over random histories of steps, resumes at random steps, damaged lines, and reads in between."""
    draw, reader, late = random.Random(seed), Rows(tmp_path), Rows(tmp_path)
    reader.look()
    metrics, step, life = MetricsWriter(tmp_path), 0, 0
    clock = itertools.count()
    expected: list[tuple[int, int]] = []
    for _ in range(60):
        match draw.randrange(5):
            case 0:
                metrics.close()
                step, life = draw.randint(0, step), life + 1
                metrics = MetricsWriter(tmp_path, step)
                expected = [row for row in expected if row[0] <= step]
            case 1 if draw.random() < 0.5:
                with (tmp_path / "metrics.jsonl").open("a") as file:
                    file.write('{"step": 3, "lo\n')
            case 2:
                reader.look()
            case _:
                step += 1
                metrics.write({"step": step, "life": life, "time": f"{next(clock):05}"})
                expected.append((step, life))
    metrics.write({"step": step + 1, "life": life, "time": f"{next(clock):05}"})
    for rows_reader in (reader, late):
        rows_reader.look()
        assert rows_reader.rows == [*expected, (step + 1, life)]
        assert rows_reader.look() == []


def test_a_half_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    reader, path = Follower(tmp_path), tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "loss')
    assert [item.step for item in reader.poll()] == [1]
    with path.open("a") as file:
        file.write('": 3.0}\n')
    assert [item.fields for item in reader.poll()] == [{"step": 2, "loss": 3.0}]


def test_a_file_that_is_read_in_pieces_gives_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the rows that a piece ends within."""
    monkeypatch.setattr(follow, "_PIECE_BYTES", 64)
    reader, path, numbers = Follower(tmp_path), tmp_path / "metrics.jsonl", range(1, 51)
    path.write_text("".join(f'{{"step": {step}, "loss": {step}.5}}\n' for step in numbers) + '{"step": 51')
    assert [(item.step, item.fields["loss"]) for item in reader.poll()] == [(step, step + 0.5) for step in numbers]
    with path.open("a") as file:
        file.write("}\n")
    assert [item.step for item in reader.poll()] == [51]


def test_a_view_of_a_long_run_reads_its_last_rows_and_its_last_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on behind them; after a resume, with the rows that are new."""
    monkeypatch.setattr(follow, "RECENT_BYTES", 1000)
    metrics = MetricsWriter(tmp_path)
    for step in range(1, 201):
        metrics.write({"step": step, "time": f"{step:05}"} | ({"validation_loss": 4.0} if step % 60 == 0 else {}))
    view, everything = Follower.of_recent(tmp_path), [item.step for item in Follower(tmp_path).poll()]
    steps = [item.step for item in view.poll()]
    assert steps[0] == 120 and 180 in steps and steps[1:] == everything[-len(steps) + 1 :] and 10 < len(steps) < 40
    metrics.write({"step": 201, "time": "00201"})
    assert [item.step for item in view.poll()] == [201]
    metrics.close()
    MetricsWriter(tmp_path, 199).write({"step": 200, "time": "00300"})
    assert [(item.kind, item.step) for item in view.poll()][-2:] == [("rewind", 199), ("row", 200)]
    (tmp_path / "short").mkdir()
    MetricsWriter(tmp_path / "short").write({"step": 1, "time": "00001"})
    assert [item.step for item in Follower.of_recent(tmp_path / "short").poll()] == [1]


def test_rows_and_events_come_by_time(tmp_path: Path) -> None:
    events, metrics = Events(tmp_path), MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        metrics.write({"step": step, "time": f"2026-01-31T12:00:0{step}.000Z"})
    lines = [{"time": f"2026-01-31T12:00:0{step}.500Z", "event": "save", "step": step} for step in (1, 2)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(item.kind, item.step) for item in Follower(tmp_path).poll()] == [
        ("row", 1), ("event", 1), ("row", 2), ("event", 2), ("row", 3),
    ]  # fmt: skip
    events.close()


def test_a_clock_that_is_set_back_changes_no_order(tmp_path: Path) -> None:
    """Rows come in the order of their file: a later step in front of an earlier one would look like a resume."""
    metrics, events = MetricsWriter(tmp_path), Events(tmp_path)
    for step, second in ((1, 50), (2, 51), (3, 20), (4, 21), (5, 52)):
        metrics.write({"step": step, "time": f"2026-01-31T12:00:{second}.000Z"})
    lines = [
        {"time": f"2026-01-31T12:00:{second}.500Z", "event": "save", "step": step}
        for step, second in ((2, 51), (4, 21))
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    items = Follower(tmp_path).poll()
    assert [item.step for item in items if item.kind == "row"] == [1, 2, 3, 4, 5]
    assert [item.step for item in items if item.kind == "event"] == [2, 4]
    assert [item.kind for item in items].count("rewind") == 0
    events.close()


@pytest.mark.parametrize(
    "row", [{"step": -1}, {"step": 2**63}, {"step": True}, {"step": 2, "time": ["a"]}, {"step": 2, "time": 7}, {}]
)
def test_a_row_that_no_run_writes_is_left_out(tmp_path: Path, row: dict[str, Any]) -> None:
    rows = [{"step": 1, "time": "a"}, row, {"step": 2**63 - 1, "time": "b"}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(fields) + "\n" for fields in rows))
    assert [(item.kind, item.step) for item in Follower(tmp_path).poll()] == [("row", 1), ("row", 2**63 - 1)]


def test_steps_of_earlier_starts_are_not_counted(tmp_path: Path) -> None:
    """Counters of this start begin at 0 wherever the run resumes; everything else covers the whole run."""
    rows = [
        {"step": step, "time": f"2026-01-31T12:00:0{step}.000Z", "tokens_per_s": 100.0, "step_s": 2.0}
        | {"spent_s": {"compute": 1.5, "sum": 0.5}, "validation_loss": 5.0 - step}
        for step in range(1, 6)
    ]
    for since, counted in (("", 5), ("2026-01-31T12:00:03.500Z", 2), ("2026-01-31T13", 0)):
        state = RunState(tmp_path, since=since)
        for row in rows:
            state.take(FollowedItem("row", row))
        assert state.trained_tokens == 200 * counted and state.spent_s["compute"] == 1.5 * counted
        assert state.validation == (5, 0.0) and state.pace_s == 1.0 and state.shares == {"compute": 0.75, "sum": 0.25}


def test_pace_and_time_left_use_the_last_steps(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    state.take(FollowedItem("event", {"event": "start", "step": 0, "last_step": 100, "time": ""}))
    for step in range(1, 41):
        seconds = 2 * step if step > 8 else 0  # a slow beginning is not of the last 32
        state.take(
            FollowedItem("row", {"step": step, "time": f"2026-01-31T12:{seconds // 60:02}:{seconds % 60:02}.000Z"})
        )
    assert state.pace_s == 2.0 and state.left_s == 120.0


def test_the_end_of_a_phase_is_not_the_end_of_the_run(tmp_path: Path) -> None:
    form = dict(run="a", model="m", cluster="c", devices=1, flops_per_token=1.0, peak_flops=None, mfu=None, step_s=1.0)
    form |= dict(tokens=1, bubble=0.0, memory_bytes=[1], capacity_bytes=[1], links=[])
    state, end = RunState(tmp_path), {"event": "end", "outcome": "finished", "exit_code": 0, "step": 3, "time": ""}
    for phase, over in ((1, False), (2, True)):
        (tmp_path / "watch.json").write_text(json.dumps({**form, "phase": phase, "phases": 2}))
        state.take(FollowedItem("event", {"event": "start", "step": 0, "time": ""}))
        assert not state.is_over
        state.take(FollowedItem("event", end))
        assert state.is_over == over
