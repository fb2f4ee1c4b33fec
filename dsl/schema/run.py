"""A run: how a model is trained on a cluster. `Spec` is a whole resolved spec, what every later stage starts from."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PrivateAttr

from dsl.facts.devices import group_nodes, most_group_nodes
from dsl.facts.schedules import AUTO, CHUNKED, DEFAULT, DEFAULT_CHUNKS, NAMES, PLAIN, SUMMARIES, in_words
from dsl.schema.adapter import Lora
from dsl.schema.base import Choices, Derived, FilePath, Node, NumberBounds, Quiet, Syntax
from dsl.schema.cluster import Cluster
from dsl.schema.metrics import Metrics
from dsl.schema.model import Model, Moe
from dsl.schema.parallel import Parallel
from dsl.schema.precision import Precision
from dsl.schema.train import PLANNED, Train
from dsl.schema.training_data import Data

Recompute = Literal[
    "rmsnorm", "mla_up", "qkv", "swiglu", "hyper", "up", "attention", "dense", "router", "shared", "experts", "logits",
    "layer",
]  # fmt: skip
Offload = Literal["moments", "master"]
Fusion = Literal["residual_norm", "route", "join", "quantise", "norm_gradient"]
WIDEST_NORM_GRADIENT = 8192  # columns: a thread of a GPU has no registers for more of a row and all that is beside it
if TYPE_CHECKING:  # a checker of types reads no words that a table gives
    ScheduleName = str
else:
    ScheduleName = Literal[NAMES]
MAX_CHUNKS = 1000  # a stage has a layer, and a model has no more of them


class ScheduleBlock(Node):
    """The order of forwards and backwards on the ranks of a pipeline: by its name, or from a file."""

    name: Annotated[
        ScheduleName | None,
        Field(description="name of the schedule", examples=[f"name = {DEFAULT}"]),
        Choices(SUMMARIES),
        Derived(f"{PLAIN} where pipeline = 1, else {DEFAULT}; none where a file is given"),
    ] = None
    chunks: Annotated[
        int | None,
        Field(
            ge=2,
            le=MAX_CHUNKS,
            description=f"stages a rank has, of {in_words(CHUNKED)}, and of {AUTO} with `placement = loop`",
            examples=["chunks = 2"],
        ),
        Derived(f"{DEFAULT_CHUNKS} under {in_words(CHUNKED)}, else none"),
    ] = None
    cap: Annotated[
        Fraction | tuple[Fraction, ...] | None,
        Syntax("ranks"),
        NumberBounds(ge=1, le=100_000_000),
        Field(
            description="most activations that a rank holds at once, or that each pipeline rank holds, "
            f"of {AUTO}; each is that of 1/pipeline of the model, and a stage's where a rank has v of them 1/v of it",
            examples=["cap = 9", "cap = 8.5", "cap = [8, 8, 7.5, 7]"],
        ),
    ] = None
    host_copies: Annotated[
        bool,
        Field(
            description=f"whether {AUTO} may copy activations to the memory of the host and back, so that a cap costs "
            "less time",
            examples=["host_copies = true"],
        ),
        Quiet(),
    ] = False
    placement: Annotated[
        Literal["v", "loop", "bidirectional"] | None,
        Field(description=f"where the stages are that {AUTO} orders", examples=["placement = v"]),
        Choices(
            {
                "v": "two stages a rank, r and 2P-1-r",
                "loop": "stage s on rank s mod P: one stage a rank, or `chunks` of them",
                "bidirectional": "one stage a rank, and a second copy of it on rank P-1-r",
            }
        ),
        Quiet(),
    ] = None
    copies: Annotated[
        int | None,
        Field(ge=1, le=2, description=f"most ranks that hold a stage, of {AUTO}", examples=["copies = 1"]),
        Quiet(),
    ] = None
    order: Annotated[
        Literal["drawn", "cost"],
        Field(description="which micro-batch of a step goes first", examples=["order = cost"]),
        Choices(
            {
                "drawn": "they go as their samples are drawn",
                "cost": "they go as is best for the schedule, by what attention computes for their documents",
            }
        ),
        Quiet(),
    ] = "drawn"
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
        Derived(
            "20 of 132, or that share of other devices, if `expert`, `expert_tensor` or `tensor` is above 1, or `zero` "
            "on several data ranks, and the devices state `sms`; else 0"
        ),
        Field(
            ge=0,
            le=4096,
            description=f"SMs that communicate; {PLANNED}",
            examples=["communication = 20", "communication = auto"],
        ),
    ] = 0


class Spec(Node):
    """A run: a model, the cluster it is trained on, in which precision, and how."""

    _files: object = PrivateAttr(default=None)  # compiler.plan.spec_files.SpecFiles, once they are read

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
                "mla_up": "the up-projections of latent attention, and of the queries of compressed attention",
                "qkv": "the product that gives queries, keys and values of grouped-query attention or a delta rule",
                "swiglu": "the activation between up and down",
                "hyper": "what mixes several residual streams, and their sums inside of a layer",
                "up": "the first product of feed-forward parts, in front of the activation",
                "attention": "all of attention",
                "dense": "the feed-forward part of a dense layer",
                "router": "the gate of an MoE layer",
                "shared": "the shared experts",
                "experts": "the routed experts",
                "logits": "the products of the head, in blocks: no tensor of all tokens and words is made",
                "layer": "whole layers: only their inputs are kept, and their forward is run again, dispatch included",
            }
        ),
    ] = ()
    recompute_layers: Annotated[
        int | None,
        Field(
            ge=1,
            le=10_000,
            description="how many layers of each pipeline stage `layer` means, the first ones; else every layer",
            examples=["recompute_layers = 5"],
        ),
        Quiet(),
    ] = None
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
    offload: Annotated[
        tuple[Offload, ...],
        Field(
            description="state of the optimizer that lies in the memory of the host; an update takes it to the device "
            "and back, part by part",
            examples=["offload = [moments, master]"],
        ),
        Choices(
            {
                "moments": "what the optimizer keeps of each weight: the moments of AdamW",
                "master": "master weights, where their dtype is not that of the weights",
            }
        ),
    ] = ()
    parallel: Annotated[
        Parallel,
        Field(description="degrees of parallelism", examples=["parallel { pipeline = 2 }"]),
        Derived("data parallelism only"),
    ]
    schedule: Annotated[
        ScheduleBlock,
        Field(description="the order of forwards and backwards", examples=[f"schedule {{ name = {DEFAULT} }}"]),
        Derived(f"{PLAIN} where pipeline = 1, else {DEFAULT}"),
    ]
    sm: Annotated[
        Sm,
        Field(description="how SMs are divided", examples=["sm { communication = 20 }"]),
        Derived("`communication` by its default"),
    ] = Sm.model_construct()
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
    adapter: Annotated[
        Lora | None,
        Quiet(),
        Field(
            description="what is trained beside the weights of `train.initial`, which stay as they are; none: these",
            examples=["adapter lora { rank = 16, on = [q_up, kv_up, out] }"],
        ),
    ] = None
    data: Annotated[
        Data,
        Field(
            description="the text it is trained on",
            examples=["data { source = python_stdlib, tokenizer = train(4096) }"],
        ),
    ]
    metrics: Annotated[  # last, so that no line of a resolved spec moves by it
        Metrics | None,
        Quiet(),
        Field(
            description="where the numbers of the run go besides its folder; none: nowhere",
            examples=["metrics { tensorboard = true, prometheus = 9400 }"],
        ),
    ] = None

    @property
    def row_alignment(self) -> int:
        """What the rows that an expert receives are padded to a multiple of: what the precision asks for; or 8 in BF16
        on accelerators, where a column of rows then has whole 16 bytes. Products of CPUs need none of it, and without
        padding rows stay where they are if there is one expert rank."""
        by_tiles = self.precision.row_alignment
        return 8 if by_tiles == 1 and self.precision.linear == "bf16" and self.has_hosts else by_tiles

    @property
    def has_hosts(self) -> bool:
        """Whether devices are accelerators, whose hosts have memory of their own."""
        return any(device.bf16 is not None for device in self.cluster.devices)

    @property
    def tokens_of_rank(self) -> int:
        """Tokens of a micro-batch that a rank has between attention and dense parts: context ranks divide sequences,
        and tensor ranks what a context rank has of them."""
        return self.train.micro_batch * self.train.sequence // (self.parallel.context * self.parallel.tensor)

    @property
    def sequence_ranks(self) -> int:
        """Ranks that have parts of the same sequences, of which a balancing loss is made: context ranks, and tensor
        ranks where several share a sequence. 1 without such a loss."""
        if not any(isinstance(span.ffn, Moe) and span.ffn.balance.sequence_loss for span in self.model.layers):
            return 1
        return self.parallel.context * max(1, self.parallel.tensor // self.train.micro_batch)

    @property
    def splits_vocabulary(self) -> bool:
        """Whether tensor ranks have parts of the embedding and of the head: equal ones, or else each has all."""
        return self.parallel.tensor > 1 and self.model.vocab % self.parallel.tensor == 0

    @property
    def group_nodes(self) -> int | None:
        """The most nodes that an expert group lies on; None where groups begin or end inside of nodes."""
        return most_group_nodes((node.devices for _, node in self.cluster.parts), self.parallel.expert_group)

    @property
    def by_nodes(self) -> bool:
        """Whether a token goes to each node once: as `route` says; else where an expert group has several whole nodes,
        each with whole experts, and rows come back in a dtype in which they can be added."""
        sizes = [node.devices for _, node in self.cluster.parts]
        found = {group_nodes(devices, self.parallel.expert_group) for devices in sizes}
        several = found.isdisjoint({None, 1}) and len(found) == 1
        several = several and all(devices % self.parallel.expert_tensor == 0 for devices in sizes)
        if self.parallel.route is None:
            return several and self.precision.combine != "e4m3"
        return several and self.parallel.route == "nodes"

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
