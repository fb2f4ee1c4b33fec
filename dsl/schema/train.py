"""What a run is trained on, for how long, by which optimizer, and when it is saved and validated."""

from __future__ import annotations

import warnings
from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import MAX_STEPS, MAX_TOKENS, Choices, FilePath, Node, Syntax, Unit
from dsl.schema.optimizers import AnyOptimizer

PLANNED = "auto: the fastest that fits"  # as far as can be predicted, compiler/predict/search.py
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), Unit("token", bare=True)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS), Unit("step", bare=True)]
LearningRate = Annotated[float, Field(ge=0, le=10)]


class Batch(Node):
    """Sequences of a step, over all ranks. It grows from `start` to `end` over the first `over_tokens` tokens."""

    start: Annotated[int, Field(ge=1, le=100_000_000, description="sequences of the first steps")]
    end: Annotated[int, Field(ge=1, le=100_000_000, description="sequences of a step when it has grown")]
    over_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS, description="tokens over which it grows")] = 0


class RatePhase(Node):
    """The learning rate goes from `start` to `end` and is at `end` when `end_tokens` tokens have been trained on."""

    shape: Annotated[Literal["linear", "constant", "cosine"], Field(description="the curve between both")]
    start: Annotated[LearningRate, Field(description="rate at the beginning")]
    end: Annotated[LearningRate, Field(description="rate at the end")]
    end_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS, description="where the phase ends")]


class Checkpoint(Node):
    """When the run is saved. The last step is saved always."""

    every: Annotated[Steps, Field(description="steps between checkpoints", examples=["every = 1000 steps"])]
    keep: Annotated[int, Field(ge=1, le=1_000_000, description="newest checkpoints kept", examples=["keep = 3"])] = 3
    best: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="checkpoints of the lowest validation loss kept besides; each save then validates first",
            examples=["best = 1"],
        ),
    ] = 0
    keep_every: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_STEPS,
            description="steps between checkpoints that are kept for ever, or none; a multiple of `every`",
            examples=["keep_every = 10_000 steps"],
        ),
        Unit("step", bare=True),
    ] = None
    failure: Annotated[
        Literal["continue", "stop"],
        Field(description="what follows a save that fails", examples=["failure = stop"]),
        Choices(
            {
                "continue": "it is said, and the run goes on to the next save; it fails if the last save fails",
                "stop": "the run ends",
            }
        ),
    ] = "continue"


class Validate(Node):
    """When the held-out loss is measured."""

    every: Annotated[Steps, Field(description="steps between validations", examples=["every = 1000 steps"])]
    batches: Annotated[
        int, Field(ge=1, le=1_000_000, description="global batches of one validation", examples=["batches = 2"])
    ] = 1
    ema: Annotated[
        bool,
        Field(description="measure the loss of the moving average of the weights too", examples=["ema = true"]),
    ] = False


class Ema(Node):
    """An exponential moving average of the weights. Their owners keep it in the memory of their hosts."""

    decay: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="share of the average that stays in a step; the new weights have the rest",
            examples=["decay = 0.999"],
        ),
    ]


Validation = Annotated[
    Validate | None,
    Field(description="when the held-out loss is measured", examples=["validate { every = 1000 steps }"]),
]

with warnings.catch_warnings():
    # The field takes the place of a deprecated method of BaseModel, on purpose.
    warnings.filterwarnings("ignore", message='Field name "validate"')

    class Train(Node):
        """What is trained on, for how long, and by which optimizer."""

        sequence: Annotated[
            int,
            Field(ge=1, le=16_777_216, description="tokens of a sequence", examples=["sequence = 4096"]),
            Unit("token", bare=True),
        ]
        micro_batch: Annotated[
            int,
            Field(
                ge=1,
                le=1_000_000,
                description=f"sequences of a micro-batch; {PLANNED}",
                examples=["micro_batch = 1", "micro_batch = auto"],
            ),
        ]
        batch: Annotated[
            Batch,
            Syntax("batch"),
            Field(
                description="sequences of a step, over all ranks",
                examples=["batch = 64", "batch { from = 3072, to = 15360, over = 469B tokens }"],
            ),
        ]
        tokens: Annotated[Tokens, Field(description="tokens of the whole run; or `steps`", examples=["tokens = 10B"])]
        optimizer: Annotated[
            AnyOptimizer, Field(description="how weights are updated", examples=["optimizer adamw { clip = 1.0 }"])
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
                description="of initial weights and of the order of samples",
                examples=["seed = 1"],
            ),
        ] = 1
        initial: Annotated[
            str | None,
            FilePath(),
            Field(
                min_length=1,
                max_length=4096,
                description="checkpoint whose weights the run begins with, in the place of random ones; or the folder "
                "of a run or of checkpoints, whose newest is meant; relative to the spec",
                examples=['initial = "llama.weights"'],
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
