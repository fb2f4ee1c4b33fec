"""The mixture of experts of a layer, cut at its two all-to-alls: router | experts | join, and shared experts as a
separate segment.

T tokens of a micro-batch · D hidden · E experts (in the segment of experts, those of this rank) · K experts per token ·
S = T·K routed rows · R rows that an expert rank receives, expert after expert, each expert's padded.

If the width of experts is split over e ranks, an expert becomes e narrower experts with the same gate weight. They are
chosen together, and the sum of their outputs is its output. Then S = T·K·e.
Sources: DeepSeekMoE, arXiv 2401.06066; DeepSeek-V2, arXiv 2405.04434, §2.1.3; DeepSeek-V3, arXiv 2412.19437, §2.1.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from compiler import ir
from compiler.ir.dtypes import TORCH_DTYPE
from compiler.model.layers import hyper
from compiler.model.layers.builder import Place, add_bias_paths, grouped_linear, index, linear, segment_of, weights
from compiler.model.layers.dense import Activation, activation_of, constants_of, up_parts
from compiler.model.layers.padding import real_rows
from compiler.model.layers.residual import (
    StreamEntry,
    StreamExit,
    add_to_stream,
    entrance,
    exit_of,
    has_post,
    has_pre,
    post_gain,
    pre_gain,
    stream_entry,
    stream_exit,
    sum_of,
)
from dsl.schema.model import Score

# --- The sequence-wise loss that balances experts. Source: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20
#
# With whole sequences and without padding, the router computes it in one op. Else it is computed from choice counts.


def has_balance(place: Place) -> bool:
    """Whether a layer has a sequence-wise loss."""
    return place.moe.balance.sequence_loss > 0 and not place.is_mtp


def rows_of_sequence(place: Place) -> int:
    """The rows of each sequence on a rank."""
    return place.spec.train.sequence // place.spec.sequence_ranks


@dataclass(frozen=True)
class SequenceLoss:
    """The sequence-wise loss, from logits or, with `sqrt_softplus`, from scores. rows: of each sequence on a rank."""

    score: Score
    top_k: int
    rows: int
    sequence: int

    def of_choices(self, ops: Any, logits_TE: Any, expert_TK: Any) -> Any:
        """The loss of whole sequences without padding."""
        if self.score == "sqrt_softplus":
            return ops.balance_scores(logits_TE, expert_TK, self.sequence)
        return ops.sequence_balance(logits_TE, expert_TK, self.sequence, self.score == "softmax")

    def of_counts(self, ops: Any, logits_TE: Any, counts_NE: Any) -> Any:
        """A rank's part of the loss, if ranks have parts of sequences. counts: of the choices in each part, from all
        ranks that have parts of these sequences."""
        if self.score == "sqrt_softplus":
            return ops.counted_balance_scores(logits_TE, counts_NE, self.rows, self.sequence)
        return ops.counted_balance(logits_TE, counts_NE, self.rows, self.sequence, self.score == "softmax")

    def of_real(self, ops: Any, logits_TE: Any, counts_NE: Any, real_T: Any) -> Any:
        """The loss without padding rows. real: which rows are tokens."""
        values = logits_TE, counts_NE, real_T, self.rows, self.top_k
        if self.score == "sqrt_softplus":
            return ops.real_balance_scores(*values)
        return ops.real_balance(*values, self.score == "softmax")


@dataclass(frozen=True)
class SequenceBalance:
    """A rank's part of the sequence-wise loss, from scores and the all-gathered counts. If rows may be padding, the
    last input says which are tokens."""

    loss: SequenceLoss

    def __call__(self, ops: Any, p: Any, scores_TE: Any, choices_NE: Any, *real_T: Any) -> tuple[Any, ...]:
        if real_T:
            return (self.loss.of_real(ops, scores_TE, choices_NE, *real_T),)
        return (self.loss.of_counts(ops, scores_TE, choices_NE),)


def build_balance(place: Place) -> ir.Segment:
    """The segment of the sequence-wise balancing loss, from a rank's scores (T·E) and the counts that all ranks of a
    sequence have gathered."""
    moe, rows = place.moe, rows_of_sequence(place)
    counts = place.T // rows * place.spec.sequence_ranks
    padded = real_rows(place)
    loss = SequenceLoss(moe.score, moe.top_k, rows, place.spec.train.sequence)
    return segment_of(
        "balance",
        SequenceBalance(loss),
        (),
        (ir.Input("scores", (place.T, moe.experts), place.wide_dtype), index("choices", counts, moe.experts), *padded),
        ("sequence_loss",),
        {"rows": rows, "sequence": place.spec.train.sequence}
        | {"softmax": moe.score == "softmax", "given": moe.score == "sqrt_softplus"}
        | ({"top_k": moe.top_k} if padded else {}),
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
SHARED_PARAMETERS = add_bias_paths(
    {"norm": "ffn.norm", "up": "ffn.shared.up", "gate": "ffn.shared.gate", "down": "ffn.shared.down"}, "up", "down"
)
LOAD = "load"  # output of routers if rows may be padding: how many tokens each expert gets
TABLE_DTYPE = "int32"  # of the table of the experts for each token
SUMMED = ("stream", "attended", "attended_post", "attended_comb")  # inputs of a join that recomputes the residual
JOIN_PARAMETERS = {"post_norm": "ffn.post_norm"}
EXPERTS_PARAMETERS = add_bias_paths({"up": "ffn.experts.up", "down": "ffn.experts.down"}, "up", "down")


@dataclass(frozen=True)
class Scores:
    """x → a logit per expert, or with `sqrt_softplus` a score."""

    score: Score
    biased: bool

    def __call__(self, ops: Any, p: Any, x_TD: Any) -> Any:
        logits_TE = ops.linear_wide(x_TD, p.weight)
        if self.biased:
            logits_TE = ops.add_bias(logits_TE, p.logit_bias)
        return ops.sqrt_softplus(logits_TE) if self.score == "sqrt_softplus" else logits_TE


@dataclass(frozen=True)
class ExpertChoice:
    """Logits → the K experts of each token and their weights: by score, plus the balancing bias if `biased`, from the
    best groups only."""

    score: Score
    biased: bool
    groups: int
    top_groups: int
    top_k: int
    normalize: bool
    scale: float

    def __call__(self, ops: Any, p: Any, logits_TE: Any, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return the gate weights and the experts. `inputs`: further inputs of the router, if the choice has any."""
        return self.choose_by_score(ops, p, logits_TE)

    def choose_by_score(self, ops: Any, p: Any, logits_TE: Any) -> tuple[Any, Any]:
        """Return the gate weights [T, K] and the experts [T, K] with the best scores."""
        bias_E, sizes = p.bias if self.biased else None, (self.groups, self.top_groups, self.top_k)
        if self.score == "sqrt_softplus":
            gate_TK, expert_TK = ops.route_scores(logits_TE, bias_E, *sizes, self.normalize, self.scale)
        else:
            softmax = self.score == "softmax"
            gate_TK, expert_TK = ops.route(logits_TE, bias_E, softmax, *sizes, self.normalize, self.scale)
        return gate_TK, expert_TK

    def weigh(self, ops: Any, logits_TE: Any, expert_TK: Any) -> Any:
        """The gate weights of experts that were chosen by other means."""
        if self.score == "sqrt_softplus":
            return ops.weigh_chosen_scores(logits_TE, expert_TK, self.normalize, self.scale)
        return ops.weigh_chosen(logits_TE, expert_TK, self.score == "softmax", self.normalize, self.scale)


