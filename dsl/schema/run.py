"""A run: how a model is trained on a cluster. `Spec` is a whole resolved spec, the input of all later stages."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PrivateAttr

from dsl.facts.devices import group_nodes, most_group_nodes
from dsl.facts.schedules import AUTO, CHUNKED, DEFAULT, DEFAULT_CHUNKS, NAMES, PLAIN, SUMMARIES, join_names
from dsl.schema.adapter import Lora
from dsl.schema.base import Choices, DerivedDefault, FilePath, Node, NumberBounds, QuietField, Syntax
from dsl.schema.cluster import Cluster
from dsl.schema.kernels import Kernels
from dsl.schema.metrics import Metrics
from dsl.schema.model import Model, Moe
from dsl.schema.parallel import Parallel
from dsl.schema.precision import Precision
from dsl.schema.stack import Stack
from dsl.schema.train import PLANNED, Train
from dsl.schema.training_data import Data

Recompute = Literal[
    "rmsnorm", "mla_up", "qkv", "swiglu", "hyper", "up", "attention", "dense", "router", "shared", "experts", "logits",
    "layer",
]  # fmt: skip
Offload = Literal["moments", "master"]
Fusion = Literal["residual_norm", "route", "join", "quantise", "norm_gradient"]
WIDEST_NORM_GRADIENT = 8192  # columns: a GPU thread lacks the registers for wider rows
if TYPE_CHECKING:  # a type checker cannot read words from a table
    ScheduleName = str
else:
    ScheduleName = Literal[NAMES]
MAX_CHUNKS = 1000  # a stage has at least one layer, and a model at most so many


class ScheduleBlock(Node):
    """The order of forwards and backwards on the pipeline ranks: by name, or from a file."""

    name: Annotated[
        ScheduleName | None,
        Field(description="name of the schedule", examples=[f"name = {DEFAULT}"]),
        Choices(SUMMARIES),
        DerivedDefault(f"{PLAIN} if pipeline = 1, else {DEFAULT}; none if a file is given"),
    ] = None
    chunks: Annotated[
        int | None,
        Field(
            ge=2,
            le=MAX_CHUNKS,
            description=f"stages per rank, for {join_names(CHUNKED)}, and for {AUTO} with `placement = loop`",
            examples=["chunks = 2"],
        ),
        DerivedDefault(f"{DEFAULT_CHUNKS} for {join_names(CHUNKED)}, else none"),
    ] = None
    cap: Annotated[
        Fraction | tuple[Fraction, ...] | None,
        Syntax("ranks"),
        NumberBounds(ge=1, le=100_000_000),
        Field(
            description=f"for {AUTO}: most activations that a rank holds at once, or one number per pipeline rank; "
            "the unit is the activations of one micro-batch in 1/pipeline of the model, so with v stages per rank a "
            "stage counts 1/v",
            examples=["cap = 9", "cap = 8.5", "cap = [8, 8, 7.5, 7]"],
        ),
    ] = None
    host_copies: Annotated[
        bool,
        Field(
            description=f"whether {AUTO} may copy activations to host memory and back, so that a cap costs less time",
            examples=["host_copies = true"],
        ),
        QuietField(),
    ] = False
    placement: Annotated[
        Literal["v", "loop", "bidirectional"] | None,
        Field(description=f"for {AUTO}: which ranks hold which stages", examples=["placement = v"]),
        Choices(
            {
                "v": "two stages per rank, r and 2P-1-r",
                "loop": "stage s on rank s mod P: one stage per rank, or `chunks` stages",
                "bidirectional": "one stage per rank, and a second copy of it on rank P-1-r",
            }
        ),
        QuietField(),
    ] = None
    copies: Annotated[
        int | None,
        Field(ge=1, le=2, description=f"for {AUTO}: most ranks that hold the same stage", examples=["copies = 1"]),
        QuietField(),
    ] = None
    deferred: Annotated[
        int | None,
        Field(
            ge=0,
            le=1_000_000,
            description="most weight gradients that a rank defers at once, which takes less memory; others are "
            "computed with the rest of their backward; default: as the schedule has it",
            examples=["deferred = 4"],
        ),
        QuietField(),
    ] = None
    order: Annotated[
        Literal["drawn", "cost"],
        Field(description="order of the micro-batches of a step", examples=["order = cost"]),
        Choices(
            {
                "drawn": "the order in which their samples are drawn",
                "cost": "the best order for the schedule, by the cost of attention within their documents",
            }
        ),
        QuietField(),
    ] = "drawn"
    file: Annotated[
        str | None,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="a schedule file in the format of `dsc schedule`, instead of a name; relative to the spec",
            examples=['file = "mine.schedule"'],
        ),
    ] = None


class Sm(Node):
    """The division of a device's streaming multiprocessors (SMs); compute gets the rest."""

    communication: Annotated[
        int,
        DerivedDefault(
            "20 of 132, or the same share of other devices, if the devices state `sms` and `expert`, `expert_tensor` "
            "or `tensor` is above 1, or `zero` is on several data ranks; else 0"
        ),
        Field(
            ge=0,
            le=4096,
            description=f"SMs for communication; {PLANNED}",
            examples=["communication = 20", "communication = auto"],
        ),
    ] = 0


