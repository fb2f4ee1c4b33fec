"""watch.json of a build: facts for viewers of a run, and the destinations of its metrics. Ranks do not read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtime.contract.recipe import Amount, Count, Share
from runtime.system.strict_json import NumberRange, Pattern, pretty, read

Positive = Annotated[float, NumberRange(0)]
Text = Annotated[str, Pattern(".{1,2048}")]
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LinkTraffic:
    """Planned traffic of a step over all links of a class, for one purpose, with balanced experts."""

    level: Text
    purpose: Text
    bytes: Amount


@dataclass(frozen=True)
class MetricsSinks:
    """Destinations of metrics besides the run folder, from the `metrics` block."""

    tensorboard: bool = False
    prometheus: Annotated[int, NumberRange(0, 65535)] | None = None  # port
    listen: Text = LOOPBACK
    wandb: Text | None = None  # project
    mlflow: Text | None = None  # experiment
    otel: Text | None = None  # endpoint


@dataclass(frozen=True)
class WatchFacts:
    """Predictions for a step of the largest batch, as in `dsc plan`; bytes of a device are by pipeline rank.

    `flops_per_token`: of training, with masked attention. `peak_flops`: of all devices in BF16, None if one has no
    known peak. `step_s`: including the generation of completions. `bubble`: share of the step that the mean rank waits
    in the pipeline. `calibrated`: False if times are from another CPU, so that they do not apply to this machine.
    """

    run: Text
    model: Text
    cluster: Text
    devices: Count
    phase: Count
    phases: Count
    flops_per_token: Positive
    peak_flops: Positive | None
    mfu: Positive | None
    step_s: Positive
    tokens: Count
    bubble: Share
    memory_bytes: tuple[Amount, ...]
    capacity_bytes: tuple[Amount, ...]
    links: tuple[LinkTraffic, ...]
    metrics: MetricsSinks | None = None
    calibrated: bool = True

    def to_json(self) -> str:
        """Return the text of the file."""
        return pretty(self)

    @staticmethod
    def from_json(text: str | bytes) -> WatchFacts:
        """Parse the file. Raises FormError."""
        return read(WatchFacts, text, "a watch file")
