"""Where the metrics of a run go besides its folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dsl.schema.base import Node

LOOPBACK = "127.0.0.1"
Name = Annotated[str | None, Field(min_length=1, max_length=128)]


class Metrics(Node):
    """Where the metrics of a run go besides its folder. No key changes the training."""

    tensorboard: Annotated[
        bool,
        Field(
            description="write TensorBoard event files to `tensorboard/` in the run folder",
            examples=["tensorboard = true"],
        ),
    ] = False
    prometheus: Annotated[
        int | None,
        Field(
            ge=0,
            le=65535,
            description="port that serves the metrics to Prometheus; 0: a free port, which the run prints",
            examples=["prometheus = 9400"],
        ),
    ] = None
    listen: Annotated[
        str,
        Field(
            min_length=1,
            max_length=255,
            description="address that the Prometheus port listens on; any other than loopback is open to other "
            "machines",
            examples=['listen = "0.0.0.0"'],
        ),
    ] = LOOPBACK
    wandb: Annotated[
        Name, Field(description="Weights & Biases project that gets the metrics", examples=['wandb = "mine"'])
    ] = None
    mlflow: Annotated[
        Name,
        Field(
            description="MLflow experiment that gets the metrics, on the server at MLFLOW_TRACKING_URI",
            examples=['mlflow = "mine"'],
        ),
    ] = None
    otel: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=2048,
            description="OpenTelemetry OTLP endpoint that gets a span for each step and each save",
            examples=['otel = "http://localhost:4318"'],
        ),
    ] = None
