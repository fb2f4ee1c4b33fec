"""The model: what is computed, independent of machines and of parallelism. Published values: arXiv 2412.19437, §4.2."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.attention import Gqa, Mla
from dsl.schema.base import Choices, Node, Phase, Syntax, Width

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


class Dense(Node):
    """A SwiGLU feed-forward layer."""

    kind: Annotated[Literal["dense"], Syntax("label"), Field(description="the kind")] = "dense"
    inner: Annotated[Width, Field(description="width between up and down", examples=["inner = 2048"])]


class Moe(Node):
    """A mixture of SwiGLU experts: every token goes to the shared ones and to `top_k` of the routed ones."""

    kind: Annotated[Literal["moe"], Syntax("label"), Field(description="the kind")] = "moe"
    experts: Annotated[int, Field(ge=1, le=65536, description="routed experts", examples=["experts = 64"])]
    shared: Annotated[int, Field(ge=0, le=256, description="shared experts", examples=["shared = 1"])]
    top_k: Annotated[int, Field(ge=1, le=1024, description="routed experts of a token", examples=["top_k = 8"])]
    inner: Annotated[Width, Field(description="width of one expert", examples=["inner = 2048"])]
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
        Literal["sigmoid", "softmax"],
        Field(
            description="how logits become scores: sigmoid as V3, softmax as V2",
            examples=["score = sigmoid"],
        ),
        Choices(
            {
                "sigmoid": "every expert is scored on its own; a group counts the sum of its two best (DeepSeek-V3)",
                "softmax": "the scores of all experts sum to 1; a group counts its best (DeepSeek-V2)",
            }
        ),
    ]
    normalize: Annotated[
        bool, Field(description="divide the chosen scores by their sum", examples=["normalize = true"])
    ]
    scale: Annotated[
        float, Field(gt=0, le=1000, description="factor of the gate weights", examples=["scale = 2.5"])
    ] = 1.0
    balance: Annotated[
        Balance, Field(description="how the load is kept even", examples=["balance { bias_rate = 0.001 }"])
    ] = Balance.model_construct()


class LayerRange(Node):
    """Layers FIRST to LAST, counted from 0 and both included, that have the same feed-forward part."""

    first: Annotated[int, Field(ge=0, le=MAX_LAYER, description="the first layer, counted from 0")]
    last: Annotated[int, Field(ge=0, le=MAX_LAYER, description="the last layer")]
    ffn: Annotated[Dense | Moe, Field(description="their feed-forward part", examples=["ffn dense { inner = 2048 }"])]


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


class Model(Node):
    """A DeepSeek-class transformer: RMSNorm, pre-norm residual blocks, untied embedding and head."""

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
        Mla | Gqa,
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
    mtp: Annotated[
        Mtp | None, Field(description="multi-token prediction, or none", examples=["mtp { depth = 1, weight = 0.3 }"])
    ] = None

    @property
    def num_layers(self) -> int:
        """Main layers; MTP blocks are not counted."""
        return self.layers[-1].last + 1

    def ffn(self, layer: int) -> Dense | Moe:
        """The feed-forward part of main layer `layer`."""
        for span in self.layers:
            if span.first <= layer <= span.last:
                return span.ffn
        raise IndexError(f"layer {layer} of {self.num_layers}")
