"""Residual streams of a model that has several. Published values: arXiv 2606.19348, section 4.2."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dsl.schema.base import Node


class HyperConnections(Node):
    """Several residual streams in the place of one (mHC, arXiv 2512.24880).

    Every part of a layer reads a sum of them, and adds to all what it gives. They are mixed by a matrix of each token,
    whose rows and columns sum to 1.
    """

    streams: Annotated[int, Field(ge=2, le=16, description="residual streams", examples=["streams = 4"])]
    rounds: Annotated[
        int,
        Field(
            ge=1,
            le=100,
            description="rounds of Sinkhorn and Knopp, which divide by the sums of rows and of columns",
            examples=["rounds = 20"],
        ),
    ] = 20
    eps: Annotated[
        float, Field(gt=0, le=0.1, description="what is added to sums that are divided by", examples=["eps = 1e-6"])
    ] = 1e-6
