"""MLflow: exports rows as metrics of an MLflow run. Later starts continue the same MLflow run.

Steps that were discarded and retrained have two points, because MLflow cannot delete any.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from runtime.observe.sinks.sink import Point, SinkContext
from runtime.observe.watch.run_state import seconds_of

URI = "MLFLOW_TRACKING_URI"
FOLDER = "mlruns"  # in the run folder, without a server
MAX_METRICS = 1000  # metrics per call
KILLED = "KILLED"  # status of a run that reported no end


class MLflow:
    """Logs to an experiment; needs mlflow or mlflow-skinny. MLFLOW_TRACKING_URI is the server; without it, metrics are
    written to `mlruns/` in the run folder."""

    def __init__(self) -> None:
        self.destination = ""
        self.key: str | None = None

    def open(self, opened: SinkContext) -> None:
        """Start the MLflow run, or continue it."""
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        if URI not in os.environ:  # write only inside the run folder
            os.environ |= {URI: (opened.run.resolve() / FOLDER).as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
        self._client: Any = MlflowClient()
        name = str(opened.metrics.mlflow)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        if opened.key is None:
            self.key = self._client.create_run(number, run_name=opened.name).info.run_id
        else:
            self.key = opened.key
            self._client.update_run(self.key, status="RUNNING")
        self._ended = KILLED
        self.destination = f"experiment {name}, run {self.key}"

    def send(self, points: Sequence[Point]) -> None:
        """Log the numbers of rows. Non-finite numbers are not supported."""
        logged: list[Any] = []
        for item, values in points:
            if item.kind == "row":
                time_ms = round(1000 * (seconds_of(item.time) or 0.0))
                named = {name: value for name, value in values.items() if math.isfinite(value)}
                logged += [self._metric(name, value, time_ms, item.step) for name, value in named.items()]
            elif item.fields.get("event") == "start":
                self._ended = KILLED
            elif item.fields.get("event") == "end":
                self._ended = "FINISHED" if item.fields.get("outcome") == "finished" else "FAILED"
        for first in range(0, len(logged), MAX_METRICS):
            self._client.log_batch(self.key, metrics=logged[first : first + MAX_METRICS])

    def close(self) -> None:
        """Set the final status of the MLflow run."""
        self._client.set_terminated(self.key, status=self._ended)
