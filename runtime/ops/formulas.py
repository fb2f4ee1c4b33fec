"""The autograd formula of every op, as data: which op gives which gradients from what.

Input and weight gradients are separate ops, so that a joint graph can be cut between them; neither is traced unless it
is asked for, and nothing is kept that no wanted gradient reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gradient:
    """An op of the backward. `reads`, in call order: arguments or outputs of the forward, `d_<output>` tangents, or
    (argument, dim) for an extent. `gives`: the arguments whose gradients it returns, in order.
    """

    op: str
    reads: tuple[str | tuple[str, int], ...]
    gives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Formula:
    """Names of an op's arguments and outputs in order, and its gradients. `differentiable` outputs have tangents."""

    args: tuple[str, ...]
    outputs: tuple[str, ...]
    differentiable: tuple[str, ...]
    gradients: tuple[Gradient, ...]


GQA = ("q", "k", "v")
GQA_SIZES = ("sequence", "heads", "kv_heads", "theta")
MLA = ("q", "kv", "k_rope")
MLA_SIZES = ("sequence", "heads", "nope", "rope", "value", "theta")
PERMUTED = (
    Gradient("permute_dgrad", ("d_rows", "order", ("expert", 1)), ("x",)),
    Gradient("permute_gate_dgrad", ("d_row_gate", "order", ("expert", 1)), ("gate",)),
)

FORMULAS: dict[str, Formula] = {
    "linear": Formula(
        ("x", "w"),
        ("y",),
        ("y",),
        (Gradient("linear_dgrad", ("d_y", "w"), ("x",)), Gradient("linear_wgrad", ("d_y", "x"), ("w",))),
    ),
    "linear_wide": Formula(
        ("x", "w"),
        ("y",),
        ("y",),
        (Gradient("linear_wide_dgrad", ("d_y", "w"), ("x",)), Gradient("linear_wide_wgrad", ("d_y", "x"), ("w",))),
    ),
    "rmsnorm": Formula(
        ("x", "w", "eps"),
        ("y", "rstd"),
        ("y",),
        (
            Gradient("rmsnorm_dgrad", ("d_y", "x", "w", "rstd"), ("x",)),
            Gradient("rmsnorm_wgrad", ("d_y", "x", "rstd"), ("w",)),
        ),
    ),
    "head_rmsnorm": Formula(
        ("x", "w", "eps"),
        ("y", "rstd"),
        ("y",),
        (
            Gradient("head_rmsnorm_dgrad", ("d_y", "x", "w", "rstd"), ("x",)),
            Gradient("head_rmsnorm_wgrad", ("d_y", "x", "rstd"), ("w",)),
        ),
    ),
    "gqa_attention": Formula(
        (*GQA, *GQA_SIZES),
        ("o", "lse"),
        ("o",),
        (Gradient("gqa_attention_dgrad", ("d_o", *GQA, "o", "lse", *GQA_SIZES), GQA),),
    ),
    "mla_attention": Formula(
        (*MLA, *MLA_SIZES),
        ("o", "lse"),
        ("o",),
        (Gradient("mla_attention_dgrad", ("d_o", *MLA, "o", "lse", *MLA_SIZES), MLA),),
    ),
    "route": Formula(
        ("logits", "bias", "softmax", "groups", "top_groups", "top_k", "normalize", "scale"),
        ("gate", "expert"),
        ("gate",),
        (Gradient("route_dgrad", ("d_gate", "logits", "expert", "softmax", "normalize", "scale"), ("logits",)),),
    ),
    "sequence_balance": Formula(
        ("logits", "expert", "sequence", "softmax"),
        ("loss",),
        ("loss",),
        (Gradient("sequence_balance_dgrad", ("d_loss", "logits", "expert", "sequence", "softmax"), ("logits",)),),
    ),
    "permute": Formula(
        ("x", "gate", "expert", "num_experts"),
        ("rows", "row_gate", "order", "counts"),
        ("rows", "row_gate"),
        PERMUTED,
    ),
    "permute_placed": Formula(
        ("x", "gate", "expert", "slots"),
        ("rows", "row_gate", "order", "counts"),
        ("rows", "row_gate"),
        PERMUTED,
    ),
    "unpermute": Formula(
        ("y", "order", "top_k"),
        ("sum",),
        ("sum",),
        (Gradient("unpermute_dgrad", ("d_sum", "order", "top_k"), ("y",)),),
    ),
    "grouped_linear": Formula(
        ("x", "w", "offsets"),
        ("y",),
        ("y",),
        (
            Gradient("grouped_linear_dgrad", ("d_y", "w", "offsets"), ("x",)),
            Gradient("grouped_linear_wgrad", ("d_y", "x", "offsets", ("w", 0)), ("w",)),
        ),
    ),
    "swiglu": Formula(("h",), ("y",), ("y",), (Gradient("swiglu_dgrad", ("d_y", "h"), ("h",)),)),
    "gated_swiglu": Formula(
        ("h", "gate"), ("y",), ("y",), (Gradient("gated_swiglu_dgrad", ("d_y", "h", "gate"), ("h", "gate")),)
    ),
    "embedding": Formula(
        ("tokens", "w"), ("h",), ("h",), (Gradient("embedding_wgrad", ("d_h", "tokens", ("w", 0)), ("w",)),)
    ),
    "cross_entropy": Formula(
        ("logits", "targets"),
        ("loss", "lse"),
        ("loss",),
        (Gradient("cross_entropy_dgrad", ("d_loss", "logits", "targets", "lse"), ("logits",)),),
    ),
}


