"""The kinds of attention, the indexers that choose their keys, and their parameter counts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Aliases, Choices, FilePath, Node, QuietField, Syntax, Width
from dsl.schema.rotation import Position

# --- The indexer of sparse attention


class Indexer(Node):
    """DeepSeek Sparse Attention (arXiv 2512.02556, §2.1): small heads choose the keys, or the compressed entries (arXiv
    2606.19348, §2.3.1), that a query attends to."""

    heads: Annotated[int, Field(ge=1, le=65536, description="heads of the indexer", examples=["heads = 64"])]
    head_dim: Annotated[
        int,
        Field(
            ge=2,
            le=4096,
            description="width of its heads; RoPE rotates as many of their columns as of an attention head, at the "
            "same end",
            examples=["head_dim = 128"],
        ),
    ]
    top_k: Annotated[
        int,
        Field(
            ge=1,
            le=16_777_216,
            description="keys, or entries, that a query attends to; all earlier ones if there are fewer",
            examples=["top_k = 2048"],
        ),
    ]
    loss: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="weight of its loss: the divergence of its scores from attention, averaged over tokens",
            examples=["loss = 1.0"],
        ),
    ] = 1.0

    def parameters(self, hidden: int, query_rank: int) -> dict[str, int]:
        """Parameters of an indexer over keys (arXiv 2512.02556, §2.1): q·J·w for the queries of J heads of width w, D·w
        for the shared key, 2·w for its LayerNorm, and D·J for the head weights."""
        queries = query_rank * self.heads * self.head_dim
        return {"products": queries + hidden * (self.head_dim + self.heads), "norms": 2 * self.head_dim}

    def parameters_over_entries(self, hidden: int, query_rank: int, rate: int) -> dict[str, int]:
        """Parameters of an indexer over compressed entries of two windows: as over keys, but its keys are compressed
        entries too."""
        queries = query_rank * self.heads * self.head_dim
        return {
            "products": queries + hidden * self.heads + 2 * hidden * 2 * self.head_dim,
            "norms": self.head_dim,
            "positions": 2 * rate * self.head_dim,
        }


# --- The attention of DeepSeek-V4: a sliding window, and compressed entries

Rate = Annotated[int, Field(ge=2, le=65536, description="tokens compressed into one entry", examples=["rate = 128"])]


class Hca(Node):
    """Heavily compressed attention (arXiv 2606.19348, §2.3.2): an entry compresses `rate` tokens, and a query attends
    to all earlier entries."""

    kind: Annotated[Literal["hca"], Syntax("label"), Field(description="the kind")] = "hca"
    rate: Rate


class Csa(Node):
    """Compressed sparse attention (arXiv 2606.19348, §2.3.1): an entry compresses two windows of `rate` tokens, and an
    indexer chooses the entries that a query attends to."""

    kind: Annotated[Literal["csa"], Syntax("label"), Field(description="the kind")] = "csa"
    rate: Rate
    indexer: Annotated[
        Indexer,
        Field(
            description="the indexer that chooses the entries of each query",
            examples=["indexer { heads = 64, head_dim = 128, top_k = 512 }"],
        ),
    ]


class Compressed(Node):
    """The attention of DeepSeek-V4 (arXiv 2606.19348, §2.3): one head of keys that are also the values, a sliding
    window, and compressed entries of all earlier tokens; queries and outputs have low-rank projections."""

    kind: Annotated[Literal["compressed"], Syntax("label"), Field(description="the kind")] = "compressed"
    heads: Annotated[int, Field(ge=1, le=65536, description="query heads", examples=["heads = 64"])]
    head_dim: Annotated[
        int,
        Field(
            ge=2,
            le=4096,
            description="width of a head; RoPE rotates its last `rope.width` columns, in pairs",
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
            description="tokens in the sliding window, the token itself included",
            examples=["window = 128"],
        ),
    ]
    sinks: Annotated[
        bool,
        Field(
            description="whether each query head has an attention sink: a learned logit in the softmax",
            examples=["sinks = true"],
        ),
    ] = False
    groups: Annotated[
        int,
        Field(
            ge=1,
            le=65536,
            description="groups of heads; the output of each group has its own projection",
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
            description="compressed entries beside the window; none: only the window",
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
        """The indexer of the entries, if there is one."""
        return self.compress.indexer if isinstance(self.compress, Csa) else None

    def parameters(self, hidden: int) -> dict[str, int]:
        """Parameters for head width d and G groups of rank o (arXiv 2606.19348, §2.3): D·q + q + q·H·d for queries, D·d
        + d for keys, H·d·o + G·o·D for the output. Entries of m tokens add 2·D·d, m·d for the position bias and d for
        their norm. Entries of two windows have twice as many products and positions."""
        d, queries = self.head_dim, self.heads * self.head_dim
        windows = 0 if self.compress is None else 2 if isinstance(self.compress, Csa) else 1
        query = (hidden + queries) * self.query_rank
        output = queries * self.out_rank + self.groups * self.out_rank * hidden
        counts = {
            "products": query + hidden * d + 2 * hidden * windows * d + output,
            "norms": self.query_rank + d + (d if self.compress else 0),
            "positions": self.compress.rate * windows * d if self.compress else 0,
            "sinks": self.heads if self.sinks else 0,
        }
        if self.compress and self.indexer:
            index_counts = self.indexer.parameters_over_entries(hidden, self.query_rank, self.compress.rate)
            counts |= {part: counts[part] + count for part, count in index_counts.items()}
        return counts


# --- Other kinds of attention

ModuleText = Annotated[
    str,
    FilePath(),
    Field(
        min_length=1,
        max_length=4096,
        description="a Python file, relative to the spec, and a subclass of torch.nn.Module in it; planning, "
        "compiling and training run the file, `dsc check` does not",
        examples=['module = "layers.py:Mixer"'],
    ),
]


class HeadDim(Node):
    """Widths of one attention head. Query and key have nope + rope columns; the value has its own width."""

    nope: Annotated[
        int,
        Field(ge=1, le=4096, description="width of the part of query and key without RoPE", examples=["nope = 128"]),
    ]
    rope: Annotated[int, Field(ge=2, le=4096, description="width of the part with RoPE; even", examples=["rope = 64"])]
    value: Annotated[int, Field(ge=1, le=4096, description="width of the value", examples=["value = 128"])]


Scale = Annotated[
    float | None,
    Field(
        gt=0,
        le=1e3,
        description="factor of q·k in the softmax; default 1/√(width of a query head)",
        examples=["scale = 1 / 16"],
    ),
]


class Mla(Node):
    """Multi-head latent attention (arXiv 2405.04434, §2.1): low-rank queries, keys and values, one RoPE key for all
    heads.
    """

    kind: Annotated[Literal["mla"], Syntax("label"), Field(description="the kind")] = "mla"
    heads: Annotated[int, Field(ge=1, le=65536, description="attention heads", examples=["heads = 128"])]
    query_rank: Annotated[
        int | None,
        Field(ge=1, le=1_048_576, description="rank of the queries; none: full rank", examples=["query_rank = 1536"]),
    ]
    kv_rank: Annotated[Width, Field(description="rank of keys and values", examples=["kv_rank = 512"])]
    head_dim: Annotated[
        HeadDim, Field(description="widths of a head", examples=["head_dim { nope = 128, rope = 64, value = 128 }"])
    ]
    scale: Scale = None
    indexer: Annotated[
        Indexer | None,
        QuietField(),
        Field(
            description="the indexer that chooses the keys of each query; none: a query attends to all earlier tokens",
            examples=["indexer { heads = 64, head_dim = 128, top_k = 2048 }"],
        ),
    ] = None
    rope: Position

    def parameters(self, hidden: int) -> dict[str, int]:
        """Parameters for ranks q and c and head widths n | r | v (arXiv 2405.04434, §2.1): D·q + q + q·H(n + r) for
        queries, or D·H(n + r) without a query rank; D(c + r) + c + c·H(n + v) for keys and values; H·v·D for the
        output. The terms q and c are norms."""
        dim, rank = self.head_dim, self.query_rank or 0
        queries = self.heads * (dim.nope + dim.rope)
        query = (hidden + queries) * rank if rank else hidden * queries
        latent = hidden * (self.kv_rank + dim.rope) + self.kv_rank * self.heads * (dim.nope + dim.value)
        output = self.heads * dim.value * hidden
        counts = {"products": query + latent + output, "norms": rank + self.kv_rank}
        if self.indexer and rank:
            counts |= {part: counts[part] + n for part, n in self.indexer.parameters(hidden, rank).items()}
        return counts


class Gqa(Node):
    """Grouped-query attention: `heads / kv_heads` query heads share one head of keys and values; kv_heads = heads is
    multi-head attention. RoPE rotates the whole head, in interleaved pairs, unless `rope.width` is given."""

    kind: Annotated[Literal["gqa"], Syntax("label"), Field(description="the kind")] = "gqa"
    heads: Annotated[int, Field(ge=1, le=65536, description="query heads", examples=["heads = 32"])]
    kv_heads: Annotated[int, Field(ge=1, le=65536, description="heads of keys and values", examples=["kv_heads = 8"])]
    head_dim: Annotated[
        int,
        Field(ge=2, le=4096, description="width of a head; even, as RoPE rotates pairs", examples=["head_dim = 128"]),
    ]
    bias: Annotated[
        Literal["qkv", "all"] | None,
        Field(description="which projections have a bias, or none", examples=["bias = qkv"]),
        Choices(
            {
                "qkv": "queries, keys and values (Qwen2)",
                "all": "these and the output projection (GPT-OSS)",
            }
        ),
    ] = None
    qk_norm: Annotated[
        Literal["head", "width"] | None,
        Aliases({"true": "head", "false": "none"}),
        Field(
            description="what the RMSNorm of queries and keys before RoPE normalises, or none; `true` means `head`",
            examples=["qk_norm = head"],
        ),
        Choices(
            {
                "head": "every head on its own, with one gain for all heads (Qwen3)",
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
            description="tokens in the sliding window, the token itself included; default: all earlier tokens",
            examples=["window = 128"],
        ),
    ] = None
    sinks: Annotated[
        bool,
        Field(
            description="whether each query head has an attention sink: a learned logit in the softmax (GPT-OSS)",
            examples=["sinks = true"],
        ),
    ] = False
    output_gate: Annotated[
        bool,
        QuietField(),
        Field(
            description="whether the output of attention is multiplied by sigmoid(x·W), element by element "
            "(Qwen3-Next)",
            examples=["output_gate = true"],
        ),
    ] = False
    softcap: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e6,
            description="cap of the attention logits s, which become softcap·tanh(s/softcap) (Gemma 2), or none",
            examples=["softcap = 50"],
        ),
    ] = None
    rope: Position

    def parameters(self, hidden: int) -> dict[str, int]:
        """Parameters for head width d and K heads of keys and values (arXiv 2305.13245): D·H·d + 2·D·K·d + H·d·D. A
        gate has as many columns as the queries."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        columns = (2 if self.output_gate else 1) * queries + 2 * keys
        norms = {"head": 2 * self.head_dim, "width": queries + keys, None: 0}
        return {
            "products": hidden * (columns + queries),
            "norms": norms[self.qk_norm],
            "biases": (columns if self.bias else 0) + (hidden if self.bias == "all" else 0),
            "sinks": self.heads if self.sinks else 0,
        }


