"""The ops in torch's dispatcher, as `torch.ops.dsc.*`: single nodes of a traced graph. Emitted code does not need this.

`ops()` is the table of functions a layer is traced with.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from runtime.ops import OPS
from runtime.ops.fakes import FAKES
from runtime.ops.formulas import FORMULAS, autograd


@cache
def register() -> torch.library.Library:
    """Define every op with its implementation, shape rule and autograd formula, once. The library lives as long as the
    cache holds it.
    """
    library = torch.library.Library("dsc", "DEF")
    for name in FAKES:  # a fused op has none: it comes into a graph that is traced already
        function = OPS[name]
        accumulator = name.endswith("_") and next(iter(function.__annotations__))
        schema = torch.library.infer_schema(function, mutates_args=(accumulator,) if accumulator else ())
        library.define(name + schema)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dsc::{name}", FAKES[name], lib=library)
    for name, formula in FORMULAS.items():
        setup_context, backward = autograd(formula)
        torch.library.register_autograd(f"dsc::{name}", backward, setup_context=setup_context, lib=library)
    return library


def ops() -> SimpleNamespace:
    """The torch table: each op by its name, without the outputs that only its backward reads.

    `add`, `cat2` and `split2` are torch's own; the halves of `split2` are views.
    """
    register()
    dsc = torch.ops.dsc

    def rmsnorm(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
        return dsc.rmsnorm(x_TD, w_D, eps)[0]

    def head_rmsnorm(x_TW: Tensor, w_C: Tensor, eps: float) -> Tensor:
        return dsc.head_rmsnorm(x_TW, w_C, eps)[0]

    def gqa_attention(q: Tensor, k: Tensor, v: Tensor, *sizes: int | float) -> Tensor:
        return dsc.gqa_attention(q, k, v, *sizes)[0]

    def mla_attention(q: Tensor, kv: Tensor, k_rope: Tensor, *sizes: int | float) -> Tensor:
        return dsc.mla_attention(q, kv, k_rope, *sizes)[0]

    def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        return dsc.cross_entropy(logits_TV, targets_T)[0]

    def cat2(a_TM: Tensor, b_TN: Tensor) -> Tensor:
        return torch.cat((a_TM, b_TN), dim=-1)

    def split2(x_TM: Tensor, at: int) -> tuple[Tensor, ...]:
        return torch.split(x_TM, [at, x_TM.shape[-1] - at], dim=-1)

    return SimpleNamespace(
        add=torch.add,
        cat2=cat2,
        split2=split2,
        cross_entropy=cross_entropy,
        embedding=dsc.embedding,
        gated_swiglu=dsc.gated_swiglu,
        gqa_attention=gqa_attention,
        grouped_linear=dsc.grouped_linear,
        head_rmsnorm=head_rmsnorm,
        linear=dsc.linear,
        linear_wide=dsc.linear_wide,
        mla_attention=mla_attention,
        permute=dsc.permute,
        permute_placed=dsc.permute_placed,
        rmsnorm=rmsnorm,
        route=dsc.route,
        sequence_balance=dsc.sequence_balance,
        swiglu=dsc.swiglu,
        unpermute=dsc.unpermute,
    )
