"""A user-defined layer as a graph: the forward and backward of a traced torch module, without torch.

Nodes are those of a joint graph (compiler/model/segments/joint.py). A node may be one of our ops or a `TorchCall`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

Constant = int | float | bool | None  # None: an optional tensor that is left out
TENSOR, DEVICE = "%", "device"  # atoms of a call: its next tensor, and the device of its tensors
# An atom is a number, or Python source text: a tensor, `device`, `torch.float32`, or a quoted string.
Atom = int | float | bool | str | None | tuple["Atom", ...]


@dataclass(frozen=True, slots=True)
class TorchCall:
    """The arguments of a torch op. Its tensors are `%` here, in order.

    `aten.sum.dim_IntList(x, [0], dtype=torch.float32)` is `args = ("%", (0,))`, `options = (("dtype",
    "torch.float32"),)`.
    """

    args: tuple[Atom, ...]
    options: tuple[tuple[str, Atom], ...] = ()


@dataclass(frozen=True, slots=True)
class OpNode:
    """One op: a value's name or a constant for each argument, a name for each output.

    `call`: set for a torch op. `op` is then its name (`aten.mm.default`), and `args` are its tensors.
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
        """Whether its op computes the gradient of an input, such as linear_dgrad."""
        return self.op.endswith("_dgrad")

    @property
    def is_weight_gradient(self) -> bool:
        """Whether its op computes the gradient of a weight and can add it to an accumulator, such as linear_wgrad."""
        return self.op.endswith("_wgrad")

    @property
    def forward_op(self) -> str:
        """The op whose gradient it computes: linear for linear_wgrad. Otherwise its own name."""
        return self.op.removesuffix("_dgrad").removesuffix("_wgrad")

    @property
    def stem(self) -> str:
        """The beginning of the names of its results: mm for aten.mm.default."""
        return self.op.split(".")[1].lstrip("_") if self.call else self.op


@dataclass(frozen=True, slots=True)
class ModuleParameter:
    """A parameter of a module."""

    name: str  # in the module: up.weight
    shape: tuple[int, ...]
    constant: float | None = None  # its initial value; None: random numbers


@dataclass(frozen=True, slots=True)
class WantedModule:
    """A module that a spec names, with the sizes and dtypes of a run."""

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

    `forward` computes `y` from `x` and the parameters, which are named as in `locals`. `backward` computes the
    gradients of `x` and of each parameter from these, from values of the forward, and from `d_y`.
    """

    parameters: tuple[ModuleParameter, ...]
    forward: tuple[OpNode, ...]
    backward: tuple[OpNode, ...]
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]  # (value, shape, dtype) of all values
    y: str  # the name of the output's value
    d_x: str  # that of the gradient of x
    weights: tuple[str, ...]  # those of the gradients of the parameters

    @cached_property
    def locals(self) -> tuple[str, ...]:
        """The names of its parameters in a segment: p_up_weight, with a number appended if names would collide."""
        names: list[str] = []
        for parameter in self.parameters:
            name = "p_" + parameter.name.replace(".", "_")
            alike = sum(used_name == name or used_name.rpartition("__")[0] == name for used_name in names)
            names.append(f"{name}__{alike}" if alike else name)
        return tuple(names)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return next(shape[0] for value, shape, _ in self.tensors if value == INPUT)

    @cached_property
    def digest(self) -> str:
        """sha256 of the whole graph."""
        values = (self.parameters, self.forward, self.backward, self.tensors, self.y, self.d_x, self.weights)
        return hashlib.sha256(repr(values).encode()).hexdigest()


class SpecModules(Protocol):
    """A source of the modules that a spec names."""

    def module(self, wanted: WantedModule) -> Module:
        """The traced module."""
