"""The joint graph of a segment: its forward and its backward in one list of nodes. No torch.

`compiler.model.segments.interpret` builds it from the op rules. `compiler.model.segments.trace` builds it again from
what autograd records. The two must be equal before a segment is emitted (`compiler.model.segments.check`).

Names of values:

- parameters, inputs and outputs have the segment's names; the tangent of output `y` is `d_y`;
- any other value of the forward is named by the op that made it (`linear_2`, `rmsnorm_0_rstd`), its gradient is
  `d_linear_2`;
- one tensor may be the gradient of several values, such as both arguments of a sum and the sum. It is the tangent if
  it is the gradient of an output; else it is named by the last of these values in the forward, where inputs come first;
- gradients of parameters and summands of a gradient, which never leave a function, are named by their op
  (`linear_dgrad_0`);
- a value that the backward recomputes has the first value's name and the suffix `_again`.
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
ADD_TO = "add_"  # add_(g_w, value): accumulates a weight gradient that was not computed by one of our wgrad ops
MODULE = "module"  # the op by which a layer calls a traced module of many nodes (compiler/ir/module.py)


@dataclass(frozen=True)
class GivenTensors:
    """The tensor arguments of the functions of a graph: parameters, inputs, and gradients of outputs."""

    params: tuple[str, ...]
    inputs: tuple[str, ...]
    tangents: tuple[str, ...]


@dataclass(frozen=True)
class Joint:
    """`nodes` are in an order of execution. `outputs`, `gradients`, `weights`: (name, value) of each output of the
    segment, of the gradient of each input, and of the gradient of each parameter.
    """

    segment: Segment
    nodes: tuple[OpNode, ...]
    tensors: dict[str, Tensor]
    outputs: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
    weights: tuple[tuple[str, str], ...]
    recomputed: tuple[str, ...] = ()  # values that the backward recomputes
    early: tuple[str, ...] = ()  # values that F computes although only the backward reads them
    parts: tuple[tuple[OpNode, tuple[OpNode, ...]], ...] = ()  # fused node → the nodes that it replaces
    arguments: GivenTensors | None = None  # tensor arguments of its functions; None: those that the segment names
    columns: frozenset[str] = frozenset()  # column-major tensors

    @property
    def params(self) -> tuple[str, ...]:
        """The parameter tensors that functions may read."""
        return self.arguments.params if self.arguments else tuple(param.name for param in self.segment.params)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors of the segment's inputs."""
        return self.arguments.inputs if self.arguments else tuple(argument.name for argument in self.segment.inputs)

    @property
    def tangents(self) -> tuple[str, ...]:
        """The tensors of the gradients of outputs."""
        if self.arguments:
            return self.arguments.tangents
        return tuple(gradient_of(output.name) for output in self.segment.outputs if output.grad)

    @property
    def needed_nodes(self) -> tuple[OpNode, ...]:
        """The nodes, views included, that a result of the segment or a gradient depends on."""
        todo = {value for _, value in (*self.outputs, *self.gradients, *self.weights)}
        needed = []
        for node in reversed(self.nodes):
            if todo.intersection(node.outputs):
                needed.append(node)
                todo.update(node.reads)
        return tuple(reversed(needed))


def arguments_of(segment: Segment) -> tuple[Param | Input, ...]:
    """The arguments of a segment's function, parameters first."""
    return (*segment.params, *segment.inputs)


@dataclass
class Draft:
    """A joint graph under construction, with provisional names that `with_final_names` replaces.

    `names`: provisional → final names of values of the forward. `totals`: the provisional name of the gradient of each
    value of the forward, in forward order. `outputs`, `gradients` and `weights` are those of `Joint` under provisional
    names.
    """

    segment: Segment
    nodes: list[OpNode] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    totals: dict[str, str] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    gradients: list[tuple[str, str]] = field(default_factory=list)
    weights: list[tuple[str, str]] = field(default_factory=list)

    def with_final_names(self) -> Joint:
        """The joint graph under the names that this module's docstring states."""
        names = self._names()

        def final(value: str) -> str:
            return names.get(value, value)

        def rename_node(node: OpNode) -> OpNode:
            args = tuple(final(arg) if isinstance(arg, str) else arg for arg in node.args)
            return replace(node, args=args, outputs=tuple(final(value) for value in node.outputs))

        return Joint(
            self.segment,
            tuple(rename_node(node) for node in self.nodes),
            {final(value): tensor for value, tensor in self.tensors.items()},
            tuple(
                (output.name, final(value)) for output, value in zip(self.segment.outputs, self.outputs, strict=True)
            ),
            tuple((name, final(value)) for name, value in self.gradients),
            tuple((name, final(value)) for name, value in self.weights),
        )

    def _names(self) -> dict[str, str]:
        """The final name of every output of a node."""
        names = dict(self.names)
        arguments = {argument.name for argument in arguments_of(self.segment)}
        returned = {output.name for output in self.segment.outputs}
        for output, value in zip(self.segment.outputs, self.outputs, strict=True):
            if value not in arguments and names.get(value) not in returned:
                names[value] = output.name
        inner = {value for node in self.nodes for value in node.outputs} - names.keys()
        for source, value in (*self.gradients, *self.totals.items()):
            if value in inner:
                names[value] = gradient_of(source)  # the last value whose gradient it is wins
        used_names = {*names.values(), *arguments}
        occurrence: Counter[str] = Counter()
        for node in self.nodes:
            unnamed = [value for value in node.outputs if value not in names]
            stem = node.stem
            while unnamed and f"{stem}_{occurrence[stem]}" in used_names:
                occurrence[stem] += 1
            for index, value in enumerate(unnamed):
                suffix = f"_{index}" if len(node.outputs) > 1 else ""
                names[value] = f"{stem}_{occurrence[stem]}{suffix}"
            occurrence[stem] += bool(unnamed)
        return names
