"""Which implementation computes an op on GPUs: a kernel of the build, a library, or torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsl.schema import Spec
    from dsl.schema.kernels import Kernels

TRITON, TORCH = "triton", "torch"
# The ops of each key of `kernels`. Of keys whose ops include several, all run on the same implementation.
OPS_OF: Mapping[str, tuple[str, ...]] = {
    "attention": ("gqa_attention", "gqa_attention_dgrad"),
    "latent_attention": ("mla_attention", "mla_attention_dgrad"),
    "fp8_products": ("linear_fp8", "linear_fp8_dgrad", "grouped_linear_fp8", "grouped_linear_fp8_dgrad"),
    "grouped_products": ("grouped_linear", "grouped_linear_dgrad", "grouped_linear_wgrad_"),
    "sparse_attention": (
        "select_keys",
        "chosen_attention",
        "chosen_attention_dgrad",
        "indexer_loss",
        "indexer_loss_dgrad",
    ),
    "compressed_attention": ("compressed_attention", "compressed_attention_dgrad"),
    "delta_rule": ("delta_rule", "delta_rule_dgrad"),
}
KEY_OF = {op: key for key, ops in OPS_OF.items() for op in ops}


# Plans price an op before its data and scales are told apart, and a weight gradient without its accumulation.
PLANNED_AS: Mapping[str, str] = {
    "linear_fp8": "linear",
    "linear_fp8_dgrad": "linear_dgrad",
    "grouped_linear_fp8": "grouped_linear",
    "grouped_linear_fp8_dgrad": "grouped_linear_dgrad",
    "grouped_linear_wgrad_": "grouped_linear_wgrad",
}


def stated_choices(kernels: Kernels) -> Mapping[str, str]:
    """The implementation of each key that a run states."""
    words = {key: getattr(kernels, key) for key in OPS_OF}
    return {key: word for key, word in words.items() if word is not None}


def choices_of(kernels: Kernels) -> Mapping[str, str]:
    """The implementation of each op whose key is stated."""
    stated = stated_choices(kernels)
    return {op: stated[key] for op, key in KEY_OF.items() if key in stated}


def torch_ops(spec: Spec) -> frozenset[str]:
    """The ops for which a spec of GPUs names torch, though they have kernels; none on CPUs."""
    if not spec.has_hosts:
        return frozenset()
    return frozenset(op for op, word in choices_of(spec.kernels).items() if word == TORCH)
