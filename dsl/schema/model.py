"""The model: what is computed, independent of machines and of parallelism. Published values: arXiv 2412.19437, §4.2."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dsl.schema.attention import AnyAttention, Compressed, CustomAttention, Mla, ModuleText
from dsl.schema.base import Choices, Node, Phase, Quiet, Syntax, Width

# --- Residual streams of a model that has several. Published values: arXiv 2606.19348, section 4.2


class HyperConnections(Node):
    """Several residual streams in the place of one (mHC, arXiv 2512.24880).

    Every part of a layer reads a sum of them, and adds to all what it gives. They are mixed by a matrix of each token,
    whose rows and columns sum to 1.
    """

    streams: Annotated[int, Field(ge=2, le=16, description="residual streams", examples=["streams = 4"])]
    rounds: Annotated[
        int,
        Field(
            ge=1,
            le=100,
            description="rounds of Sinkhorn and Knopp, which divide by the sums of rows and of columns",
            examples=["rounds = 20"],
        ),
    ] = 20
    eps: Annotated[
        float, Field(gt=0, le=0.1, description="what is added to sums that are divided by", examples=["eps = 1e-6"])
    ] = 1e-6


# --- model

MAX_LAYER = 999  # counted from 0; a layer takes some 50 ms to compile


class Balance(Node):
    """How the load of the experts is kept even."""

    bias_rate: Annotated[
        tuple[Phase, ...] | None,
        Syntax("phases"),
        Field(
            description="step of the balancing bias after each optimizer step; without it there is no bias",
            examples=["bias_rate = 0.001", "bias_rate = 0.001 until 14.3T tokens then 0"],
        ),
    ] = None
    sequence_loss: Annotated[
        float, Field(ge=0, le=1, description="weight of the sequence-wise loss", examples=["sequence_loss = 1e-4"])
    ] = 0.0


Act = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu2"]
UNGATED = ("gelu", "gelu_tanh", "relu2")
Activation = Annotated[
    Act,
    Quiet(),
    Field(description="what is between up and down", examples=["activation = geglu_tanh"]),
    Choices(
        {
            "swiglu": "silu(gate)·up, of two products (Llama, DeepSeek)",
            "geglu": "gelu(gate)·up, of two products, by erf",
            "geglu_tanh": "gelu(gate)·up, of two products, by tanh (Gemma)",
            "gelu": "gelu(up), of one product, by erf",
            "gelu_tanh": "gelu(up), of one product, by tanh (GPT-2)",
            "relu2": "max(up, 0)², of one product (Nemotron)",
        }
    ),
]


class Clamp(Node):
    """A SwiGLU whose parts are cut off: gate·sigmoid(alpha·gate)·(up + shift), with gate at most `limit` and up within
    ±`limit`."""

    limit: Annotated[float, Field(gt=0, le=1e6, description="where gate and up are cut off", examples=["limit = 7"])]
    alpha: Annotated[
        float, Field(gt=0, le=1000, description="factor of the gate in the sigmoid", examples=["alpha = 1.702"])
    ] = 1.0
    shift: Annotated[float, Field(ge=-100, le=100, description="what is added to up", examples=["shift = 1"])] = 0.0


Clamped = Annotated[
    Clamp | None,
    Quiet(),
    Field(
        description="where a SwiGLU cuts off its parts, or none: GPT-OSS has these, DeepSeek-V4 a limit alone",
        examples=["clamp { limit = 7, alpha = 1.702, shift = 1 }"],
    ),
]
Biased = Annotated[
    bool,
    Quiet(),
    Field(description="whether the products of a feed-forward part have biases (GPT-OSS)", examples=["bias = true"]),
]


class Dense(Node):
    """A feed-forward layer."""

    kind: Annotated[Literal["dense"], Syntax("label"), Field(description="the kind")] = "dense"
    inner: Annotated[Width, Field(description="width between up and down", examples=["inner = 2048"])]
    activation: Activation = "swiglu"
    clamp: Clamped = None
    bias: Biased = False


Score = Literal["sigmoid", "softmax", "sqrt_softplus"]  # what a router makes of its logits


class Moe(Node):
    """A mixture of experts: every token goes to the shared ones and to `top_k` of the routed ones."""

    kind: Annotated[Literal["moe"], Syntax("label"), Field(description="the kind")] = "moe"
    experts: Annotated[int, Field(ge=1, le=65536, description="routed experts", examples=["experts = 64"])]
    shared: Annotated[int, Field(ge=0, le=256, description="shared experts", examples=["shared = 1"])]
    top_k: Annotated[int, Field(ge=1, le=1024, description="routed experts of a token", examples=["top_k = 8"])]
    inner: Annotated[Width, Field(description="width of one expert", examples=["inner = 2048"])]
    activation: Activation = "swiglu"
    clamp: Clamped = None
    bias: Biased = False
    shared_inner: Annotated[
        int | None,
        Quiet(),
        Field(
            ge=1,
            le=1_048_576,
            description="width of one shared expert, or none: that of a routed one",
            examples=["shared_inner = 5632"],
        ),
    ] = None
    shared_gate: Annotated[
        bool,
        Quiet(),
        Field(
            description="whether each token weighs what the shared experts give by sigmoid(x·w), as in Qwen2-MoE",
            examples=["shared_gate = true"],
        ),
    ] = False
    router_bias: Annotated[
        bool,
        Quiet(),
        Field(
            description="whether the logits of the router have a bias, which is trained as weights are (GPT-OSS)",
            examples=["router_bias = true"],
        ),
    ] = False
    choice: Annotated[
        Literal["scores", "table"],
        Quiet(),
        Field(description="what decides which experts a token goes to", examples=["choice = table"]),
        Choices(
            {
                "scores": "the largest scores, in the best groups",
                "table": "a fixed table by the token, which is random at first; scores weigh the experts (DeepSeek-V4)",
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
            description="nodes that the experts of a token lie on at most, or none: what the groups must come to",
            examples=["max_nodes = 4"],
        ),
    ] = None
    score: Annotated[
        Score,
        Field(
            description="how logits become scores: sigmoid as V3, softmax as V2",
            examples=["score = sigmoid"],
        ),
        Choices(
            {
                "sigmoid": "every expert is scored on its own; a group counts the sum of its two best (DeepSeek-V3)",
                "softmax": "the scores of all experts sum to 1; a group counts its best (DeepSeek-V2)",
                "sqrt_softplus": "√log(1 + e^logit), every expert on its own; groups as with sigmoid (DeepSeek-V4)",
            }
        ),
    ]
    normalize: Annotated[
        bool,
        Field(
            description="divide the chosen scores by their sum: of softmax, as if it were taken of the chosen logits",
            examples=["normalize = true"],
        ),
    ]
    scale: Annotated[
        float, Field(gt=0, le=1000, description="factor of the gate weights", examples=["scale = 2.5"])
    ] = 1.0
    balance: Annotated[
        Balance, Field(description="how the load is kept even", examples=["balance { bias_rate = 0.001 }"])
    ] = Balance.model_construct()


def is_gated(ffn: Dense | Moe) -> bool:
    """Whether the activation of a feed-forward part reads two products, gate and up."""
    return ffn.clamp is not None or ffn.activation not in UNGATED


class Custom(Node):
    """A feed-forward part of one's own: a torch module that is traced when the run is planned."""

    kind: Annotated[Literal["custom"], Syntax("label"), Field(description="the kind")] = "custom"
    module: ModuleText


