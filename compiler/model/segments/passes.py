"""The table of fusion passes: each pattern, its replacement, and how often a segment has it. No torch.

Passes are grouped by names that a run can turn off (`unfused`), except `logits`, which a run turns on (`recompute`).
Passes of one name are applied in order, larger patterns first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from compiler.ir import Segment
from compiler.ir.names import gradient_of
from compiler.model.segments.joint import OpNode
from compiler.model.segments.pass_facts import (
    adds_expert_rows,
    can_quantise_latents,
    gets_packed,
    has_biases,
    has_pre,
    has_slots,
    has_unknown_matches,
    has_wide_norms,
    latent,
    logits,
    num_normed_sums,
    quantised_norms,
    reads_router_input,
    recomputes_activation,
    requantises_attention,
    residual,
    routes_in_one_op,
    saves_swiglu_input,
    sends_packed,
    swiglus,
)


@dataclass(frozen=True)
class Pass:
    """Replaces the nodes `find` by the nodes `make`.

    Arguments and outputs of `find` are pattern names; each stands for one value or constant throughout. No other node
    may read a value that `make` does not return. The nodes that one node replaces belong to one function, F, I or W,
    unless `may_recompute` is set.
    """

    find: tuple[OpNode, ...]
    make: tuple[OpNode, ...]
    matches: Callable[[Segment], int | None]  # number of matches; None if the segment alone does not determine it
    may_recompute: bool = False  # whether `make` may compute values of another function again
    applies: Callable[[Segment], bool] = lambda segment: True  # whether there is a kernel for the segment's sizes


_ROUTING = ("softmax", "groups", "top_groups", "top_k", "normalize", "scale")


def _activation(op: str, gate_inputs: tuple[str, ...]) -> tuple[Pass, ...]:
    """Passes for SwiGLU and the quantisation around it. `gate_inputs`: the gate of a gated one, () for a plain one."""
    gated, inputs = bool(gate_inputs), ("h", *gate_inputs)
    activation = OpNode(op, inputs, ("y",)), OpNode("quantise", ("y",), ("q",))
    gradients = ("dh", *(gradient_of(name) for name in gate_inputs))
    return (
        Pass(
            find=(*activation, OpNode("requantise", ("q",), ("columns",))),
            make=(OpNode(f"{op}_quantise_requantise", inputs, ("columns",)),),
            matches=lambda segment: swiglus(segment, gated) and saves_swiglu_input(segment),
        ),
        Pass(
            find=(*activation, OpNode("quantise", ("h",), ("kept",))),
            make=(OpNode(f"{op}_quantise_kept", inputs, ("q", "kept")),),
            matches=lambda segment: swiglus(segment, gated) and saves_swiglu_input(segment),
        ),
        Pass(
            find=activation,
            make=(OpNode(f"{op}_quantise", inputs, ("q",)),),
            matches=lambda s: swiglus(s, gated) * (0 if saves_swiglu_input(s) else 1 + recomputes_activation(s)),
        ),
        Pass(
            find=(
                OpNode(f"{op}_dgrad", ("dy", *inputs), gradients),
                OpNode("quantise_both", ("dh",), ("q", "columns")),
            ),
            make=(OpNode(f"{op}_dgrad_quantise_both", ("dy", *inputs), ("q", "columns", *gradients[1:])),),
            matches=lambda segment: swiglus(segment, gated) and not has_biases(segment),
        ),
    )


# ---------------------------------------------------------------- attention

_LATENT = ("queries", "kv", "k_rope", "sequence", "heads", "nope", "rope", "value", "theta")


def _latent_gradient(from_copy: bool, quantised: bool) -> Pass:
    """The gradient of latent attention. `from_copy`: it reads the saved lower-precision output; `quantised`: it returns
    the gradient of keys and values quantised by rows and by columns."""
    first = (OpNode("dequantise", ("kept",), ("o",)),) if from_copy else ()
    gradients = ("d_queries", "d_kv", "d_k_rope")
    last = (OpNode("quantise_both", ("d_kv",), ("q", "columns")),) if quantised else ()
    tensors, sizes = ("do", *_LATENT[:3]), _LATENT[3:]
    op = f"{'dequantise_' * from_copy}mla_attention_dgrad{'_quantise_both' * quantised}"
    return Pass(
        find=(*first, OpNode("mla_attention_dgrad", (*tensors, "o", "lse", *sizes), gradients), *last),
        make=(
            OpNode(
                op,
                (*tensors, "kept" if from_copy else "o", "lse", *sizes),
                (gradients[0], *(("q", "columns") if quantised else gradients[1:2]), gradients[2]),
            ),
        ),
        matches=lambda segment: (
            requantises_attention(segment, from_copy=True) == from_copy
            and (quantised or not can_quantise_latents(segment))
        ),
        applies=lambda segment: can_quantise_latents(segment) if quantised else bool(latent(segment)),
    )


# ---------------------------------------------------------------- a norm's gradient


def _parts(segment: Segment) -> str:
    """The prefix of the fused gradient of a block's norm. It names the sum that gives dy; "" if dy is not a sum."""
    if segment.kind == "router":
        return "permuted_" if "route" in segment.fused else "sum_"  # of rows and of the router's product
    several = not {"kv_down", "kv", "beta"}.isdisjoint(param.name for param in segment.params)
    return "sum_" if several else ""  # of the several products that read the norm


