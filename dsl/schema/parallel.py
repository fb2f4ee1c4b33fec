"""The degrees of parallelism of a run, and the placement of layers, experts and token rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Choices, DerivedDefault, FilePath, Node
from dsl.schema.train import PLANNED

MAX_DEGREE = 1_048_576
Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE)]


class Parallel(Node):
    """Degrees of parallelism: world = pipeline·data·context·tensor, and expert·expert_tensor divides
    data·context·tensor."""

    @property
    def columns(self) -> int:
        """Devices per pipeline rank."""
        return self.data * self.tensor * self.context

    @property
    def expert_group(self) -> int:
        """Devices of an expert group, which holds all experts of a layer once and exchanges token rows."""
        return self.expert * self.expert_tensor

    @property
    def copies(self) -> int:
        """Groups of data ranks that each keep one copy of what `zero` = 2 or 3 shards."""
        return self.data // self.shard if self.shard and self.data % self.shard == 0 else 1

    pipeline: Annotated[
        Degree, Field(description=f"pipeline ranks; {PLANNED}", examples=["pipeline = 16", "pipeline = auto"])
    ] = 1
    expert: Annotated[
        Degree,
        Field(
            description=f"ranks that share the experts of a layer; {PLANNED}",
            examples=["expert = 64", "expert = auto"],
        ),
    ] = 1
    expert_tensor: Annotated[
        Degree,
        Field(
            description="ranks that split the width of each routed expert, independent of `tensor`; neighbouring "
            "ranks of an expert group",
            examples=["expert_tensor = 2"],
        ),
    ] = 1
    data: Annotated[
        Degree,
        Field(
            description="data-parallel ranks; auto: all devices that the other degrees leave",
            examples=["data = auto", "data = 128"],
        ),
        DerivedDefault("auto: devices of the cluster / (pipeline·tensor·context)"),
    ]
    tensor: Annotated[
        Degree,
        Field(
            description="ranks that split heads, the width of dense layers and the vocabulary, and the token rows "
            f"between them; neighbouring ranks, best on one node; {PLANNED}",
            examples=["tensor = 2", "tensor = auto"],
        ),
    ] = 1
    context: Annotated[
        Degree,
        Field(
            description="ranks that split each sequence; each has two chunks, one as far from the front as the other "
            f"is from the end; {PLANNED}",
            examples=["context = 4", "context = auto"],
        ),
    ] = 1
    layout: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=4000,
            description="which layers are on which stage, in Megatron's layout syntax; default, or auto: as even as "
            "possible",
            examples=['layout = "Et*3|(tt|)*28ttmL"'],
        ),
    ] = None
    placement: Annotated[
        str | None,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="a file from `dsc place` with the rank of each expert, relative to the spec; default: experts "
            "in order of their numbers",
            examples=['placement = "placement.json"'],
        ),
    ] = None
    route: Annotated[
        Literal["flat", "nodes"] | None,
        Field(
            description="how token rows reach experts on other nodes; default: `nodes` if an expert group fills "
            "several nodes, else `flat`",
            examples=["route = nodes"],
        ),
        Choices(
            {
                "flat": "each row on its own, to the rank of its expert",
                "nodes": "a token once to each node, to the device of the same index, and from there within the node; "
                "sums come back (DeepSeek-V3)",
            }
        ),
    ] = None
    zero: Annotated[
        int,
        Field(
            ge=0,
            le=3,
            description="what data ranks shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too",
            examples=["zero = 1"],
        ),
    ] = 0
    shard: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_DEGREE,
            description="neighbouring data ranks that share one copy of what `zero` = 2 or 3 shards during a step, "
            "best on one node; each other group of that size has its own copy, and the groups sum their gradients "
            "once a step (hybrid sharding); default: all data ranks",
            examples=["shard = 8"],
        ),
    ] = None
    overlap_reduce: Annotated[
        bool,
        Field(
            description="reduce the gradients of a stage during the backward of other stages, instead of after the "
            "last one",
            examples=["overlap_reduce = false"],
        ),
    ] = True
