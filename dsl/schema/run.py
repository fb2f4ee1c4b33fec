"""A run: how a model is trained on a cluster. `Spec` is a whole resolved spec, what every later stage starts from."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PrivateAttr

from dsl.schedules import AUTO, CHUNKED, DEFAULT, DEFAULT_CHUNKS, NAMES, PLAIN, SUMMARIES, in_words
from dsl.schema.base import MAX_STEPS, MAX_TOKENS, Choices, Derived, FilePath, Node, Syntax, Unit
from dsl.schema.cluster import Cluster
from dsl.schema.model import Model
from dsl.schema.optimizers import AnyOptimizer
from dsl.schema.precision import Precision

MAX_DEGREE = 1_048_576
Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), Unit("token", bare=True)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS), Unit("step", bare=True)]
LearningRate = Annotated[float, Field(ge=0, le=10)]

Recompute = Literal["rmsnorm", "mla_up", "swiglu", "attention", "dense", "router", "shared", "experts", "logits"]
Fusion = Literal["residual_norm", "route", "join", "quantise", "norm_gradient"]
WIDEST_NORM_GRADIENT = 8192  # columns: a thread of a GPU has no registers for more of a row and all that is beside it
if TYPE_CHECKING:  # a checker of types reads no words that a table gives
    ScheduleName = str
else:
    ScheduleName = Literal[NAMES]
MAX_CHUNKS = 1000  # a stage has a layer, and a model has no more of them


PLANNED = "auto: the fastest that fits"  # as far as can be predicted, compiler/predict/search.py


class Parallel(Node):
    """Degrees of parallelism. world = pipeline·data·tensor·context; expert divides data."""

    pipeline: Annotated[
        Degree, Field(description=f"ranks a pipeline has; {PLANNED}", examples=["pipeline = 16", "pipeline = auto"])
    ] = 1
    expert: Annotated[
        Degree,
        Field(
            description=f"ranks the experts of a layer are spread over; {PLANNED}",
            examples=["expert = 64", "expert = auto"],
        ),
    ] = 1
    data: Annotated[
        Degree,
        Field(
            description="ranks per pipeline rank; auto: what the cluster leaves",
            examples=["data = auto", "data = 128"],
        ),
        Derived("auto: devices of the cluster / (pipeline·tensor·context)"),
    ]
    tensor: Annotated[Degree, Field(description="ranks a matrix is split over", examples=["tensor = 1"])] = 1
    context: Annotated[Degree, Field(description="ranks a sequence is split over", examples=["context = 1"])] = 1
    layout: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=4000,
            description="which layers are on which stage, in Megatron's words; else, or auto, as even as it gets",
            examples=['layout = "Et*3|(tt|)*28ttmL"'],
        ),
    ] = None
    placement: Annotated[
        str | None,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="which expert is on which rank, a file of `dsc place`; else by number; relative to the spec",
            examples=['placement = "placement.json"'],
        ),
    ] = None
    zero: Annotated[
        int, Field(ge=0, le=3, description="1: each optimizer state has one owner", examples=["zero = 1"])
    ] = 0


class Schedule(Node):
    """The order of forwards and backwards on the ranks of a pipeline: by its name, or from a file."""

    name: Annotated[
        ScheduleName | None,
        Field(description="name of the schedule", examples=[f"name = {DEFAULT}"]),
        Choices(SUMMARIES),
        Derived(f"{PLAIN} where pipeline = 1, else {DEFAULT}; none where a file is given"),
    ] = None
    chunks: Annotated[
        int | None,
        Field(ge=2, le=MAX_CHUNKS, description=f"stages a rank has, of {in_words(CHUNKED)}", examples=["chunks = 2"]),
        Derived(f"{DEFAULT_CHUNKS} under {in_words(CHUNKED)}, else none"),
    ] = None
    cap: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000_000,
            description="most activations that a rank holds at once, "
            f"of {AUTO}; each is that of 1/pipeline of the model",
            examples=["cap = 9"],
        ),
    ] = None
    file: Annotated[
        str | None,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="a schedule in the form of `dsc schedule`, instead of a name; relative to the spec",
            examples=['file = "mine.schedule"'],
        ),
    ] = None


class Sm(Node):
    """How a device's streaming multiprocessors are divided; compute keeps the rest."""

    communication: Annotated[
        int,
        Field(
            ge=0,
            le=4096,
            description=f"SMs that communicate; {PLANNED}",
            examples=["communication = 20", "communication = auto"],
        ),
    ] = 0


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
        checkpoint: Annotated[
            Checkpoint | None,
            Field(description="when the run is saved, besides its end", examples=["checkpoint { every = 1000 steps }"]),
        ] = None
        validate: Validation = None  # type: ignore[assignment]


