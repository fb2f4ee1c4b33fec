"""Rotary position embedding (RoPE): the columns of a head that it rotates, and its scaling to a longer context."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dsl.schema.base import Node, Syntax

Factor = Annotated[
    float, Field(ge=1, le=1e6, description="new context length divided by the original one", examples=["factor = 8"])
]
Original = Annotated[
    int,
    Field(ge=1, le=1_099_511_627_776, description="tokens of the original context", examples=["original = 8192"]),
]


class LinearScaling(Node):
    """All frequencies divided by a factor: position interpolation (arXiv 2306.15595)."""

    kind: Annotated[Literal["linear"], Syntax("label"), Field(description="the kind")] = "linear"
    factor: Factor


class Llama3Scaling(Node):
    """The scaling of Llama 3.1 divides low frequencies by a factor.

    A frequency with fewer than `low_freq_factor` turns in the original context is divided; one with more than
    `high_freq_factor` turns is unchanged; between them it is a weighted mean of both.
    """

    kind: Annotated[Literal["llama3"], Syntax("label"), Field(description="the kind")] = "llama3"
    factor: Factor
    original: Original
    low_freq_factor: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="turns in the original context below which a frequency is divided",
            examples=["low_freq_factor = 1"],
        ),
    ] = 1.0
    high_freq_factor: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="turns in the original context above which a frequency is unchanged",
            examples=["high_freq_factor = 4"],
        ),
    ] = 4.0


class YarnScaling(Node):
    """YaRN (arXiv 2309.00071): frequencies divided by a factor along a ramp over the pairs of columns.

    With m(s) = 0.1·s·ln(factor) + 1, sines and cosines are multiplied by `attention_factor` if it is given, else by
    m(mscale) / m(mscale_all_dim) if both are given, else by m(1). In latent attention, `mscale_all_dim` also multiplies
    the softmax scale by m(mscale_all_dim)², as in DeepSeek-V3.
    """

    kind: Annotated[Literal["yarn"], Syntax("label"), Field(description="the kind")] = "yarn"
    factor: Factor
    original: Original
    beta_fast: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="turns in the original context at and above which a frequency is unchanged",
            examples=["beta_fast = 32"],
        ),
    ] = 32.0
    beta_slow: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="turns in the original context at and below which a frequency is divided",
            examples=["beta_slow = 1"],
        ),
    ] = 1.0
    truncate: Annotated[
        bool,
        Field(description="whether the ends of the ramp are rounded to whole pairs", examples=["truncate = false"]),
    ] = True
    attention_factor: Annotated[
        float | None,
        Field(gt=0, le=1e3, description="factor of sines and cosines", examples=["attention_factor = 1.0"]),
    ] = None
    mscale: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e3,
            description="how steeply the factor of sines and cosines grows with ln(factor)",
            examples=["mscale = 1.0"],
        ),
    ] = None
    mscale_all_dim: Annotated[
        float | None,
        Field(
            gt=0,
            le=1e3,
            description="how steeply the softmax scale of latent attention grows with ln(factor)",
            examples=["mscale_all_dim = 1.0"],
        ),
    ] = None


class Rope(Node):
    """Rotary position embedding (RoPE) on interleaved pairs."""

    theta: Annotated[
        float, Field(ge=1, le=1e12, description="base of the angles pos·theta^(−2i/rope)", examples=["theta = 10_000"])
    ]
    width: Annotated[
        int | None,
        Field(
            ge=2,
            le=4096,
            description="columns of each head that are rotated, in pairs: the first ones, or the last ones of "
            "`compressed` attention; default: all",
            examples=["width = 64"],
        ),
    ] = None
    scaling: Annotated[
        LinearScaling | Llama3Scaling | YarnScaling | None,
        Field(
            description="scaling of the frequencies to a longer context",
            examples=["scaling yarn { factor = 40, original = 4096 }"],
        ),
    ] = None


Position = Annotated[
    Rope | None,
    Field(
        description="rotary position embedding; none: attention without positions",
        examples=["rope { theta = 10_000 }", "rope = none"],
    ),
]
