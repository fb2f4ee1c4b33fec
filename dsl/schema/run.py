"""A run: how a model is trained on a cluster. `Spec` is the whole of a resolved spec."""

from __future__ import annotations

import warnings
from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import MAX_STEPS, MAX_TOKENS, Node, Syntax, Unit
from dsl.schema.cluster import Cluster
from dsl.schema.model import Model
from dsl.schema.precision import Precision

MAX_DEGREE = 1_048_576
Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), Unit("token", bare=True)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS), Unit("step", bare=True)]
LearningRate = Annotated[float, Field(ge=0, le=10)]

Recompute = Literal["rmsnorm", "mla_up", "swiglu", "attention", "router", "shared", "experts"]
ScheduleName = Literal["dualpipe", "1f1b", "dualpipev", "zb1p", "zbv", "interleaved", "gpipe", "auto"]


class Parallel(Node):
    """Degrees of parallelism. world = pipeline·data·tensor·context; expert divides data."""

    pipeline: Annotated[Degree, Field(description="ranks a pipeline has")] = 1
    expert: Annotated[Degree, Field(description="ranks the experts of a layer are spread over")] = 1
    data: Annotated[Degree, Field(description="ranks per pipeline rank; auto: what the cluster leaves")]
    tensor: Annotated[Degree, Field(description="ranks a matrix is split over")] = 1
    context: Annotated[Degree, Field(description="ranks a sequence is split over")] = 1
    zero: Annotated[int, Field(ge=0, le=3, description="1: each optimizer state has one owner")] = 0


class Schedule(Node):
    """The order of forwards and backwards."""

    name: Annotated[ScheduleName, Field(description="1f1b where pipeline = 1, else dualpipe")]


class Sm(Node):
    """How a device's streaming multiprocessors are divided; compute keeps the rest."""

    communication: Annotated[int, Field(ge=0, le=4096, description="SMs that communicate")] = 0


class Batch(Node):
    """Sequences of a step, over all ranks. It grows from `start` to `end` over the first `over_tokens` tokens."""

    start: Annotated[int, Field(ge=1, le=100_000_000)]
    end: Annotated[int, Field(ge=1, le=100_000_000)]
    over_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0


class AdamW(Node):
    """AdamW with decoupled weight decay; norms and biases are not decayed."""

    kind: Annotated[Literal["adamw"], Syntax("label")] = "adamw"
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the first moment")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the second moment")] = 0.95
    eps: Annotated[float, Field(gt=0, le=1, description="added to the root of the second moment")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, le=10, description="decay of the weights, times the rate")] = 0.0
    clip: Annotated[float | None, Field(gt=0, le=1e9, description="largest global gradient norm, or none")] = None


class RatePhase(Node):
    """The learning rate goes from `start` to `end` and is at `end` when `end_tokens` tokens have been trained on."""

    shape: Literal["linear", "constant", "cosine"]
    start: LearningRate
    end: LearningRate
    end_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]


class Checkpoint(Node):
    """When the run is saved. The last step is saved always."""

    every: Annotated[Steps, Field(description="steps between checkpoints", examples=["every = 1000 steps"])]
    keep: Annotated[int, Field(ge=1, le=1_000_000, description="checkpoints kept")] = 3


class Validate(Node):
    """When the held-out loss is measured."""

    every: Annotated[Steps, Field(description="steps between validations", examples=["every = 1000 steps"])]
    batches: Annotated[int, Field(ge=1, le=1_000_000, description="global batches of one validation")] = 1


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
            int, Field(ge=1, le=1_000_000, description="sequences of a micro-batch", examples=["micro_batch = 1"])
        ]
        batch: Annotated[
            Batch, Syntax("batch"), Field(description="sequences of a step, over all ranks", examples=["batch = 64"])
        ]
        tokens: Annotated[Tokens, Field(description="tokens of the whole run; or `steps`", examples=["tokens = 10B"])]
        optimizer: Annotated[AdamW, Field(examples=["optimizer adamw { clip = 1.0 }"])]
        rate: Annotated[
            tuple[RatePhase, ...],
            Syntax("rate"),
            Field(description="learning rate", examples=["rate { warmup 2000 steps to 2.2e-4, constant }"]),
        ]
        seed: Annotated[
            int, Field(ge=0, le=2**63 - 1, description="of initial weights and of the order of samples")
        ] = 1
        checkpoint: Checkpoint | None = None
        validate: Validate | None = None  # type: ignore[assignment]


class TrainTokenizer(Node):
    """A byte-level BPE trained on the data, written `train(vocab)`."""

    vocab: Annotated[int, Field(ge=257, le=16_777_216, description="entries, the 256 bytes among them")]


class Data(Node):
    """Where the text comes from. Paths are relative to the spec."""

    source: Annotated[
        str,
        Field(
            min_length=1,
            max_length=4096,
            description="a path, a glob, or python_stdlib",
            examples=["source = python_stdlib"],
        ),
    ]
    tokenizer: Annotated[
        str | TrainTokenizer,
        Syntax("tokenizer"),
        Field(description="a tokenizer.json, or train(vocab)", examples=["tokenizer = train(4096)"]),
    ]
    validation: Annotated[float, Field(ge=0, lt=1, description="share of the files that is held out")] = 0.0


class Spec(Node):
    """A run with everything it names, resolved: what every later stage starts from."""

    name: Annotated[str, Syntax("label")]
    model: Annotated[Model, Field(examples=["model = deepseek_v3"])]
    cluster: Annotated[Cluster, Field(examples=["cluster = laptop"])]
    precision: Annotated[Precision, Field(examples=["precision = fp32"])]
    recompute: Annotated[tuple[Recompute, ...], Field(description="ops computed again in the backward")] = ()
    parallel: Parallel
    schedule: Annotated[Schedule, Field(examples=["schedule { name = dualpipe }"])]
    sm: Sm = Sm()
    train: Annotated[Train, Field(examples=["train { … }"])]
    data: Annotated[Data, Field(examples=["data { source = python_stdlib, tokenizer = train(4096) }"])]