@dataclass(frozen=True)
class ReplayedChoice(ExpertChoice):
    """The choices that were made when the completions were generated. They are an input."""

    def __call__(self, ops: Any, p: Any, logits_TE: Any, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        _, expert_TK = self.choose_by_score(ops, p, logits_TE)
        expert_TK = ops.replay_choices(expert_TK, *inputs)
        return self.weigh(ops, logits_TE, expert_TK), expert_TK


@dataclass(frozen=True)
class TableChoice(ExpertChoice):
    """The experts that a table lists for each token id. The tokens are an input."""

    def __call__(self, ops: Any, p: Any, logits_TE: Any, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        expert_TK = ops.table_choices(*inputs, p.table)
        return self.weigh(ops, logits_TE, expert_TK), expert_TK


@dataclass(frozen=True)
class RowOrder:
    """Permutes rows into the order of their experts, or with `by_slots` of the experts' slots. A row is copied for each
    of the `slices` of its expert, whose slots are `apart` from one another."""

    experts: int
    by_slots: bool
    slices: int = 1
    apart: int = 0

    def __call__(self, ops: Any, p: Any, x_TD: Any, gate_TK: Any, expert_TK: Any) -> tuple[Any, ...]:
        """Return the rows, their gate weights, their order, and how many each expert gets."""
        if self.slices > 1:
            sliced = ops.slice_choices(gate_TK, expert_TK, p.slots, self.slices, self.apart)
            permuted = ops.permute(x_TD, *sliced, self.slices * self.experts)
        elif self.by_slots:
            permuted = ops.permute_placed(x_TD, gate_TK, expert_TK, p.slots)
        else:
            permuted = ops.permute(x_TD, gate_TK, expert_TK, self.experts)
        return tuple(permuted)


@dataclass(frozen=True)
class Loads:
    """The outputs of a router for the balance of experts: the sequence-wise loss, if there is one; or, if ranks have
    parts of sequences, the logits and the counts of choices in each part."""

    order: RowOrder
    loss: SequenceLoss | None
    counted: bool

    def __call__(self, ops: Any, p: Any, logits_TE: Any, expert_TK: Any) -> tuple[Any, ...]:
        if self.loss is None:
            return ()
        if self.counted:
            return logits_TE, ops.choice_counts(expert_TK, self.order.experts, self.loss.rows)
        return (self.loss.of_choices(ops, logits_TE, expert_TK),)

    def without_padding(
        self, ops: Any, p: Any, logits_TE: Any, expert_TK: Any, real_T: Any, rows: int
    ) -> tuple[Any, ...]:
        """Return the number of tokens of each expert, then the outputs, computed without padding rows."""
        order, slots = self.order, p.slots if self.order.by_slots else None
        load_E = ops.real_counts(expert_TK, real_T, slots, order.slices * order.experts, rows)
        if self.loss is None:
            return (load_E,)
        counts_NE = ops.real_counts(expert_TK, real_T, None, order.experts, self.loss.rows)
        if self.counted:
            return load_E, logits_TE, counts_NE
        return load_E, self.loss.of_real(ops, logits_TE, counts_NE, real_T)


@dataclass(frozen=True)
class Router:
    """Sum of the stream → norm → scores → choice → permuted rows → outputs for balancing.

    Returns the residual h + y for the join, where y is the output of attention; the normed x for the shared experts, if
    there are any; rows, gate weights, order and counts; load and loss; and with several residual streams, the mixing by
    which the join adds its sum. `padded`: the number of rows if some may be padding, else 0. If so, the mark of real
    tokens is an input before those of the choice.
    """

    arrive: StreamEntry
    score: Scores
    choose: ExpertChoice
    order: RowOrder
    loads: Loads
    shared: bool
    padded: int = 0

    def __call__(self, ops: Any, p: Any, h_TD: Any, y_TD: Any, *arguments: Any) -> tuple[Any, ...]:
        mixing, inputs = (arguments[:2], arguments[2:]) if self.arrive.streams else ((), arguments)
        real, choice_inputs = (inputs[:1], inputs[1:]) if self.padded else ((), inputs)
        residual_TD, x_TD, following = self.arrive(ops, p, h_TD, y_TD, mixing)
        logits_TE = self.score(ops, p, x_TD)
        gate_TK, expert_TK = self.choose(ops, p, logits_TE, choice_inputs)
        if real:
            expert_TK = ops.spread_padding(expert_TK, *real, self.order.experts, self.choose.groups)
        routed = self.order(ops, p, x_TD, gate_TK, expert_TK)
        if real:
            loads = self.loads.without_padding(ops, p, logits_TE, expert_TK, real[0], self.padded)
        else:
            loads = self.loads(ops, p, logits_TE, expert_TK)
        return (residual_TD, *((x_TD,) if self.shared else ()), *routed, *loads, *following)


def replays_choices(place: Place) -> bool:
    """Whether a router replays the choices made when completions were generated: several steps train on these."""
    grpo = place.spec.train.grpo
    return grpo is not None and grpo.iterations > 1 and place.moe.choice != "table"


def build_router(place: Place) -> ir.Segment:
    """The segment of the router: the residual stream (T·N) and attention's output (T·D) -> the stream, a row (D) and a
    gate weight for each chosen expert, their order, and the number of rows per expert. It also returns the input of
    shared experts (T·D) and the loss or the counts for balancing, if there are any."""
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
    routes = (index("routes", place.T, moe.top_k),) if replays else ()
    choice_inputs = (index("tokens", place.T),) if by_table else routes
    padded = real_rows(place)
    table = (ir.Param("table", shape, TABLE_DTYPE, grad=False, role="table"),) if by_table else ()
    order = RowOrder(moe.experts, by_slots, place.slices, place.experts_local if place.slices > 1 else 0)
    rows = rows_of_sequence(place) if counted else place.spec.train.sequence
    loss = SequenceLoss(moe.score, moe.top_k, rows, place.spec.train.sequence) if balance else None
    router = Router(
        arrive=stream_entry(place),
        score=Scores(moe.score, moe.router_bias),
        choose=_choice(place),
        order=order,
        loads=Loads(order, loss, counted),
        shared=shared,
        padded=place.T if padded else 0,
    )
    segment = segment_of(
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
        (*sum_of(place), *padded, *choice_inputs),
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
        {"eps": place.model.norm_eps, "biased": biased, "softmax": moe.score == "softmax", "groups": moe.groups}
        | {"top_groups": moe.top_groups, "top_k": moe.top_k, "normalize": moe.normalize, "scale": moe.scale}
        | {"sequence": place.spec.train.sequence, "shared": shared, "balance": balance}
        | ({"logit_bias": True} if logit_bias else {})
        | ({"replays": True} if replays else {})
        | ({"padded": place.T} if padded else {})
        | ({"by_slots": True} if by_slots else {})
        | ({"slices": place.slices, "apart": place.experts_local} if place.slices > 1 else {})
        | ({"sqrt_softplus": True} if moe.score == "sqrt_softplus" else {})
        | ({"counted": rows_of_sequence(place)} if counted else {})
        | hyper.streams_of(place)
        | entrance(place),
    )
    return replace(
        segment,
        remade=(
            *(_recomputed_norm(place, "residual") if shared else ()),
            *_recomputed_residual(place, "residual", sum_of(place)),
        ),
    )


def _choice(place: Place) -> ExpertChoice:
    """The way a router chooses experts."""
    moe = place.moe
    kind = TableChoice if moe.choice == "table" else ReplayedChoice if replays_choices(place) else ExpertChoice
    groups = moe.groups, moe.top_groups, moe.top_k
    return kind(moe.score, moe.balance.bias_rate is not None, *groups, moe.normalize, moe.scale)


def _recomputed_norm(place: Place, residual: str) -> tuple[ir.RecomputedValue, ...]:
    """How to recompute the normed `x`, which the router and the shared experts read. If norms are recomputed, each
    does so for its own backward and `x` is not saved. With several residual streams it cannot be recomputed, as their
    sum is not saved."""
    remade = ir.RecomputedValue("x", "rmsnorm", (residual, "norm", place.model.norm_eps))
    return (remade,) if "rmsnorm" in place.recompute and has_pre(place) and not hyper.mixing(place) else ()


def _recomputed_residual(place: Place, residual: str, inputs: tuple[ir.Input, ...]) -> tuple[ir.RecomputedValue, ...]:
    """How to recompute the residual, which the router and the join read. If the sums of several streams are recomputed,
    each does so for its own backward, from values that are saved in any case."""
    recomputes_residual = "hyper" in place.recompute and hyper.mixing(place)
    return (
        (ir.RecomputedValue(residual, "hyper_add", tuple(argument.name for argument in inputs)),)
        if recomputes_residual
        else ()
    )


@dataclass(frozen=True)
class SharedExperts:
    """The experts that every token goes to, as one. `h`, if passed, is what the backward recomputes `x` from.

    If `gated`, a gate weight per token is applied before `down`, as for routed rows, or after the bias of `down`.
    """

    activation: Activation
    biased: bool
    gated: bool

    def __call__(self, ops: Any, p: Any, x_TD: Any, *h_TD: Any) -> tuple[Any, ...]:
        h_TM, act = linear(ops, p, "up", x_TD, self.biased), self.activation
        if not self.gated:
            return (linear(ops, p, "down", act(ops, h_TM), self.biased),)
        gate_T = ops.sigmoid_gate(ops.linear_wide(x_TD, p.gate))
        if self.biased:
            return (ops.gate_rows(linear(ops, p, "down", act(ops, h_TM), self.biased), gate_T),)
        return (ops.linear(act.times_gate(ops, h_TM, gate_T), p.down),)


def build_shared(place: Place) -> ir.Segment:
    """The segment of the shared experts: x (T·D) -> T·D. It also takes h if the backward recomputes x from it."""
    moe, D = place.moe, place.D
    inner = (moe.shared_inner or moe.inner) * moe.shared
    parts = up_parts(moe, inner)
    gate = (place.weight("gate", 1, D),) if moe.shared_gate else ()
    params: tuple[ir.Param, ...] = (
        *place.fused_params(weights(place, "up", sum(parts), D, moe.bias), *parts),
        *gate,
        *weights(place, "down", D, inner, moe.bias),
    )
    constants = {**({"gated": True} if gate else {}), **constants_of(moe)}
    inputs: tuple[ir.Input, ...] = (place.input("x", place.T, D),)
    remade = _recomputed_norm(place, "h")
    if remade:  # the norm's gradients are the router's
        params = (place.gain("norm", D, grad=False), *params)
        inputs = (*inputs, replace(place.input("h", place.T, D), grad=False))
    shared = SharedExperts(activation_of(moe), moe.bias, moe.shared_gate)
    return replace(segment_of("shared", shared, params, inputs, ("y",), constants), remade=remade)


@dataclass(frozen=True)
class RoutedExperts:
    """The routed experts of this rank, or one of the `slices` of each. The gate weight is applied before `down`, so
    that the outputs need not be saved. The bias of `down` is multiplied by the gate weight too, and each slice adds an
    equal share of it."""

    activation: Activation
    biased: bool
    slices: int

    def __call__(self, ops: Any, p: Any, rows_RD: Any, gate_R: Any, offsets_E: Any) -> tuple[Any, ...]:
        h_RM = grouped_linear(ops, p, "up", rows_RD, offsets_E, self.biased)
        act_RI = self.activation.times_gate(ops, h_RM, gate_R)
        if self.biased and self.slices > 1:
            gate_R = ops.scale(gate_R, 1 / self.slices)
        return (grouped_linear(ops, p, "down", act_RI, offsets_E, self.biased, gate_R),)


def build_experts(place: Place) -> ir.Segment:
    """The segment of this rank's routed experts: R rows (R·D) with gate weights, and the offset of each expert ->
    R·D."""
    moe, D, stack = place.moe, place.D, place.experts_local
    inner = moe.inner // place.slices
    parts = up_parts(moe, inner)
    up, down = weights(place, "up", sum(parts), D, moe.bias, stack), weights(place, "down", D, inner, moe.bias, stack)
    return segment_of(
        "experts",
        RoutedExperts(activation_of(moe), moe.bias, place.slices),
        (*place.rows(up, *parts), *place.columns(down)),
        (
            place.input("rows", "R", D),
            ir.Input("gate", ("R",), place.wide_dtype),
            index("offsets", stack, dtype="int32"),
        ),
        ("y",),
        constants_of(moe) | ({"slices": place.slices} if moe.bias and place.slices > 1 else {}),
    )


@dataclass(frozen=True)
class Join:
    """h + the shared experts' output + the returned rows, summed over each token's experts."""

    top_k: int

    def __call__(self, ops: Any, p: Any, h_TD: Any, *arguments: Any) -> tuple[Any, ...]:
        *shared_TD, y_SD, order_S = arguments
        for x_TD in shared_TD:
            h_TD = ops.add(h_TD, x_TD)
        return (ops.add(h_TD, ops.unpermute(y_SD, order_S, self.top_k)),)


@dataclass(frozen=True)
class JoinApart:
    """`Join` with the parts summed before they are added to h, because the sum is normed, scaled, or mixed into several
    residual streams. `arguments` ends with the mixing and, if h is recomputed (`recomputes_residual`), with what it is
    recomputed from."""

    top_k: int
    leave: StreamExit
    mixed: bool
    recomputes_residual: bool

    def __call__(self, ops: Any, p: Any, h_TD: Any, *arguments: Any) -> tuple[Any, ...]:
        arguments = arguments[: -len(SUMMED)] if self.recomputes_residual else arguments
        arguments, mixing = (arguments[:-2], arguments[-2:]) if self.mixed else (arguments, ())
        *shared_TD, y_SD, order_S = arguments
        y_TD = ops.unpermute(y_SD, order_S, self.top_k)
        for x_TD in shared_TD:
            y_TD = ops.add(x_TD, y_TD)
        return (add_to_stream(ops, h_TD, self.leave(ops, p, y_TD), mixing),)


def build_join(place: Place) -> ir.Segment:
    """The segment that ends a MoE layer: the residual stream, the shared experts' output and the S returned rows -> the
    stream after the layer (T·N)."""
    T, S, D = place.T, place.S, place.D
    shared_input = (place.input("shared", T, D),) if place.moe.shared else ()
    sources = tuple(replace(part, name=name, grad=False) for part, name in zip(sum_of(place), SUMMED, strict=False))
    remade = _recomputed_residual(place, "h", sources)
    top_k, mixed = place.moe.top_k * place.slices, bool(hyper.mixing(place))
    apart = mixed or bool(exit_of(place))
    segment = segment_of(
        "join",
        JoinApart(top_k, stream_exit(place), mixed, bool(remade)) if apart else Join(top_k),
        post_gain(place),
        (
            place.input("h", T, place.N),
            *shared_input,
            place.input("rows", S, D),
            index("order", S),
            *hyper.mixing(place),
            *(sources if remade else ()),
        ),
        ("y",),
        {"top_k": top_k}
        | ({"eps": place.model.norm_eps} if has_post(place) else {})
        | ({"mixed": True} if mixed else {})
        | ({"again": True} if remade else {})
        | exit_of(place),
    )
    return replace(segment, remade=remade)