def _remade(segment: Segment) -> str:
    """The suffix of the fused op where the backward recomputes a block's norm for W only; "" where it does not, or
    where products of I read it, too. A router that returns its logits does not recompute their product."""
    products = {param.name for param in segment.params} & {"qkv", "up"}
    outputs = {output.name for output in segment.outputs}
    if "scores" in outputs and routes_in_one_op(segment):
        is_again = "rmsnorm" in segment.recompute or (segment.recomputes_all and "x" not in outputs)
    else:
        is_again = "rmsnorm" in segment.recompute and not segment.recomputes_all
    if not is_again or not products.isdisjoint(segment.recompute):
        return ""
    quantised = segment.kind != "router" and "operands" in dict(segment.stored) and "quantise" in segment.fused
    return "_again_quantise" if quantised else "_again"


# prefix → (nodes that compute dy, values that they read)
_SUMS: dict[str, tuple[tuple[OpNode, ...], tuple[str, ...]]] = {
    "permuted_": (
        (OpNode("permute_dgrad_add", ("drows", "order", "top_k", "other", "more"), ("dy",)),),
        ("drows", "order", "top_k", "other", "more"),
    ),
    "sum_": ((OpNode("add", ("a", "b"), ("dy",)),), ("a", "b")),
    "": ((), ("dy",)),
}
_NORMS = {"_again_quantise": "rmsnorm_quantise", "_again": "rmsnorm", "": ""}


def _norm_gradient(parts: str, remade: str) -> Pass:
    """The gradient of a norm plus that of the residual, fused with the sum before it (`parts`) and with the recomputed
    norm (`remade`)."""
    sums, reads = _SUMS[parts]
    norm = (OpNode(_NORMS[remade], ("x", "w", "eps"), ("y", "rstd")),) if remade else ()
    last = OpNode("rmsnorm_dgrad_add", ("dy", "x", "w", "rstd", "add"), ("dx",))
    args = (*reads, "x", "w", "eps" if remade else "rstd", "add")
    results = tuple(value for node in (*sums, *norm, last) for value in node.outputs)
    return Pass(
        find=(*sums, *norm, last),
        make=(OpNode(f"{parts}rmsnorm{remade}_dgrad_add", args, results),),
        matches=lambda segment: (
            "residual_norm" in segment.fused
            and has_pre(segment)
            and _parts(segment) == parts
            and _remade(segment) == remade
        ),
    )


# ---------------------------------------------------------------- the head


