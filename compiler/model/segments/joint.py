"""The joint graph of a segment: its forward and its backward in one list of nodes. No torch.

`compiler.model.segments.interpret` makes it from the op rules. `compiler.model.segments.trace` makes it a second time,
from what autograd records, and the two must be equal before a segment is emitted (`compiler.model.segments.check`).

Values are named. Parameters, inputs and outputs have the segment's names, the tangent of output `y` is `d_y`. Any other
value of the forward is named by the op that made it (`linear_2`, `rmsnorm_0_rstd`), its gradient is `d_linear_2`. One
tensor may be the gradient of several values: of both arguments of a sum and of the sum. It is the tangent if it is the
gradient of an output; else it is named by the last of these values in the forward, inputs being the first. Gradients of
parameters and summands of a gradient, which never leave a function, are named by their op (`linear_dgrad_0`). What the
backward computes a second time has the first value's name with `_again` behind it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from compiler.ir import Input, Param, Segment
from compiler.ir.module import Constant as Constant
from compiler.ir.module import OpNode as OpNode
from compiler.ir.names import gradient_of
from compiler.model.ops import Tensor

COLUMNS = "columns"  # columns(x, low, high): the view x[:, low:high]
ADD_TO = "add_"  # add_(g_w, value): what adds the gradient of a weight that no op of ours ends
MODULE = "module"  # what a layer calls for a traced module: many nodes (compiler/ir/module.py)


@dataclass(frozen=True)
class GivenTensors:
    """The tensors that the functions of a graph are given: of parameters, of inputs, and of gradients of outputs."""

    params: tuple[str, ...]
    inputs: tuple[str, ...]
    tangents: tuple[str, ...]


@dataclass(frozen=True)
class Joint:
    """`nodes` in an order of execution; `outputs`, `gradients`, `weights`: the value of each output of the segment, of
    the gradient of each input and of each parameter that has one. `again`: what the backward computes a second time.
    """

    segment: Segment
    nodes: tuple[OpNode, ...]
    tensors: dict[str, Tensor]
    outputs: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
    weights: tuple[tuple[str, str], ...]
    again: tuple[str, ...] = ()
    early: tuple[str, ...] = ()  # what F makes though the backward alone reads it
    parts: tuple[tuple[OpNode, tuple[OpNode, ...]], ...] = ()  # of fused nodes, those that each stands for
    given: GivenTensors | None = None  # what its functions are given, where that is not what the segment names
    columns: frozenset[str] = frozenset()  # tensors that lie column by column

    @property
    def params(self) -> tuple[str, ...]:
        """The tensors of parameters that functions may read."""
        return self.given.params if self.given else tuple(param.name for param in self.segment.params)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors of the segment's inputs."""
        return self.given.inputs if self.given else tuple(each.name for each in self.segment.inputs)

    @property
    def tangents(self) -> tuple[str, ...]:
        """The tensors of the gradients of outputs."""
        if self.given:
            return self.given.tangents
        return tuple(gradient_of(output.name) for output in self.segment.outputs if output.grad)

    @property
    def needed(self) -> tuple[OpNode, ...]:
        """The nodes, views among them, without which a result of the segment or a gradient is not there."""
        todo = {value for _, value in (*self.outputs, *self.gradients, *self.weights)}
        found = []
        for node in reversed(self.nodes):
            if todo.intersection(node.outputs):
                found.append(node)
                todo.update(node.reads)
        return tuple(reversed(found))


def arguments_of(segment: Segment) -> tuple[Param | Input, ...]:
    return (*segment.params, *segment.inputs)


@dataclass
class Draft:
    """A joint graph in the making: what `names` does not name has a provisional name, until `named` gives it one.

    `names`: provisional → final names of values of the forward. `totals`: by the name of a value of the forward, in its
    order, the provisional name of its gradient. `outputs`, `gradients` and `weights` are those of `Joint`, provisional.
    """

    segment: Segment
    nodes: list[OpNode] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    totals: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    gradients: list[tuple[str, str]] = field(default_factory=list)
    weights: list[tuple[str, str]] = field(default_factory=list)

    def named(self) -> Joint:
        """The joint graph under the names that the docstring of this module states."""
        names = self._names()

        def final(value: str) -> str:
            return names.get(value, value)

        def renamed(node: OpNode) -> OpNode:
            args = tuple(final(arg) if isinstance(arg, str) else arg for arg in node.args)
            return replace(node, args=args, outputs=tuple(final(value) for value in node.outputs))

        return Joint(
            self.segment,
            tuple(renamed(node) for node in self.nodes),
            {final(value): tensor for value, tensor in self.tensors.items()},
            tuple(
                (output.name, final(value)) for output, value in zip(self.segment.outputs, self.outputs, strict=True)
            ),
            tuple((name, final(value)) for name, value in self.gradients),
            tuple((name, final(value)) for name, value in self.weights),
        )

    def _names(self) -> dict[str, str]:
        """The final name of every value that a node makes."""
        names = dict(self.names)
        arguments = {argument.name for argument in arguments_of(self.segment)}
        returned = {output.name for output in self.segment.outputs}
        for output, value in zip(self.segment.outputs, self.outputs, strict=True):
            if value not in arguments and names.get(value) not in returned:
                names[value] = output.name
        inner = {value for node in self.nodes for value in node.outputs} - names.keys()
        for of, value in (*self.gradients, *self.totals.items()):
            if value in inner:
                names[value] = gradient_of(of)  # of the last value whose gradient it is
        taken = {*names.values(), *arguments}
        occurrence: Counter[str] = Counter()
        for node in self.nodes:
            unnamed = [value for value in node.outputs if value not in names]
            stem = node.stem
            while unnamed and f"{stem}_{occurrence[stem]}" in taken:
                occurrence[stem] += 1
            for index, value in enumerate(unnamed):
                suffix = f"_{index}" if len(node.outputs) > 1 else ""
                names[value] = f"{stem}_{occurrence[stem]}{suffix}"
            occurrence[stem] += bool(unnamed)
        return names
