"""The attention of DeepSeek-V4: a window, and compressed entries beside it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Node, Syntax
from dsl.schema.indexer import Indexer
from dsl.schema.rope import Position

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
