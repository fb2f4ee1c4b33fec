"""The model, independent of machines and parallelism. Published values: arXiv 2412.19437, §4.2."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dsl.schema.attention import AnyAttention, Compressed, CustomAttention, Mla, ModuleText
from dsl.schema.base import Choices, Node, Phase, QuietField, Syntax, Width

# --- Hyper-connections. Published values: arXiv 2606.19348, section 4.2


class HyperConnections(Node):
    """Several residual streams instead of one (mHC, arXiv 2512.24880).

    Every part of a layer reads a weighted sum of the streams and adds its output to all of them. A matrix per token,
    whose rows and columns sum to 1, mixes them.
    """

    streams: Annotated[int, Field(ge=2, le=16, description="residual streams", examples=["streams = 4"])]
    rounds: Annotated[
        int,
        Field(
            ge=1,
            le=100,
            description="Sinkhorn-Knopp rounds, which divide by the sums of rows and of columns",
            examples=["rounds = 20"],
        ),
    ] = 20
    eps: Annotated[
        float, Field(gt=0, le=0.1, description="added to the sums before the division", examples=["eps = 1e-6"])
    ] = 1e-6


# --- model

MAX_LAYER = 999  # counted from 0; a layer takes about 50 ms to compile


class Balance(Node):
    """Load balancing of the experts."""

    bias_rate: Annotated[
        tuple[Phase, ...] | None,
        Syntax("phases"),
        Field(
            description="change of the balancing bias after each optimizer step; default: no bias",
            examples=["bias_rate = 0.001", "bias_rate = 0.001 until 14.3T tokens then 0"],
        ),
    ] = None
    sequence_loss: Annotated[
        float,
        Field(ge=0, le=1, description="weight of the sequence-wise balancing loss", examples=["sequence_loss = 1e-4"]),
    ] = 0.0


Act = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu2"]
UNGATED = ("gelu", "gelu_tanh", "relu2")
Activation = Annotated[
    Act,
    QuietField(),
    Field(description="activation between the up and down projections", examples=["activation = geglu_tanh"]),
    Choices(
        {
            "swiglu": "silu(gate)·up, with two matrices (Llama, DeepSeek)",
            "geglu": "gelu(gate)·up, with two matrices, by erf",
            "geglu_tanh": "gelu(gate)·up, with two matrices, by tanh (Gemma)",
            "gelu": "gelu(up), with one matrix, by erf",
            "gelu_tanh": "gelu(up), with one matrix, by tanh (GPT-2)",
            "relu2": "max(up, 0)², with one matrix (Nemotron)",
        }
    ),
]


class Clamp(Node):
    """A clamped SwiGLU: gate·sigmoid(alpha·gate)·(up + shift), with gate at most `limit` and up within ±`limit`."""

    limit: Annotated[float, Field(gt=0, le=1e6, description="bound of gate and up", examples=["limit = 7"])]
    alpha: Annotated[
        float, Field(gt=0, le=1000, description="factor of the gate in the sigmoid", examples=["alpha = 1.702"])
    ] = 1.0
    shift: Annotated[float, Field(ge=-100, le=100, description="added to up", examples=["shift = 1"])] = 0.0


Clamped = Annotated[
    Clamp | None,
    QuietField(),
    Field(
        description="clamps of a SwiGLU, or none; GPT-OSS has all three keys, DeepSeek-V4 only a limit",
        examples=["clamp { limit = 7, alpha = 1.702, shift = 1 }"],
    ),
]
Biased = Annotated[
    bool,
    QuietField(),
    Field(description="whether the linears of a feed-forward part have biases (GPT-OSS)", examples=["bias = true"]),
]


class Dense(Node):
    """A feed-forward layer."""

    kind: Annotated[Literal["dense"], Syntax("label"), Field(description="the kind")] = "dense"
    inner: Annotated[Width, Field(description="width between up and down", examples=["inner = 2048"])]
    activation: Activation = "swiglu"
    clamp: Clamped = None
    bias: Biased = False


Score = Literal["sigmoid", "softmax", "sqrt_softplus"]  # how a router turns logits into scores


class Moe(Node):
    """A mixture of experts: every token goes to all shared experts and to `top_k` routed experts."""

    kind: Annotated[Literal["moe"], Syntax("label"), Field(description="the kind")] = "moe"
    experts: Annotated[int, Field(ge=1, le=65536, description="routed experts", examples=["experts = 64"])]
    shared: Annotated[int, Field(ge=0, le=256, description="shared experts", examples=["shared = 1"])]
    top_k: Annotated[int, Field(ge=1, le=1024, description="routed experts per token", examples=["top_k = 8"])]
    inner: Annotated[Width, Field(description="width of one expert", examples=["inner = 2048"])]
    activation: Activation = "swiglu"
    clamp: Clamped = None
    bias: Biased = False
    shared_inner: Annotated[
        int | None,
        QuietField(),
        Field(
            ge=1,
            le=1_048_576,
            description="width of one shared expert; none: that of a routed one",
            examples=["shared_inner = 5632"],
        ),
    ] = None
    shared_gate: Annotated[
        bool,
        QuietField(),
        Field(
            description="whether the output of the shared experts is multiplied by sigmoid(x·w) per token (Qwen2-MoE)",
            examples=["shared_gate = true"],
        ),
    ] = False
    router_bias: Annotated[
        bool,
        QuietField(),
        Field(
            description="whether the router has a bias that is trained like a weight (GPT-OSS)",
            examples=["router_bias = true"],
        ),
    ] = False
    choice: Annotated[
        Literal["scores", "table"],
        QuietField(),
        Field(description="how the experts of a token are chosen", examples=["choice = table"]),
        Choices(
            {
                "scores": "by the largest scores in the best groups",
                "table": "by a fixed table with a row per token id, filled at random; scores only weight the experts "
                "(DeepSeek-V4)",
            }
        ),
    ] = "scores"
    groups: Annotated[
        int, Field(ge=1, le=65536, description="groups the experts are divided into", examples=["groups = 8"])
    ] = 1
    top_groups: Annotated[
        int,
        Field(ge=1, le=65536, description="groups a token may choose its experts from", examples=["top_groups = 4"]),
    ] = 1
    max_nodes: Annotated[
        int | None,
        Field(
            ge=1,
            le=65536,
            description="most nodes that hold the experts of a token, or none; the groups must ensure it",
            examples=["max_nodes = 4"],
        ),
    ] = None
    score: Annotated[
        Score,
        Field(
            description="how logits become scores: sigmoid as in V3, softmax as in V2",
            examples=["score = sigmoid"],
        ),
        Choices(
            {
                "sigmoid": "each expert is scored on its own; the score of a group is the sum of its two best "
                "(DeepSeek-V3)",
                "softmax": "the scores of all experts sum to 1; the score of a group is its best (DeepSeek-V2)",
                "sqrt_softplus": "√log(1 + e^logit), each expert on its own; groups as with sigmoid (DeepSeek-V4)",
            }
        ),
    ]
    normalize: Annotated[
        bool,
        Field(
            description="divide the chosen scores by their sum; with softmax this is the softmax of the chosen logits",
            examples=["normalize = true"],
        ),
    ]
    scale: Annotated[
        float, Field(gt=0, le=1000, description="factor of the gate weights", examples=["scale = 2.5"])
    ] = 1.0
    balance: Annotated[
        Balance, Field(description="load balancing of the experts", examples=["balance { bias_rate = 0.001 }"])
    ] = Balance.model_construct()


def is_gated(ffn: Dense | Moe) -> bool:
    """Whether the activation of a feed-forward part reads two projections, gate and up."""
    return ffn.clamp is not None or ffn.activation not in UNGATED


class Custom(Node):
    """A custom feed-forward part: a torch module that is traced when the run is planned."""

    kind: Annotated[Literal["custom"], Syntax("label"), Field(description="the kind")] = "custom"
    module: ModuleText


class LayerRange(Node):
    """Equal layers FIRST to LAST, counted from 0 and both included; `by` N: each N-th of them, from FIRST on.

    A range with `by` takes its layers out of the ranges without. Keys that it leaves out come from the range without
    `by` that holds FIRST.
    """

    KEYS: ClassVar = ("ffn", "attention")

    first: Annotated[int, Field(ge=0, le=MAX_LAYER, description="the first layer, counted from 0")]
    last: Annotated[int, Field(ge=0, le=MAX_LAYER, description="the last layer")]
    by: Annotated[int, Syntax("label"), Field(ge=1, le=MAX_LAYER, description="the distance between two layers")] = 1
    ffn: Annotated[
        Dense | Moe | Custom, Field(description="their feed-forward part", examples=["ffn dense { inner = 2048 }"])
    ]
    attention: Annotated[
        AnyAttention | None,
        Field(
            description="their attention, merged over the model's: keys that are left out come from there",
            examples=["attention { rope { theta = 1e6 } }"],
        ),
    ] = None

    @property
    def layers(self) -> range:
        """The layers that the range names; some may belong to a range with `by`."""
        return range(self.first, self.last + 1, self.by)


class Mtp(Node):
    """Multi-token prediction: `depth` blocks that share embedding and head with the model; each predicts one token
    further ahead."""

    depth: Annotated[
        int, Field(ge=1, le=16, description="tokens predicted beyond the next one", examples=["depth = 1"])
    ]
    weight: Annotated[
        tuple[Phase, ...],
        Syntax("phases"),
        Field(
            description="weight of the MTP loss", examples=["weight = 0.3", "weight = 0.3 until 10T tokens then 0.1"]
        ),
    ]
    attention: Annotated[
        AnyAttention | None,
        QuietField(),
        Field(
            description="attention of the blocks, merged over the model's; none: that of the last layer",
            examples=["attention { window = 128 }"],
        ),
    ] = None


class Model(Node):
    """A transformer: blocks of attention and a feed-forward part on a residual stream, with RMSNorm."""

    name: Annotated[str, Syntax("label"), Field(description="name of the model")]
    vocab: Annotated[
        int, Field(ge=2, le=16_777_216, description="entries of the vocabulary", examples=["vocab = 129_280"])
    ]
    hidden: Annotated[Width, Field(description="width of the residual stream", examples=["hidden = 7168"])]
    init_std: Annotated[
        float, Field(gt=0, le=10, description="standard deviation of initial weights", examples=["init_std = 0.006"])
    ]
    norm_eps: Annotated[float, Field(gt=0, le=1, description="epsilon of every RMSNorm", examples=["norm_eps = 1e-6"])]
    attention: Annotated[
        AnyAttention,
        Field(
            description="attention of every layer",
            examples=["attention gqa { heads = 32, kv_heads = 8, head_dim = 128, rope { theta = 10_000 } }"],
        ),
    ]
    layers: Annotated[
        tuple[LayerRange, ...],
        Syntax("layers"),
        Field(
            description="ranges of layers, counted from 0, without a gap",
            examples=["layers 0..2 { ffn dense { inner = 2048 } }"],
        ),
    ]
    tied: Annotated[
        bool,
        QuietField(),
        Field(description="whether embedding and head are one matrix", examples=["tied = true"]),
    ] = False
    norm: Annotated[
        Literal["pre", "post", "sandwich"],
        QuietField(),
        Field(description="where a block has its norms", examples=["norm = sandwich"]),
        Choices(
            {
                "pre": "before attention and before the feed-forward part (Llama, DeepSeek)",
                "post": "after each, on what is added to the residual stream (OLMo 2)",
                "sandwich": "before and after each (Gemma 2 and 3, GLM-4)",
            }
        ),
    ] = "pre"
    hyper_connections: Annotated[
        HyperConnections | None,
        QuietField(),
        Field(
            description="several residual streams instead of one, or none; DeepSeek-V4 has four",
            examples=["hyper_connections { streams = 4 }"],
        ),
    ] = None
    embedding_scale: Annotated[
        float,
        QuietField(),
        Field(gt=0, le=1e6, description="factor of the embeddings", examples=["embedding_scale = 48"]),
    ] = 1.0
    residual_scale: Annotated[
        float,
        QuietField(),
        Field(
            gt=0,
            le=1000,
            description="factor of what attention and feed-forward parts add to the residual stream",
            examples=["residual_scale = 0.22"],
        ),
    ] = 1.0
    logit_scale: Annotated[
        float,
        QuietField(),
        Field(gt=0, le=1000, description="factor of the logits", examples=["logit_scale = 0.125"]),
    ] = 1.0
    logit_cap: Annotated[
        float | None,
        QuietField(),
        Field(
            gt=0,
            le=1e6,
            description="cap of the logits, which become cap·tanh(logit / cap), or none",
            examples=["logit_cap = 30"],
        ),
    ] = None
    mtp: Annotated[
        Mtp | None, Field(description="multi-token prediction, or none", examples=["mtp { depth = 1, weight = 0.3 }"])
    ] = None

    @property
    def stream_width(self) -> int:
        """Width of all residual streams together: hidden times their number."""
        return self.hidden * (self.hyper_connections.streams if self.hyper_connections else 1)

    @property
    def num_layers(self) -> int:
        """Number of main layers, without MTP blocks."""
        return max(span.last for span in self.layers) + 1

    def range_of(self, layer: int) -> int:
        """The index of the range that main layer `layer` belongs to. Raises IndexError beyond the last layer.

        A layer that no range names counts as in the last range; a rule reports it.
        """
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of {self.num_layers}")
        indices = [index for index, span in enumerate(self.layers) if layer in span.layers]
        return max(indices, key=lambda index: self.layers[index].by > 1, default=len(self.layers) - 1)

    def layers_of(self, index: int) -> tuple[int, ...]:
        """The main layers that belong to a range."""
        if all(span.by == 1 for span in self.layers):
            return tuple(self.layers[index].layers)
        return tuple(layer for layer in self.layers[index].layers if self.range_of(layer) == index)

    def ffn(self, layer: int) -> Dense | Moe | Custom:
        """The feed-forward part of main layer `layer`."""
        return self.layers[self.range_of(layer)].ffn

    def attention_of(self, layer: int) -> AnyAttention:
        """The attention of main layer `layer`."""
        return self.layers[self.range_of(layer)].attention or self.attention

    @property
    def attention_of_mtp(self) -> AnyAttention:
        """The attention of the MTP blocks, if there are any."""
        return (self.mtp and self.mtp.attention) or self.attention_of(self.num_layers - 1)

    @property
    def customs(self) -> tuple[tuple[str, Custom | CustomAttention], ...]:
        """Custom attentions and feed-forward parts, as (path, part)."""
        parts = (*self.attentions, *((f"model.layers.{index}.ffn", span.ffn) for index, span in enumerate(self.layers)))
        return tuple((path, part) for path, part in parts if isinstance(part, Custom | CustomAttention))

    @property
    def has_latents(self) -> bool:
        """Whether a range of layers or MTP has latent or compressed attention, whose queries have a latent."""
        ranges = (span.attention or self.attention for span in self.layers)
        return any(isinstance(attention, Mla | Compressed) for attention in (*ranges, self.mtp and self.mtp.attention))

    @property
    def attentions(self) -> tuple[tuple[str, AnyAttention], ...]:
        """Every attention, as (path, attention): that of the model, and those that ranges and MTP have of their own."""
        of_ranges = (
            (f"model.layers.{index}.attention", span.attention)
            for index, span in enumerate(self.layers)
            if span.attention is not None
        )
        of_mtp = (("model.mtp.attention", self.mtp.attention),) if self.mtp and self.mtp.attention else ()
        return (("model.attention", self.attention), *of_ranges, *of_mtp)
