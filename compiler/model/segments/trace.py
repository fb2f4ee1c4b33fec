"""Traces a segment with torch into the joint graph of its forward and the backward that autograd derives.

`make_fx` under fake tensors runs the segment on the torch op table and then `torch.autograd.grad`. Our ops stay single
nodes because their gradients are ops too. Gradients of all intermediate values are requested as well, so that each gets
its name in the graph. Sizes are static, except R. Tensors have no storage, so any size can be traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compiler import ir
from compiler.ir.module import INPUT, TANGENT, Module
from compiler.ir.names import gradient_of
from compiler.model.segments.convert import ResultLabel, convert
from compiler.model.segments.joint import MODULE, Joint, arguments_of
from compiler.model.segments.torch_calls import compute

ROWS_HINT = 7  # any size for R but 0 and 1, which torch would specialise


class ModuleReplay(torch.autograd.Function):
    """Executes a traced module node by node, with the module's own backward."""

    @staticmethod
    def forward(ctx: Any, module: Module, x_TD: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        """x_TD and the parameters -> y_TD."""
        ctx.module, ctx.values = module, dict(zip((INPUT, *module.locals), (x_TD, *params), strict=True))
        compute(module.forward, ctx.values, x_TD.device)
        y_TD: torch.Tensor = ctx.values[module.y]
        return y_TD

    @staticmethod
    def backward(ctx: Any, d_y_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """d_y_TD -> the gradients of x and of each parameter."""
        module, values = ctx.module, ctx.values | {TANGENT: d_y_TD}
        compute(module.backward, values, d_y_TD.device)
        return (None, values[module.d_x], *(values[weight] for weight in module.weights))


class Recorder:
    """The torch op table. Records each result of each call as ((op, occurrence, output index), tensor)."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.calls: Counter[str] = Counter()
        self.results: list[tuple[tuple[str, int, int], torch.Tensor]] = []

    def module(self, module: Module, x_TD: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        """x_TD and the parameters of a traced module -> y_TD."""
        y_TD: torch.Tensor = ModuleReplay.apply(module, x_TD, *params)
        self.results.append(((MODULE, self.calls[MODULE], 0), y_TD))
        self.calls[MODULE] += 1
        return y_TD

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = getattr(self.ops, op)(*args)
            outputs = result if isinstance(result, tuple) else (result,)
            self.results += [((op, self.calls[op], index), tensor) for index, tensor in enumerate(outputs)]
            self.calls[op] += 1
            return result

        return call


def trace(segment: ir.Segment, ops: Any) -> Joint:
    """The base graph of a segment by autograd. `ops`: the table of `compiler.model.segments.torch_ops`."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    arguments = fake_arguments(segment, mode)
    names = list(arguments)
    labels: list[ResultLabel] = []

    def joint(*values: torch.Tensor) -> list[torch.Tensor | None]:
        """Return outputs, gradients of inputs and parameters, gradients of intermediate values, and these values, in
        the order of `labels`."""
        by_name = dict(zip(names, values, strict=True))
        for argument in arguments_of(segment):
            if argument.grad:
                by_name[argument.name] = by_name[argument.name].detach().requires_grad_()
        recorder = Recorder(ops)
        outputs = run(segment, recorder, by_name)
        leaves = [("gradient", i.name) for i in segment.inputs if i.grad]
        leaves += [("weight", p.name) for p in segment.params if p.grad]
        between = [(key, tensor) for key, tensor in recorder.results if tensor.requires_grad]
        differentiable = [  # empty for a frozen embedding
            (tensor, by_name[gradient_of(output.name)])
            for output, tensor in zip(segment.outputs, outputs, strict=True)
            if output.grad and tensor.requires_grad
        ]
        gradients = differentiable and torch.autograd.grad(
            [tensor for tensor, _ in differentiable],
            [*(by_name[name] for _, name in leaves), *(tensor for _, tensor in between)],
            [tangent for _, tangent in differentiable],
            allow_unused=True,
        )
        labels[:] = [ResultLabel("output", output.name) for output in segment.outputs]
        labels.extend(ResultLabel(role, name) for role, name in leaves)
        labels.extend(ResultLabel("between gradient", key=key) for key, _ in between)
        labels.extend(ResultLabel("between", key=key) for key, _ in recorder.results)
        return [*outputs, *gradients, *(tensor for _, tensor in recorder.results)]

    with mode:
        outputs = run(segment, Recorder(ops), arguments)
        tangents = {
            gradient_of(output.name): torch.empty_like(tensor)
            for output, tensor in zip(segment.outputs, outputs, strict=True)
            if output.grad
        }
        names += tangents
        graph = make_fx(joint)(*arguments.values(), *tangents.values())
    return convert(segment, graph.graph, names, labels)


def run(segment: ir.Segment, ops: Any, arguments: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Call the segment's function. `arguments`: parameters and inputs by name."""
    params = SimpleNamespace(**{param.name: arguments[param.name] for param in segment.params})
    outputs: tuple[torch.Tensor, ...] = segment.function(ops, params, *(arguments[i.name] for i in segment.inputs))
    return outputs


def fake_arguments(segment: ir.Segment, mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    """Fake tensors for parameters and inputs, by name. Those with R rows share one symbol for R."""
    arguments = arguments_of(segment)
    rows: Any = None
    if any("R" in argument.shape for argument in arguments):
        dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])  # type: ignore[var-annotated]
        rows = mode.from_tensor(torch.empty(ROWS_HINT), symbolic_context=dynamic).shape[0]
    with mode:
        return {
            argument.name: torch.empty(
                tuple(rows if extent == "R" else extent for extent in argument.shape),  # type: ignore[misc]
                dtype=getattr(torch, argument.dtype),
            )
            for argument in arguments
        }
