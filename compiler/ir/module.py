"""A layer of a user's own as a graph: a traced torch module, its forward and its backward, without torch.

Nodes are those of a joint graph (compiler/model/segments/joint.py). Besides ops of our own, a node may be a `TorchCall`
of one of torch's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

Constant = int | float | bool | None  # None: a tensor the op is not given
TENSOR, DEVICE = "%", "device"  # atoms of a call: its next tensor, and the device of the tensors it is computed with
# An atom is a number, or text as Python spells it: a tensor, `device`, `torch.float32`, or a text in its quotes.
Atom = int | float | bool | str | None | tuple["Atom", ...]


@dataclass(frozen=True, slots=True)
class TorchCall:
    """What an op of torch is called with beside its tensors, which are `%` here, in their order.

    `aten.sum.dim_IntList(x, [0], dtype=torch.float32)` is `args = ("%", (0,))`, `options = (("dtype",
    "torch.float32"),)`.
    """

    args: tuple[Atom, ...]
    options: tuple[tuple[str, Atom], ...] = ()


@dataclass(frozen=True, slots=True)
class OpNode:
    """One op: a value's name or a constant for each argument, a name for each output.

    `call`: of an op of torch, whose name is then `op` (`aten.mm.default`) and whose tensors are `args`.
    """

    op: str
    args: tuple[str | Constant, ...]
    outputs: tuple[str, ...]
    call: TorchCall | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(arg for arg in self.args if isinstance(arg, str))

    @property
    def is_input_gradient(self) -> bool:
        """Whether it is the op that ends the gradient of an input: linear_dgrad."""
        return self.op.endswith("_dgrad")

    @property
    def is_weight_gradient(self) -> bool:
        """Whether it is the op that ends the gradient of a weight, which it can add to an accumulator: linear_wgrad."""
        return self.op.endswith("_wgrad")

    @property
    def forward_op(self) -> str:
        """The op whose gradient it computes: linear for linear_wgrad. Of any other op its own name."""
        return self.op.removesuffix("_dgrad").removesuffix("_wgrad")

    @property
    def stem(self) -> str:
        """What the names of its results begin with: mm of aten.mm.default."""
        return self.op.split(".")[1].lstrip("_") if self.call else self.op


@dataclass(frozen=True, slots=True)
class ModuleParameter:
    """A parameter of a module: its name there, and the number that it begins with (None: random numbers)."""

    name: str  # up.weight
    shape: tuple[int, ...]
    constant: float | None = None


@dataclass(frozen=True, slots=True)
class WantedModule:
    """A module of a spec, at the sizes at which a run has it."""

    text: str  # mylayer.py:MyFfn
    role: str  # ffn or attention
    sequences: int  # of a micro-batch
    sequence: int
    hidden: int
    dtype: str  # of activations
    parameter: str  # dtype of parameters

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.sequence


INPUT, OUTPUT, TANGENT = "x", "y", "d_y"


@dataclass(frozen=True)
class Module:
    """A traced module: y = module(x), both [tokens, hidden].

    `forward` makes `y` of `x` and of the parameters, named as `locals`; `backward` makes the gradients of `x` and of
    each parameter of these, of what the forward made, and of `d_y`. `tensors`: (value, shape, dtype) of all of them.
    """

    parameters: tuple[ModuleParameter, ...]
    forward: tuple[OpNode, ...]
    backward: tuple[OpNode, ...]
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    y: str  # the values that are the output, the gradient of x, and those of the parameters
    d_x: str
    weights: tuple[str, ...]

    @cached_property
    def locals(self) -> tuple[str, ...]:
        """The names of its parameters in a segment: p_up_weight; a number behind those that would be alike."""
        names: list[str] = []
        for each in self.parameters:
            name = "p_" + each.name.replace(".", "_")
            alike = sum(other == name or other.rpartition("__")[0] == name for other in names)
            names.append(f"{name}__{alike}" if alike else name)
        return tuple(names)

    @property
    def tokens(self) -> int:
        """Tokens that it is computed on at a time: those of a micro-batch."""
        return next(shape[0] for value, shape, _ in self.tensors if value == INPUT)

    @cached_property
    def digest(self) -> str:
        """sha256 of all that it computes."""
        values = (self.parameters, self.forward, self.backward, self.tensors, self.y, self.d_x, self.weights)
        return hashlib.sha256(repr(values).encode()).hexdigest()


class SpecModules(Protocol):
    """Where the modules that a spec names come from."""

    def module(self, wanted: WantedModule) -> Module:
        """The traced module."""
