"""Attention: its kinds, and what their heads see."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Aliases, Choices, FilePath, Node, Quiet, Syntax, Width
from dsl.schema.compressed import Compressed
from dsl.schema.indexer import Indexer
from dsl.schema.rope import Position

ModuleText = Annotated[
    str,
    FilePath(),
    Field(
        min_length=1,
        max_length=4096,
        description="a file of Python, relative to the spec, and a class of torch.nn.Module in it; what plans, "
        "compiles and trains runs the file, `dsc check` does not",
        examples=['module = "layers.py:Mixer"'],
    ),
]


class HeadDim(Node):
    """Widths of one attention head. The query and key are [nope | rope] wide, the value is its own."""

    nope: Annotated[
        int,
        Field(
            ge=1, le=4096, description="width of the part of query and key without position", examples=["nope = 128"]
        ),
    ]
    rope: Annotated[
        int, Field(ge=2, le=4096, description="width of the rotated part; pairs, so even", examples=["rope = 64"])
    ]
    value: Annotated[int, Field(ge=1, le=4096, description="width of the value", examples=["value = 128"])]


Scale = Annotated[
    float | None,
    Field(
        gt=0,
        le=1e3,
        description="factor of q·k in the softmax; 1/√(width of a query head) if it is not given",
        examples=["scale = 1 / 16"],
    ),
]


class Mla(Node):
    """Multi-head latent attention (arXiv 2405.04434, §2.1): low-rank queries and keys/values, one rope key for all."""

    kind: Annotated[Literal["mla"], Syntax("label"), Field(description="the kind")] = "mla"
    heads: Annotated[int, Field(ge=1, le=65536, description="attention heads", examples=["heads = 128"])]
    query_rank: Annotated[
        int | None,
        Field(ge=1, le=1_048_576, description="rank of the queries, or none", examples=["query_rank = 1536"]),
    ]
    kv_rank: Annotated[Width, Field(description="rank of keys and values", examples=["kv_rank = 512"])]
    head_dim: Annotated[
        HeadDim, Field(description="widths of a head", examples=["head_dim { nope = 128, rope = 64, value = 128 }"])
    ]
    scale: Scale = None
    indexer: Annotated[
        Indexer | None,
        Quiet(),
        Field(
            description="what chooses the keys of each query, or none: it attends to all of its past",
            examples=["indexer { heads = 64, head_dim = 128, top_k = 2048 }"],
        ),
    ] = None
    rope: Position


class Gqa(Node):
    """Grouped-query attention: `heads / kv_heads` query heads share one head of keys and values; kv_heads = heads is
    multi-head attention. All of a head is rotated, on interleaved pairs, unless `rope` says less."""

    kind: Annotated[Literal["gqa"], Syntax("label"), Field(description="the kind")] = "gqa"
    heads: Annotated[int, Field(ge=1, le=65536, description="query heads", examples=["heads = 32"])]
    kv_heads: Annotated[int, Field(ge=1, le=65536, description="heads of keys and values", examples=["kv_heads = 8"])]
    head_dim: Annotated[
        int, Field(ge=2, le=4096, description="width of a head; rotated in pairs, so even", examples=["head_dim = 128"])
    ]
    bias: Annotated[
        Literal["qkv", "all"] | None,
        Field(description="which projections have a bias, or none", examples=["bias = qkv"]),
        Choices(
            {
                "qkv": "queries, keys and values have one (Qwen2)",
                "all": "what attention returns has one as well (GPT-OSS)",
            }
        ),
    ] = None
    qk_norm: Annotated[
        Literal["head", "width"] | None,
        Aliases({"true": "head", "false": "none"}),
        Field(
            description="over what the RMSNorm of queries and of keys before the rotation goes, or none; "
            "`true` is `head`",
            examples=["qk_norm = head"],
        ),
        Choices(
            {
                "head": "every head by itself, all heads with one gain (Qwen3)",
                "width": "all query heads together, and all key heads together (OLMoE)",
            }
        ),
    ] = None
    scale: Scale = None
    window: Annotated[
        int | None,
        Field(
            ge=1,
            le=1_099_511_627_776,
            description="tokens that a token attends to, itself the last of them; all before it if it is not given",
            examples=["window = 128"],
        ),
    ] = None
    sinks: Annotated[
        bool,
        Field(
            description="whether each query head has a learned logit that takes a share of the softmax (GPT-OSS)",
            examples=["sinks = true"],
        ),
    ] = False
    output_gate: Annotated[
        bool,
        Quiet(),
        Field(
            description="whether each number that attention gives is multiplied by a sigmoid of a product (Qwen3-Next)",
            examples=["output_gate = true"],
        ),
    ] = False
    softcap: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e6,
            description="bound of the logits s before the softmax, as softcap·tanh(s/softcap) (Gemma 2), or none",
            examples=["softcap = 50"],
        ),
    ] = None
    rope: Position


class DeltaNet(Node):
    """Linear attention by a gated delta rule: each head has a state of `key_dim` × `value_dim` numbers, and no keys are
    kept (arXiv 2412.06464, 2510.26692). Queries, keys and values pass a short causal convolution; there is no rotation.
    """

    kind: Annotated[Literal["deltanet"], Syntax("label"), Field(description="the kind")] = "deltanet"
    heads: Annotated[
        int, Field(ge=1, le=65536, description="heads of values, with a state each", examples=["heads = 32"])
    ]
    key_heads: Annotated[
        int,
        Field(
            ge=1,
            le=65536,
            description="heads of queries and keys, of which each is that of heads / key_heads heads of values",
            examples=["key_heads = 16"],
        ),
    ]
    key_dim: Annotated[
        int, Field(ge=1, le=4096, description="width of a head of queries and of keys", examples=["key_dim = 128"])
    ]
    value_dim: Annotated[
        int, Field(ge=1, le=4096, description="width of a head of values", examples=["value_dim = 128"])
    ]
    gate: Annotated[
        Literal["head", "channel"],
        Field(description="of what a state has a decay of its own", examples=["gate = channel"]),
        Choices(
            {
                "head": "all of a head decays alike; what it gives has a gate of SiLU (Gated DeltaNet, Qwen3-Next)",
                "channel": "each channel of a key decays on its own; decays and a gate of sigmoid are products of rank "
                "value_dim (Kimi Delta Attention)",
            }
        ),
    ]
    convolution: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="tokens that the convolution in front of it sees, the token itself the last of them",
            examples=["convolution = 4"],
        ),
    ] = 4


class CustomAttention(Node):
    """An attention of one's own: a torch module that is traced when the run is planned."""

    kind: Annotated[Literal["custom"], Syntax("label"), Field(description="the kind")] = "custom"
    module: ModuleText


SoftmaxAttention = Mla | Gqa  # of heads with keys and values each
AnyAttention = Mla | Gqa | Compressed | DeltaNet | CustomAttention
