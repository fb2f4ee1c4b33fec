"""Library functions that do an op's work: each row builds, from the op's arguments, a call that does that work.

Inputs are prepared as the library needs them: rows sorted by expert, heads split and rotated, scales in its layout. So
it is timed at its best. One that is not installed, or does not support this device or these sizes, raises, and its
column has the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.ops.causal import angles, rotate, split_heads
from runtime.ops.quantise import dequantise

Call = Callable[[], Any]
Peer = Callable[..., Call]
BF16 = torch.bfloat16

# ---------------------------------------------------------------- products


def grouped_mm(x: Tensor, w: Tensor, offsets: Tensor) -> Call:
    turned = w.transpose(1, 2)
    return lambda: torch._grouped_mm(x, turned, offs=offsets)


def grouped_mm_dgrad(dy: Tensor, w: Tensor, offsets: Tensor) -> Call:
    return lambda: torch._grouped_mm(dy, w, offs=offsets)


def grouped_mm_wgrad(acc: Tensor, dy: Tensor, x: Tensor, offsets: Tensor) -> Call:
    """torch._grouped_mm for the weight gradient, without the accumulation, which it cannot do."""
    return lambda: torch._grouped_mm(dy.t(), x, offs=offsets)


def grouped_mm_of_fp8(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor, offsets: Tensor) -> Call:
    return grouped_mm(dequantise(x, xs).to(BF16), dequantise(w, ws).to(BF16), offsets)


def grouped_mm_of_fp8_wgrad(acc: Tensor, dy: Tensor, dys: Tensor, x: Tensor, xs: Tensor, offsets: Tensor) -> Call:
    dy_turned, x_turned = (dequantise(data, scales).to(BF16).t().contiguous() for data, scales in ((dy, dys), (x, xs)))
    return grouped_mm_wgrad(acc, dy_turned, x_turned, offsets)


def bf16_product(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor) -> Call:
    a, b = dequantise(x, xs).to(BF16), dequantise(w, ws).to(BF16)
    return lambda: a @ b.t()


def bf16_wgrad(acc: Tensor, dy: Tensor, dys: Tensor, x: Tensor, xs: Tensor) -> Call:
    """The BF16 product for the weight gradient, without the accumulation."""
    return bf16_product(dy, dys, x, xs)


def scaled_mm(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor) -> Call:
    """One scale per tensor: the speed of cuBLAS on the same bytes without tiles."""
    scale = torch.ones((), device=x.device)
    return lambda: torch._scaled_mm(x, w.t(), scale_a=scale, scale_b=scale, out_dtype=BF16, use_fast_accum=False)


def scaled_mm_tiles(x: Tensor, xs: Tensor, w: Tensor, ws: Tensor) -> Call:
    """cuBLAS's own product of 1×128 by 128×128 tiles."""
    return lambda: torch._scaled_mm(x, w.t(), scale_a=xs, scale_b=ws.t(), out_dtype=BF16)


def scaled_mm_wgrad(acc: Tensor, dy: Tensor, dys: Tensor, x: Tensor, xs: Tensor) -> Call:
    return scaled_mm(dy, dys, x, xs)


def its_product(h: Tensor, w: Tensor, targets: Tensor) -> Call:
    out = torch.empty(len(h), len(w), dtype=h.dtype, device=h.device)
    return lambda: torch.mm(h, w.t(), out=out)


def its_products_dgrad(dloss: Tensor, h: Tensor, w: Tensor, targets: Tensor, lse: Tensor) -> Call:
    """The product for the logits again, and that for the gradient of h."""
    again, dlogits = its_product(h, w, targets), torch.randn(len(h), len(w), dtype=h.dtype, device=h.device)
    dh = torch.empty_like(h)
    return lambda: (again(), torch.mm(dlogits, w, out=dh))


def its_products_wgrad(acc: Tensor, dloss: Tensor, h: Tensor, w: Tensor, targets: Tensor, lse: Tensor) -> Call:
    again, dlogits = its_product(h, w, targets), torch.randn(len(h), len(w), dtype=h.dtype, device=h.device)
    dw = torch.empty_like(w)
    return lambda: (again(), torch.mm(dlogits.t(), h, out=dw))


# ---------------------------------------------------------------- attention


