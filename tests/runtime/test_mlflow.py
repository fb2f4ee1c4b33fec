"""The exporter to MLflow, with a client that records its calls."""

from __future__ import annotations

import math
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.contract import MetricsSinks
from runtime.observe.sinks import mlflow
from runtime.observe.sinks.sink import Point, SinkContext
from runtime.observe.watch.follow import FollowedItem
from runtime.observe.watch.run_state import RunState


def row(step: int) -> FollowedItem:
    return FollowedItem("row", {"step": step, "time": f"2026-01-31T12:00:{step:02}.000Z"})


class Client:
    """A stand-in for MLflow's client that records its calls."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if name == "known" else None

    def create_experiment(self, name: str) -> str:
        self.calls.append(("experiment", name))
        return "8"

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.calls.append(("run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="new"))

    def update_run(self, key: str, status: str) -> None:
        self.calls.append(("update", key, status))

    def log_batch(self, key: str, metrics: list[Any]) -> None:
        self.calls.append(("log", key, metrics))

    def set_terminated(self, key: str, status: str) -> None:
        self.calls.append(("end", key, status))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The recorded calls of MLflow's client."""
    calls: list[tuple[Any, ...]] = []
    metric = SimpleNamespace(Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.entities", metric)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=lambda: Client(calls)))
    monkeypatch.setattr(mlflow, "MAX_METRICS", 3)
    monkeypatch.setenv(mlflow.URI, "http://localhost")
    return calls


def test_mlflow_gets_all_numbers_in_calls_of_limited_size(tmp_path: Path, client: list[tuple[Any, ...]]) -> None:
    sink = mlflow.MLflow()
    sink.open(SinkContext(tmp_path / "mine", MetricsSinks(mlflow="new"), RunState(tmp_path)))
    assert (sink.key, sink.destination) == ("new", "experiment new, run new")
    assert client == [("experiment", "new"), ("run", "8", "mine")]
    client.clear()
    sink.send([Point(row(1), {"a": 1.0, "b": math.nan, "c": 2.0}), Point(row(2), {"a": 3.0, "b": -math.inf, "c": 4.0})])
    time_ms = round(1000 * datetime(2026, 1, 31, 12, 0, 1, tzinfo=UTC).timestamp())
    first, second = (
        [("a", 1.0, time_ms, 1), ("c", 2.0, time_ms, 1)],
        [("a", 3.0, time_ms + 1000, 2), ("c", 4.0, time_ms + 1000, 2)],
    )
    assert client == [("log", "new", [*first, second[0]]), ("log", "new", [second[1]])]
    client.clear()
    sink.send([Point(row(3), dict.fromkeys("abc", 1.0)), Point(FollowedItem("event", {"event": "save"}), {})])
    assert [len(metrics) for _, _, metrics in client] == [3]


@pytest.mark.parametrize(
    ("happened", "status"),
    [
        ([], "KILLED"),
        ([("end", "finished")], "FINISHED"),
        ([("end", "failed")], "FAILED"),
        ([("end", "finished"), ("start", None)], "KILLED"),
        ([("end", "finished"), ("save", None)], "FINISHED"),
    ],
)
def test_mlflow_continues_a_run_and_sets_its_final_status(
    tmp_path: Path, client: list[tuple[Any, ...]], happened: list[tuple[str, str | None]], status: str
) -> None:
    sink = mlflow.MLflow()
    sink.open(SinkContext(tmp_path, MetricsSinks(mlflow="known"), RunState(tmp_path), key="before"))
    sink.send([Point(FollowedItem("event", {"event": event, "outcome": outcome}), {}) for event, outcome in happened])
    sink.close()
    assert client == [("update", "before", "RUNNING"), ("end", "before", status)]


def test_mlflow_writes_into_the_run_folder_where_no_server_is_given(
    tmp_path: Path, client: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    opened = SinkContext(tmp_path / "mine", MetricsSinks(mlflow="known"), RunState(tmp_path))
    mlflow.MLflow().open(opened)
    assert os.environ[mlflow.URI] == "http://localhost" and client == [("run", "7", "mine")]
    monkeypatch.delenv(mlflow.URI)
    mlflow.MLflow().open(opened)
    assert os.environ[mlflow.URI] == (tmp_path / "mine" / "mlruns").as_uri()
