"""What a run does about a loss that is not finite, a loss spike, replicas that differ, or a slow rank."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import MAX_STEPS, Choices, Node, StoredUnit

Action = Literal["stop", "skip", "rollback"]
ACTIONS = Choices(
    {
        "stop": "end the run; `--resume --skip-batch` continues without these samples",
        "skip": "repeat the step with the next samples, as if these were not in the data",
        "rollback": "go back `back` steps and continue, as if the samples since then were not in the data",
    }
)
Response = Literal["warn", "exclude"]
RESPONSES = Choices(
    {
        "warn": "report it",
        "exclude": "also save a checkpoint and continue without its device, if that is faster; needs `dsc train "
        "--restarts N --elastic`",
    }
)
Remembered = Annotated[int, Field(ge=1, le=10_000), StoredUnit("step", bare=True)]


class Spike(Node):
    """When the loss or gradient norm of a step counts as a spike. The limits are in standard deviations above the mean
    of the last `window` steps."""

    loss: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e6,
            description="limit of the loss, in standard deviations above its mean, or none",
            examples=["loss = 6"],
        ),
    ] = 6.0
    norm: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e6,
            description="limit of the gradient norm, in standard deviations above its mean, or none",
            examples=["norm = 6"],
        ),
    ] = 6.0
    action: Annotated[
        Action, Field(description="what to do about a spike", examples=["action = rollback"]), ACTIONS
    ] = "skip"


class Health(Node):
    """What to do about a step with a bad loss or gradient, before any weight changes; how often to compare replicas;
    and what to do about a slow rank."""

    not_finite: Annotated[
        Action,
        Field(
            description="what to do about a loss or gradient norm that is not finite", examples=["not_finite = skip"]
        ),
        ACTIONS,
    ] = "stop"
    spike: Annotated[
        Spike | None,
        Field(
            description="limits of a spike and what to do about one; none: no limits", examples=["spike { loss = 6 }"]
        ),
    ] = None
    window: Annotated[
        Remembered,
        Field(
            description="steps over which the mean is taken, and over which `most` counts", examples=["window = 128"]
        ),
    ] = 128
    back: Annotated[Remembered, Field(description="steps that a rollback goes back", examples=["back = 50 steps"])] = 20
    most: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            description="skips and rollbacks allowed in a window; one more ends the run",
            examples=["most = 5"],
        ),
    ] = 3
    rerun: Annotated[
        bool,
        Field(
            description="compute a bad step again first; if the bits differ, a device made an error, and the second "
            "result counts",
            examples=["rerun = false"],
        ),
    ] = True
    hash: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_STEPS,
            description="steps between bitwise comparisons of all replicas, or none; they are also compared before "
            "each save",
            examples=["hash = 1000 steps"],
        ),
        StoredUnit("step", bare=True),
    ] = None
    straggler: Annotated[
        Response | None,
        Field(
            description="what to do about a rank on a CPU that is slower than ranks with the same work; none: nothing",
            examples=["straggler = exclude"],
        ),
        RESPONSES,
    ] = "warn"

    @property
    def rolls_back(self) -> bool:
        """Whether any action is a rollback."""
        return "rollback" in (self.not_finite, self.spike and self.spike.action)
