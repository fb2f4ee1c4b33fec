"""Training: sequences, batch, length, optimizer and learning rate, and when a run is saved and validated."""

from __future__ import annotations

import warnings
from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import (
    MAX_STEPS,
    MAX_TOKENS,
    Choices,
    DerivedDefault,
    FilePath,
    Node,
    QuietField,
    StoredUnit,
    Syntax,
)
from dsl.schema.grpo import MAX_SEQUENCE, Grpo
from dsl.schema.health import Health
from dsl.schema.optimizers import AnyOptimizer

PLANNED = "auto: the fastest that fits"  # by the predictions of compiler/predict/search.py
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), StoredUnit("token", bare=True)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS), StoredUnit("step", bare=True)]
MAX_PHASES = 100
LOCAL = "local"  # the place of checkpoints in the folder of the run
LearningRate = Annotated[float, Field(ge=0, le=10)]


class Batch(Node):
    """Sequences per step, over all ranks. The batch grows from `start` to `end` over the first `over_tokens` tokens."""

    start: Annotated[int, Field(ge=1, le=100_000_000, description="sequences per step at the beginning")]
    end: Annotated[int, Field(ge=1, le=100_000_000, description="sequences per step when the batch has grown")]
    over_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS, description="tokens over which it grows")] = 0


class RatePhase(Node):
    """The learning rate goes from `start` to `end` and reaches `end` after `end_tokens` tokens of training."""

    shape: Annotated[Literal["linear", "constant", "cosine"], Field(description="the curve from start to end")]
    start: Annotated[LearningRate, Field(description="rate at the beginning")]
    end: Annotated[LearningRate, Field(description="rate at the end")]
    end_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS, description="where the phase ends")]


class PhaseWithin(Node):
    """Position of a phase in its run: steps and tokens before it, and the length of the run's pieces of text."""

    number: Annotated[
        int, Field(ge=1, le=MAX_PHASES, description="number of the phase, from 1", examples=["number = 2"])
    ]
    phases: Annotated[int, Field(ge=1, le=MAX_PHASES, description="phases of the run", examples=["phases = 2"])]
    first_step: Annotated[
        int, Field(ge=0, le=MAX_STEPS, description="steps of the earlier phases", examples=["first_step = 1000"])
    ]
    first_token: Annotated[
        int,
        Field(ge=0, le=MAX_TOKENS, description="tokens of the earlier phases", examples=["first_token = 4_096_000"]),
    ]
    longest: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_SEQUENCE,
            description="tokens of the longest sequence of the run; each phase reads whole pieces of this length",
            examples=["longest = 4096"],
        ),
    ]

    @property
    def is_last(self) -> bool:
        """Whether no phase follows."""
        return self.number == self.phases


class Checkpoint(Node):
    """When the run is saved. The last step is always saved."""

    every: Annotated[Steps, Field(description="steps between checkpoints", examples=["every = 1000 steps"])]
    keep: Annotated[
        int, Field(ge=1, le=1_000_000, description="number of newest checkpoints to keep", examples=["keep = 3"])
    ] = 3
    best: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="checkpoints with the lowest validation loss to keep besides; above 0, each save validates "
            "first",
            examples=["best = 1"],
        ),
    ] = 0
    keep_every: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_STEPS,
            description="steps between checkpoints to keep forever, or none; a multiple of `every`",
            examples=["keep_every = 10_000 steps"],
        ),
        StoredUnit("step", bare=True),
    ] = None
    failure: Annotated[
        Literal["continue", "stop"],
        Field(description="what to do if a save fails", examples=["failure = stop"]),
        Choices(
            {
                "continue": "report it and go on to the next save; if the last save fails, the run fails",
                "stop": "end the run",
            }
        ),
    ] = "continue"
    background: Annotated[
        bool,
        Field(
            description="write checkpoints in the background, from a copy in host memory",
            examples=["background = false"],
        ),
        QuietField(),
    ] = True
    to: Annotated[
        tuple[str, ...],
        Syntax("places"),
        Field(
            description="where checkpoints go: `local` is the folder of the run; each is also copied to the other "
            "folders and store URLs; paths are relative to the spec",
            examples=['to = [local, "/mnt/slow/mine"]', 'to = [local, "s3://bucket/mine"]'],
        ),
        QuietField(),
    ] = (LOCAL,)