def _logits(trained: bool, part: bool) -> Pass:
    """The product of the head, its loss and their gradients, block by block. `part`: for one shard of the
    vocabulary."""
    op = "cross_entropy_part" if part else "cross_entropy"
    results, tangents = (("lse", "picked"), ("dlse", "dpicked")) if part else (("loss", "lse"), ("dloss",))
    read = (*tangents, "h", "w", "targets", "lse")
    return Pass(
        find=(
            OpNode("linear", ("h", "w"), ("logits",)),
            OpNode(op, ("logits", "targets"), results),
            OpNode(f"{op}_dgrad", (*tangents, "logits", "targets", "lse"), ("dlogits",)),
            OpNode("linear_dgrad", ("dlogits", "w"), ("dh",)),
            *((OpNode("linear_wgrad", ("dlogits", "h"), ("dw",)),) if trained else ()),
        ),
        make=(
            OpNode(f"linear_{op}", ("h", "w", "targets"), results),
            OpNode(f"linear_{op}_dgrad", read, ("dh",)),
            *((OpNode(f"linear_{op}_wgrad", read, ("dw",)),) if trained else ()),
        ),
        matches=lambda segment: logits(segment, trained, part),
        may_recompute=True,
    )


# ---------------------------------------------------------------- the table

_ROUTED = ("gate", "expert")
_PERMUTED = ("rows", "row_gate", "order", "counts")

