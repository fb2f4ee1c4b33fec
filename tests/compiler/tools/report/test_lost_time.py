"""Where the time of a run went, against histories with a known cause of each second."""

from __future__ import annotations

import datetime
import random
from typing import Any

import pytest

from compiler.tools.report.lost_time import LostTime, lost_time


class History:
    """A fictitious run: its rows and events, and the seconds for each cause."""

    def __init__(self) -> None:
        self.now_s, self.step = 1.7e9, 0
        self.events: list[dict[str, Any]] = []
        self.kept: list[dict[str, Any]] = []
        self.replaced: list[dict[str, Any]] = []
        self.spent = dict.fromkeys(("steps", "again", "checkpoint", "restart", "other"), 0.0)

    def _stamp(self) -> str:
        return datetime.datetime.fromtimestamp(self.now_s, datetime.UTC).isoformat().replace("+00:00", "Z")

    def event(self, name: str, **fields: Any) -> None:
        self.events.append({"time": self._stamp(), "event": name, "step": self.step, **fields})

    def train(self, seconds: float) -> None:
        self.now_s += seconds
        self.step += 1
        self.kept.append({"step": self.step, "time": self._stamp(), "step_s": seconds})

    def save(self, seconds: float) -> None:
        self.now_s += seconds
        self.spent["checkpoint"] += seconds
        self.event("save", seconds=seconds)

    def validate(self, seconds: float) -> None:
        self.now_s += seconds
        self.spent["other"] += seconds
        self.event("notice")

    def fail(self, saved: int, until_found: float, until_start: float) -> None:
        """Half a step, its end being noticed, and the ranks that start again from a checkpoint."""
        self.now_s += until_found
        self.event("restart")
        self.now_s += until_start
        self.spent["restart"] += until_found + until_start
        self.go_back(saved)
        self.event("start")

    def go_back(self, saved: int) -> None:
        self.replaced += [row for row in self.kept if row["step"] > saved]
        self.kept = [row for row in self.kept if row["step"] <= saved]
        self.step = saved

    def found(self) -> LostTime:
        lost = lost_time(self.kept, self.replaced, self.events)
        assert lost is not None
        return lost


@pytest.mark.parametrize("seed", range(20))
def test_each_second_is_attributed_and_the_parts_sum_to_the_time(seed: int) -> None:
    draw, run = random.Random(seed), History()
    run.event("start")
    saved = 0
    for _ in range(draw.randint(5, 60)):
        run.train(draw.uniform(0.1, 2))
        kind = draw.choice(("nothing", "nothing", "save", "validate", "fail", "by hand"))
        if kind == "save":
            run.save(draw.uniform(0.01, 1))
            saved = run.step
        elif kind == "validate":
            run.validate(draw.uniform(0.01, 1))
            run.train(0.5)
        elif kind == "fail":
            run.fail(saved, draw.uniform(0.1, 5), draw.uniform(0.1, 5))
        elif kind == "by hand":
            run.event("end")
            run.now_s += 86_400  # no process ran
            run.go_back(saved)
            run.event("start")
    run.event("end")
    lost = run.found()
    run.spent["steps"] = sum(row["step_s"] for row in run.kept)
    run.spent["again"] = sum(row["step_s"] for row in run.replaced)
    for name, seconds in run.spent.items():
        assert getattr(lost, name) == pytest.approx(seconds, abs=1e-3), name
    assert lost.wall == pytest.approx(sum(run.spent.values()), abs=1e-3)
    assert lost.goodput == pytest.approx(run.spent["steps"] / sum(run.spent.values()), abs=1e-6)


def test_damaged_rows_are_ignored() -> None:
    rows = [{"step": 1, "time": 5}, {"step": 2, "time": "soon", "step_s": "long"}, {"step": 3}]
    assert lost_time(rows, [], [{"event": "start", "time": "x"}]) is None
    run = History()
    run.event("start")
    run.train(1.0)
    run.save(0.5)
    run.train(2.0)
    damaged = [{"event": "save", "step": 1, "time": "soon"}, {"event": "restart", "step": 1}]
    lost = lost_time([rows[0], *run.kept, rows[2]], [], [run.events[0], *damaged, run.events[1]])
    assert lost is not None and (lost.wall, lost.steps, lost.checkpoint) == pytest.approx((3.5, 3.0, 0.5))


def test_time_that_failures_cost_has_its_step() -> None:
    run = History()
    run.event("start")
    for _ in range(4):
        run.train(1.0)
    run.fail(saved=2, until_found=3.0, until_start=4.0)
    run.train(1.5)
    run.event("end")
    assert run.found().lost_at == pytest.approx({3: 1.0 + 7.0, 4: 1.0})