class Validate(Node):
    """When the held-out loss is measured."""

    every: Annotated[Steps, Field(description="steps between validations", examples=["every = 1000 steps"])]
    batches: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            description="most batches of one validation; no held-out row counts twice",
            examples=["batches = 2"],
        ),
    ] = 1
    ema: Annotated[
        bool,
        Field(description="also measure the loss of the moving average of the weights", examples=["ema = true"]),
    ] = False


class Ema(Node):
    """An exponential moving average of the weights, kept in host memory."""

    decay: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="share of the average that a step keeps; the rest comes from the new weights",
            examples=["decay = 0.999"],
        ),
    ]


Validation = Annotated[
    Validate | None,
    Field(description="when the held-out loss is measured", examples=["validate { every = 1000 steps }"]),
]

with warnings.catch_warnings():
    # The field replaces a deprecated method of BaseModel, on purpose.
    warnings.filterwarnings("ignore", message='Field name "validate"')

    class Train(Node):
        """Length, sequences, batch, optimizer and learning rate of the training."""

        sequence: Annotated[
            int,
            Field(ge=1, le=MAX_SEQUENCE, description="tokens per sequence", examples=["sequence = 4096"]),
            StoredUnit("token", bare=True),
        ]
        micro_batch: Annotated[
            int,
            Field(
                ge=1,
                le=1_000_000,
                description=f"sequences per micro-batch; {PLANNED}",
                examples=["micro_batch = 1", "micro_batch = auto"],
            ),
        ]
        batch: Annotated[
            Batch,
            Syntax("batch"),
            Field(
                description="sequences per step, over all ranks",
                examples=["batch = 64", "batch { from = 3072, to = 15360, over = 469B tokens }"],
            ),
        ]
        tokens: Annotated[
            Tokens,
            Field(description="length of the run or phase in tokens; or give `steps`", examples=["tokens = 10B"]),
        ]
        optimizer: Annotated[
            AnyOptimizer,
            Field(description="optimizer that updates the weights", examples=["optimizer adamw { clip = 1.0 }"]),
        ]
        rate: Annotated[
            tuple[RatePhase, ...],
            Syntax("rate"),
            Field(description="learning rate", examples=["rate { warmup 2000 steps to 2.2e-4, constant }"]),
        ]
        seed: Annotated[
            int,
            Field(
                ge=0,
                le=2**63 - 1,
                description="seed of the initial weights and of the order of samples",
                examples=["seed = 1"],
            ),
        ] = 1
        initial: Annotated[
            str | None,
            FilePath(),
            Field(
                min_length=1,
                max_length=4096,
                description="checkpoint with the initial weights, instead of random ones; or a folder of a run or of "
                "checkpoints, for the newest in it; relative to the spec",
                examples=['initial = "llama.weights"'],
            ),
        ] = None
        only: Annotated[
            Literal["indexer"] | None,
            QuietField(),
            Choices({"indexer": "only the indexers, by their own loss, with attention to all keys (DeepSeek-V3.2)"}),
            Field(
                description="the part of the model to train, with all else frozen; none: everything",
                examples=["only = indexer"],
            ),
        ] = None
        checkpoint: Annotated[
            Checkpoint | None,
            Field(description="when the run is saved, besides its end", examples=["checkpoint { every = 1000 steps }"]),
        ] = None
        validate: Validation = None  # type: ignore[assignment]
        ema: Annotated[
            Ema | None,
            Field(description="a moving average of the weights, or none", examples=["ema { decay = 0.999 }"]),
        ] = None
        health: Annotated[
            Health | None,
            QuietField(),
            Field(
                description="what to do about a loss that is not finite, a spike, or replicas that differ; none: a "
                "loss that is not finite ends the run",
                examples=["health { not_finite = skip, spike { action = rollback }, hash = 1000 steps }"],
            ),
        ] = None
        grpo: Annotated[
            Grpo | None,
            QuietField(),
            Field(
                description="reinforcement learning on completions of the model; none: training on the text",
                examples=["grpo { group = 8, prompt = 256, completion = 256, rewards { correct { check = exact } } }"],
            ),
        ] = None
        within: Annotated[
            PhaseWithin | None,
            QuietField(),
            DerivedDefault("none; for a phase, from its run"),
            Field(
                description="position of this phase in its run; dsc writes it from the `phase` blocks",
                examples=[
                    "within { number = 2, phases = 2, first_step = 1000, first_token = 4_096_000, longest = 4096 }"
                ],
            ),
        ] = None

        @property
        def first_step(self) -> int:
            """Steps of the earlier phases."""
            return self.within.first_step if self.within else 0

        @property
        def first_token(self) -> int:
            """Tokens of the earlier phases."""
            return self.within.first_token if self.within else 0
