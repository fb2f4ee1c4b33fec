"""Precision recipes: which role is kept or computed in which dtype."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.facts.formats import PRODUCTS, Dtype, FormatFacts, Scale
from dsl.schema.base import Choices, Node, Syntax

Rounding = Literal["nearest", "stochastic"]
DTYPES = Choices(
    {
        "fp64": "64-bit float",
        "fp32": "32-bit float",
        "bf16": "16 bits: the range of fp32 with 8 bits of precision",
        "e4m3": "8 bits: 4 of exponent, 3 of fraction; elements of a tile share a scale",
        "e2m1": "4 bits: 2 of exponent, 1 of fraction; elements of a tile share a scale",
        "e5m6": "12 bits: 5 of exponent, 6 of fraction; elements of a tile share a scale",
    }
)
SCALES = Choices(
    {
        "fp32": "any scale, in 4 bytes",
        "e8m0": "a power of two, in a byte; rounded up, so that nothing saturates",
        "e4m3": "8 bits with 3 of fraction, relative to the tensor's own scale",
    }
)
ROUNDINGS = Choices(
    {
        "nearest": "to the nearest number, of two as near to the even one",
        "stochastic": "up or down at random, so that the mean is exact",
    }
)


class Tile(Node):
    """Elements that share one scale, written `rows`x`columns`."""

    rows: Annotated[int, Field(ge=1, le=1024, description="rows of a tile")]
    columns: Annotated[int, Field(ge=1, le=1024, description="columns of a tile")]

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


class High(Node):
    """Layers at both ends of the model whose linears stay in the dtype of `compute`, and with the last ones MTP's.

    Rows on their way to the experts of these layers have that dtype, too.
    """

    first: Annotated[
        int, Field(ge=0, le=4096, description="how many layers at the beginning", examples=["first = 1"])
    ] = 0
    last: Annotated[int, Field(ge=0, le=4096, description="how many layers at the end", examples=["last = 1"])] = 0


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
    scale: Annotated[Scale, SCALES, Field(description="dtype of the scale of a tile", examples=["scale = e8m0"])] = (
        "fp32"
    )
    tensor_scale: Annotated[
        bool,
        Field(
            description="whether each tensor has an FP32 scale that the scales of its tiles are relative to; in e4m3 "
            "without tiles, the only one that it has",
            examples=["tensor_scale = true"],
        ),
    ] = False
    gradient_rounding: Annotated[
        Rounding,
        ROUNDINGS,
        Field(
            description="how gradients are rounded to the dtype of linear", examples=["gradient_rounding = stochastic"]
        ),
    ] = "nearest"
    hadamard: Annotated[
        bool,
        Field(
            description="whether both inputs of a weight gradient are transformed first, in blocks of 16 rows",
            examples=["hadamard = true"],
        ),
    ] = False
    high: Annotated[
        High | None,
        Field(
            description="layers whose linears stay in the dtype of compute", examples=["high { first = 1, last = 1 }"]
        ),
    ] = None
    attention_output: Annotated[
        Dtype | None,
        DTYPES,
        Field(
            description="what attention returns, as it is kept for the backward; by default that of compute",
            examples=["attention_output = e5m6"],
        ),
    ] = None
    logits: Annotated[
        Dtype | None,
        DTYPES,
        Field(
            description="what the head gives, as the loss reads it and as it is kept for the backward; by default that "
            "of compute",
            examples=["logits = fp32"],
        ),
    ] = None
    promote: Annotated[
        int | None,
        Field(
            ge=1, le=65536, description="summands after which a partial sum moves to FP32", examples=["promote = 128"]
        ),
    ] = None

    @property
    def scales_tensors(self) -> bool:
        """Whether each operand of a linear is E4M3 with one scale for all of it."""
        tiles = self.activation_tile, self.weight_tile
        return self.linear == "e4m3" and self.tensor_scale and self.scale == "fp32" and tiles == (None, None)

    @property
    def row_alignment(self) -> int:
        """What the rows that an expert receives are padded to a multiple of: a tile of rows, which have one scale in
        weight gradients of few bits, 128 in blocks of FP8; the 16 that a product reads at a time where a tensor has one
        scale; otherwise 1. `Spec.row_alignment` says what a run takes."""
        if self.scales_tensors:
            return 16
        if self.linear in ("e4m3", "e2m1") and self.scale != "fp32" and self.activation_tile is not None:
            return self.activation_tile.columns
        return 128 if self.linear == "e4m3" else 1


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
        activation_tile=Tile.model_construct(rows=1, columns=128),
        weight_tile=Tile.model_construct(rows=128, columns=128),
        promote=128,
        moments="bf16",
    ),
    "mxfp8": Precision.model_construct(
        name="mxfp8",
        linear="e4m3",
        activation_tile=Tile.model_construct(rows=1, columns=32),
        weight_tile=Tile.model_construct(rows=1, columns=32),
        scale="e8m0",
    ),
    "nvfp4": Precision.model_construct(
        name="nvfp4",
        linear="e2m1",
        activation_tile=Tile.model_construct(rows=1, columns=16),
        weight_tile=Tile.model_construct(rows=16, columns=16),
        scale="e4m3",
        tensor_scale=True,
        gradient_rounding="stochastic",
        hadamard=True,
        high=High.model_construct(first=1, last=1),
    ),
}
RECIPES = {
    "fp64": "64-bit floats throughout",
    "fp32": "32-bit floats throughout",
    "bf16": "activations, weights and their products in BF16; master weights, gradients and moments in FP32",
    "fp8_block": "DeepSeek-V3's: products in E4M3, a scale for each 1x128 of activations and 128x128 of weights",
    "mxfp8": "OCP's and NVIDIA's: products in E4M3, for each 1x32 a scale that is a power of two",
    "nvfp4": "NVIDIA's: products in E2M1, for each 1x16 (16x16 of weights) a scale in E4M3, and one for the tensor",
}


def format_of(precision: Precision) -> FormatFacts | None:
    """The format of a precision's linears; None where they have no scales, or as no row has them."""
    tiles = _extents(precision.activation_tile), _extents(precision.weight_tile)
    wanted = (precision.linear, *tiles, precision.scale, precision.tensor_scale)
    return next((form for form in PRODUCTS if wanted == form.keys), None)


def _extents(tile: Tile | None) -> tuple[int, int] | None:
    return (tile.rows, tile.columns) if tile else None
