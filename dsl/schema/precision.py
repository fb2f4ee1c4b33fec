"""Precision recipes: which role is kept or computed in which dtype."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Choices, Node, Syntax

Dtype = Literal["fp64", "fp32", "bf16", "e4m3"]
DTYPES = Choices(
    {
        "fp64": "64-bit float",
        "fp32": "32-bit float",
        "bf16": "16 bits: the range of fp32 with 8 bits of precision",
        "e4m3": "8 bits: 4 of exponent, 3 of fraction; elements of a tile share a scale",
    }
)


class Tile(Node):
    """Elements that share one scale, written `rows`x`columns`."""

    rows: Annotated[int, Field(ge=1, le=1024, description="rows of a tile")]
    columns: Annotated[int, Field(ge=1, le=1024, description="columns of a tile")]


class Precision(Node):
    """A dtype per role. The defaults are mixed BF16 with FP32 master weights."""

    name: Annotated[str, Syntax("label"), Field(description="name of the precision")]
    parameter: Annotated[
        Dtype, DTYPES, Field(description="weights as the forward and backward read them", examples=["parameter = bf16"])
    ] = "bf16"
    compute: Annotated[
        Dtype, DTYPES, Field(description="activations, norms, attention", examples=["compute = bf16"])
    ] = "bf16"
    linear: Annotated[
        Dtype, DTYPES, Field(description="operands of every linear but the gate", examples=["linear = e4m3"])
    ] = "bf16"
    accumulate: Annotated[
        Dtype, DTYPES, Field(description="sums inside a matrix product", examples=["accumulate = fp32"])
    ] = "fp32"
    gradients: Annotated[
        Dtype, DTYPES, Field(description="accumulated weight gradients", examples=["gradients = fp32"])
    ] = "fp32"
    master: Annotated[Dtype, DTYPES, Field(description="weights the optimizer updates", examples=["master = fp32"])] = (
        "fp32"
    )
    moments: Annotated[Dtype, DTYPES, Field(description="the optimizer's moments", examples=["moments = bf16"])] = (
        "fp32"
    )
    dispatch: Annotated[
        Dtype, DTYPES, Field(description="rows on their way to the experts", examples=["dispatch = e4m3"])
    ] = "bf16"
    combine: Annotated[Dtype, DTYPES, Field(description="rows on their way back", examples=["combine = bf16"])] = "bf16"
    activation_tile: Annotated[
        Tile | None,
        Field(description="elements of an activation that share a scale", examples=["activation_tile = 1x128"]),
    ] = None
    weight_tile: Annotated[
        Tile | None, Field(description="elements of a weight that share a scale", examples=["weight_tile = 128x128"])
    ] = None
    promote: Annotated[
        int | None,
        Field(
            ge=1, le=65536, description="summands after which a partial sum moves to FP32", examples=["promote = 128"]
        ),
    ] = None

    @property
    def row_alignment(self) -> int:
        """What the rows that an expert receives are padded to a multiple of: a tile of 128 rows, which have one scale
        in weight gradients of eight bits, or 8, of which a column has 16 bytes in BF16."""
        return {"e4m3": 128, "bf16": 8}.get(self.linear, 1)


def _uniform(dtype: Dtype) -> Precision:
    return Precision.model_construct(
        name=dtype,
        parameter=dtype,
        compute=dtype,
        linear=dtype,
        accumulate=dtype,
        gradients=dtype,
        master=dtype,
        moments=dtype,
        dispatch=dtype,
        combine=dtype,
    )


BUILT_IN = {
    "fp64": _uniform("fp64"),
    "fp32": _uniform("fp32"),
    "bf16": Precision.model_construct(name="bf16"),
    "fp8_block": Precision.model_construct(
        name="fp8_block",
        linear="e4m3",
        dispatch="e4m3",
        activation_tile=Tile(rows=1, columns=128),
        weight_tile=Tile(rows=128, columns=128),
        promote=128,
        moments="bf16",
    ),
}