class DeltaNet(Node):
    """Linear attention by a gated delta rule (arXiv 2412.06464, 2510.26692): each head has a state of `key_dim` ×
    `value_dim` numbers instead of cached keys. Queries, keys and values go through a short causal convolution; there is
    no RoPE."""

    kind: Annotated[Literal["deltanet"], Syntax("label"), Field(description="the kind")] = "deltanet"
    heads: Annotated[int, Field(ge=1, le=65536, description="value heads; each has a state", examples=["heads = 32"])]
    key_heads: Annotated[
        int,
        Field(
            ge=1,
            le=65536,
            description="heads of queries and keys; heads / key_heads value heads share one",
            examples=["key_heads = 16"],
        ),
    ]
    key_dim: Annotated[
        int, Field(ge=1, le=4096, description="width of a query and key head", examples=["key_dim = 128"])
    ]
    value_dim: Annotated[int, Field(ge=1, le=4096, description="width of a value head", examples=["value_dim = 128"])]
    gate: Annotated[
        Literal["head", "channel"],
        Field(description="what each decay applies to", examples=["gate = channel"]),
        Choices(
            {
                "head": "one decay per head, and a SiLU gate on the output (Gated DeltaNet, Qwen3-Next)",
                "channel": "one decay per key channel, and a sigmoid gate on the output; both have projections of "
                "rank value_dim (Kimi Delta Attention)",
            }
        ),
    ]
    convolution: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="width of the causal convolution in tokens, the token itself included",
            examples=["convolution = 4"],
        ),
    ] = 4

    def parameters(self, hidden: int) -> dict[str, int]:
        """Parameters for K key heads of width k, H value heads of width v and J taps of the convolution (arXiv
        2412.06464, 2510.26692).

        Products: D(2·K·k + H·v) for the inputs, D·H·v for the gate, H·v·D for the output. Gates, in FP32: D·H for
        `beta`, D·H for the decays. With a decay per channel, both are of rank v: D·v + v·H·v for the gate, and D·v (a
        product) + v·H·k for the decays. Vectors: J for each of the 2·K·k + H·v columns; H rates and a bias for each
        decay; v for the norm.
        """
        keys, values, H, v = self.key_heads * self.key_dim, self.heads * self.value_dim, self.heads, self.value_dim
        by_channel = self.gate == "channel"
        decays, width = (H * self.key_dim, v) if by_channel else (H, hidden)
        return {
            "products": hidden * (2 * keys + 2 * values) + width * values + (2 * hidden * v if by_channel else 0),
            "gates": hidden * H + width * decays,
            "vectors": self.convolution * (2 * keys + values) + H + decays + v,
        }


class CustomAttention(Node):
    """Custom attention: a torch module that is traced when the run is planned."""

    kind: Annotated[Literal["custom"], Syntax("label"), Field(description="the kind")] = "custom"
    module: ModuleText

    def parameters(self, hidden: int) -> dict[str, int]:
        """Empty: the parameters are unknown until the module is traced."""
        return {}


SoftmaxAttention = Mla | Gqa  # kinds whose heads have keys and values
AnyAttention = Mla | Gqa | Compressed | DeltaNet | CustomAttention
