"""Ops that run on torch on every device, each with the reason. kernels.json of a build quotes the reasons."""

from __future__ import annotations

from dsl.facts.formats import FP8, PRODUCTS

# Formats of products whose ops run only on CPUs, on torch: `dsl.rules.training` refuses accelerators.
FORMATS = tuple(form.name for form in PRODUCTS if form != FP8)

PRODUCT = "a matrix product: torch calls cuBLAS"
PASS = "one pass over its operands, as in a kernel"
VIEW = "a view, which computes nothing"
SCORES = "small compared to the matrix products around it"
SUM = "a sum of rows, in I where I returns its operand: between parts that tensor ranks split"

NORM = "small compared to attention: the norm of queries and keys in models that norm all heads together"
POLICY = "no kernel yet: a cross entropy of each row, and a few numbers per token"
PARTS = "a few numbers per row: one of each tensor rank, and the logit of the target"
AROUND = "one pass over its operands, small compared to the delta rule beside it"


def _names_with_gradients(*ops: str) -> tuple[str, ...]:
    return tuple(f"{op}{end}" for op in ops for end in ("", "_dgrad"))


ON_TORCH: dict[str, str] = {
    **dict.fromkeys(("linear", "linear_dgrad", "linear_wgrad_"), PRODUCT),
    **dict.fromkeys(("block_linear", "block_linear_dgrad", "block_linear_wgrad_"), PRODUCT),
    **dict.fromkeys(("linear_wide", "linear_wide_dgrad", "linear_wide_wgrad_"), PRODUCT),
    **dict.fromkeys(("add", "add_bias", "add_bias_wgrad_", "cat2"), PASS),
    **dict.fromkeys((*_names_with_gradients("add_grouped_bias"), "add_grouped_bias_wgrad_"), PASS),
    **dict.fromkeys(("add_bias_wgrad", "rmsnorm_wgrad"), SUM),
    **dict.fromkeys(_names_with_gradients("place_parts", "cross_entropy_of_parts"), PARTS),
    **dict.fromkeys(_names_with_gradients("policy_loss"), POLICY),
    **dict.fromkeys(_names_with_gradients("two_squares", "shared_rmsnorm"), NORM),
    **dict.fromkeys((*_names_with_gradients("log_decay", "gate_columns"), "log_decay_wgrad_"), AROUND),
    "columns": VIEW,
    **dict.fromkeys((*_names_with_gradients("compress"), "compress_wgrad_"), SCORES),
    **dict.fromkeys(_names_with_gradients("unweighted_rmsnorm"), PASS),
    "linear_detached": PRODUCT,
    **dict.fromkeys(_names_with_gradients("center", "gate_rows", "sigmoid_gate", "scale"), PASS),
    **dict.fromkeys(
        _names_with_gradients("sqrt_softplus", "route_scores", "balance_scores", "slice_choices", "softcap"), SCORES
    ),
    **dict.fromkeys(("replay_choices", "table_choices", "weigh_chosen", "weigh_chosen_scores"), SCORES),
    **dict.fromkeys(("choice_counts", *_names_with_gradients("counted_balance", "counted_balance_scores")), SCORES),
    **dict.fromkeys(("spread_padding", "real_counts"), SCORES),
    **dict.fromkeys(_names_with_gradients("blank_rows"), PASS),
    **dict.fromkeys(_names_with_gradients("real_balance", "real_balance_scores"), SCORES),
}


def is_cpu_only(op: str) -> bool:
    """Whether the format of an op is computed only on CPUs."""
    return any(f"_{name}_" in f"{op}_" for name in FORMATS)
