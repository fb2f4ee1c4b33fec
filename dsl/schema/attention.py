"""Attention: its kinds, their rotation, what chooses their keys, and what their heads see."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Aliases, Choices, FilePath, Node, Quiet, Syntax, Width

# --- Rotary position embedding: which columns of a head turn, and how frequencies are scaled for a longer context

Factor = Annotated[
    float, Field(ge=1, le=1e6, description="how much longer the context becomes", examples=["factor = 8"])
]
Original = Annotated[
    int,
    Field(ge=1, le=1_099_511_627_776, description="tokens of the context before", examples=["original = 8192"]),
]


class LinearScaling(Node):
    """All frequencies divided by a factor: position interpolation (arXiv 2306.15595)."""

    kind: Annotated[Literal["linear"], Syntax("label"), Field(description="the kind")] = "linear"
    factor: Factor


class Llama3Scaling(Node):
    """Frequencies divided by a factor where few of their turns fit into the original context, as Llama 3.1 does.

    Fewer than `low_freq_factor` turns: divided; more than `high_freq_factor`: as they were; between, a mean of both.
    """

    kind: Annotated[Literal["llama3"], Syntax("label"), Field(description="the kind")] = "llama3"
    factor: Factor
    original: Original
    low_freq_factor: Annotated[
        float,
        Field(gt=0, le=1e6, description="turns below which a frequency is divided", examples=["low_freq_factor = 1"]),
    ] = 1.0
    high_freq_factor: Annotated[
        float,
        Field(
            gt=0, le=1e6, description="turns above which a frequency stays as it is", examples=["high_freq_factor = 4"]
        ),
    ] = 4.0


class YarnScaling(Node):
    """YaRN (arXiv 2309.00071): frequencies divided by a factor along a ramp over the pairs of columns.

    With m(s) = 0.1·s·ln(factor) + 1, sines and cosines are multiplied by `attention_factor`, or else by m(mscale) /
    m(mscale_all_dim) if both are given, or else by m(1). Latent attention with `mscale_all_dim` has its softmax scale
    multiplied by m(mscale_all_dim)², as DeepSeek-V3 does.
    """

    kind: Annotated[Literal["yarn"], Syntax("label"), Field(description="the kind")] = "yarn"
    factor: Factor
    original: Original
    beta_fast: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="turns in the original context from which on a frequency stays as it is",
            examples=["beta_fast = 32"],
        ),
    ] = 32.0
    beta_slow: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="turns in the original context up to which a frequency is divided",
            examples=["beta_slow = 1"],
        ),
    ] = 1.0
    truncate: Annotated[
        bool, Field(description="whether the ramp begins and ends at whole pairs", examples=["truncate = false"])
    ] = True
    attention_factor: Annotated[
        float | None,
        Field(gt=0, le=1e3, description="factor of sines and cosines", examples=["attention_factor = 1.0"]),
    ] = None
    mscale: Annotated[
        float | None,
        Field(gt=0, le=1e3, description="how steeply that factor grows with ln(factor)", examples=["mscale = 1.0"]),
    ] = None
    mscale_all_dim: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e3,
            description="how steeply the softmax scale of latent attention grows with ln(factor)",
            examples=["mscale_all_dim = 1.0"],
        ),
    ] = None


class Rope(Node):
    """Rotary position embedding on interleaved pairs."""

    theta: Annotated[
        float, Field(ge=1, le=1e12, description="base of the angles pos·theta^(−2i/rope)", examples=["theta = 10_000"])
    ]
    width: Annotated[
        int | None,
        Field(
            ge=2,
            le=4096,
            description="columns of each head that are rotated, in pairs: the first of them, of `compressed` the last; "
            "all if it is not given",
            examples=["width = 64"],
        ),
    ] = None
    scaling: Annotated[
        LinearScaling | Llama3Scaling | YarnScaling | None,
        Field(
            description="how the frequencies of a longer context follow from those of a shorter one",
            examples=["scaling yarn { factor = 40, original = 4096 }"],
        ),
    ] = None


Position = Annotated[
    Rope | None,
    Field(
        description="rotary position embedding, or none: attention without positions",
        examples=["rope { theta = 10_000 }", "rope = none"],
    ),
]


# --- What chooses the keys of latent attention


class Indexer(Node):
    """DeepSeek Sparse Attention (arXiv 2512.02556, §2.1): small heads that choose the keys that a query attends to, or
    the compressed entries (arXiv 2606.19348, §2.3.1)."""

    heads: Annotated[int, Field(ge=1, le=65536, description="heads of the indexer", examples=["heads = 64"])]
    head_dim: Annotated[
        int,
        Field(
            ge=2,
            le=4096,
            description="width of its heads; as many of their columns are rotated as of a head of attention, likewise "
            "the first or the last",
            examples=["head_dim = 128"],
        ),
    ]
    top_k: Annotated[
        int,
        Field(
            ge=1,
            le=16_777_216,
            description="keys, or entries, that a query attends to; all of its past where these are fewer",
            examples=["top_k = 2048"],
        ),
    ]
    loss: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="weight of its loss: of the divergence of its scores from attention, the mean over the tokens",
            examples=["loss = 1.0"],
        ),
    ] = 1.0


# --- The attention of DeepSeek-V4: a window, and compressed entries beside it

Rate = Annotated[int, Field(ge=2, le=65536, description="tokens that an entry stands for", examples=["rate = 128"])]


class Hca(Node):
    """Heavily compressed attention (arXiv 2606.19348, §2.3.2): entries of `rate` tokens each, and queries attend to all
    entries before them."""

    kind: Annotated[Literal["hca"], Syntax("label"), Field(description="the kind")] = "hca"
    rate: Rate


class Csa(Node):
    """Compressed sparse attention (arXiv 2606.19348, §2.3.1): entries of two windows of `rate` tokens each, of which an
    indexer chooses those that a query attends to."""

    kind: Annotated[Literal["csa"], Syntax("label"), Field(description="the kind")] = "csa"
    rate: Rate
    indexer: Annotated[
        Indexer,
        Field(
            description="what chooses the entries of each query",
            examples=["indexer { heads = 64, head_dim = 128, top_k = 512 }"],
        ),
    ]


class Compressed(Node):
    """The attention of DeepSeek-V4 (arXiv 2606.19348, §2.3): one head of keys, which are the values too, a window over
    it, and compressed entries of all tokens before; queries and what attention returns are projected by low rank."""

    kind: Annotated[Literal["compressed"], Syntax("label"), Field(description="the kind")] = "compressed"
    heads: Annotated[int, Field(ge=1, le=65536, description="query heads", examples=["heads = 64"])]
    head_dim: Annotated[
        int,
        Field(
            ge=2,
            le=4096,
            description="width of a head; the last `width` columns of `rope` are rotated, in pairs",
            examples=["head_dim = 512"],
        ),
    ]
    query_rank: Annotated[
        int, Field(ge=1, le=1_048_576, description="rank of the queries", examples=["query_rank = 1024"])
    ]
    window: Annotated[
        int,
        Field(
            ge=1,
            le=1_099_511_627_776,
            description="tokens whose keys a token attends to one by one, itself the last of them",
            examples=["window = 128"],
        ),
    ]
    sinks: Annotated[
        bool,
        Field(
            description="whether each query head has a learned logit that takes a share of the softmax",
            examples=["sinks = true"],
        ),
    ] = False
    groups: Annotated[
        int,
        Field(
            ge=1,
            le=65536,
            description="groups of heads; what each returns is projected by a matrix of its own",
            examples=["groups = 8"],
        ),
    ]
    out_rank: Annotated[
        int,
        Field(ge=1, le=1_048_576, description="width that each group is projected to", examples=["out_rank = 1024"]),
    ]
    compress: Annotated[
        Csa | Hca | None,
        Field(
            description="compressed entries that stand beside the window, or none: the window alone",
            examples=[
                "compress hca { rate = 128 }",
                "compress csa { rate = 4, indexer { heads = 64, head_dim = 128, top_k = 512 } }",
                "compress = none",
            ],
        ),
    ] = None
    rope: Position

    @property
    def indexer(self) -> Indexer | None:
        """What chooses entries, if they are chosen."""
        return self.compress.indexer if isinstance(self.compress, Csa) else None


# --- Attention: its kinds, and what their heads see

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
