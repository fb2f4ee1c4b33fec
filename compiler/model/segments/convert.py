"""Converts the fx graph of a traced segment into a joint graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from compiler import ir
from compiler.ir.module import TENSOR, TorchCall
from compiler.model.ops import RULES, Tensor
from compiler.model.segments.joint import COLUMNS, MODULE, Constant, Draft, Joint, OpNode
from compiler.model.segments.torch_calls import call_of

aten = torch.ops.aten

IDENTITIES = (aten.detach.default, aten.alias.default)  # ops that return their argument
PARTS = (aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int)  # ops that return several views


@dataclass(frozen=True, slots=True)
class ResultLabel:
    """Identifies one result of the traced function. By `name`: an output, or the gradient of an input or of a weight.
    By `key` (op, occurrence, output index): an intermediate value or its gradient."""

    role: str
    name: str = ""
    key: tuple[str, int, int] = ("", 0, 0)


def convert(segment: ir.Segment, graph: fx.Graph, arguments: Sequence[str], labels: Sequence[ResultLabel]) -> Joint:
    """Convert an fx graph. `arguments`: the name of each placeholder; `labels`: one per result."""
    *body, output = graph.nodes
    results = [None if node is None else producer_of(node) for node in output.args[0]]
    nodes = dict(zip(labels, results, strict=True))
    roots = [node for label, node in nodes.items() if label.role in ("output", "gradient", "weight") and node]
    conversion = Conversion(ancestors_of(roots), Draft(segment))
    for name, node in zip(arguments, (n for n in body if n.op == "placeholder"), strict=True):
        conversion.argument(name, node)
    for node in body:
        if node in conversion.live and node.op == "call_function":
            conversion.add(node)
    draft = conversion.draft
    for label, node in nodes.items():
        if label.role == "between" and node in conversion.values:
            draft.names |= conversion.forward_names(node, label.key)
        if label.role == "between gradient" and node in conversion.values:
            op, occurrence, index = label.key
            names = (f"{MODULE}_{occurrence}",) if op == MODULE else RULES[op].value_names(op, occurrence)
            draft.totals[names[index]] = conversion.values[node]

    def chosen(role: str) -> list[tuple[str, str]]:
        missing = [label.name for label, node in nodes.items() if label.role == role and node is None]
        assert not missing, f"no {role} of {missing} in {segment.kind}"
        return [(label.name, conversion.values[node]) for label, node in nodes.items() if label.role == role and node]

    draft.outputs = [value for _, value in chosen("output")]
    draft.gradients, draft.weights = chosen("gradient"), chosen("weight")
    return draft.with_final_names()


def producer_of(node: fx.Node) -> fx.Node:
    """The node that produces this node's tensor, behind ops that return their argument."""
    while node.target in IDENTITIES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def ancestors_of(roots: Sequence[fx.Node]) -> set[fx.Node]:
    """The roots and all their ancestors."""
    seen: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return seen


