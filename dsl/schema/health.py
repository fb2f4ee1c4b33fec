"""What a run does where its numbers go wrong: a loss that is not finite, a spike, replicas that differ."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import MAX_STEPS, Choices, Node, StoredUnit

Action = Literal["stop", "skip", "rollback"]
ACTIONS = Choices(
    {
        "stop": "the run ends; `--resume --skip-batch` goes on without the samples",
        "skip": "the step is made again of the samples that follow, as if these were not in the data",
        "rollback": "the run goes back `back` steps, and on as if the samples since then were not in the data",
    }
)
Remembered = Annotated[int, Field(ge=1, le=10_000), StoredUnit("step", bare=True)]


class Spike(Node):
    """When a step is a spike: by its loss, or by its gradient norm. The numbers are standard deviations above the mean
    of the last `window` steps."""

    loss: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e6,
            description="how far the loss is above the mean, in standard deviations, or none",
            examples=["loss = 6"],
        ),
    ] = 6.0
    norm: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e6,
            description="how far the gradient norm is above its mean, in standard deviations, or none",
            examples=["norm = 6"],
        ),
    ] = 6.0
    action: Annotated[Action, Field(description="what follows a spike", examples=["action = rollback"]), ACTIONS] = (
        "skip"
    )


class Health(Node):
    """What follows a step with wrong numbers, before any weight is changed; and how often replicas are compared."""

    not_finite: Annotated[
        Action,
        Field(description="what follows a loss or gradient norm that is not finite", examples=["not_finite = skip"]),
        ACTIONS,
    ] = "stop"
    spike: Annotated[
        Spike | None,
        Field(
            description="what a spike is, and what follows it; none: no step is one", examples=["spike { loss = 6 }"]
        ),
    ] = None
    window: Annotated[
        Remembered,
        Field(description="steps that a spike is compared with, and in which `most` counts", examples=["window = 128"]),
    ] = 128
    back: Annotated[Remembered, Field(description="steps that a rollback goes back", examples=["back = 50 steps"])] = 20
    most: Annotated[
        int,
        Field(
            ge=1, le=1_000_000, description="skips and rollbacks in a window before the run ends", examples=["most = 5"]
        ),
    ] = 3
    rerun: Annotated[
        bool,
        Field(
            description="compute a wrong step again before anything follows; other bits are an error of a device, and "
            "the second result holds",
            examples=["rerun = false"],
        ),
    ] = True
    hash: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_STEPS,
            description="steps between comparisons of the bits of all replicas, or none; before each save, too",
            examples=["hash = 1000 steps"],
        ),
        StoredUnit("step", bare=True),
    ] = None

    @property
    def rolls_back(self) -> bool:
        """Whether anything is followed by a rollback."""
        return "rollback" in (self.not_finite, self.spike and self.spike.action)
