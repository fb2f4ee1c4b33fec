"""Attention: its kinds, what chooses their keys, and how many parameters each has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Aliases, Choices, FilePath, Node, Quiet, Syntax, Width
from dsl.schema.rotation import Position

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

    def parameters(self, hidden: int, query_rank: int) -> dict[str, int]:
        """Over keys (arXiv 2512.02556, §2.1): J heads of width w have q·J·w, one key D·w behind a LayerNorm of 2·w, and
        weights D·J."""
        queries = query_rank * self.heads * self.head_dim
        return {"products": queries + hidden * (self.head_dim + self.heads), "norms": 2 * self.head_dim}

    def parameters_over_entries(self, hidden: int, query_rank: int, rate: int) -> dict[str, int]:
        """Over compressed entries of two windows: as over keys, but its keys are entries that are made as those are."""
        queries = query_rank * self.heads * self.head_dim
        return {
            "products": queries + hidden * self.heads + 2 * hidden * 2 * self.head_dim,
            "norms": self.head_dim,
            "positions": 2 * rate * self.head_dim,
        }


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

    def parameters(self, hidden: int) -> dict[str, int]:
        """Head width d, G groups of rank o (arXiv 2606.19348, §2.3): D·q + q + q·H·d; D·d + d for keys; H·d·o for the
        groups and G·o·D out. Entries of m tokens: 2·D·d, m·d of the position bias, and d of their norm. Entries of two
        windows have twice as many products and positions."""
        d, queries = self.head_dim, self.heads * self.head_dim
        windows = 0 if self.compress is None else 2 if isinstance(self.compress, Csa) else 1
        query = (hidden + queries) * self.query_rank
        out = queries * self.out_rank + self.groups * self.out_rank * hidden
        counts = {
            "products": query + hidden * d + 2 * hidden * windows * d + out,
            "norms": self.query_rank + d + (d if self.compress else 0),
            "positions": self.compress.rate * windows * d if self.compress else 0,
            "sinks": self.heads if self.sinks else 0,
        }
        if self.compress and self.indexer:
            more = self.indexer.parameters_over_entries(hidden, self.query_rank, self.compress.rate)
            counts |= {part: counts[part] + count for part, count in more.items()}
        return counts


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

    def parameters(self, hidden: int) -> dict[str, int]:
        """Ranks q and c, head widths n | r | v (arXiv 2405.04434, §2.1): queries D·q + q + q·H(n + r), or D·H(n + r)
        without a query rank; D(c + r) + c + c·H(n + v) for keys and values; H·v·D out. The ranks' norms are the q and
        c."""
        dim, rank = self.head_dim, self.query_rank or 0
        queries = self.heads * (dim.nope + dim.rope)
        query = (hidden + queries) * rank if rank else hidden * queries
        latent = hidden * (self.kv_rank + dim.rope) + self.kv_rank * self.heads * (dim.nope + dim.value)
        out = self.heads * dim.value * hidden
        counts = {"products": query + latent + out, "norms": rank + self.kv_rank}
        if self.indexer and rank:
            counts |= {part: counts[part] + n for part, n in self.indexer.parameters(hidden, rank).items()}
        return counts


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

    def parameters(self, hidden: int) -> dict[str, int]:
        """Head width d and K heads of keys and values (arXiv 2305.13245): D·H·d + 2·D·K·d + H·d·D. A gate is as many
        columns as queries."""
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

    def parameters(self, hidden: int) -> dict[str, int]:
        """Key width k of K heads and value width v of H (arXiv 2412.06464, 2510.26692), J taps of the convolution.

        Products: D(2·K·k + H·v), a gate D·H·v, H·v·D out. Gates, in FP32: `beta` D·H, and decays D·H. Where channels
        decay, by products of rank v: a gate D·v + v·H·v, decays v·H·k behind a product D·v. Vectors: J for each of
        2·K·k + H·v columns; H rates and a bias for each decay; a norm v.
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
    """An attention of one's own: a torch module that is traced when the run is planned."""

    kind: Annotated[Literal["custom"], Syntax("label"), Field(description="the kind")] = "custom"
    module: ModuleText

    def parameters(self, hidden: int) -> dict[str, int]:
        """None: they are unknown until the module is traced."""
        return {}


SoftmaxAttention = Mla | Gqa  # of heads with keys and values each
AnyAttention = Mla | Gqa | Compressed | DeltaNet | CustomAttention