@dataclass
class Conversion:
    """The joint nodes converted so far. Values other than arguments have provisional names that begin with %."""

    live: set[fx.Node]
    draft: Draft
    values: dict[fx.Node, str] = field(default_factory=dict)

    def argument(self, name: str, node: fx.Node) -> None:
        self.values[node] = name
        self.draft.tensors[name] = abstract(node.meta["val"])

    def add(self, node: fx.Node) -> None:
        """Convert one call. An op that returns several views is converted with its items instead."""
        target = node.target
        if target in IDENTITIES:
            self.values[node] = self.values[producer_of(node)]
        elif target is operator.getitem:
            self._item(node)
        elif target in PARTS:
            pass
        elif target == aten.slice.Tensor:
            self._slice(node)
        elif target == aten.add.Tensor and _are_alike(node):
            self._emit(node, "add", node.args)
        elif target == aten.cat.default and _are_columns(node):
            self._emit(node, "cat2", node.args[0])
        else:
            assert isinstance(target, torch._ops.OpOverload), node.format_node()
            if target.namespace == "dsc":
                assert node.kwargs.keys() <= {"like"}, node.format_node()  # gives only the shapes of gradients
                self._emit(node, target._opname, node.args)
            else:
                self._emit_call(node, *call_of(node))

    def forward_names(self, node: fx.Node, key: tuple[str, int, int]) -> dict[str, str]:
        """Final names of all outputs, hidden ones included, of the op that made `node` as its `index`-th output."""
        op, occurrence, index = key
        value = self.values[node]
        if op == MODULE:
            return {value: f"{MODULE}_{occurrence}"}
        final = RULES[op].value_names(op, occurrence)
        for drafted in self.draft.nodes:
            if value in drafted.outputs and drafted.op == op:
                return dict(zip(drafted.outputs, final, strict=True))
        return {value: final[index]}  # a view

    def _emit(self, node: fx.Node, op: str, args: Any) -> None:
        self.draft.nodes.append(OpNode(op, tuple(self._argument(arg) for arg in args), self._results(node)))

    def _results(self, node: fx.Node) -> tuple[str, ...]:
        """The provisional names of the results of a call. A gradient that is not needed is an empty tensor."""
        meta = node.meta["val"]
        is_tuple = isinstance(meta, tuple | list)
        outputs = tuple(f"%{node.name}.{index}" for index in range(len(meta))) if is_tuple else (f"%{node.name}",)
        for value, tensor in zip(outputs, meta if is_tuple else [meta], strict=True):
            self.draft.tensors[value] = Tensor((0,), "float32") if tensor is None else abstract(tensor)
        self.values[node] = outputs[0]
        return outputs

    def _item(self, node: fx.Node) -> None:
        parent, index = node.args
        assert isinstance(parent, fx.Node) and isinstance(index, int)
        if parent.target not in PARTS:
            self.values[node] = f"%{parent.name}.{index}"
            return
        x, *extra_args = parent.args
        assert isinstance(x, fx.Node), parent.format_node()
        if parent.target == aten.unbind.int:
            dim = int(extra_args[0]) if extra_args else 0  # type: ignore[arg-type]
            self._emit_call(node, "aten.select.int", TorchCall((TENSOR, dim, index)), [x])
            return
        dim = int(extra_args[1]) if len(extra_args) > 1 else 0  # type: ignore[arg-type]
        widths = [part.shape[dim] for part in parent.meta["val"]]
        self._part(node, x, dim, sum(widths[:index]), sum(widths[: index + 1]))

    def _slice(self, node: fx.Node) -> None:
        args: tuple[Any, ...] = (*node.args, *(None, 0, None, None, 1)[len(node.args) :])
        x, dim, low, high, step = args
        assert isinstance(x, fx.Node) and isinstance(dim, int) and isinstance(step, int), node.format_node()
        extent = x.meta["val"].shape[dim]
        low, high, _ = slice(low, high).indices(extent)
        if step == 1:
            self._part(node, x, dim, low, high)
        else:
            self._emit_call(node, "aten.slice.Tensor", TorchCall((TENSOR, dim, low, high, step)), [x])

    def _part(self, node: fx.Node, x: fx.Node, dim: int, low: int, high: int) -> None:
        """Emit the elements `low` to `high` of `x` along a dimension; for columns of a matrix, as `columns`."""
        rank = x.meta["val"].dim()
        if rank == 2 and dim in (1, -1):
            self._columns(node, x, low, high)
        else:
            self._emit_call(node, "aten.slice.Tensor", TorchCall((TENSOR, dim, low, high)), [x])

    def _emit_call(self, node: fx.Node, op: str, call: TorchCall, tensors: Sequence[fx.Node]) -> None:
        reads = tuple(self.values[producer_of(tensor)] for tensor in tensors)
        self.draft.nodes.append(OpNode(op, reads, self._results(node), call))

    def _columns(self, node: fx.Node, x: fx.Node, low: int, high: int) -> None:
        value = f"%{node.name}"
        self.values[node] = value
        self.draft.tensors[value] = abstract(node.meta["val"])
        self.draft.nodes.append(OpNode(COLUMNS, (self.values[producer_of(x)], low, high), (value,)))

    def _argument(self, arg: Any) -> str | Constant:
        if isinstance(arg, fx.Node):
            return self.values[producer_of(arg)]
        assert arg is None or isinstance(arg, int | float | bool), arg
        return arg


def _are_alike(node: fx.Node) -> bool:
    """Whether a call adds two tensors of one shape and dtype."""
    args = [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]
    alike = len(args) == 2 and args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
    return alike and not node.kwargs


def _are_columns(node: fx.Node) -> bool:
    """Whether a call concatenates the columns of two matrices."""
    parts, dim = (*node.args, 0)[:2]
    return len(parts) == 2 and parts[0].meta["val"].dim() == 2 and dim in (1, -1)  # type: ignore[arg-type,union-attr,index]


def abstract(tensor: torch.Tensor) -> Tensor:
    """Shape and dtype of a fake tensor, with R for a dynamic extent."""
    shape = tuple(extent if isinstance(extent, int) else "R" for extent in tensor.shape)
    assert "R" not in shape[1:], shape
    return Tensor(shape, str(tensor.dtype).removeprefix("torch."))
