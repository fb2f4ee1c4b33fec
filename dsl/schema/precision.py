"""Precision recipes: the dtype that each role is kept or computed in."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.facts.formats import FP8, PRODUCTS, Dtype, FormatFacts, Scale
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
        "fp32": "any value, in 4 bytes",
        "e8m0": "a power of two, in 1 byte; rounded up, so that no element saturates",
        "e4m3": "8 bits with 3 of fraction, relative to the scale of the tensor",
    }
)
ROUNDINGS = Choices(
    {
        "nearest": "to the nearest number, ties to even",
        "stochastic": "up or down at random, so that the mean is exact",
    }
)


class Tile(Node):
    """Elements that share one scale, written `rows`x`columns`."""

    rows: Annotated[int, Field(ge=1, le=1024, description="rows of a tile")]
    columns: Annotated[int, Field(ge=1, le=1024, description="columns of a tile")]

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


class HighPrecisionLayers(Node):
    """Layers at both ends of the model whose linears stay in the dtype of `compute`; the last ones include MTP.

    Token rows sent to the experts of these layers have that dtype too.
    """

    first: Annotated[int, Field(ge=0, le=4096, description="layers at the beginning", examples=["first = 1"])] = 0
    last: Annotated[int, Field(ge=0, le=4096, description="layers at the end", examples=["last = 1"])] = 0


class Precision(Node):
    """A dtype for each role. The defaults are mixed BF16 with FP32 master weights."""

    name: Annotated[str, Syntax("label"), Field(description="name of the precision")]
    parameter: Annotated[
        Dtype, DTYPES, Field(description="weights that forward and backward read", examples=["parameter = bf16"])
    ] = "bf16"
    compute: Annotated[
        Dtype, DTYPES, Field(description="activations, norms, attention", examples=["compute = bf16"])
    ] = "bf16"
    linear: Annotated[
        Dtype, DTYPES, Field(description="operands of every linear except the router", examples=["linear = e4m3"])
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
        Dtype, DTYPES, Field(description="token rows sent to the experts", examples=["dispatch = e4m3"])
    ] = "bf16"
    combine: Annotated[
        Dtype, DTYPES, Field(description="token rows sent back from the experts", examples=["combine = bf16"])
    ] = "bf16"
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
            description="whether each tensor has an FP32 scale, which the scales of its tiles are relative to; in e4m3 "
            "without tiles it is the only scale",
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
            description="whether a Hadamard transform is applied to both operands of a weight gradient, in blocks of "
            "16 rows",
            examples=["hadamard = true"],
        ),
    ] = False
    high: Annotated[
        HighPrecisionLayers | None,
        Field(
            description="layers whose linears stay in the dtype of compute", examples=["high { first = 1, last = 1 }"]
        ),
    ] = None
    attention_output: Annotated[
        Dtype | None,
        DTYPES,
        Field(
            description="the output of attention as kept for the backward; default: that of compute",
            examples=["attention_output = e5m6"],
        ),
    ] = None
    logits: Annotated[
        Dtype | None,
        DTYPES,
        Field(
            description="the output of the head, which the loss reads and the backward keeps; default: that of compute",
            examples=["logits = fp32"],
        ),
    ] = None
    promote: Annotated[
        int | None,
        Field(
            ge=1,
            le=65536,
            description="summands after which a partial sum is added to an FP32 sum",
            examples=["promote = 128"],
        ),
    ] = None

    @property
    def scales_tensors(self) -> bool:
        """Whether each operand of a linear is E4M3 with one scale per tensor."""
        tiles = self.activation_tile, self.weight_tile
        return self.linear == "e4m3" and self.tensor_scale and self.scale == "fp32" and tiles == (None, None)

    @property
    def row_alignment(self) -> int:
        """The rows of an expert are padded to a multiple of this: the rows of a tile in weight gradients of low-bit
        formats; 128 for FP8 blocks; 16, which a product reads at a time, if a tensor has one scale; otherwise 1.
        `Spec.row_alignment` is the value for a run."""
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
        high=HighPrecisionLayers.model_construct(first=1, last=1),
    ),
}
RECIPES = {
    "fp64": "64-bit floats throughout",
    "fp32": "32-bit floats throughout",
    "bf16": "activations, weights and their products in BF16; master weights, gradients and moments in FP32",
    "fp8_block": "as in DeepSeek-V3: products in E4M3, with a scale for each 1x128 of activations and 128x128 of "
    "weights",
    "mxfp8": "the format of OCP and NVIDIA: products in E4M3, with a power-of-two scale for each 1x32",
    "nvfp4": "the format of NVIDIA: products in E2M1, with an E4M3 scale for each 1x16 (16x16 of weights) and one for "
    "the tensor",
}


def format_of(precision: Precision) -> FormatFacts | None:
    """The format of a precision's linears, a row of `PRODUCTS`; None if no row matches."""
    tiles = _extents(precision.activation_tile), _extents(precision.weight_tile)
    wanted = (precision.linear, *tiles, precision.scale, precision.tensor_scale)
    return next((form for form in PRODUCTS if wanted == form.keys), None)


def is_split_over_ranks(precision: Precision) -> bool:
    """Whether tensor ranks can train with this precision: without low-precision products, or with FP8 blocks, whose
    rows are quantised after `gather`. Shards would draw the same random numbers for stochastic rounding."""
    if precision.linear == precision.compute:
        return True
    plain = not precision.hadamard and precision.gradient_rounding == "nearest"
    return plain and format_of(precision) == FP8


def _extents(tile: Tile | None) -> tuple[int, int] | None:
    return (tile.rows, tile.columns) if tile else None
