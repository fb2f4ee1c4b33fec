"""Optimizers: the settings that a spec may give each, and what plan, memory and predictions must know of it.

A new optimizer is a class here, which joins `AnyOptimizer`, and a file of its kind's name in
`runtime/state/optimizers` with the code (docs/extending.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from dsl.schema.base import Node, Syntax

StateRole = Literal["moments", "master"]  # of a precision
Unit = Literal["element", "matrix"]
SHARED = ("kind", "weight_decay", "clip", "qk_clip")  # fields that every kind has

# Fields that several kinds have:
WeightDecay = Annotated[
    float, Field(ge=0, le=10, description="decay of the weights, times the rate", examples=["weight_decay = 0.1"])
]
Clip = Annotated[
    float | None, Field(gt=0, le=1e9, description="largest global gradient norm, or none", examples=["clip = 1.0"])
]
QkClip = Annotated[
    float | None,
    Field(
        gt=0,
        le=1e9,
        description="largest logit of a head of attention, or none: queries and keys of a head that had a larger one "
        "in a step are multiplied after it, so that it would have been this (QK-clip; 100 in Kimi K2)",
        examples=["qk_clip = 100"],
    ),
]
Beta1 = Annotated[float, Field(ge=0, lt=1, description="decay of the first moment of AdamW", examples=["beta1 = 0.9"])]
Beta2 = Annotated[
    float, Field(ge=0, lt=1, description="decay of the second moment of AdamW", examples=["beta2 = 0.95"])
]
Eps = Annotated[
    float, Field(gt=0, le=1, description="added to the root of the second moment of AdamW", examples=["eps = 1e-8"])
]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that an optimizer keeps for each parameter, of the parameter's shape."""

    name: str  # checkpoints call it <name>/<parameter>
    role: StateRole = "moments"  # the role of the precision that says its dtype


class Optimizer(Node):
    """What is known of an optimizer without running it. A kind is a subclass, with its settings as fields.

    Each has the fields of `SHARED`, whose meaning is the same for all kinds.
    """

    if TYPE_CHECKING:  # the fields of SHARED, which each kind declares
        kind: Any
        weight_decay: Any
        clip: Any
        qk_clip: Any

    state: ClassVar[tuple[StateTensor, ...]]
    # What an owner of optimizer state has whole: `zero = 1` cuts a bucket anywhere, or between its parameters.
    unit: ClassVar[Unit] = "element"
    # The kind, of unit "element", of all that is no matrix of a layer; its settings are fields here too.
    rest: ClassVar[type[Optimizer] | None] = None

    @property
    def rows(self) -> tuple[Optimizer, ...]:
        """This optimizer, and behind it the one of the rest, if there is one, with its settings."""
        return _rows(self)

    def is_rest(self, matrices: tuple[int, ...]) -> bool:
        """Whether the last of the `rows` updates a parameter, which has these `matrices` (`compiler.ir.Param`)."""
        return self.rest is not None and not matrices

    def of(self, matrices: tuple[int, ...]) -> Optimizer:
        """The row that updates a parameter of these `matrices`."""
        return self.rows[self.is_rest(matrices)]

    def settings(self) -> dict[str, int | float]:
        """The fields of this kind alone, in their order: what the code of the update takes besides. True is 1."""
        others = {*SHARED, *(self.rest.model_fields if self.rest else ())}
        return {name: +getattr(self, name) for name in type(self).model_fields if name not in others}

    def flops(self, shape: tuple[int, ...]) -> int:
        """FLOPs of the matrix products of one update of a parameter, in the dtype of `compute`.

        The unit "element" has none. Work that is done element by element is not counted: it is hidden under reading and
        writing the elements.
        """
        return 0

    def scratch_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes that one update of a parameter needs besides the parameter, its gradient and its state.

        `itemsize`: bytes of an element of `compute`."""
        return 0


@lru_cache
def _rows(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """`Optimizer.rows`, which each parameter of a plan is asked for. No optimizer keeps them: `model_copy` would
    copy them to one with other settings."""
    if optimizer.rest is None:
        return (optimizer,)
    names = (name for name in optimizer.rest.model_fields if name != "kind")
    return optimizer, optimizer.rest.model_construct(**{name: getattr(optimizer, name) for name in names})


class AdamW(Optimizer):
    """AdamW with decoupled weight decay; norms and biases are not decayed."""

    state: ClassVar[tuple[StateTensor, ...]] = (StateTensor("moment1"), StateTensor("moment2"))

    kind: Annotated[Literal["adamw"], Syntax("label"), Field(description="the kind")] = "adamw"
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.95
    eps: Eps = 1e-8
    weight_decay: WeightDecay = 0.0
    clip: Clip = None
    qk_clip: QkClip = None


class Muon(Optimizer):
    """Muon for the matrices of layers, which brings singular values of their momentum near 1, and AdamW for all else.

    Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, with the weight decay and the scale
    of updates of Moonlight (arXiv 2502.16982, §2.2). AdamW has what is no matrix of a layer: embedding, head, gains of
    norms, biases. The matrices are those of published weights: of every expert, gate and up apart, heads together.
    """

    state: ClassVar = (StateTensor("momentum"),)
    unit: ClassVar = "matrix"
    rest: ClassVar = AdamW

    kind: Annotated[Literal["muon"], Syntax("label"), Field(description="the kind")] = "muon"
    momentum: Annotated[
        float, Field(ge=0, lt=1, description="decay of the momentum of matrices", examples=["momentum = 0.95"])
    ] = 0.95
    nesterov: Annotated[
        bool,
        Field(
            description="whether a matrix moves along its gradient and the decayed momentum, or the momentum alone",
            examples=["nesterov = true"],
        ),
    ] = True
    newton_schulz: Annotated[
        int,
        Field(
            ge=1,
            le=100,
            description="steps of Newton and Schulz that bring small singular values near 1 fast: coefficients 3.4445, "
            "-4.7750, 2.0315",
            examples=["newton_schulz = 5", "newton_schulz = 8"],
        ),
    ] = 5
    polish: Annotated[
        int,
        Field(
            ge=0,
            le=100,
            description="steps behind them that bring singular values to 1: coefficients 2, -1.5, 0.5; DeepSeek-V4 has "
            "8 steps and 2 of these",
            examples=["polish = 0", "polish = 2"],
        ),
    ] = 0
    rms: Annotated[
        float,
        Field(
            gt=0,
            le=100,
            description="root mean square of an update of a matrix, over the rate: updates are scaled by "
            "rms * sqrt(max(rows, columns)), so that rates of AdamW hold",
            examples=["rms = 0.2"],
        ),
    ] = 0.2
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.95
    eps: Eps = 1e-8
    weight_decay: WeightDecay = 0.0
    clip: Clip = None
    qk_clip: QkClip = None

    def flops(self, shape: tuple[int, ...]) -> int:
        """Three products a step: two of s²·l multiplications and one of s³, for the shorter and longer side."""
        short, long = sorted(shape)
        return (self.newton_schulz + self.polish) * (4 * short * short * long + 2 * short**3)

    def scratch_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Three matrices of this shape and two of the square of its shorter side in `compute`; the first of the three
        is made of one in FP32 or FP64."""
        short, long = sorted(shape)
        return max(3 * itemsize, max(4, itemsize) + itemsize) * short * long + 2 * itemsize * short * short


# What a run may name, joined by `|`.
AnyOptimizer = AdamW | Muon
OPTIMIZERS = {each.model_fields["kind"].default: each for each in get_args(AnyOptimizer) or (AnyOptimizer,)}
