"""What a run is trained on, for how long, by which optimizer, and when it is saved and validated."""

from __future__ import annotations

import warnings
from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import MAX_STEPS, MAX_TOKENS, Choices, Derived, FilePath, Node, Quiet, StoredUnit, Syntax
from dsl.schema.grpo import MAX_SEQUENCE, Grpo
from dsl.schema.health import Health
from dsl.schema.optimizers import AnyOptimizer

PLANNED = "auto: the fastest that fits"  # as far as can be predicted, compiler/predict/search.py
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), StoredUnit("token", bare=True)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS), StoredUnit("step", bare=True)]
MAX_PHASES = 100
LOCAL = "local"  # of the places of checkpoints: the folder of the run
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


class PhaseWithin(Node):
    """Where a phase is in the run that it is of: what was trained before, and how the samples of the run lie."""

    number: Annotated[
        int, Field(ge=1, le=MAX_PHASES, description="number of the phase, from 1", examples=["number = 2"])
    ]
    phases: Annotated[int, Field(ge=1, le=MAX_PHASES, description="phases of the run", examples=["phases = 2"])]
    first_step: Annotated[
        int, Field(ge=0, le=MAX_STEPS, description="steps of the phases before", examples=["first_step = 1000"])
    ]
    first_token: Annotated[
        int, Field(ge=0, le=MAX_TOKENS, description="tokens of the phases before", examples=["first_token = 4_096_000"])
    ]
    longest: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_SEQUENCE,
            description="tokens of the longest sequence of the run: a phase reads whole pieces of so many tokens",
            examples=["longest = 4096"],
        ),
    ]

    @property
    def is_last(self) -> bool:
        """Whether no phase follows."""
        return self.number == self.phases


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
        StoredUnit("step", bare=True),
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
    background: Annotated[
        bool,
        Field(
            description="write checkpoints while the run trains on, from a copy in the memory of the host",
            examples=["background = false"],
        ),
        Quiet(),
    ] = True
    to: Annotated[
        tuple[str, ...],
        Syntax("places"),
        Field(
            description="where checkpoints are: `local`, the folder of the run, and folders or URLs of stores to which "
            "each is copied; relative to the spec",
            examples=['to = [local, "/mnt/slow/mine"]', 'to = [local, "s3://bucket/mine"]'],
        ),
        Quiet(),
    ] = (LOCAL,)


class Validate(Node):
    """When the held-out loss is measured."""

    every: Annotated[Steps, Field(description="steps between validations", examples=["every = 1000 steps"])]
    batches: Annotated[
        int,
        Field(
            ge=1,
            le=1_000_000,
            description="global batches of one validation, at most; no held-out row counts twice",
            examples=["batches = 2"],
        ),
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
            Field(ge=1, le=MAX_SEQUENCE, description="tokens of a sequence", examples=["sequence = 4096"]),
            StoredUnit("token", bare=True),
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
        tokens: Annotated[
            Tokens, Field(description="tokens of the run, or of a phase of it; or `steps`", examples=["tokens = 10B"])
        ]
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
        only: Annotated[
            Literal["indexer"] | None,
            Quiet(),
            Choices({"indexer": "the indexers, by their own loss, of attention to all keys (DeepSeek-V3.2)"}),
            Field(
                description="what alone is trained, while all else stays as it is; none: everything",
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
            Quiet(),
            Field(
                description="what follows a loss that is not finite, a spike, or replicas that differ; none: a loss "
                "that is not finite ends the run",
                examples=["health { not_finite = skip, spike { action = rollback }, hash = 1000 steps }"],
            ),
        ] = None
        grpo: Annotated[
            Grpo | None,
            Quiet(),
            Field(
                description="training on completions that the model writes itself, by their rewards; none: on the text",
                examples=["grpo { group = 8, prompt = 256, completion = 256, rewards { correct { check = exact } } }"],
            ),
        ] = None
        within: Annotated[
            PhaseWithin | None,
            Quiet(),
            Derived("none; of a phase, as its run has it"),
            Field(
                description="where this phase is in its run; dsc writes it, from the `phase` blocks of a run",
                examples=[
                    "within { number = 2, phases = 2, first_step = 1000, first_token = 4_096_000, longest = 4096 }"
                ],
            ),
        ] = None

        @property
        def first_step(self) -> int:
            """Steps of the phases before this one."""
            return self.within.first_step if self.within else 0

        @property
        def first_token(self) -> int:
            """Tokens of the phases before this one."""
            return self.within.first_token if self.within else 0
