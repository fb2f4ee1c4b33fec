"""Optimizers: the settings that a spec may give each, and what plan, memory and predictions must know of it.

A new optimizer is a class here, which joins `AnyOptimizer`, and a file of its kind's name in `runtime/optimizers` with
the code (docs/extending.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from dsl.schema.base import Node, Syntax

StateRole = Literal["moments", "master"]  # of a precision
Unit = Literal["element", "matrix"]
SHARED = ("kind", "weight_decay", "clip")  # fields that every kind has


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor that an optimizer keeps for each parameter, of the parameter's shape."""

    name: str  # checkpoints call it <name>/<parameter>
    role: StateRole = "moments"  # the role of the precision that says its dtype


class Optimizer(Node):
    """What is known of an optimizer without running it. A kind is a subclass, with its settings as fields.

    Each has the fields of `SHARED`, whose meaning is the same for all kinds.
    """

    state: ClassVar[tuple[StateTensor, ...]]
    # What an owner of optimizer state has whole: `zero = 1` cuts a bucket anywhere, or between its parameters.
    unit: ClassVar[Unit] = "element"

    def settings(self) -> dict[str, int | float]:
        """The fields of this kind alone, in their order: what the code of the update takes besides."""
        return {name: getattr(self, name) for name in type(self).model_fields if name not in SHARED}

    @classmethod
    def flops(cls, shape: tuple[int, ...]) -> int:
        """FLOPs of the matrix products of one update of a parameter, in the dtype of `compute`.

        The unit "element" has none. Work that is done element by element is not counted: it is hidden under reading and
        writing the elements.
        """
        return 0

    @classmethod
    def scratch_bytes(cls, shape: tuple[int, ...]) -> int:
        """Bytes that one update of a parameter needs besides the parameter, its gradient and its state."""
        return 0


class AdamW(Optimizer):
    """AdamW with decoupled weight decay; norms and biases are not decayed."""

    state: ClassVar = (StateTensor("moment1"), StateTensor("moment2"))

    kind: Annotated[Literal["adamw"], Syntax("label"), Field(description="the kind")] = "adamw"
    beta1: Annotated[float, Field(ge=0, lt=1, description="decay of the first moment", examples=["beta1 = 0.9"])] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="decay of the second moment", examples=["beta2 = 0.95"])] = (
        0.95
    )
    eps: Annotated[
        float, Field(gt=0, le=1, description="added to the root of the second moment", examples=["eps = 1e-8"])
    ] = 1e-8
    weight_decay: Annotated[
        float, Field(ge=0, le=10, description="decay of the weights, times the rate", examples=["weight_decay = 0.1"])
    ] = 0.0
    clip: Annotated[
        float | None, Field(gt=0, le=1e9, description="largest global gradient norm, or none", examples=["clip = 1.0"])
    ] = None


# What a run may name, joined by `|`.
AnyOptimizer = AdamW
OPTIMIZERS = {each.model_fields["kind"].default: each for each in get_args(AnyOptimizer) or (AnyOptimizer,)}
