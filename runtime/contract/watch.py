"""watch.json of a build: what those who watch a run need to know of it, and where its numbers go. No rank reads it."""

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
    """What a planned step moves over all links of a class for one purpose, with even load on the experts."""

    level: Text
    purpose: Text
    bytes: Amount


@dataclass(frozen=True)
class MetricsSinks:
    """Where the numbers of a run go besides its folder, as the `metrics` block says it."""

    tensorboard: bool = False
    prometheus: Annotated[int, NumberRange(0, 65535)] | None = None  # port
    listen: Text = LOOPBACK
    wandb: Text | None = None  # project
    mlflow: Text | None = None  # experiment
    otel: Text | None = None  # endpoint


@dataclass(frozen=True)
class WatchFacts:
    """What is predicted of a step of the largest batch, as `dsc plan` shows it; bytes of a device, by pipeline rank.

    `flops_per_token`: of training, attention masked. `peak_flops`: of all devices in BF16, None where one has no peak.
    `step_s`: with the completions that it learns from. `bubble`: share of that in which the mean rank waits in the
    pipeline. `calibrated`: False where times are those of another CPU, so that they say little of this machine.
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
        """The text of the file."""
        return pretty(self)

    @staticmethod
    def from_json(text: str | bytes) -> WatchFacts:
        """The value of the text. Raises FormError."""
        return read(WatchFacts, text, "a watch file")