def mla_heads(
    q: Tensor, kv: Tensor, k_rope: Tensor, sequence: int, heads: int, nope: int, rope: int, value: int, theta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, H, S, nope + rope] and v [B, H, S, value], rotated."""
    turn = angles(sequence, rope, theta, q.dtype, q.device)
    q, kv = split_heads(q, sequence, heads), split_heads(kv, sequence, heads)
    k_rope = rotate(split_heads(k_rope.float(), sequence, 1), turn).to(q.dtype).expand(-1, heads, -1, -1)
    q_rope = rotate(q[..., nope:].float(), turn).to(q.dtype)
    parts = torch.cat([q[..., :nope], q_rope], -1), torch.cat([kv[..., :nope], k_rope], -1), kv[..., nope:]
    return tuple(x.contiguous() for x in parts)  # type: ignore[return-value]


def gqa_heads(
    q: Tensor, k: Tensor, v: Tensor, sequence: int, heads: int, kv_heads: int, theta: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split_heads(q, sequence, heads), split_heads(k, sequence, kv_heads), split_heads(v, sequence, kv_heads)
    turn = angles(sequence, q.shape[-1], theta, q.dtype, q.device)
    return rotate(q.float(), turn).to(q.dtype), rotate(k.float(), turn).to(k.dtype), v.contiguous()


def sdpa(heads_of: Callable[..., tuple[Tensor, Tensor, Tensor]], backend: SDPBackend) -> Peer:
    """Only softmax(q·k)·v. Flash attention needs one width for all, so v is padded with zeros."""

    def make(*arguments: Any) -> Call:
        return _sdpa(*heads_of(*arguments), backend)

    return make


def sdpa_dgrad(heads_of: Callable[..., tuple[Tensor, Tensor, Tensor]], backend: SDPBackend) -> Peer:
    def make(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *sizes: Any) -> Call:
        inputs = heads_of(q, k, v, *sizes)
        for x in inputs:
            x.requires_grad_()
        out = _sdpa(*inputs, backend)()
        tangent = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, inputs, tangent, retain_graph=True)

    return make


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Call:
    value, grouped = v.shape[-1], q.shape[1] != k.shape[1]
    if backend == SDPBackend.FLASH_ATTENTION and value != q.shape[-1]:
        v = functional.pad(v, (0, q.shape[-1] - value))

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)[..., :value]

    return call


# ---------------------------------------------------------------- Liger, QuACK, torch's own


def liger_rmsnorm(x: Tensor, w: Tensor, eps: float) -> Call:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return lambda: rms_norm_forward(x, w, eps, 0.0, "llama", None)[0]


def liger_swiglu(h: Tensor) -> Call:
    from liger_kernel.ops.swiglu import swiglu_forward

    g, u = (half.contiguous() for half in h.chunk(2, 1))
    return lambda: swiglu_forward(g, u)[-1]


def liger_linear_cross_entropy(h: Tensor, w: Tensor, targets: Tensor) -> Call:
    """Liger's loss; it computes the gradients in its forward."""
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    return lambda: fused_linear_cross_entropy_forward(h, w, targets, ignore_index=-1, reduction="sum")[0]


def quack_rmsnorm(x: Tensor, w: Tensor, eps: float) -> Call:
    from quack import rmsnorm

    return lambda: rmsnorm(x, w, eps=eps)


def fused_adamw(
    master: Tensor,
    gradients: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    rounded: Tensor | None,
    factor: float,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    step: int,
) -> Call:
    """torch's fused AdamW, with FP32 moments and no rounded copy, as it supports neither BF16 moments nor the copy."""
    lists = [[master], [gradients], [moment1.float()], [moment2.float()], [], [torch.tensor(float(step)).to(master)]]
    numbers: dict[str, Any] = {"lr": rate, "beta1": beta1, "beta2": beta2, "weight_decay": decay, "eps": eps}
    return lambda: torch._fused_adamw_(*lists, **numbers, amsgrad=False, maximize=False)


FLASH, CUDNN, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
BACKENDS = (("flash", FLASH), ("cuDNN", CUDNN), ("efficient", EFFICIENT))
FP8_PRODUCT = {"BF16 product": bf16_product, "_scaled_mm": scaled_mm, "_scaled_mm, tiles": scaled_mm_tiles}

PEERS: Mapping[str, Mapping[str, Peer]] = {
    "rmsnorm": {"Liger": liger_rmsnorm, "QuACK": quack_rmsnorm},
    "swiglu": {"Liger": liger_swiglu},
    "grouped_linear": {"_grouped_mm": grouped_mm},
    "grouped_linear_dgrad": {"_grouped_mm": grouped_mm_dgrad},
    "grouped_linear_wgrad_": {"_grouped_mm": grouped_mm_wgrad},
    "grouped_linear_fp8": {"BF16 _grouped_mm": grouped_mm_of_fp8},
    "grouped_linear_fp8_dgrad": {"BF16 _grouped_mm": grouped_mm_of_fp8},
    "grouped_linear_fp8_wgrad_": {"BF16 _grouped_mm": grouped_mm_of_fp8_wgrad},
    "linear_fp8": FP8_PRODUCT,
    "linear_fp8_dgrad": FP8_PRODUCT,
    "linear_fp8_wgrad_": {"BF16 product": bf16_wgrad, "_scaled_mm": scaled_mm_wgrad},
    "linear_cross_entropy": {"its product": its_product, "Liger, with gradients": liger_linear_cross_entropy},
    "linear_cross_entropy_dgrad": {"its products": its_products_dgrad},
    "linear_cross_entropy_wgrad_": {"its products": its_products_wgrad},
    "linear_cross_entropy_part": {"its product": its_product},
    "linear_cross_entropy_part_dgrad": {"its products": lambda dlse, *args: its_products_dgrad(*args)},
    "linear_cross_entropy_part_wgrad_": {"its products": lambda acc, dlse, *args: its_products_wgrad(acc, *args)},
    "mla_attention": {name: sdpa(mla_heads, backend) for name, backend in BACKENDS},
    "mla_attention_dgrad": {name: sdpa_dgrad(mla_heads, backend) for name, backend in BACKENDS},
    "gqa_attention": {name: sdpa(gqa_heads, backend) for name, backend in BACKENDS},
    "gqa_attention_dgrad": {name: sdpa_dgrad(gqa_heads, backend) for name, backend in BACKENDS},
    "adamw": {"_fused_adamw_": fused_adamw},
}