class LayerRange(Node):
    """Layers FIRST to LAST, counted from 0 and both included, that are alike; `by` N: each N-th of them, from FIRST on.

    A range `by` goes before one without: the layers that it names are its own. What it leaves out is as in the range
    without `by` that FIRST is in.
    """

    KEYS: ClassVar = ("ffn", "attention")

    first: Annotated[int, Field(ge=0, le=MAX_LAYER, description="the first layer, counted from 0")]
    last: Annotated[int, Field(ge=0, le=MAX_LAYER, description="the last layer")]
    by: Annotated[int, Syntax("label"), Field(ge=1, le=MAX_LAYER, description="the distance of two layers")] = 1
    ffn: Annotated[
        Dense | Moe | Custom, Field(description="their feed-forward part", examples=["ffn dense { inner = 2048 }"])
    ]
    attention: Annotated[
        AnyAttention | None,
        Field(
            description="their attention, put over the model's: a key that is left out is as it is there",
            examples=["attention { rope { theta = 1e6 } }"],
        ),
    ] = None

    @property
    def layers(self) -> range:
        """The layers that the range names."""
        return range(self.first, self.last + 1, self.by)


class Mtp(Node):
    """Multi-token prediction: `depth` blocks that share the main embedding and head, each one token further ahead."""

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
        Quiet(),
        Field(
            description="attention of the blocks, put over the model's, or none: that of the last layer",
            examples=["attention { window = 128 }"],
        ),
    ] = None