def autograd(formula: Formula) -> tuple[Callable[..., None], Callable[..., tuple[Tensor | None, ...]]]:
    """(setup_context, backward) of a formula, for `torch.library.register_autograd`."""

    # torch passes these arguments by keyword, under exactly these names
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        values = dict(zip((*formula.args, *formula.outputs), (*inputs, *outputs), strict=True))
        ctx.wanted = _wanted(formula, ctx.needs_input_grad[: len(inputs)])  # torch adds an argument of its own
        ctx.tangents = {f"d_{name}": (values[name].shape, values[name].dtype) for name in formula.differentiable}
        reads = {read: None for gradient in ctx.wanted for read in gradient.reads if read not in ctx.tangents}
        kept = {read: values[read] if isinstance(read, str) else values[read[0]].shape[read[1]] for read in reads}
        ctx.tensor_names = [name for name, value in kept.items() if isinstance(value, Tensor)]
        ctx.constants = {name: value for name, value in kept.items() if not isinstance(value, Tensor)}
        ctx.save_for_backward(*(kept[name] for name in ctx.tensor_names))
        ctx.mark_non_differentiable(*(values[name] for name in formula.outputs if name not in formula.differentiable))
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        values = dict(zip((f"d_{name}" for name in formula.outputs), tangents, strict=True))
        arrived = [tangent for tangent in tangents if tangent is not None]
        if not arrived:
            return (None,) * len(formula.args)
        for name, (shape, dtype) in ctx.tangents.items():
            if values[name] is None:  # an output nobody used
                values[name] = arrived[0].new_zeros(shape, dtype=dtype)
        values |= ctx.constants | dict(zip(ctx.tensor_names, ctx.saved_tensors, strict=True))
        given: dict[str, Tensor] = {}
        for gradient in ctx.wanted:
            result = getattr(torch.ops.dsc, gradient.op)(*(values[read] for read in gradient.reads))
            given |= dict(zip(gradient.gives, result if isinstance(result, tuple) else (result,), strict=True))
        return tuple(
            given.get(name) if needed else None for name, needed in zip(formula.args, ctx.needs_input_grad, strict=True)
        )

    return setup_context, backward


def _wanted(formula: Formula, needed: tuple[bool, ...]) -> tuple[Gradient, ...]:
    """The gradients of `formula` that give anything an argument needs."""
    names = {name for name, need in zip(formula.args, needed, strict=True) if need}
    return tuple(gradient for gradient in formula.gradients if names.intersection(gradient.gives))