PASSES: dict[str, tuple[Pass, ...]] = {
    "residual_norm": (
        Pass(
            find=(OpNode("add", ("h", "x"), ("sum",)), OpNode("rmsnorm", ("sum", "w", "eps"), ("y", "rstd"))),
            make=(OpNode("add_rmsnorm", ("h", "x", "w", "eps"), ("sum", "y", "rstd")),),
            matches=num_normed_sums,
        ),
        Pass(
            find=(OpNode("rmsnorm_dgrad", ("dy", "x", "w", "rstd"), ("dx",)), OpNode("add", ("dx", "other"), ("sum",))),
            make=(OpNode("rmsnorm_dgrad_add", ("dy", "x", "w", "rstd", "other"), ("sum",)),),
            matches=residual,
        ),
    ),
    "route": (
        Pass(
            find=(
                OpNode("route", ("logits", "bias", *_ROUTING), _ROUTED),
                OpNode("permute", ("x", "gate", "expert", "experts"), _PERMUTED),
            ),
            make=(OpNode("route_permute", ("logits", "bias", "x", None, *_ROUTING), (*_ROUTED, *_PERMUTED)),),
            matches=lambda segment: routes_in_one_op(segment) and not has_slots(segment),
        ),
        Pass(
            find=(
                OpNode("route", ("logits", "bias", *_ROUTING), _ROUTED),
                OpNode("permute_placed", ("x", "gate", "expert", "slots"), _PERMUTED),
            ),
            make=(OpNode("route_permute", ("logits", "bias", "x", "slots", *_ROUTING), (*_ROUTED, *_PERMUTED)),),
            matches=lambda segment: routes_in_one_op(segment) and has_slots(segment),
        ),
        Pass(
            find=(
                OpNode("permute_dgrad", ("drows", "order", "top_k"), ("dx",)),
                OpNode("add", ("other", "dx"), ("both",)),
                OpNode("add", ("both", "more"), ("sum",)),
            ),
            make=(OpNode("permute_dgrad_add", ("drows", "order", "top_k", "other", "more"), ("sum",)),),
            matches=lambda segment: reads_router_input(segment, shared=True),
        ),
        Pass(
            find=(
                OpNode("permute_dgrad", ("drows", "order", "top_k"), ("dx",)),
                OpNode("add", ("other", "dx"), ("sum",)),
            ),
            make=(OpNode("permute_dgrad_add", ("drows", "order", "top_k", "other", None), ("sum",)),),
            matches=lambda segment: reads_router_input(segment, shared=False),
        ),
    ),
    "join": (
        Pass(
            find=(
                OpNode("add", ("h", "shared"), ("both",)),
                OpNode("unpermute", ("rows", "order", "top_k"), ("routed",)),
                OpNode("add", ("both", "routed"), ("sum",)),
            ),
            make=(OpNode("unpermute_add", ("h", "shared", "rows", "order", "top_k"), ("sum",)),),
            matches=lambda segment: adds_expert_rows(segment, shared=True),
        ),
        Pass(
            find=(
                OpNode("unpermute", ("rows", "order", "top_k"), ("routed",)),
                OpNode("add", ("h", "routed"), ("sum",)),
            ),
            make=(OpNode("unpermute_add", ("h", None, "rows", "order", "top_k"), ("sum",)),),
            matches=lambda segment: adds_expert_rows(segment, shared=False),
        ),
    ),
    "logits": tuple(_logits(trained, part) for trained in (True, False) for part in (False, True)),
    "quantise": (
        *_activation("swiglu", ()),
        *_activation("gated_swiglu", ("gate",)),
        Pass(
            find=(
                OpNode("add_rmsnorm", ("h", "x", "w", "eps"), ("sum", "y", "rstd")),
                OpNode("quantise", ("y",), ("q",)),
            ),
            make=(OpNode("add_rmsnorm_quantise", ("h", "x", "w", "eps"), ("sum", "q", "rstd")),),
            matches=lambda s: num_normed_sums(s) if s.kind == "dense" and "residual_norm" in s.fused else 0,
        ),
        Pass(
            find=(OpNode("rmsnorm", ("x", "w", "eps"), ("y", "rstd")), OpNode("quantise", ("y",), ("q",))),
            make=(OpNode("rmsnorm_quantise", ("x", "w", "eps"), ("q", "rstd")),),
            matches=quantised_norms,
        ),
        Pass(
            find=(
                OpNode("add_rmsnorm", ("h", "x", "w", "eps"), ("sum", "y", "rstd")),
                OpNode("quantise", ("y",), ("q",)),
            ),
            make=(OpNode("add_rmsnorm_quantise_wide", ("h", "x", "w", "eps"), ("sum", "y", "q", "rstd")),),
            matches=lambda s: sends_packed(s) and has_pre(s) and "residual_norm" in s.fused,
        ),
        Pass(
            find=(OpNode("rmsnorm", ("x", "w", "eps"), ("y", "rstd")), OpNode("quantise", ("y",), ("q",))),
            make=(OpNode("rmsnorm_quantise_wide", ("x", "w", "eps"), ("y", "q", "rstd")),),
            matches=lambda s: has_wide_norms(s) and has_pre(s) and "residual_norm" not in s.fused,
        ),
        Pass(
            find=(
                OpNode("dequantise", ("kept",), ("x",)),
                OpNode("quantise", ("x",), ("q",)),
                OpNode("requantise", ("q",), ("columns",)),
            ),
            make=(OpNode("dequantise_quantise_requantise", ("kept",), ("columns",)),),
            matches=lambda segment: requantises_attention(segment, from_copy=True),
        ),
        Pass(
            find=(OpNode("quantise", ("x",), ("q",)), OpNode("requantise", ("q",), ("columns",))),
            make=(OpNode("quantise_requantise", ("x",), ("columns",)),),
            matches=lambda segment: (
                None if has_unknown_matches(segment) else requantises_attention(segment, from_copy=False)
            ),
        ),
        Pass(  # the saved copy is quantised first
            find=(OpNode("quantise", ("x",), ("kept",)), OpNode("quantise", ("x",), ("q",))),
            make=(OpNode("quantise_kept", ("x",), ("q", "kept")),),
            matches=lambda segment: requantises_attention(segment, from_copy=True),
        ),
        Pass(
            find=(OpNode("mla_attention", _LATENT, ("o", "lse")), OpNode("quantise_kept", ("o",), ("q", "kept"))),
            make=(OpNode("mla_attention_quantise_kept", _LATENT, ("q", "kept", "lse")),),
            matches=lambda segment: requantises_attention(segment, from_copy=True),
            applies=lambda segment: bool(latent(segment)) and "peaks" not in latent(segment),
        ),
        *(
            _latent_gradient(from_copy, quantised)
            for from_copy, quantised in ((True, True), (False, True), (True, False))
        ),
        Pass(  # copies of quantised rows
            find=(OpNode("quantise", ("dy",), ("q",)), OpNode("unpermute_dgrad", ("q", "order", "top_k"), ("drows",))),
            make=(OpNode("unpermute_dgrad_quantise", ("dy", "order", "top_k"), ("drows",)),),
            matches=gets_packed,
        ),
    ),
    "norm_gradient": tuple(
        _norm_gradient(parts, remade) for parts, remade in product(_SUMS, _NORMS) if parts or remade
    ),
}
