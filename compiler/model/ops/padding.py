"""Rows of padding in a router: where they go, and what is counted without them."""

from __future__ import annotations

from compiler.model.ops.routing import infer_counted, infer_counts
from compiler.model.ops.rule import Gradient, Rule, Tensor, elementwise


def _infer_blank(x_TN: Tensor, real_T: Tensor) -> tuple[Tensor, ...]:
    assert real_T.shape == x_TN.shape[:1], (x_TN, real_T)
    return (x_TN,)


def _infer_spread(expert_TK: Tensor, real_T: Tensor, num_experts: int, groups: int) -> tuple[Tensor, ...]:
    assert real_T.shape == expert_TK.shape[:1] and num_experts % groups == 0, (expert_TK, real_T, num_experts, groups)
    return (expert_TK,)


def _infer_real_counts(
    expert_TK: Tensor, real_T: Tensor, slots_E: Tensor | None, num_places: int, rows: int
) -> tuple[Tensor, ...]:
    assert real_T.shape == expert_TK.shape[:1], (expert_TK, real_T)
    return infer_counts(expert_TK, num_places, rows)


def _infer_real_balance(
    logits_TE: Tensor, counts_NE: Tensor, real_T: Tensor, rows: int, top_k: int, softmax: bool = False
) -> tuple[Tensor, ...]:
    assert real_T.shape == logits_TE.shape[:1], (logits_TE, real_T)
    return infer_counted(logits_TE, counts_NE, rows, rows)


def _infer_real_balance_scores(
    score_TE: Tensor, counts_NE: Tensor, real_T: Tensor, rows: int, top_k: int
) -> tuple[Tensor, ...]:
    return _infer_real_balance(score_TE, counts_NE, real_T, rows, top_k)


BLANK_ROWS = Rule(
    args=("x", "real"),
    outputs=("y",),
    infer=_infer_blank,
    kernel_class="add",
    differentiable=("y",),
    dgrad=Gradient("blank_rows_dgrad", reads=("d_y", "real"), gives=("x",)),
)

SPREAD_PADDING = Rule(
    args=("expert", "real", "num_experts", "groups"),
    outputs=("spread",),
    infer=_infer_spread,
    kernel_class="router",
    differentiable=(),
)

REAL_COUNTS = Rule(
    args=("expert", "real", "slots", "num_places", "rows"),
    outputs=("counts",),
    infer=_infer_real_counts,
    kernel_class="router",
    flops=elementwise("expert", 1),
    differentiable=(),
)

REAL_BALANCE = Rule(
    args=("logits", "counts", "real", "rows", "top_k", "softmax"),
    outputs=("loss",),
    infer=_infer_real_balance,
    kernel_class="router",
    flops=elementwise("logits", 8),
    differentiable=("loss",),
    dgrad=Gradient(
        "real_balance_dgrad",
        reads=("d_loss", "logits", "counts", "real", "rows", "top_k", "softmax"),
        gives=("logits",),
        flops=elementwise("logits", 10),
    ),
)

REAL_BALANCE_SCORES = Rule(
    args=("score", "counts", "real", "rows", "top_k"),
    outputs=("loss",),
    infer=_infer_real_balance_scores,
    kernel_class="router",
    flops=elementwise("score", 4),
    differentiable=("loss",),
    dgrad=Gradient(
        "real_balance_scores_dgrad",
        reads=("d_loss", "score", "counts", "real", "rows", "top_k"),
        gives=("score",),
        flops=elementwise("score", 6),
    ),
)

RULES = {
    "blank_rows": BLANK_ROWS,
    "spread_padding": SPREAD_PADDING,
    "real_counts": REAL_COUNTS,
    "real_balance": REAL_BALANCE,
    "real_balance_scores": REAL_BALANCE_SCORES,
}