class TrainTokenizer(Node):
    """A byte-level BPE trained on the data, written `train(vocab)`."""

    vocab: Annotated[int, Field(ge=257, le=16_777_216, description="entries, the 256 bytes among them")]


class Data(Node):
    """Where the text comes from. Paths are those from the folder of the spec."""

    source: Annotated[
        str,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="a path, a glob, or python_stdlib; .txt, .md and .py files are documents, lines of .jsonl are",
            examples=["source = python_stdlib"],
        ),
    ]
    tokenizer: Annotated[
        str | TrainTokenizer,
        Syntax("tokenizer"),
        FilePath(),
        Field(description="a tokenizer.json, or train(vocab)", examples=["tokenizer = train(4096)"]),
    ]
    validation: Annotated[
        float, Field(ge=0, lt=1, description="share of the documents that is held out", examples=["validation = 5%"])
    ] = 0.0


class Spec(Node):
    """A run: a model, the cluster it is trained on, in which precision, and how."""

    _files: object = PrivateAttr(default=None)  # compiler.spec_files.SpecFiles, once they are read

    name: Annotated[str, Syntax("label"), Field(description="name of the run")]
    model: Annotated[Model, Field(description="the model that is trained, by name", examples=["model = deepseek_v3"])]
    cluster: Annotated[
        Cluster, Field(description="the devices it is trained on, by name", examples=["cluster = laptop"])
    ]
    precision: Annotated[
        Precision, Field(description="a precision block, or fp64, fp32 or bf16", examples=["precision = fp32"])
    ]
    recompute: Annotated[
        tuple[Recompute, ...],
        Field(
            description=f"ops computed again in the backward; {PLANNED}",
            examples=["recompute = [rmsnorm, swiglu]", "recompute = auto"],
        ),
        Choices(
            {
                "rmsnorm": "the norms",
                "mla_up": "the up-projections of latent attention",
                "swiglu": "the activation between up and down",
                "attention": "all of attention",
                "dense": "the feed-forward part of a dense layer",
                "router": "the gate of an MoE layer",
                "shared": "the shared experts",
                "experts": "the routed experts",
                "logits": "the products of the head, in blocks: no tensor of all tokens and words is made",
            }
        ),
    ] = ()
    unfused: Annotated[
        tuple[Fusion, ...],
        Field(
            description="ops that stay apart, though one kernel does them: for a comparison, or to look for an error",
            examples=["unfused = [residual_norm, join]"],
        ),
        Choices(
            {
                "residual_norm": "the sum with the residual stream and the norm after it, forward and backward",
                "route": "the choice of experts and the permutation of rows, and their gradients",
                "join": "the sum of each token's expert rows and the residual stream",
                "quantise": "eight-bit operands and the norms, activations and gradients that they are of",
                "norm_gradient": "the gradient of a norm, the sum that it is made of, and the norm computed again",
            }
        ),
    ] = ()
    parallel: Annotated[
        Parallel,
        Field(description="degrees of parallelism", examples=["parallel { pipeline = 2 }"]),
        Derived("data parallelism only"),
    ]
    schedule: Annotated[
        Schedule,
        Field(description="the order of forwards and backwards", examples=[f"schedule {{ name = {DEFAULT} }}"]),
        Derived(f"{PLAIN} where pipeline = 1, else {DEFAULT}"),
    ]
    sm: Annotated[Sm, Field(description="how SMs are divided", examples=["sm { communication = 20 }"])] = (
        Sm.model_construct()
    )
    train: Annotated[
        Train,
        Field(
            description="how it is trained",
            examples=[
                "train { sequence = 4096, micro_batch = 1, batch = 64, steps = 1000, "
                "optimizer adamw { }, rate { constant at 1e-4 } }"
            ],
        ),
    ]
    data: Annotated[
        Data,
        Field(
            description="the text it is trained on",
            examples=["data { source = python_stdlib, tokenizer = train(4096) }"],
        ),
    ]

    @property
    def row_alignment(self) -> int:
        """What the rows that an expert receives are padded to a multiple of: what the precision asks for; or 8 in BF16
        on accelerators, where a column of rows then has whole 16 bytes. Products of CPUs need none of it, and without
        padding rows stay where they are if there is one expert rank."""
        by_tiles = self.precision.row_alignment
        accelerators = any(device.bf16 is not None for device in self.cluster.devices)
        return 8 if by_tiles == 1 and self.precision.linear == "bf16" and accelerators else by_tiles

    @property
    def files(self) -> object:
        """What the files say that `schedule.file`, `parallel.placement` and `cluster.rates` name. None until
        `with_files`."""
        return self._files

    def with_files(self, files: object) -> Spec:
        """The spec with what its files say."""
        copy = self.model_copy()
        copy._files = files
        return copy
