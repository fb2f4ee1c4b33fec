"""The router: when the Triton kernels apply and how they launch. Their text is route.py.j2 and route_dgrad.py.j2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.emit.kernels.kernel import FUSION, KernelChoice, power_of_two


def routing(
    experts: int, softmax: bool, groups: int, top_groups: int, top_k: int, normalize: bool
) -> tuple[tuple[str, Any], ...]:
    """Return the sizes and options of route.py.j2, except the tokens and warps of a program."""
    groups = _groups(groups, top_groups)
    return (
        ("E", experts),
        ("K", top_k),
        ("GROUPS", groups),
        ("TOP_GROUPS", min(top_groups, groups)),
        ("SOFTMAX", softmax),
        ("NORMALIZE", normalize),
    )


def _groups(groups: int, top_groups: int) -> int:
    """The number of groups of experts, or 1 if none is dropped."""
    return groups if top_groups < groups else 1


def lanes(experts: int, groups: int, top_groups: int, top_k: int) -> dict[str, int]:
    """Powers of two that hold the groups, the experts of a group, and the choices."""
    groups = _groups(groups, top_groups)
    return {"BLOCK_G": power_of_two(groups), "BLOCK_M": power_of_two(experts // groups), "BLOCK_K": power_of_two(top_k)}


def scores(softmax: bool, normalize: bool) -> str:
    """The part of a kernel's name for the scores and gate weights."""
    return ("softmax" if softmax else "sigmoid") + ("_normalize" if normalize else "")


def has_kernels(experts: int, top_k: int, dtype: str) -> bool:
    """Whether the kernels take these sizes. Scores are FP32, as `linear_wide` returns them."""
    return dtype == "float32" and experts <= 512 and top_k <= 16


def choose(
    experts: int, dtype: str, softmax: bool, groups: int, top_groups: int, top_k: int, normalize: bool
) -> KernelChoice | None:
    """Choose the kernel that routes a token to `top_k` experts in `top_groups` of `groups` groups."""
    if not has_kernels(experts, top_k, dtype):
        return None
    sizes = f"e{experts}_g{groups}_{top_groups}_k{top_k}"
    launch = lanes(experts, groups, top_groups, top_k)
    return KernelChoice(
        name=f"route_{sizes}_{scores(softmax, normalize)}",
        template="route",
        values=(
            ("permuted", False),
            *routing(experts, softmax, groups, top_groups, top_k, normalize),
            ("ROWS", max(1, 128 // (launch["BLOCK_G"] * launch["BLOCK_M"]))),
            ("ROUTE", {**launch, "num_warps": 1, **FUSION}),
        ),
    )


def choose_dgrad(experts: int, dtype: str, top_k: int, softmax: bool, normalize: bool) -> KernelChoice | None:
    if not has_kernels(experts, top_k, dtype):
        return None
    block = power_of_two(experts)
    launch = {"BLOCK_E": block, "BLOCK_K": power_of_two(top_k), "ROWS": max(1, 1024 // block), "num_warps": 4}
    return KernelChoice(
        name=f"route_dgrad_e{experts}_k{top_k}_{scores(softmax, normalize)}",
        template="route_dgrad",
        values=(
            ("E", experts),
            ("K", top_k),
            ("SOFTMAX", softmax),
            ("NORMALIZE", normalize),
            ("LAUNCH", {**launch, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "route": lambda sms, logits, bias, softmax, groups, top_groups, top_k, normalize, scale: choose(
        int(logits.shape[1]), logits.dtype, softmax, groups, top_groups, top_k, normalize
    ),
    "route_dgrad": lambda sms, dgate, logits, expert, softmax, normalize, scale: choose_dgrad(
        int(logits.shape[1]), logits.dtype, int(expert.shape[1]), softmax, normalize
    ),
}
