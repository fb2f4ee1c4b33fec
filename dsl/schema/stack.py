"""The software that a plan assumes, if it is not that of dsc."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Choices, Node, QuietField


class Stack(Node):
    """The software of another trainer, to compare its published runs with plans. `dsc compile` refuses it."""

    launches: Annotated[
        Literal["eager", "compiled", "graphs"] | None,
        Field(
            description="how kernels are launched; default: compiled, or graphs if `kernels` has them",
            examples=["launches = graphs"],
        ),
        Choices(
            {
                "eager": "torch runs op by op: twice the passes over memory",
                "compiled": "fused kernels, launched by a host that keeps ahead of the device",
                "graphs": "fused kernels in CUDA graphs: shorter gaps, and no call of the host for an exchange",
            }
        ),
        QuietField(),
    ] = None
    transport: Annotated[
        Literal["nccl", "deepep", "hybridep"] | None,
        Field(
            description="what moves rows between expert ranks; default: what was measured on the device",
            examples=["transport = nccl"],
        ),
        Choices(
            {
                "nccl": "NCCL's all-to-all, which sends each row on its own",
                "deepep": "DeepEP, which sends a token once to each node",
                "hybridep": "HybridEP, which takes fewer SMs",
            }
        ),
        QuietField(),
    ] = None
    tensor: Annotated[
        Literal["apart", "chunked"],
        Field(description="how tensor ranks exchange rows", examples=["tensor = chunked"]),
        Choices(
            {
                "apart": "before or after the product of the rows, beside other segments",
                "chunked": "in as many chunks as there are tensor ranks, each beside the product of the one before, as "
                "in Megatron's userbuffers: only one chunk takes time of its own",
            }
        ),
        QuietField(),
    ] = "apart"
    balance: Annotated[
        Literal["router", "forced"],
        Field(description="what decides the load of experts", examples=["balance = forced"]),
        Choices(
            {
                "router": "the router; the plan takes equal loads",
                "forced": "random choices, as in published benchmarks: the fullest rank has its median load",
            }
        ),
        QuietField(),
    ] = "router"

    @property
    def differs(self) -> bool:
        """Whether it differs from the software of dsc."""
        return self != Stack.model_construct()


TRANSPORTS = ("hybridep", "deepep", "nccl")  # the fastest first
