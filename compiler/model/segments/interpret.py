"""The shape interpreter: the joint graph and the cut of a segment, from the op rules alone. No torch.

A layer called with `ShapeOps` runs on shapes. The backward follows from the rules as autograd derives it: ops in
reverse order, each passing gradients to its arguments; a second gradient of a value is added to the first when it
arrives. The result is the base graph. A torch trace must equal it before a segment is emitted
(`compiler.model.segments.check`). Passes rewrite it: recompute, storage and fusion, in this order. Costs are those of
the rewritten graph; plans and emitted code use it unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from compiler import ir
from compiler.ir.module import INPUT, TANGENT, Module
from compiler.ir.names import gradient_of, is_gradient, value_of
from compiler.model.ops import RULES, Extent, Gradient, Rule, Tensor
from compiler.model.segments import storage
from compiler.model.segments.fuse import fuse_ops
from compiler.model.segments.joint import COLUMNS, MODULE, Constant, Draft, Joint, OpNode
from compiler.model.segments.node_costs import costs
from compiler.model.segments.printer import inner_peaks
from compiler.model.segments.recompute import recompute_values
from compiler.model.segments.split import split
from compiler.model.segments.unpack import quantised_parameters, unpack_tensors


def cut(segment: ir.Segment) -> ir.Cut:
    """Cut a segment: what F saves for I and W, what I defers to W, and what each function costs."""
    joint = interpret(segment)
    flat = unpack_tensors(joint)
    parts = split(flat)
    return replace(
        parts.cut, costs=costs(joint), inside=inner_peaks(flat, parts), quantised=quantised_parameters(joint)
    )


# ---------------------------------------------------------------- forward


@dataclass(frozen=True, slots=True)
class SymbolicValue:
    """A tensor without data, as a layer sees it: its name, shape and dtype."""

    name: str
    tensor: Tensor
    requires_grad: bool

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.tensor.shape


@dataclass(frozen=True)
class OpCall:
    """A call of an op by a layer."""

    op: str
    args: tuple[SymbolicValue | Constant, ...]
    outputs: tuple[SymbolicValue, ...]  # hidden ones included

    @property
    def rule(self) -> Rule:
        return RULES[self.op]

    @property
    def arg_names(self) -> tuple[str, ...]:
        """The names of its arguments: those of the rule, without optional ones that the call leaves out."""
        return self.rule.args[: len(self.args)]

    def argument(self, name: str) -> SymbolicValue | Constant:
        return self.args[self.rule.args.index(name)]

    def output(self, name: str) -> SymbolicValue:
        return self.outputs[self.rule.outputs.index(name)]


@dataclass(frozen=True)
class ModuleCall:
    """A call of a traced module by a layer, on `x` and the module's parameters."""

    module: Module
    args: tuple[SymbolicValue, ...]
    outputs: tuple[SymbolicValue]

    @property
    def names_of_values(self) -> dict[str, str]:
        """The values of the graph by the module's names for its inputs and its output."""
        names = dict(zip((INPUT, *self.module.locals), (arg.name for arg in self.args), strict=True))
        return names | {self.module.y: self.outputs[0].name}


class ShapeOps:
    """The op table on shapes. Records the calls, in order."""

    def __init__(self) -> None:
        self.calls: list[OpCall | ModuleCall] = []

    def module(self, module: Module, x_TD: SymbolicValue, *params: SymbolicValue) -> SymbolicValue:
        """x_TD and the parameters of a traced module -> y_TD."""
        y_TD = SymbolicValue(f"{MODULE}_{sum(isinstance(call, ModuleCall) for call in self.calls)}", x_TD.tensor, True)
        self.calls.append(ModuleCall(module, (x_TD, *params), (y_TD,)))
        return y_TD

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op not in RULES:
            raise AttributeError(f"no op {op}")
        return lambda *args: self._call(op, args)

    def _call(self, op: str, args: tuple[SymbolicValue | Constant, ...]) -> Any:
        rule = RULES[op]
        assert 0 <= len(rule.args) - len(args) <= len(rule.optional), f"{op} takes {rule.args}"
        abstract = [arg.tensor if isinstance(arg, SymbolicValue) else arg for arg in args]
        try:
            tensors = rule.infer(*abstract)
        except AssertionError as error:
            raise AssertionError(f"op {op} does not take {', '.join(map(str, abstract))}") from error
        requires_grad = any(isinstance(arg, SymbolicValue) and arg.requires_grad for arg in args)
        names = rule.value_names(op, sum(isinstance(call, OpCall) and call.op == op for call in self.calls))
        outputs = tuple(
            SymbolicValue(name, tensor, requires_grad and output in rule.differentiable)
            for name, tensor, output in zip(names, tensors, rule.outputs, strict=True)
        )
        self.calls.append(OpCall(op, args, outputs))
        visible = outputs[: len(outputs) - rule.hidden]
        return visible if len(visible) > 1 else visible[0]


