"""Triton kernels as emitted source: one row for each op that has one, its reference being the op in `runtime/ops`.

A module with a template beside it (`rmsnorm.py`, `rmsnorm.py.j2`) is a family of kernels. Its `OPS` has a row for each
op: a function from the number of SMs and the op's own arguments to the choice of a kernel. Ops that share a file make
the same choice.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from compiler.kernels.kernel import Choice, KernelFile, render
from dsl.formats import FP8, PRODUCTS

__all__ = ["KERNELS", "ON_TORCH", "KernelFile", "emit_kernel"]

# Ops that run on torch on every device: products that cuBLAS does, and what torch adds, sums, joins and views. The
# gradient of sinks is a sum of one number for each query and head; biases of experts are looked up by row. Attention
# with a window, sinks or a softcap has no kernel yet.
ON_TORCH = (
    *("add", "add_bias", "add_bias_wgrad_", "cat2", "columns", "linear", "linear_dgrad", "linear_wgrad_"),
    *("add_grouped_bias", "add_grouped_bias_dgrad", "add_grouped_bias_wgrad_"),
    *("linear_wide", "linear_wide_dgrad", "linear_wide_wgrad_", "bounded_attention_wgrad_"),
    *("bounded_attention", "bounded_attention_dgrad"),
    # Activations and scores that no DeepSeek model before V4 has: elementwise, and of one input alone.
    *(f"{op}{end}" for op in ("clamped_swiglu", "gate_rows", "geglu", "geglu_tanh") for end in ("", "_dgrad")),
    *(f"{op}{end}" for op in ("gelu", "gelu_tanh", "relu2") for end in ("", "_dgrad")),
    *(f"{op}{end}" for op in ("sigmoid_gate", "sqrt_softplus", "route_scores") for end in ("", "_dgrad")),
    *("balance_scores", "balance_scores_dgrad", "scale", "scale_dgrad", "softcap", "softcap_dgrad"),
)

# Formats of products whose ops run on torch, and on CPUs alone: `dsl.rules.training` refuses accelerators.
FORMATS = tuple(form.name for form in PRODUCTS if form != FP8)


def _rows() -> dict[str, Callable[..., Choice | None]]:
    """The rows of all families, by op."""
    found: dict[str, Callable[..., Choice | None]] = {}
    for template in sorted(Path(__file__).parent.glob("*.py.j2")):
        family = template.name.removesuffix(".py.j2")
        if template.with_name(f"{family}.py").is_file():  # others are included
            rows = import_module(f"{__name__}.{family}").OPS
            assert not rows.keys() & found.keys(), f"two kernels of {rows.keys() & found.keys()}"
            found |= rows
    return found


KERNELS = _rows()


def emit_kernel(op: str, arguments: tuple[Any, ...], num_sms: int) -> KernelFile | None:
    """The kernel file that holds function `op` for these arguments, or None if the reference op runs.

    `arguments` are those of the op's call, in order: `Buffer` for tensors (rows may be "R"), plain constants else.
    `num_sms` is how many SMs compute may use: the device's less those kept for communication. The text depends
    on nothing else, and not on the number of rows.
    """
    if op in ON_TORCH or any(f"_{name}_" in f"{op}_" for name in FORMATS):
        return None
    assert op in KERNELS, f"op {op} has no row in compiler/kernels and is not in ON_TORCH"
    choice = KERNELS[op](num_sms, *arguments)
    return render(choice) if choice else None