class Spec(Node):
    """A run: a model, the cluster that trains it, its precision, and all settings of the training."""

    _files: object = PrivateAttr(default=None)  # compiler.plan.spec_files.SpecFiles, once the files are read

    name: Annotated[str, Syntax("label"), Field(description="name of the run")]
    model: Annotated[Model, Field(description="name of the model to train", examples=["model = deepseek_v3"])]
    cluster: Annotated[Cluster, Field(description="name of the cluster to train on", examples=["cluster = laptop"])]
    precision: Annotated[
        Precision,
        Field(
            description="name of a precision block, or a built-in one such as fp32 or bf16",
            examples=["precision = fp32"],
        ),
    ]
    recompute: Annotated[
        tuple[Recompute, ...],
        Field(
            description=f"ops recomputed in the backward; {PLANNED}",
            examples=["recompute = [rmsnorm, swiglu]", "recompute = auto"],
        ),
        Choices(
            {
                "rmsnorm": "the RMSNorms",
                "mla_up": "the up-projections of latent attention, and of queries in compressed attention",
                "qkv": "the projection to queries, keys and values of grouped-query attention or a delta rule",
                "swiglu": "the activation between up and down",
                "hyper": "the mixing of several residual streams, and their sums inside a layer",
                "up": "the first product of feed-forward parts, before the activation",
                "attention": "all of attention",
                "dense": "the feed-forward part of a dense layer",
                "router": "the router of an MoE layer",
                "shared": "the shared experts",
                "experts": "the routed experts",
                "logits": "the products of the head, in blocks, so that the full logits are never in memory",
                "layer": "whole layers: only their inputs are kept, and the backward runs their forward again, "
                "dispatch included",
            }
        ),
    ] = ()
    recompute_layers: Annotated[
        int | None,
        Field(
            ge=1,
            le=10_000,
            description="number of layers that `layer` recomputes, the first ones of each pipeline stage; default: all",
            examples=["recompute_layers = 5"],
        ),
        QuietField(),
    ] = None
    unfused: Annotated[
        tuple[Fusion, ...],
        Field(
            description="ops that run as separate kernels instead of a fused one, for comparison or debugging",
            examples=["unfused = [residual_norm, join]"],
        ),
        Choices(
            {
                "residual_norm": "the sum with the residual stream and the norm after it, forward and backward",
                "route": "the choice of experts and the permutation of token rows, and their gradients",
                "join": "the sum of each token's expert rows and the residual stream",
                "quantise": "FP8 operands and the norms, activations and gradients that they are quantised from",
                "norm_gradient": "the gradient of a norm, the sum that it reads, and the recomputed norm",
            }
        ),
    ] = ()
    offload: Annotated[
        tuple[Offload, ...],
        Field(
            description="optimizer state kept in host memory; an update copies it to the device and back, part by part",
            examples=["offload = [moments, master]"],
        ),
        Choices(
            {
                "moments": "the optimizer's state of each weight, such as the moments of AdamW",
                "master": "master weights, if their dtype differs from that of the weights",
            }
        ),
    ] = ()
    parallel: Annotated[
        Parallel,
        Field(description="degrees of parallelism", examples=["parallel { pipeline = 2 }"]),
        DerivedDefault("only data parallelism"),
    ]
    schedule: Annotated[
        ScheduleBlock,
        Field(description="the order of forwards and backwards", examples=[f"schedule {{ name = {DEFAULT} }}"]),
        DerivedDefault(f"{PLAIN} if pipeline = 1, else {DEFAULT}"),
    ]
    sm: Annotated[
        Sm,
        Field(description="the division of the SMs of a device", examples=["sm { communication = 20 }"]),
        DerivedDefault("`communication` has its default"),
    ] = Sm.model_construct()
    train: Annotated[
        Train,
        Field(
            description="length, batch, optimizer and learning rate of the training",
            examples=[
                "train { sequence = 4096, micro_batch = 1, batch = 64, steps = 1000, "
                "optimizer adamw { }, rate { constant at 1e-4 } }"
            ],
        ),
    ]
    adapter: Annotated[
        Lora | None,
        QuietField(),
        Field(
            description="adapters, trained beside the frozen weights of `train.initial`; none: the weights are trained",
            examples=["adapter lora { rank = 16, on = [q_up, kv_up, out] }"],
        ),
    ] = None
    data: Annotated[
        Data,
        Field(
            description="the training data",
            examples=["data { source = python_stdlib, tokenizer = train(4096) }"],
        ),
    ]
    kernels: Annotated[
        Kernels,
        Field(
            description="the implementations of ops on GPUs, where there are several",
            examples=["kernels { delta_rule = fla }"],
        ),
        QuietField(),
    ] = Kernels.model_construct()
    stack: Annotated[
        Stack,
        Field(
            description="the software that is planned, if it is not that of dsc; such a run can only be planned",
            examples=["stack { launches = graphs, transport = nccl }"],
        ),
        QuietField(),
    ] = Stack.model_construct()
    metrics: Annotated[  # last, so that it moves no line of a resolved spec
        Metrics | None,
        QuietField(),
        Field(
            description="where the metrics of the run go besides its folder; none: nowhere else",
            examples=["metrics { tensorboard = true, prometheus = 9400 }"],
        ),
    ] = None

    @property
    def row_alignment(self) -> int:
        """The rows of an expert are padded to a multiple of this: the value of the precision; or 8 in BF16 on
        accelerators, so that columns of rows are aligned to 16 bytes. CPUs need no alignment, and without padding, rows
        need not move if there is one expert rank."""
        by_tiles = self.precision.row_alignment
        return 8 if by_tiles == 1 and self.precision.linear == "bf16" and self.has_hosts else by_tiles

    @property
    def has_hosts(self) -> bool:
        """Whether devices are accelerators, whose host memory is separate."""
        return any(device.bf16 is not None for device in self.cluster.devices)

    @property
    def tokens_of_rank(self) -> int:
        """Tokens of a micro-batch that a rank holds between attention and dense parts: context ranks split sequences,
        and tensor ranks split the tokens of a context rank."""
        return self.train.micro_batch * self.train.sequence // (self.parallel.context * self.parallel.tensor)

    @property
    def sequence_ranks(self) -> int:
        """Ranks with parts of the same sequences, which a sequence-wise balancing loss sums over: context ranks, and
        tensor ranks if several share a sequence. 1 without such a loss."""
        if not any(isinstance(span.ffn, Moe) and span.ffn.balance.sequence_loss for span in self.model.layers):
            return 1
        return self.parallel.context * max(1, self.parallel.tensor // self.train.micro_batch)

    @property
    def splits_vocabulary(self) -> bool:
        """Whether tensor ranks split the embedding and the head. Only equal parts are possible; otherwise each rank
        holds all of both."""
        return self.parallel.tensor > 1 and self.model.vocab % self.parallel.tensor == 0

    @property
    def group_nodes(self) -> int | None:
        """The most nodes that an expert group spans; None if groups begin or end inside nodes."""
        return most_group_nodes((node.devices for _, node in self.cluster.parts), self.parallel.expert_group)

    @property
    def routes_by_nodes(self) -> bool:
        """Whether a token is sent to each node once. `route` decides; by default, if an expert group fills several
        whole nodes with whole experts, and rows come back in a dtype that can be summed."""
        sizes = [node.devices for _, node in self.cluster.parts]
        counts = {group_nodes(devices, self.parallel.expert_group) for devices in sizes}
        fills_nodes = counts.isdisjoint({None, 1}) and len(counts) == 1
        fills_nodes = fills_nodes and all(devices % self.parallel.expert_tensor == 0 for devices in sizes)
        if self.parallel.route is None:
            return fills_nodes and self.precision.combine != "e4m3"
        return fills_nodes and self.parallel.route == "nodes"

    @property
    def files(self) -> object:
        """Contents of the files that `schedule.file`, `parallel.placement` and `cluster.rates` name. None until
        `with_files`."""
        return self._files

    def with_files(self, files: object) -> Spec:
        """Return the spec with the contents of its files."""
        copy = self.model_copy()
        copy._files = files
        return copy