# ---------------------------------------------------------------- backward


class _Backward:
    """The nodes and gradients so far. Values made here have provisional names: `%` and a number."""

    def __init__(self, segment: ir.Segment, calls: list[OpCall | ModuleCall]) -> None:
        self.draft = Draft(segment)
        self.module_values: dict[str, dict[str, str]] = {}  # by the output of a module: names in the module → values
        for call in calls:
            if isinstance(call, ModuleCall):
                self._inline(call, call.module.forward, call.names_of_values)
            else:
                self.draft.nodes += _forward_nodes(call)
        self.draft.tensors |= {value.name: value.tensor for call in calls for value in call.outputs}
        self.draft.names |= {value.name: value.name for call in calls for value in call.outputs}
        self.totals: dict[str, str] = {}  # by value: the sum of the gradients that have arrived

    def _inline(self, call: ModuleCall, nodes: Iterable[OpNode], existing: Mapping[str, str]) -> None:
        """Add nodes of a module. `existing`: the values that the graph has already, by the module's names."""
        tensors = {name: Tensor(shape, dtype) for name, shape, dtype in call.module.tensors}
        names = dict(existing)
        for node in nodes:
            for value in node.outputs:
                if value not in names:
                    names[value] = f"%{len(self.draft.tensors)}"
                    self.draft.tensors[names[value]] = tensors[value]
            args = tuple(names[arg] if isinstance(arg, str) else arg for arg in node.args)
            self.draft.nodes.append(replace(node, args=args, outputs=tuple(names[value] for value in node.outputs)))
        self.module_values[call.outputs[0].name] = names

    def through(self, call: ModuleCall) -> None:
        """Pass the gradient of a module's output to its input and its parameters."""
        output = call.outputs[0]
        self._inline(call, call.module.backward, self.module_values[output.name] | {TANGENT: self.total(output)})
        for value, gradient in zip(call.args, (call.module.d_x, *call.module.weights), strict=True):
            self.give(value, self.module_values[output.name][gradient])

    def emit(self, op: str, args: tuple[str | Constant, ...], tensors: list[Tensor]) -> list[str]:
        values = [f"%{len(self.draft.tensors) + index}" for index in range(len(tensors))]
        self.draft.tensors |= zip(values, tensors, strict=True)
        self.draft.nodes += _nodes(op, args, values, self.draft.tensors)
        return values

    def give(self, value: SymbolicValue, gradient: str) -> None:
        """Add a gradient to the sum of a value's gradients, as autograd does when it arrives."""
        if value.name in self.totals:
            (gradient,) = self.emit("add", (self.totals[value.name], gradient), [value.tensor])
        self.totals[value.name] = gradient

    def total(self, value: SymbolicValue) -> str:
        """The gradient of a value, after every reader has added its share."""
        has_gradient = value.requires_grad and value.name in self.totals
        assert has_gradient, f"segment {self.draft.segment.kind}: {value.name} has no gradient by the op rules"
        return self.totals[value.name]

    def backward(self, call: OpCall) -> None:
        """Compute all gradients of a call's arguments, then pass them on in the order of the arguments."""
        gradients: dict[str, str] = {}
        for gradient in call.rule.gradients:
            wanted = [call.argument(name) for name in gradient.gives]
            values = [value for value in wanted if isinstance(value, SymbolicValue)]
            if any(value.requires_grad for value in values):
                gradients |= zip(gradient.gives, self._gradient(call, gradient, values), strict=True)
        for name, value in zip(call.arg_names, call.args, strict=True):
            if name in gradients and isinstance(value, SymbolicValue) and value.requires_grad:
                self.give(value, gradients[name])

    def _gradient(self, call: OpCall, gradient: Gradient, values: list[SymbolicValue]) -> list[str]:
        left_out = {*call.rule.args} - {*call.arg_names}
        args = tuple(self._argument(call, read) for read in gradient.reads if read not in left_out)
        if not gradient.op:
            return [str(args[0])] * len(values)
        return self.emit(gradient.op, args, [value.tensor for value in values])

    def _argument(self, call: OpCall, read: str | Extent) -> str | Constant:
        rule = call.rule
        if isinstance(read, Extent):
            argument = call.argument(read.argument)
            assert isinstance(argument, SymbolicValue)
            return argument.shape[read.dim]
        if is_gradient(read) and value_of(read) in rule.outputs:
            return self.total(call.output(value_of(read)))
        value = call.argument(read) if read in rule.args else call.output(read)
        return value.name if isinstance(value, SymbolicValue) else value


