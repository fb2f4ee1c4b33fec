"""Registers the ops with torch's dispatcher as `torch.ops.dsc.*`, so that each is one node of a traced graph. Emitted
code does not need this.

The shapes and dtypes that an op returns, its gradient ops and what these read come from its rule
(`compiler.model.ops`). The implementation is the reference op of `runtime.ops`. Gradients of inputs and of weights are
separate ops, so that a joint graph can be cut between them, and each is traced only if it is needed.

A gradient has the shape and dtype of its argument of the forward. Its own arguments may not determine these, so in the
dispatcher it takes an extra argument, `like`: the arguments of the forward whose gradients it returns.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from compiler.ir.names import gradient_of
from compiler.model.ops import RULES, Extent, Gradient, Rule, Tensor
from runtime.ops import OPS

# Rules whose ops are torch's own. `split2` returns views.
TORCH: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "cat2": lambda a_TM, b_TN: torch.cat((a_TM, b_TN), dim=-1),
    "split2": lambda x_TM, width: torch.split(x_TM, [width, x_TM.shape[-1] - width], dim=-1),
}


@cache
def register() -> torch.library.Library:
    """Define every op once, with its implementation, shape function and autograd formula. The cache keeps the library
    alive.
    """
    library = torch.library.Library("dsc", "DEF")
    ours = {op: rule for op, rule in RULES.items() if op not in TORCH}
    for op, rule in ours.items():
        check_names(op, rule)
        library.define(op + _schema(op))
        library.impl(op, OPS[op], "CompositeExplicitAutograd")
        torch.library.register_fake(f"dsc::{op}", _fake(rule), lib=library)
    for op in dict.fromkeys(gradient.op for rule in ours.values() for gradient in rule.gradients if gradient.op):
        library.define(op + _schema(op).replace(") ->", ", *, Tensor[] like) ->"))
        library.impl(op, _without_like(op), "CompositeExplicitAutograd")
        torch.library.register_fake(f"dsc::{op}", _fake_gradient, lib=library)
    for op, rule in ours.items():
        setup_context, backward = autograd(rule)
        torch.library.register_autograd(f"dsc::{op}", backward, setup_context=setup_context, lib=library)
    return library


def ops() -> SimpleNamespace:
    """The op table on torch: each op that a layer may call, without its hidden outputs."""
    register()
    return SimpleNamespace(**{op: TORCH.get(op) or _visible(op, rule) for op, rule in RULES.items()})


def _visible(op: str, rule: Rule) -> Callable[..., Any]:
    function = getattr(torch.ops.dsc, op)
    if not rule.hidden:
        return function
    return lambda *args: _one_or_all(function(*args)[: rule.visible])


def _one_or_all(values: tuple[Any, ...]) -> Any:
    return values if len(values) > 1 else values[0]


# ---------------------------------------------------------------- schemas, fake implementations, autograd


def _schema(op: str) -> str:
    return torch.library.infer_schema(OPS[op], mutates_args=())


def check_names(op: str, rule: Rule) -> None:
    """Assert that the parameters of the reference functions have the names of the rule's arguments, in order."""
    computed = ((gradient.op, gradient.reads) for gradient in rule.gradients if gradient.op)
    for name, reads in ((op, rule.args), *computed):
        names = [re.sub("_[A-Z][A-Za-z0-9]*$", "", parameter) for parameter in inspect.signature(OPS[name]).parameters]
        expected = [
            parameter if isinstance(read, Extent) else _parameter(read)
            for read, parameter in zip(reads, names, strict=False)
        ]
        matches = len(reads) == len(names) and expected == names
        assert matches, f"{name} takes {names}; the rule of {op} passes it {reads}"


def _parameter(read: str) -> str:
    """The parameter of a reference function, without its shape suffix, for a name in a rule: `dy` for `d_y`."""
    return re.sub("^d_", "d", read)


def abstract(value: Any) -> Any:
    """The shape and dtype of a torch tensor, as rules take them. Constants are returned unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return Tensor(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _fake(rule: Rule) -> Callable[..., Any]:
    def fake(*args: Any) -> Any:
        example = next(arg for arg in args if isinstance(arg, torch.Tensor))
        tensors = rule.infer(*map(abstract, args))
        return _one_or_all(tuple(example.new_empty(t.shape, dtype=getattr(torch, t.dtype)) for t in tensors))

    return fake


def _fake_gradient(*_: Any, like: list[torch.Tensor]) -> Any:
    return _one_or_all(tuple(argument.new_empty(argument.shape) for argument in like))


def _without_like(op: str) -> Callable[..., Any]:
    return lambda *args, like: OPS[op](*args)


def autograd(rule: Rule) -> tuple[Callable[..., None], Callable[..., tuple[torch.Tensor | None, ...]]]:
    """(setup_context, backward) of a rule, for `torch.library.register_autograd`.

    Only values that a needed gradient reads are saved.
    """

    # torch passes these arguments by keyword, under exactly these names
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        values = dict(zip((*rule.args, *rule.outputs), (*inputs, *outputs), strict=True))
        ctx.wanted = _needed_gradients(rule, ctx.needs_input_grad[: len(inputs)])  # torch adds an argument of its own
        ctx.tangents = {gradient_of(name): (values[name].shape, values[name].dtype) for name in rule.differentiable}
        reads = {read for gradient in ctx.wanted for read in (*gradient.reads, *gradient.gives)} - ctx.tangents.keys()
        saved = {
            read: values[read.argument].shape[read.dim] if isinstance(read, Extent) else values[read]
            for read in sorted(reads, key=str)
        }
        ctx.names = [read for read, value in saved.items() if isinstance(value, torch.Tensor)]
        ctx.constants = {read: value for read, value in saved.items() if not isinstance(value, torch.Tensor)}
        ctx.save_for_backward(*(saved[name] for name in ctx.names))
        ctx.mark_non_differentiable(*(values[name] for name in rule.outputs if name not in rule.differentiable))
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        values = dict(zip((gradient_of(name) for name in rule.outputs), tangents, strict=True))
        arrived = [tangent for tangent in tangents if tangent is not None]
        if not arrived:
            return (None,) * len(rule.args)
        for name, (shape, dtype) in ctx.tangents.items():
            if values[name] is None:  # an output nobody used
                values[name] = arrived[0].new_zeros(shape, dtype=dtype)
        values |= ctx.constants | dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        gradients: dict[str, torch.Tensor] = {}
        for gradient in ctx.wanted:
            args = [values[read] for read in gradient.reads]
            if not gradient.op:
                gradients |= dict.fromkeys(gradient.gives, args[0])
                continue
            result = getattr(torch.ops.dsc, gradient.op)(*args, like=[values[name] for name in gradient.gives])
            gradients |= zip(gradient.gives, result if isinstance(result, tuple) else (result,), strict=True)
        names = rule.args[: len(ctx.needs_input_grad)]  # optional arguments may be left out
        return tuple(
            gradients.get(name) if needed else None for name, needed in zip(names, ctx.needs_input_grad, strict=True)
        )

    return setup_context, backward


def _needed_gradients(rule: Rule, needed: tuple[bool, ...]) -> tuple[Gradient, ...]:
    """The gradient ops of a rule that return a gradient that is needed."""
    names = {name for name, need in zip(rule.args, needed, strict=False) if need}  # optional ones may be left out
    return tuple(gradient for gradient in rule.gradients if names.intersection(gradient.gives))
