"""Where the numbers of a run go besides its folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dsl.schema.base import Node

LOOPBACK = "127.0.0.1"
Name = Annotated[str | None, Field(min_length=1, max_length=128)]


class Metrics(Node):
    """Where the numbers of a run go besides its folder. No key changes what is trained."""

    tensorboard: Annotated[
        bool,
        Field(
            description="write event files of TensorBoard into `tensorboard/` of the run folder",
            examples=["tensorboard = true"],
        ),
    ] = False
    prometheus: Annotated[
        int | None,
        Field(
            ge=0,
            le=65535,
            description="port at which Prometheus reads the numbers; 0: one that is free, which the run says",
            examples=["prometheus = 9400"],
        ),
    ] = None
    listen: Annotated[
        str,
        Field(
            min_length=1,
            max_length=255,
            description="address of the Prometheus port; another than loopback lets other machines read it",
            examples=['listen = "0.0.0.0"'],
        ),
    ] = LOOPBACK
    wandb: Annotated[
        Name, Field(description="project of Weights & Biases that gets the numbers", examples=['wandb = "mine"'])
    ] = None
    mlflow: Annotated[
        Name,
        Field(
            description="experiment of MLflow that gets the numbers; MLFLOW_TRACKING_URI says where it is",
            examples=['mlflow = "mine"'],
        ),
    ] = None
    otel: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=2048,
            description="OTLP endpoint of OpenTelemetry that gets a span of each step and each save",
            examples=['otel = "http://localhost:4318"'],
        ),
    ] = None
