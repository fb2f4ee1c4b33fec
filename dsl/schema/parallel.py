"""The degrees of parallelism of a run, and where layers, experts and rows go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Choices, Derived, FilePath, Node
from dsl.schema.train import PLANNED

MAX_DEGREE = 1_048_576
Degree = Annotated[int, Field(ge=1, le=MAX_DEGREE)]


class Parallel(Node):
    """Degrees of parallelism. world = pipeline·data·context·tensor, and expert·expert_tensor divides
    data·context·tensor."""

    @property
    def columns(self) -> int:
        """Devices of a pipeline rank."""
        return self.data * self.tensor * self.context

    @property
    def expert_group(self) -> int:
        """Devices that have all experts of a layer once, and exchange rows for them."""
        return self.expert * self.expert_tensor

    pipeline: Annotated[
        Degree, Field(description=f"ranks a pipeline has; {PLANNED}", examples=["pipeline = 16", "pipeline = auto"])
    ] = 1
    expert: Annotated[
        Degree,
        Field(
            description=f"ranks the experts of a layer are spread over; {PLANNED}",
            examples=["expert = 64", "expert = auto"],
        ),
    ] = 1
    expert_tensor: Annotated[
        Degree,
        Field(
            description="ranks that the width of each routed expert is split over, apart from `tensor`; neighbours "
            "among those of an expert group",
            examples=["expert_tensor = 2"],
        ),
    ] = 1
    data: Annotated[
        Degree,
        Field(
            description="ranks per pipeline rank; auto: what the cluster leaves",
            examples=["data = auto", "data = 128"],
        ),
        Derived("auto: devices of the cluster / (pipeline·tensor·context)"),
    ]
    tensor: Annotated[
        Degree,
        Field(
            description="ranks that heads, the width of dense layers and the vocabulary are split over, and rows "
            f"between them; neighbouring ranks, most of them on one node; {PLANNED}",
            examples=["tensor = 2", "tensor = auto"],
        ),
    ] = 1
    context: Annotated[
        Degree,
        Field(
            description="ranks that each sequence is split over; each has two chunks, one as far from the front as the "
            f"other is from the end; {PLANNED}",
            examples=["context = 4", "context = auto"],
        ),
    ] = 1
    layout: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=4000,
            description="which layers are on which stage, in Megatron's words; else, or auto, as even as it gets",
            examples=['layout = "Et*3|(tt|)*28ttmL"'],
        ),
    ] = None
    placement: Annotated[
        str | None,
        FilePath(),
        Field(
            min_length=1,
            max_length=4096,
            description="which expert is on which rank, a file of `dsc place`; else by number; relative to the spec",
            examples=['placement = "placement.json"'],
        ),
    ] = None
    route: Annotated[
        Literal["flat", "nodes"] | None,
        Field(
            description="how rows go to experts on other nodes; where none, `nodes` if expert groups fill several",
            examples=["route = nodes"],
        ),
        Choices(
            {
                "flat": "each row by itself, to the rank of its expert",
                "nodes": "a token once to each node, to the device of the same index, and on inside the node; "
                "sums come back (DeepSeek-V3)",
            }
        ),
    ] = None
    zero: Annotated[
        int,
        Field(
            ge=0,
            le=3,
            description="what data ranks divide: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too",
            examples=["zero = 1"],
        ),
    ] = 0
    overlap_reduce: Annotated[
        bool,
        Field(
            description="sum the gradients of a stage under the backward of others, not behind the last one",
            examples=["overlap_reduce = false"],
        ),
    ] = True
