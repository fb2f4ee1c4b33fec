"""Weights & Biases: exports rows over `step`. Later starts continue the same W&B run.

Steps that were discarded and retrained have two points, because W&B cannot delete any.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from runtime.observe.sinks.sink import Point, SinkContext

FAILED = 1  # exit code


class WandB:
    """Logs to a project; needs wandb and its environment: WANDB_API_KEY, WANDB_MODE."""

    def __init__(self) -> None:
        self.destination = ""
        self.key: str | None = None
        self._exit_code = FAILED

    def open(self, opened: SinkContext) -> None:
        """Start the W&B run, or continue it."""
        import wandb

        self.key = opened.key or secrets.token_hex(4)
        forecast = opened.state.forecast
        config = {"model": forecast.model, "cluster": forecast.cluster} if forecast else {}
        self._run: Any = wandb.init(
            project=opened.metrics.wandb,
            id=self.key,
            name=opened.name,
            dir=str(opened.run),
            config=config,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric="step")
        self.destination = self._run.url or f"{opened.metrics.wandb}, offline in {self._run.dir}"

    def send(self, points: Sequence[Point]) -> None:
        """Log the numbers of rows."""
        for item, values in points:
            if item.kind == "row":
                self._run.log({**values, "step": item.step})
            elif item.fields.get("event") in ("start", "end"):
                self._exit_code = 0 if item.fields.get("outcome") == "finished" else FAILED

    def close(self) -> None:
        """End the W&B run, as failed unless the run has reported that it finished."""
        self._run.finish(exit_code=self._exit_code)
