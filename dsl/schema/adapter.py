"""Adapters: pairs of small trained matrices beside frozen weights. Hu et al., LoRA, arXiv 2106.09685."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Choices, Node, Syntax

Adapted = Literal[
    "q", "q_down", "q_up", "kv_down", "kv_up", "qkv", "out", "up", "down", "expert_up", "expert_down", "projection"
]


class Lora(Node):
    """LoRA: a weight W [out, in] becomes W + alpha / rank · B · A; A [rank, in] and B [out, rank] are trained, W is
    frozen.

    All other weights are frozen too: norms, embedding, head, routers and their balancing biases.
    """

    kind: Annotated[Literal["lora"], Syntax("label"), Field(description="the kind")] = "lora"
    rank: Annotated[int, Field(ge=1, le=65_536, description="rows of A, columns of B", examples=["rank = 16"])]
    alpha: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e6,
            description="B · A is multiplied by alpha / rank; none: the factor is 1",
            examples=["alpha = 32"],
        ),
    ] = None
    on: Annotated[
        tuple[Adapted, ...],
        Field(
            min_length=1,
            description="matrices that get an adapter, in every layer that has them",
            examples=["on = [q_up, kv_up, out, up, down]"],
        ),
        Choices(
            {
                "q": "the queries of latent attention without a query rank",
                "q_down": "the down-projection to the latent of queries",
                "q_up": "the up-projection from the latent to the queries",
                "kv_down": "the down-projection to the latent of keys and values, and the rotated key",
                "kv_up": "the up-projection from the latent to keys and values",
                "qkv": "the matrix of queries, keys, values and gate of grouped-query attention or a delta rule",
                "out": "the output projection of attention",
                "up": "the first matrix of dense layers and shared experts; of SwiGLU, gate and up as one matrix",
                "down": "the second matrix of dense layers and shared experts",
                "expert_up": "the first matrix of each routed expert",
                "expert_down": "the second matrix of each routed expert",
                "projection": "the projection of embedding and hidden state at the input of an MTP block",
            }
        ),
    ]

    @property
    def factor(self) -> float:
        """The factor of B · A."""
        return 1.0 if self.alpha is None else self.alpha / self.rank
