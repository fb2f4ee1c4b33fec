"""What chooses the keys of latent attention."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dsl.schema.base import Node


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
