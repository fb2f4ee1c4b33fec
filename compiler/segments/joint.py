"""The joint graph of a segment: its forward and its backward in one list of nodes. No torch.

Made twice: by `compiler.segments.interpret` from the op rules and by `compiler.segments.trace` from what autograd
records. Both are split by `compiler.segments.split`, and the two cuts must be equal.

Values are named. Parameters, inputs and outputs have the segment's names, the tangent of output `y` is `d_y`. Any other
value of the forward is named by the op that made it (`linear_2`, `rmsnorm_0_rstd`), its gradient is `d_linear_2`.
Summands of a gradient, which never leave a function, are named by theirs (`linear_dgrad_0`). What the backward computes
a second time has the first value's name with `_again` behind it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from compiler.ir import Input, Param, Segment
from compiler.ops import Tensor

COLUMNS = "columns"  # columns(x, low, high): the view x[:, low:high]

Constant = int | float | bool | None  # None: a tensor the op is not given


@dataclass(frozen=True, slots=True)
class Node:
    """One op: a value's name or a constant for each argument, a name for each output."""

    op: str
    args: tuple[str | Constant, ...]
    outputs: tuple[str, ...]

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(arg for arg in self.args if isinstance(arg, str))


@dataclass(frozen=True)
class Joint:
    """`nodes` in an order of execution; `outputs`, `gradients`, `weights`: the value of each output of the segment, of
    the gradient of each input and of each parameter that has one. `again`: what the backward computes a second time."""

    segment: Segment
    nodes: tuple[Node, ...]
    tensors: dict[str, Tensor]
    outputs: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
    weights: tuple[tuple[str, str], ...]
    again: tuple[str, ...] = ()
    early: tuple[str, ...] = ()  # what F makes though the backward alone reads it
    parts: tuple[tuple[Node, tuple[Node, ...]], ...] = ()  # of fused nodes, those that each stands for


def arguments_of(segment: Segment) -> tuple[Param | Input, ...]:
    return (*segment.params, *segment.inputs)


def differentiable_outputs(segment: Segment) -> tuple[str, ...]:
    return tuple(output.name for output in segment.outputs if output.grad)


def named(
    segment: Segment,
    nodes: list[Node],
    tensors: dict[str, Tensor],
    names: dict[str, str],
    outputs: list[str],
    gradients: list[tuple[str, str]],
    weights: list[tuple[str, str]],
) -> Joint:
    """The joint graph of nodes whose values have provisional names: `names` gives the final ones.

    What is not in it, a summand of a gradient, is named by its op. A value the segment returns is named by the output,
    unless it is an input handed through.
    """
    names = dict(names)
    arguments = {argument.name for argument in arguments_of(segment)}
    for output, value in zip(segment.outputs, outputs, strict=True):
        if value not in arguments and names.get(value) not in {other.name for other in segment.outputs}:
            names[value] = output.name
    occurrence: Counter[str] = Counter()
    for node in nodes:
        unnamed = [value for value in node.outputs if value not in names]
        for index, value in enumerate(unnamed):
            suffix = f"_{index}" if len(node.outputs) > 1 else ""
            names[value] = f"{node.op}_{occurrence[node.op]}{suffix}"
        occurrence[node.op] += bool(unnamed)

    def final(value: str) -> str:
        return names.get(value, value)

    def renamed(node: Node) -> Node:
        args = tuple(final(arg) if isinstance(arg, str) else arg for arg in node.args)
        return Node(node.op, args, tuple(final(value) for value in node.outputs))

    return Joint(
        segment,
        tuple(renamed(node) for node in nodes),
        {final(value): tensor for value, tensor in tensors.items()},
        tuple((output.name, final(value)) for output, value in zip(segment.outputs, outputs, strict=True)),
        tuple((name, final(value)) for name, value in gradients),
        tuple((name, final(value)) for name, value in weights),
    )
