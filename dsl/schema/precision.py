"""Precision recipes: which role is kept or computed in which dtype."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Node, Syntax

Dtype = Literal["fp64", "fp32", "bf16", "e4m3"]


class Tile(Node):
    """Elements that share one scale, written `rows`x`columns`."""

    rows: Annotated[int, Field(ge=1, le=1024)]
    columns: Annotated[int, Field(ge=1, le=1024)]


class Precision(Node):
    """A dtype per role. The defaults are mixed BF16 with FP32 master weights."""

    name: Annotated[str, Syntax("label")]
    parameter: Annotated[Dtype, Field(description="weights as the forward and backward read them")] = "bf16"
    compute: Annotated[Dtype, Field(description="activations, norms, attention")] = "bf16"
    linear: Annotated[Dtype, Field(description="operands of every linear but the gate")] = "bf16"
    accumulate: Annotated[Dtype, Field(description="sums inside a matrix product")] = "fp32"
    gradients: Annotated[Dtype, Field(description="accumulated weight gradients")] = "fp32"
    master: Annotated[Dtype, Field(description="weights the optimizer updates")] = "fp32"
    moments: Annotated[Dtype, Field(description="the optimizer's moments")] = "fp32"
    dispatch: Annotated[Dtype, Field(description="rows on their way to the experts")] = "bf16"
    combine: Annotated[Dtype, Field(description="rows on their way back")] = "bf16"
    activation_tile: Annotated[Tile | None, Field(description="elements of an activation that share a scale")] = None
    weight_tile: Annotated[Tile | None, Field(description="elements of a weight that share a scale")] = None
    promote: Annotated[
        int | None, Field(ge=1, le=65536, description="summands after which a partial sum moves to FP32")
    ] = None


def _uniform(dtype: Dtype) -> Precision:
    return Precision(
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


BUILT_IN = {"fp64": _uniform("fp64"), "fp32": _uniform("fp32"), "bf16": Precision(name="bf16")}
