"""Routing: the choice of experts, and the permutation of rows into expert order and back. Choices, orders and counts
have no gradient."""

from __future__ import annotations

from compiler.model.ops.rule import INDEX, Extent, Gradient, Rule, Tensor, elementwise, statistics_dtype


def _infer_route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    softmax: bool,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    T, E = logits_TE.shape
    assert bias_E is None or bias_E.shape == (E,), (logits_TE, bias_E)
    assert E % groups == 0 and 0 < top_k <= top_groups * E // groups, (E, groups, top_groups, top_k)
    chosen = (T, top_k)
    return Tensor(chosen, logits_TE.dtype), Tensor(chosen, INDEX)


def _infer_scores(logits_TE: Tensor) -> tuple[Tensor, ...]:
    return (logits_TE,)


def _infer_route_scores(
    score_TE: Tensor,
    bias_E: Tensor | None,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    return _infer_route(score_TE, bias_E, False, groups, top_groups, top_k, normalize, scale)


def _infer_replay_choices(expert_TK: Tensor, given_TK: Tensor) -> tuple[Tensor, ...]:
    assert expert_TK.shape[0] == given_TK.shape[0] and given_TK.dtype == INDEX, (expert_TK, given_TK)
    return (Tensor(expert_TK.shape, INDEX),)


def _infer_table_choices(tokens_T: Tensor, table_VK: Tensor) -> tuple[Tensor, ...]:
    return (Tensor((tokens_T.shape[0], table_VK.shape[1]), INDEX),)


def _infer_weigh(
    logits_TE: Tensor, expert_TK: Tensor, softmax: bool, normalize: bool, scale: float
) -> tuple[Tensor, ...]:
    assert logits_TE.shape[:1] == expert_TK.shape[:1], (logits_TE, expert_TK)
    return (Tensor(expert_TK.shape, logits_TE.dtype),)


def _infer_weigh_scores(score_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float) -> tuple[Tensor, ...]:
    return _infer_weigh(score_TE, expert_TK, False, normalize, scale)


def _infer_balance_scores(score_TE: Tensor, expert_TK: Tensor, sequence: int) -> tuple[Tensor, ...]:
    return _infer_balance(score_TE, expert_TK, sequence, False)


def _infer_sigmoid(logit_T1: Tensor) -> tuple[Tensor, ...]:
    assert logit_T1.shape[1:] == (1,), logit_T1
    return (Tensor(logit_T1.shape[:1], logit_T1.dtype),)


def _infer_balance(logits_TE: Tensor, expert_TK: Tensor, sequence: int, softmax: bool) -> tuple[Tensor, ...]:
    assert logits_TE.shape[0] % sequence == 0, (logits_TE, sequence)
    return (Tensor((), statistics_dtype(logits_TE.dtype)),)


def infer_counts(expert_TK: Tensor, num_experts: int, rows: int) -> tuple[Tensor, ...]:
    """The counts of choices in each part of `rows` rows: [T / rows, num_experts]."""
    assert expert_TK.shape[0] % rows == 0, (expert_TK, rows)
    return (Tensor((expert_TK.shape[0] // rows, num_experts), INDEX),)


def infer_counted(
    logits_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int, softmax: bool = False
) -> tuple[Tensor, ...]:
    """The scalar loss of a rank. AssertionError if the logits and the all-gathered counts do not match."""
    (T, E), (N, _) = logits_TE.shape, counts_NE.shape
    assert T % rows == 0 and N % (T // rows) == 0 and counts_NE.shape[1] == E, (logits_TE, counts_NE, rows)
    return (Tensor((), statistics_dtype(logits_TE.dtype)),)


def _infer_counted_scores(score_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int) -> tuple[Tensor, ...]:
    return infer_counted(score_TE, counts_NE, rows, sequence)


def _infer_permute(x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    T, K = gate_TK.shape
    rows_SD = Tensor((T * K, x_TD.shape[1]), x_TD.dtype)
    return rows_SD, Tensor((T * K,), gate_TK.dtype), Tensor((T * K,), INDEX), Tensor((num_experts,), INDEX)


def _infer_permute_placed(x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor) -> tuple[Tensor, ...]:
    return _infer_permute(x_TD, gate_TK, expert_TK, slots_E.shape[0])


def _infer_slices(gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor, slices: int, apart: int) -> tuple[Tensor, ...]:
    T, K = gate_TK.shape
    assert slots_E.shape[0] % apart == 0, (slots_E, apart)
    return Tensor((T, K * slices), gate_TK.dtype), Tensor((T, K * slices), INDEX)


def _infer_unpermute(y_SD: Tensor, order_S: Tensor, top_k: int) -> tuple[Tensor, ...]:
    return (Tensor((y_SD.shape[0] // top_k, y_SD.shape[1]), y_SD.dtype),)


ROUTE = Rule(
    args=("logits", "bias", "softmax", "groups", "top_groups", "top_k", "normalize", "scale"),
    outputs=("gate", "expert"),
    infer=_infer_route,
    kernel_class="router",
    flops=elementwise("logits", 8),
    differentiable=("gate",),
    dgrad=Gradient(
        "route_dgrad",
        reads=("d_gate", "logits", "expert", "softmax", "normalize", "scale"),
        gives=("logits",),
        flops=elementwise("logits", 8),
    ),
)
SEQUENCE_BALANCE = Rule(
    args=("logits", "expert", "sequence", "softmax"),
    outputs=("loss",),
    infer=_infer_balance,
    kernel_class="router",
    flops=elementwise("logits", 8),
    differentiable=("loss",),
    dgrad=Gradient(
        "sequence_balance_dgrad",
        reads=("d_loss", "logits", "expert", "sequence", "softmax"),
        gives=("logits",),
        flops=elementwise("logits", 10),
    ),
)
SQRT_SOFTPLUS = Rule(
    args=("logits",),
    outputs=("score",),
    infer=_infer_scores,
    kernel_class="router",
    flops=elementwise("logits", 6),
    differentiable=("score",),
    dgrad=Gradient(
        "sqrt_softplus_dgrad", reads=("d_score", "logits", "score"), gives=("logits",), flops=elementwise("logits", 6)
    ),
)
ROUTE_SCORES = Rule(
    args=("score", "bias", "groups", "top_groups", "top_k", "normalize", "scale"),
    outputs=("gate", "expert"),
    infer=_infer_route_scores,
    kernel_class="router",
    flops=elementwise("score", 4),
    differentiable=("gate",),
    dgrad=Gradient(
        "route_scores_dgrad",
        reads=("d_gate", "score", "expert", "normalize", "scale"),
        gives=("score",),
        flops=elementwise("score", 2),
    ),
)
REPLAY_CHOICES = Rule(
    args=("expert", "given"),
    outputs=("replayed",),
    infer=_infer_replay_choices,
    kernel_class="router",
    differentiable=(),
)
TABLE_CHOICES = Rule(
    args=("tokens", "table"),
    outputs=("expert",),
    infer=_infer_table_choices,
    kernel_class="embedding",
    touched=lambda n: n.tokens[0] * (1 + 2 * n.table[1]),
    kernel=lambda n: (n.tokens[0], n.table[1]),
    differentiable=(),
)
WEIGH_CHOSEN = Rule(
    args=("logits", "expert", "softmax", "normalize", "scale"),
    outputs=("gate",),
    infer=_infer_weigh,
    kernel_class="router",
    flops=elementwise("logits", 4),
    differentiable=("gate",),
    dgrad=ROUTE.dgrad,
)
WEIGH_CHOSEN_SCORES = Rule(
    args=("score", "expert", "normalize", "scale"),
    outputs=("gate",),
    infer=_infer_weigh_scores,
    kernel_class="router",
    flops=elementwise("expert", 4),
    differentiable=("gate",),
    dgrad=ROUTE_SCORES.dgrad,
)
BALANCE_SCORES = Rule(
    args=("score", "expert", "sequence"),
    outputs=("loss",),
    infer=_infer_balance_scores,
    kernel_class="router",
    flops=elementwise("score", 4),
    differentiable=("loss",),
    dgrad=Gradient(
        "balance_scores_dgrad",
        reads=("d_loss", "score", "expert", "sequence"),
        gives=("score",),
        flops=elementwise("score", 6),
    ),
)
CHOICE_COUNTS = Rule(
    args=("expert", "num_experts", "rows"),
    outputs=("counts",),
    infer=infer_counts,
    kernel_class="router",
    flops=elementwise("expert", 1),
    differentiable=(),
)
COUNTED_BALANCE = Rule(
    args=("logits", "counts", "rows", "sequence", "softmax"),
    outputs=("loss",),
    infer=infer_counted,
    kernel_class="router",
    flops=elementwise("logits", 8),
    differentiable=("loss",),
    dgrad=Gradient(
        "counted_balance_dgrad",
        reads=("d_loss", "logits", "counts", "rows", "sequence", "softmax"),
        gives=("logits",),
        flops=elementwise("logits", 10),
    ),
)
COUNTED_BALANCE_SCORES = Rule(
    args=("score", "counts", "rows", "sequence"),
    outputs=("loss",),
    infer=_infer_counted_scores,
    kernel_class="router",
    flops=elementwise("score", 4),
    differentiable=("loss",),
    dgrad=Gradient(
        "counted_balance_scores_dgrad",
        reads=("d_loss", "score", "counts", "rows", "sequence"),
        gives=("score",),
        flops=elementwise("score", 6),
    ),
)
SIGMOID_GATE = Rule(
    args=("logit",),
    outputs=("gate",),
    infer=_infer_sigmoid,
    kernel_class="router",
    flops=elementwise("logit", 4),
    differentiable=("gate",),
    dgrad=Gradient("sigmoid_gate_dgrad", reads=("d_gate", "gate"), gives=("logit",), flops=elementwise("d_gate", 3)),
)
SLICE_CHOICES = Rule(
    args=("gate", "expert", "slots", "slices", "apart"),
    outputs=("slice_gate", "place"),
    infer=_infer_slices,
    kernel_class="router",
    differentiable=("slice_gate",),
    dgrad=Gradient(
        "slice_choices_dgrad",
        reads=("d_slice_gate", "slices"),
        gives=("gate",),
        flops=elementwise("d_slice_gate", 1),
    ),
)
PERMUTE = Rule(
    args=("x", "gate", "expert", "num_experts"),
    outputs=("rows", "row_gate", "order", "counts"),
    infer=_infer_permute,
    kernel_class="permute",
    differentiable=("rows", "row_gate"),
    dgrad=Gradient(
        "permute_dgrad",
        reads=("d_rows", "order", Extent("gate", 1)),
        gives=("x",),
        flops=elementwise("d_rows", 1),
    ),
    apart=Gradient("permute_gate_dgrad", reads=("d_row_gate", "order", Extent("gate", 1)), gives=("gate",)),
)
PERMUTE_PLACED = Rule(
    args=("x", "gate", "expert", "slots"),
    outputs=("rows", "row_gate", "order", "counts"),
    infer=_infer_permute_placed,
    kernel_class="permute",
    differentiable=("rows", "row_gate"),
    dgrad=PERMUTE.dgrad,
    apart=PERMUTE.apart,
)
UNPERMUTE = Rule(
    args=("y", "order", "top_k"),
    outputs=("out",),
    infer=_infer_unpermute,
    kernel_class="permute",
    flops=elementwise("y", 1),
    differentiable=("out",),
    dgrad=Gradient("unpermute_dgrad", reads=("d_out", "order", "top_k"), gives=("y",)),
)


# --- Padding rows in a router: where they are sent, and counts and losses that leave them out


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
    "route": ROUTE,
    "route_scores": ROUTE_SCORES,
    "sequence_balance": SEQUENCE_BALANCE,
    "balance_scores": BALANCE_SCORES,
    "choice_counts": CHOICE_COUNTS,
    "counted_balance": COUNTED_BALANCE,
    "counted_balance_scores": COUNTED_BALANCE_SCORES,
    "sigmoid_gate": SIGMOID_GATE,
    "sqrt_softplus": SQRT_SOFTPLUS,
    "slice_choices": SLICE_CHOICES,
    "permute": PERMUTE,
    "permute_placed": PERMUTE_PLACED,
    "replay_choices": REPLAY_CHOICES,
    "table_choices": TABLE_CHOICES,
    "unpermute": UNPERMUTE,
    "weigh_chosen": WEIGH_CHOSEN,
    "weigh_chosen_scores": WEIGH_CHOSEN_SCORES,
    "blank_rows": BLANK_ROWS,
    "spread_padding": SPREAD_PADDING,
    "real_counts": REAL_COUNTS,
    "real_balance": REAL_BALANCE,
    "real_balance_scores": REAL_BALANCE_SCORES,
}
