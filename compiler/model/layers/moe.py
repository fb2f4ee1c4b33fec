"""The mixture of experts of a layer, cut at its two all-to-alls: router | experts | join, and the shared experts apart.

T tokens of a micro-batch · D hidden · E experts, in the segment of experts those of this rank · K chosen by a token ·
S = T·K routed rows · R rows an expert rank receives, expert after expert, each expert's padded.

Where the width of experts is split over e ranks, an expert is e narrower ones with its gate weight, which are chosen
together: their sum is its output. Then S = T·K·e.
Sources: DeepSeekMoE, arXiv 2401.06066; DeepSeek-V2, arXiv 2405.04434, §2.1.3; DeepSeek-V3, arXiv 2412.19437, §2.1.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compiler import ir
from compiler.ir.dtypes import TORCH_DTYPE
from compiler.model.layers import hyper
from compiler.model.layers.builder import Place, grouped_linear, index, linear, named, segment, weights
from compiler.model.layers.dense import activated, constants_of, times_gate, up_parts
from compiler.model.layers.padding import real_rows
from compiler.model.layers.residual import (
    arriving,
    entering,
    entrance,
    exit_of,
    has_post,
    has_pre,
    leaving,
    post_gain,
    pre_gain,
    sum_of,
    summed,
)

# --- The sequence-wise loss that balances the load of experts, where ranks have parts of sequences or rows may be
# padding
#
# Otherwise the router has it in one op. Source: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20.


def has_balance(place: Place) -> bool:
    """Whether a layer has a sequence-wise loss."""
    return place.moe.balance.sequence_loss > 0 and not place.mtp


def real_balance(
    ops: Any, values: tuple[Any, ...], sizes: tuple[int, int], softmax: tuple[bool, ...]
) -> tuple[Any, ...]:
    """The sequence-wise loss over tokens without padding. `values`: logits, or without `softmax` scores, the counts of
    choices, and which rows are tokens. `sizes`: rows of a sequence, and K."""
    balance = ops.real_balance if softmax else ops.real_balance_scores
    return (balance(*values, *sizes, *softmax),)


def rows_of_sequence(place: Place) -> int:
    """The rows that a rank has of each of its sequences."""
    return place.spec.train.sequence // place.spec.sequence_ranks


def balance(
    ops: Any,
    p: Any,
    scores_TE: Any,
    choices_NE: Any,
    *real_T: Any,
    rows: int,
    sequence: int,
    softmax: bool,
    given: bool,
    top_k: int = 0,
) -> tuple[Any, ...]:
    """Return a rank's part of the sequence-wise loss, where it has parts of sequences. `choices`: N counts, of all
    ranks that have parts of the same sequences. `given`: scores, not logits. `real`: which rows are tokens, if some may
    be padding."""
    if real_T:
        return real_balance(ops, (scores_TE, choices_NE, *real_T), (rows, top_k), () if given else (softmax,))
    if given:
        return (ops.counted_balance_scores(scores_TE, choices_NE, rows, sequence),)
    return (ops.counted_balance(scores_TE, choices_NE, rows, sequence, softmax),)


def build_balance(place: Place) -> ir.Segment:
    moe, rows = place.moe, rows_of_sequence(place)
    counts = place.T // rows * place.spec.sequence_ranks
    padded = real_rows(place)
    return segment(
        "balance",
        balance,
        (),
        (ir.Input("scores", (place.T, moe.experts), place.wide_dtype), index("choices", counts, moe.experts), *padded),
        ("sequence_loss",),
        rows=rows,
        sequence=place.spec.train.sequence,
        softmax=moe.score == "softmax",
        given=moe.score == "sqrt_softplus",
        **({"top_k": moe.top_k} if padded else {}),
    )


# --- moe

ROUTER_PARAMETERS = {
    "norm": "ffn.norm",
    "weight": "ffn.router.weight",
    "bias": "ffn.router.bias",
    "logit_bias": "ffn.router.logit_bias",
    "slots": "ffn.router.slots",
    "table": "ffn.router.table",
} | hyper.paths("ffn")
SHARED_PARAMETERS = named(
    {"norm": "ffn.norm", "up": "ffn.shared.up", "gate": "ffn.shared.gate", "down": "ffn.shared.down"}, "up", "down"
)
LOAD = "load"  # an output of routers where rows may be padding: how many tokens each expert gets
TABLE_DTYPE = "int32"  # of which experts each token goes to
SUMMED = ("stream", "attended", "attended_post", "attended_comb")  # inputs of a join that makes the residual again
JOIN_PARAMETERS = {"post_norm": "ffn.post_norm"}
EXPERTS_PARAMETERS = named({"up": "ffn.experts.up", "down": "ffn.experts.down"}, "up", "down")


def router(
    ops: Any,
    p: Any,
    h_TD: Any,
    y_TD: Any,
    *more: Any,
    eps: float,
    biased: bool,
    softmax: bool,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
    sequence: int,
    shared: bool,
    balance: bool,
    logit_bias: bool = False,
    by_slots: bool = False,
    slices: int = 1,
    apart: int = 0,
    sqrt_softplus: bool = False,
    counted: int = 0,
    pre: bool = True,
    streams: hyper.Streams = (),
    replays: bool = False,
    padded: int = 0,
) -> tuple[Any, ...]:
    """Chooses experts by their scores, or by tokens if they are given, or as is given if it `replays`, and puts the
    rows in their order, or `by_slots`, in that of their places in the layer; one row for each of the `slices` of an
    expert, whose places are `apart`. The residual h + y, of which attention gave y, is for the join, the normed `x` for
    the shared experts; with `balance` there is the sequence-wise loss, without its weight. Where ranks have parts of
    sequences, `balance` makes it, of the scores and of the choices that are counted, in so many rows of each. Of
    several residual streams the mixing is the first of `more`, and that of what the join adds comes last. `padded`: the
    number of rows, if some may be padding. Then `more` has a mark of the tokens in front of tables and choices, and
    loads and losses leave padding out."""
    mixing, given = (more[:2], more[2:]) if streams else ((), more)
    real, given = (given[:1], given[1:]) if padded else ((), given)
    residual_TD, x_TD, following = arriving(ops, p, h_TD, y_TD, mixing, streams)
    x_TD = entering(ops, p, x_TD, eps, pre)
    logits_TE = ops.linear_wide(x_TD, p.weight)
    if logit_bias:
        logits_TE = ops.add_bias(logits_TE, p.logit_bias)
    if sqrt_softplus:
        logits_TE = ops.sqrt_softplus(logits_TE)
    by_score = () if sqrt_softplus else (softmax,)
    if replays or not given:
        route, bias_E = ops.route_scores if sqrt_softplus else ops.route, p.bias if biased else None
        gate_TK, expert_TK = route(logits_TE, bias_E, *by_score, groups, top_groups, top_k, normalize, scale)
    if given:
        expert_TK = ops.replay_choices(expert_TK, *given) if replays else ops.table_choices(*given, p.table)
        weigh = ops.weigh_chosen_scores if sqrt_softplus else ops.weigh_chosen
        gate_TK = weigh(logits_TE, expert_TK, *by_score, normalize, scale)
    experts = p.weight.shape[0]
    if padded:
        expert_TK = ops.spread_padding(expert_TK, *real, experts, groups)
    routed = (x_TD, gate_TK, expert_TK)
    if slices > 1:
        of_slices = ops.slice_choices(gate_TK, expert_TK, p.slots, slices, apart)
        permuted = ops.permute(x_TD, *of_slices, slices * experts)
    else:
        permuted = ops.permute_placed(*routed, p.slots) if by_slots else ops.permute(*routed, experts)
    rows_SD, gate_S, order_S, counts_E = permuted
    x = (x_TD,) if shared else ()
    loss: tuple[Any, ...] = ()
    load: tuple[Any, ...] = ()
    if padded:
        load = (ops.real_counts(expert_TK, *real, p.slots if by_slots else None, slices * experts, padded),)
        if counted or balance:
            loss = (logits_TE, ops.real_counts(expert_TK, *real, None, experts, counted or sequence))
        if balance and not counted:
            loss = real_balance(ops, (*loss, *real), (sequence, top_k), () if sqrt_softplus else (softmax,))
    elif counted:
        loss = (logits_TE, ops.choice_counts(expert_TK, experts, counted))
    elif balance and sqrt_softplus:
        loss = (ops.balance_scores(logits_TE, expert_TK, sequence),)
    elif balance:
        loss = (ops.sequence_balance(logits_TE, expert_TK, sequence, softmax),)
    return (residual_TD, *x, rows_SD, gate_S, order_S, counts_E, *load, *loss, *following)


def replays_choices(place: Place) -> bool:
    """Whether a router has the choices that it made where completions were written: several steps train on these."""
    grpo = place.spec.train.grpo
    return grpo is not None and grpo.iterations > 1 and place.moe.choice != "table"


def build_router(place: Place) -> ir.Segment:
    moe, D = place.moe, place.D
    shared, balance = moe.shared > 0, has_balance(place)
    counted = balance and place.spec.sequence_ranks > 1
    biased = moe.balance.bias_rate is not None
    bias = (
        (ir.Param("bias", (moe.experts,), TORCH_DTYPE[place.spec.precision.master], grad=False, role="bias"),)
        if biased
        else ()
    )
    logit_bias = (place.vector("logit_bias", moe.experts),) if moe.router_bias else ()
    by_slots = place.spec.parallel.placement is not None or place.slices > 1
    slots = (ir.Param("slots", (moe.experts,), "int64", grad=False, role="slots"),) if by_slots else ()
    shape, by_table = (place.model.vocab, moe.top_k), moe.choice == "table"
    replays = replays_choices(place)
    given = (index("tokens", place.T),) if by_table else (index("routes", place.T, moe.top_k),) if replays else ()
    padded = real_rows(place)
    table = (ir.Param("table", shape, TABLE_DTYPE, grad=False, role="table"),) if by_table else ()
    of = segment(
        "router",
        router,
        (
            *hyper.mixers(place),
            *pre_gain(place),
            place.weight("weight", moe.experts, D),
            *logit_bias,
            *bias,
            *slots,
            *table,
        ),
        (*sum_of(place), *padded, *given),
        (
            "residual",
            *(("x",) if shared else ()),
            "rows",
            "gate",
            ir.Output("order", grad=False),
            ir.Output("counts", grad=False),
            *((ir.Output(LOAD, grad=False),) if padded else ()),
            *(("scores", ir.Output("choices", grad=False)) if counted else ("sequence_loss",) if balance else ()),
            *hyper.following(place),
        ),
        eps=place.model.norm_eps,
        biased=biased,
        softmax=moe.score == "softmax",
        groups=moe.groups,
        top_groups=moe.top_groups,
        top_k=moe.top_k,
        normalize=moe.normalize,
        scale=moe.scale,
        sequence=place.spec.train.sequence,
        shared=shared,
        balance=balance,
        **({"logit_bias": True} if logit_bias else {}),
        **({"replays": True} if replays else {}),
        **({"padded": place.T} if padded else {}),
        **({"by_slots": True} if by_slots else {}),
        **({"slices": place.slices, "apart": place.experts_local} if place.slices > 1 else {}),
        **({"sqrt_softplus": True} if moe.score == "sqrt_softplus" else {}),
        **({"counted": rows_of_sequence(place)} if counted else {}),
        **hyper.streams_of(place),
        **entrance(place),
    )
    return replace(
        of, remade=(*(_normed(place, "residual") if shared else ()), *_summed(place, "residual", sum_of(place)))
    )


def _normed(place: Place, residual: str) -> tuple[ir.Remade, ...]:
    """The normed `x` has two readers, the router and the shared experts. Where norms are computed again, each makes it
    for its own backward, and nobody keeps it. Of several residual streams it is made of their sum, which nobody has."""
    remade = ir.Remade("x", "rmsnorm", (residual, "norm", place.model.norm_eps))
    return (remade,) if "rmsnorm" in place.recompute and has_pre(place) and not hyper.mixing(place) else ()


def _summed(place: Place, residual: str, inputs: tuple[ir.Input, ...]) -> tuple[ir.Remade, ...]:
    """The residual has two readers, the router and the join. Where several streams of it are summed again, each does so
    for its own backward: what they are made of is kept in any case."""
    again = "hyper" in place.recompute and hyper.mixing(place)
    return (ir.Remade(residual, "hyper_add", tuple(each.name for each in inputs)),) if again else ()


def shared(
    ops: Any,
    p: Any,
    x_TD: Any,
    *h_TD: Any,
    gated: bool = False,
    activation: str = "swiglu",
    limit: float = 0.0,
    alpha: float = 0.0,
    shift: float = 0.0,
    biased: bool = False,
) -> tuple[Any, ...]:
    """The experts every token goes to, as one. `h`, if given, is what the backward makes `x` of.

    If `gated`, a token's own weight is applied before `down`, as that of a routed row is, or behind the bias of `down`.
    """
    h_TM, act = linear(ops, p, "up", x_TD, biased), (activation, limit, alpha, shift)
    if not gated:
        return (linear(ops, p, "down", activated(ops, h_TM, *act), biased),)
    gate_T = ops.sigmoid_gate(ops.linear_wide(x_TD, p.gate))
    if biased:
        return (ops.gate_rows(linear(ops, p, "down", activated(ops, h_TM, *act), biased), gate_T),)
    return (ops.linear(times_gate(ops, h_TM, gate_T, *act), p.down),)


def build_shared(place: Place) -> ir.Segment:
    moe, D = place.moe, place.D
    inner = (moe.shared_inner or moe.inner) * moe.shared
    parts = up_parts(moe, inner)
    gate = (place.weight("gate", 1, D),) if moe.shared_gate else ()
    params: tuple[ir.Param, ...] = (
        *place.fused(weights(place, "up", sum(parts), D, moe.bias), *parts),
        *gate,
        *weights(place, "down", D, inner, moe.bias),
    )
    constants = {**({"gated": True} if gate else {}), **constants_of(moe)}
    inputs: tuple[ir.Input, ...] = (place.input("x", place.T, D),)
    remade = _normed(place, "h")
    if remade:  # the norm's gradients are the router's
        params = (place.gain("norm", D, grad=False), *params)
        inputs = (*inputs, replace(place.input("h", place.T, D), grad=False))
    return replace(segment("shared", shared, params, inputs, ("y",), **constants), remade=remade)


def experts(
    ops: Any,
    p: Any,
    rows_RD: Any,
    gate_R: Any,
    offsets_E: Any,
    *,
    activation: str = "swiglu",
    limit: float = 0.0,
    alpha: float = 0.0,
    shift: float = 0.0,
    biased: bool = False,
    slices: int = 1,
) -> tuple[Any, ...]:
    """The routed experts of this rank, or one of the `slices` of each. The gate weight comes before `down`, so that
    their outputs need not be kept; the bias of `down` is weighed like them, and each slice adds an equal part of it."""
    h_RM = grouped_linear(ops, p, "up", rows_RD, offsets_E, biased)
    act_RI = times_gate(ops, h_RM, gate_R, activation, limit, alpha, shift)
    if biased and slices > 1:
        gate_R = ops.scale(gate_R, 1 / slices)
    return (grouped_linear(ops, p, "down", act_RI, offsets_E, biased, gate_R),)


def build_experts(place: Place) -> ir.Segment:
    moe, D, stack = place.moe, place.D, place.experts_local
    inner = moe.inner // place.slices
    parts = up_parts(moe, inner)
    up, down = weights(place, "up", sum(parts), D, moe.bias, stack), weights(place, "down", D, inner, moe.bias, stack)
    return segment(
        "experts",
        experts,
        (*place.rows(up, *parts), *place.columns(down)),
        (
            place.input("rows", "R", D),
            ir.Input("gate", ("R",), place.wide_dtype),
            index("offsets", stack, dtype="int32"),
        ),
        ("y",),
        **constants_of(moe),
        **({"slices": place.slices} if moe.bias and place.slices > 1 else {}),
    )


def join(
    ops: Any,
    p: Any,
    h_TD: Any,
    *rest: Any,
    top_k: int,
    eps: float = 0.0,
    post: bool = False,
    factor: float = 1.0,
    mixed: bool = False,
    again: bool = False,
) -> tuple[Any, ...]:
    """h + shared + the rows that came back, summed over each token's experts; what is added to h may be normed. Of
    several residual streams their mixing comes last in `rest`, and behind it, if h is made `again`, what it is made
    of."""
    rest = rest[: -len(SUMMED)] if again else rest
    rest, mixing = (rest[:-2], rest[-2:]) if mixed else (rest, ())
    *shared_TD, y_SD, order_S = rest
    if post or factor != 1 or mixed:
        y_TD = ops.unpermute(y_SD, order_S, top_k)
        for x_TD in shared_TD:
            y_TD = ops.add(x_TD, y_TD)
        return (summed(ops, h_TD, leaving(ops, p, y_TD, eps, post, factor), mixing),)
    for x_TD in shared_TD:
        h_TD = ops.add(h_TD, x_TD)
    return (ops.add(h_TD, ops.unpermute(y_SD, order_S, top_k)),)


def build_join(place: Place) -> ir.Segment:
    T, S, D = place.T, place.S, place.D
    shared_input = (place.input("shared", T, D),) if place.moe.shared else ()
    made_of = tuple(replace(each, name=name, grad=False) for each, name in zip(sum_of(place), SUMMED, strict=False))
    remade = _summed(place, "h", made_of)
    of = segment(
        "join",
        join,
        post_gain(place),
        (
            place.input("h", T, place.N),
            *shared_input,
            place.input("rows", S, D),
            index("order", S),
            *hyper.mixing(place),
            *(made_of if remade else ()),
        ),
        ("y",),
        top_k=place.moe.top_k * place.slices,
        **({"eps": place.model.norm_eps} if has_post(place) else {}),
        **({"mixed": True} if hyper.mixing(place) else {}),
        **({"again": True} if remade else {}),
        **exit_of(place),
    )
    return replace(of, remade=remade)
