"""What is trained beside weights that stay as they are: pairs of small matrices. Hu et al., LoRA, arXiv 2106.09685."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Choices, Node, Syntax

Adapted = Literal[
    "q", "q_down", "q_up", "kv_down", "kv_up", "qkv", "out", "up", "down", "expert_up", "expert_down", "projection"
]


class Lora(Node):
    """A matrix W [out, in] computes W + alpha / rank · B · A: A [rank, in] and B [out, rank] are trained, W stays.

    All other weights of the model stay as they are, too: norms, embedding, head, routers and their balancing biases.
    """

    kind: Annotated[Literal["lora"], Syntax("label"), Field(description="the kind")] = "lora"
    rank: Annotated[int, Field(ge=1, le=65_536, description="rows of A, columns of B", examples=["rank = 16"])]
    alpha: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e6,
            description="what B · A is multiplied by, times `rank`; none: as much as `rank`, so that the factor is 1",
            examples=["alpha = 32"],
        ),
    ] = None
    on: Annotated[
        tuple[Adapted, ...],
        Field(
            min_length=1,
            description="matrices that have an adapter, in every layer that has them",
            examples=["on = [q_up, kv_up, out, up, down]"],
        ),
        Choices(
            {
                "q": "queries of latent attention that are of full rank",
                "q_down": "the down-projection to the latent of queries",
                "q_up": "queries, from their latent",
                "kv_down": "the down-projection to the latent of keys and values, and the rotated key",
                "kv_up": "keys and values, from their latent",
                "qkv": "queries, keys and values of grouped-query attention or a delta rule, and a gate: one matrix",
                "out": "what attention adds to the residual stream",
                "up": "the first matrix of dense layers and shared experts: of SwiGLU, gate and up as one",
                "down": "the second matrix of dense layers and shared experts",
                "expert_up": "the first matrix of each routed expert",
                "expert_down": "the second matrix of each routed expert",
                "projection": "what joins embedding and hidden state in front of the block of multi-token prediction",
            }
        ),
    ]

    @property
    def factor(self) -> float:
        """What B · A is multiplied by."""
        return 1.0 if self.alpha is None else self.alpha / self.rank
