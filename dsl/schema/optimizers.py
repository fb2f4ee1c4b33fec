"""Optimizers: their settings in a spec, and the facts that plans, memory bounds and predictions need.

To add an optimizer, write a class here, join it to `AnyOptimizer`, and put the code in a file of the same name in
`runtime/state/optimizers` (docs/extending.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from dsl.schema.base import Node, Syntax

StateRole = Literal["moments", "master"]  # keys of a precision
Unit = Literal["element", "matrix"]
SHARED = ("kind", "weight_decay", "clip", "qk_clip")  # fields that every kind has

# Fields that several kinds have:
WeightDecay = Annotated[
    float,
    Field(
        ge=0,
        le=10,
        description="weight decay; a step decays weights by this times the rate",
        examples=["weight_decay = 0.1"],
    ),
]
Clip = Annotated[
    float | None, Field(gt=0, le=1e9, description="largest global gradient norm, or none", examples=["clip = 1.0"])
]
QkClip = Annotated[
    float | None,
    Field(
        gt=0,
        le=1e9,
        description="largest attention logit of a head, or none: if a head exceeds it in a step, its query and key "
        "weights are scaled down so that the logit would have been this (QK-clip; 100 in Kimi K2)",
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

    name: str  # its name in checkpoints is <name>/<parameter>
    role: StateRole = "moments"  # the key of the precision that gives its dtype


class Optimizer(Node):
    """Facts of an optimizer that need no run. Each kind is a subclass with its settings as fields.

    Each has the fields of `SHARED`, whose meaning is the same for all kinds.
    """

    if TYPE_CHECKING:  # the fields of SHARED, which each kind declares
        kind: Any
        weight_decay: Any
        clip: Any
        qk_clip: Any

    state: ClassVar[tuple[StateTensor, ...]]
    # Smallest piece of optimizer state that a rank owns: `zero = 1` splits a bucket anywhere, or between parameters.
    unit: ClassVar[Unit] = "element"
    # The optimizer, with unit "element", of all parameters that are no layer matrices; its settings are fields here
    # too.
    rest: ClassVar[type[Optimizer] | None] = None

    @property
    def rows(self) -> tuple[Optimizer, ...]:
        """This optimizer, followed by that of the rest, if there is one, with its settings."""
        return _rows(self)

    def is_rest(self, matrices: tuple[int, ...]) -> bool:
        """Whether the last of the `rows` updates a parameter with these `matrices` (`compiler.ir.Param`)."""
        return self.rest is not None and not matrices

    def row_of(self, matrices: tuple[int, ...]) -> Optimizer:
        """The row that updates a parameter with these `matrices`."""
        return self.rows[self.is_rest(matrices)]

    def settings(self) -> dict[str, int | float]:
        """The fields that only this kind has, in their order: further arguments of its update code. True is 1."""
        excluded = {*SHARED, *(self.rest.model_fields if self.rest else ())}
        return {name: +getattr(self, name) for name in type(self).model_fields if name not in excluded}

    def flops(self, shape: tuple[int, ...]) -> int:
        """FLOPs of the matrix products in one update of a parameter, in the dtype of `compute`.

        Optimizers of unit "element" have none. Elementwise work is not counted: reading and writing the elements takes
        longer.
        """
        return 0

    def scratch_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes that one update of a parameter needs besides the parameter, its gradient and its state.

        `itemsize`: bytes of an element in the dtype of `compute`."""
        return 0


@lru_cache
def _rows(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """`Optimizer.rows`, cached because a plan asks for every parameter. They are not stored in the optimizer, since
    `model_copy` would copy them to one with other settings."""
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
    """Muon for the matrices of layers, whose momentum it orthogonalises, and AdamW for all other parameters.

    Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024, with the weight decay and the scale
    of updates of Moonlight (arXiv 2502.16982, §2.2). AdamW updates embedding, head, norm gains and biases. A matrix is
    one of the published weights: each expert on its own, gate and up apart, all heads together.
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
            description="whether the update uses the gradient plus the decayed momentum, or only the momentum",
            examples=["nesterov = true"],
        ),
    ] = True
    newton_schulz: Annotated[
        int,
        Field(
            ge=1,
            le=100,
            description="Newton-Schulz steps that bring small singular values near 1 fast, with coefficients 3.4445, "
            "-4.7750, 2.0315",
            examples=["newton_schulz = 5", "newton_schulz = 8"],
        ),
    ] = 5
    polish: Annotated[
        int,
        Field(
            ge=0,
            le=100,
            description="further steps that bring singular values to 1, with coefficients 2, -1.5, 0.5; DeepSeek-V4 "
            "has newton_schulz = 8, polish = 2",
            examples=["polish = 0", "polish = 2"],
        ),
    ] = 0
    rms: Annotated[
        float,
        Field(
            gt=0,
            le=100,
            description="root mean square of a matrix update divided by the rate: updates are scaled by rms * "
            "sqrt(max(rows, columns)), so that learning rates of AdamW carry over",
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
        """Three products a step: two of s²·l multiply-adds and one of s³, for the shorter side s and the longer side
        l."""
        short, long = sorted(shape)
        return (self.newton_schulz + self.polish) * (4 * short * short * long + 2 * short**3)

    def scratch_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Three matrices of this shape and two square ones of its shorter side in `compute`; the first of the three is
        converted from one in FP32 or FP64."""
        short, long = sorted(shape)
        return max(3 * itemsize, max(4, itemsize) + itemsize) * short * long + 2 * itemsize * short * short


# Optimizers that a run may name, joined by `|`.
AnyOptimizer = AdamW | Muon
OPTIMIZERS = {
    optimizer_class.model_fields["kind"].default: optimizer_class
    for optimizer_class in get_args(AnyOptimizer) or (AnyOptimizer,)
}
