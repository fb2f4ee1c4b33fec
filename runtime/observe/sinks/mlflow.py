"""MLflow: the numbers of rows as metrics of a run of an experiment. A start of the run goes on with its run there.

Steps that were given up and trained again have two points there: MLflow deletes none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from runtime.observe.sinks.sink import Opened, Point
from runtime.observe.watch.run_state import seconds_of

URI = "MLFLOW_TRACKING_URI"
FOLDER = "mlruns"  # of the run folder, where there is no server
MOST = 1000  # metrics that one call takes
KILLED = "KILLED"  # of a run that says no end


class MLflow:
    """Logs to an experiment; needs mlflow or mlflow-skinny. MLFLOW_TRACKING_URI says where the server is; without
    it the numbers are in `mlruns/` of the run folder."""

    def __init__(self) -> None:
        self.where = ""
        self.key: str | None = None

    def open(self, opened: Opened) -> None:
        """Begin the run there, or go on with it."""
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        if URI not in os.environ:  # nothing is written outside of the run folder
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
        self.where = f"experiment {name}, run {self.key}"

    def send(self, points: Sequence[Point]) -> None:
        """Log the numbers of rows; those that are not finite have no place there."""
        found: list[Any] = []
        for item, values in points:
            if item.kind == "row":
                at = round(1000 * (seconds_of(item.time) or 0.0))
                named = {name: value for name, value in values.items() if math.isfinite(value)}
                found += [self._metric(name, value, at, item.step) for name, value in named.items()]
            elif item.fields.get("event") == "start":
                self._ended = KILLED
            elif item.fields.get("event") == "end":
                self._ended = "FINISHED" if item.fields.get("outcome") == "finished" else "FAILED"
        for first in range(0, len(found), MOST):
            self._client.log_batch(self.key, metrics=found[first : first + MOST])

    def close(self) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self.key, status=self._ended)