def _forward_nodes(call: OpCall) -> list[OpNode]:
    args = tuple(arg.name if isinstance(arg, SymbolicValue) else arg for arg in call.args)
    tensors = {value.name: value.tensor for value in (*call.args, *call.outputs) if isinstance(value, SymbolicValue)}
    return _nodes(call.op, args, [value.name for value in call.outputs], tensors)


def _nodes(op: str, args: tuple[str | Constant, ...], outputs: list[str], tensors: dict[str, Tensor]) -> list[OpNode]:
    """One node, or two views for `split2`."""
    if op != "split2":
        return [OpNode(op, args, tuple(outputs))]
    x, width = args
    assert isinstance(width, int)
    end = width + tensors[outputs[1]].shape[1]
    return [OpNode(COLUMNS, (x, 0, width), (outputs[0],)), OpNode(COLUMNS, (x, width, end), (outputs[1],))]


def interpret(segment: ir.Segment) -> Joint:
    """The joint graph that costs are computed from: the base graph after all passes except unpacking."""
    return rewritten(base_graph(segment))


def rewritten(base: Joint) -> Joint:
    """Apply the recompute, storage and fusion passes to a base graph."""
    return fuse_ops(storage.apply_storage_dtypes(recompute_values(base)))


def base_graph(segment: ir.Segment) -> Joint:
    """The joint graph of a segment by the op rules, before any pass."""
    params = {p.name: SymbolicValue(p.name, Tensor(p.shape, p.dtype), p.grad) for p in segment.params}
    inputs = {i.name: SymbolicValue(i.name, Tensor(i.shape, i.dtype), i.grad) for i in segment.inputs}
    ops = ShapeOps()
    outputs: tuple[SymbolicValue, ...] = segment.function(ops, SimpleNamespace(**params), *inputs.values())
    assert len(outputs) == len(segment.outputs), f"{segment.kind} returns {len(outputs)} outputs"

    graph = _Backward(segment, ops.calls)
    draft = graph.draft
    draft.tensors |= {name: value.tensor for name, value in (params | inputs).items()}
    for output, value in zip(segment.outputs, outputs, strict=True):
        if output.grad:
            draft.tensors[gradient_of(output.name)] = value.tensor
            graph.give(value, gradient_of(output.name))
    for call in reversed(ops.calls):
        if any(value.name in graph.totals for value in call.outputs):
            graph.through(call) if isinstance(call, ModuleCall) else graph.backward(call)

    def gradients(values: dict[str, SymbolicValue]) -> list[tuple[str, str]]:
        return [(name, graph.total(value)) for name, value in values.items() if value.requires_grad]

    values = [value for call in ops.calls for value in call.outputs]
    draft.totals = {value.name: graph.totals[value.name] for value in values if value.name in graph.totals}
    draft.outputs = [value.name for value in outputs]
    draft.gradients, draft.weights = gradients(inputs), gradients(params)
    return draft.with_final_names()