class Model(Node):
    """A transformer: RMSNorm, and blocks of attention and a feed-forward part around a residual stream."""

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
            description="attention of every layer, of a kind",
            examples=["attention gqa { heads = 32, kv_heads = 8, head_dim = 128, rope { theta = 10_000 } }"],
        ),
    ]
    layers: Annotated[
        tuple[LayerRange, ...],
        Syntax("layers"),
        Field(
            description="ranges of layers, counted from 0, without a hole",
            examples=["layers 0..2 { ffn dense { inner = 2048 } }"],
        ),
    ]
    tied: Annotated[
        bool,
        Quiet(),
        Field(description="whether embedding and head are one matrix", examples=["tied = true"]),
    ] = False
    norm: Annotated[
        Literal["pre", "post", "sandwich"],
        Quiet(),
        Field(description="where the norms of a block are", examples=["norm = sandwich"]),
        Choices(
            {
                "pre": "in front of attention and of the feed-forward part (Llama, DeepSeek)",
                "post": "behind both, of what is added to the residual stream (OLMo 2)",
                "sandwich": "in front of both and behind both (Gemma 2 and 3, GLM-4)",
            }
        ),
    ] = "pre"
    hyper_connections: Annotated[
        HyperConnections | None,
        Quiet(),
        Field(
            description="several residual streams in the place of one, or none: DeepSeek-V4 has four",
            examples=["hyper_connections { streams = 4 }"],
        ),
    ] = None
    embedding_scale: Annotated[
        float,
        Quiet(),
        Field(gt=0, le=1e6, description="factor of the embeddings", examples=["embedding_scale = 48"]),
    ] = 1.0
    residual_scale: Annotated[
        float,
        Quiet(),
        Field(
            gt=0,
            le=1000,
            description="factor of what attention and feed-forward parts add to the residual stream",
            examples=["residual_scale = 0.22"],
        ),
    ] = 1.0
    logit_scale: Annotated[
        float,
        Quiet(),
        Field(gt=0, le=1000, description="factor of the logits", examples=["logit_scale = 0.125"]),
    ] = 1.0
    logit_cap: Annotated[
        float | None,
        Quiet(),
        Field(
            gt=0,
            le=1e6,
            description="bound of the logits, which become cap·tanh(logit / cap), or none",
            examples=["logit_cap = 30"],
        ),
    ] = None
    mtp: Annotated[
        Mtp | None, Field(description="multi-token prediction, or none", examples=["mtp { depth = 1, weight = 0.3 }"])
    ] = None

    @property
    def stream_width(self) -> int:
        """Numbers of a token between two parts: hidden, times the residual streams."""
        return self.hidden * (self.hyper_connections.streams if self.hyper_connections else 1)

    @property
    def num_layers(self) -> int:
        """Main layers; MTP blocks are not counted."""
        return max(span.last for span in self.layers) + 1

    def range_of(self, layer: int) -> int:
        """The index of the range that main layer `layer` belongs to. IndexError beyond the last layer.

        A rule complains of layers that no range has; here they are in the last one.
        """
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of {self.num_layers}")
        found = [index for index, span in enumerate(self.layers) if layer in span.layers]
        return max(found, key=lambda index: self.layers[index].by > 1, default=len(self.layers) - 1)

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
        """The layers of the user's own: attentions, and feed-forward parts of ranges, with their paths."""
        parts = (*self.attentions, *((f"model.layers.{index}.ffn", span.ffn) for index, span in enumerate(self.layers)))
        return tuple((path, part) for path, part in parts if isinstance(part, Custom | CustomAttention))

    @property
    def has_latents(self) -> bool:
        """Whether a range of layers, or MTP, has latent attention, or compressed, whose queries have a latent."""
        ranges = (span.attention or self.attention for span in self.layers)
        return any(isinstance(each, Mla | Compressed) for each in (*ranges, self.mtp and self.mtp.attention))

    @property
    def attentions(self) -> tuple[tuple[str, AnyAttention], ...]:
        """The attention of the model, of each range that has its own, and of MTP if it has, with its path."""
        of_ranges = (
            (f"model.layers.{index}.attention", span.attention)
            for index, span in enumerate(self.layers)
            if span.attention is not None
        )
        of_mtp = (("model.mtp.attention", self.mtp.attention),) if self.mtp and self.mtp.attention else ()
        return (("model.attention", self.attention), *of_ranges, *of_mtp)
