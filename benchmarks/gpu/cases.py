"""The table of kernels to check and time: arguments, work, goal and peer.

An op's work is the floating point operations of its products (`flops`), or else the bytes of its arguments and results,
each moved once. Goals are of an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from benchmarks.gpu import arguments as a
from benchmarks.gpu import products as p
from benchmarks.gpu.arguments import BF16, EPS, FP32, Arguments
from benchmarks.gpu.products import Shape
from benchmarks.gpu.sizes import Make, Sizes


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal: a share of the machine's limit, TFLOPS, µs, or the speed relative to `peer` (ratio)."""

    kind: Literal["share", "TFLOPS", "µs", "ratio"]
    value: float
    peer: str = ""

    def __str__(self) -> str:
        if self.kind == "share":
            return f"≥ {self.value:.2f} of the limit"
        if self.kind == "ratio":
            return f"≥ {self.value:.2f}× {self.peer}"
        return f"{'≤' if self.kind == 'µs' else '≥'} {self.value:g} {self.kind}"


@dataclass(frozen=True, slots=True)
class Case:
    """One op with one kind of arguments. `roundings`: how often an intermediate number is rounded to BF16 before the
    result. `coded`: quantised values were rounded before, so some codes may be off by one. `written`: arguments that
    the op changes; `unread`: written arguments whose values it does not read. `moved`: bytes, if it touches only some
    rows of an argument."""

    op: str
    arguments: Callable[[Sizes, Make], Arguments]
    goal: Goal
    variant: str = ""
    flops: Callable[[Sizes], int] | None = None
    moved: Callable[[Sizes], int] | None = None
    rate: Literal["bf16", "fp8"] = "bf16"
    roundings: int = 0
    coded: bool = False
    written: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (BF16, FP32)  # of activations; the first is timed
    sizes: tuple[str, ...] = ("odd", "even")  # sizes other than V3's

    @property
    def name(self) -> str:
        return f"{self.op} {self.variant}".strip()


COPY = Goal("share", 0.85)
CAST = Goal("share", 0.88)
MOVE = Goal("share", 0.80)
GROUPED = Goal("ratio", 1.2, "_grouped_mm")


# ---------------------------------------------------------------- work


def product_flops(shape: Shape) -> Callable[[Sizes], int]:
    def flops(s: Sizes) -> int:
        rows, n, k = shape(s)
        return 2 * rows * n * k

    return flops


def causal_flops(columns: Callable[[Sizes], int]) -> Callable[[Sizes], int]:
    """FLOPs of causal products; `columns` is the sum of the products' widths per query and key."""
    return lambda s: s.tokens * s.sequence * s.heads * columns(s)


def band_flops(products: int, ranks: int = 1) -> Callable[[Sizes], int]:
    """FLOPs of `products` products over the width of the queries and the keys in a window, on one of `ranks` context
    ranks."""

    def flops(s: Sizes) -> int:
        pairs = s.tokens // s.sequence * (2 * s.sequence - a.window(s)) * a.window(s)  # twice the number of pairs
        return products * pairs * s.heads * s.head_dim // ranks

    return flops


def forward_columns(s: Sizes) -> int:
    return s.nope + s.rope + s.value


def backward_columns(s: Sizes) -> int:
    """Scores, dK and dQ over [nope | rope]; dP and dV over the value."""
    return 3 * (s.nope + s.rope) + 2 * s.value


def index_flops(s: Sizes) -> int:
    """FLOPs of the causal products of the indexer's heads."""
    return s.tokens * s.sequence * a.index_heads(s) * s.head_dim


def index_loss_flops(s: Sizes) -> int:
    """FLOPs of the causal products of all keys: of attention, of the indexer, and its gradients of queries and keys."""
    return s.tokens * s.sequence * (s.heads * (s.nope + s.rope) + 3 * a.index_heads(s) * s.head_dim)


def compressed_flops(chosen: bool, products: int) -> Callable[[Sizes], int]:
    """FLOPs of `products` products over the keys in the window and the entries that queries see or have chosen."""

    def flops(s: Sizes) -> int:
        q, _, entries, choices, _, S, _, window, rate = a.compressed(s, Make(BF16, "meta"), chosen)
        most = choices.shape[1] if choices is not None else entries.shape[0]
        seen = sum(min(t + 1, window) + min((t + 1) // rate, most) for t in range(S))
        return 2 * products * s.tokens // S * seen * q.shape[1]

    return flops


def state_flops(state: int, chunk: int) -> Callable[[Sizes], int]:
    """FLOPs of `state` products of each row with a state, and of `chunk` products among the rows of a chunk, of which
    half are masked."""
    return lambda s: s.tokens * a.state_heads(s) * s.head_dim * (2 * state * s.head_dim + chunk * min(64, s.sequence))


def head_flops(products: int) -> Callable[[Sizes], int]:
    return lambda s: 2 * products * s.tokens * s.vocab * s.hidden


def fp8(op: str, arguments: Callable[[Sizes, Make], Arguments], goal: Goal, variant: str, shape: Shape) -> Case:
    """An E4M3 product with BF16 results, or added to FP32."""
    written = (0,) if op.endswith("_") else ()
    return Case(op, arguments, goal, variant, product_flops(shape), rate="fp8", dtypes=(BF16,), written=written)


# ---------------------------------------------------------------- the table


O_PROJ, Q_UP, DOCUMENTS, CONTEXT = "out-projection", "q up", "of documents", "of a context rank"
PLAIN = ("gelu", "gelu_tanh", "relu2")

CASES: tuple[Case, ...] = (
    # ---- norms
    Case("rmsnorm", lambda s, t: (*a.norm(s, t), EPS), COPY),
    Case("rmsnorm_dgrad", a.norm_gradient, COPY),
    Case("rmsnorm_wgrad_", a.norm_wgrad, COPY, written=(0,)),
    Case("add_rmsnorm", lambda s, t: (t(s.tokens, s.hidden), *a.norm(s, t), EPS), COPY, roundings=1),
    Case("rmsnorm_dgrad_add", lambda s, t: (*a.norm_gradient(s, t), t(s.tokens, s.hidden)), COPY, roundings=1),
    Case("rmsnorm_again_dgrad_add", lambda s, t: a.norm_beside(s, t, 1, again=True), COPY, roundings=1),
    Case(
        "rmsnorm_again_quantise_dgrad_add",
        lambda s, t: a.norm_beside(s, t, 1, again=True),
        COPY,
        dtypes=(BF16,),
        roundings=1,
    ),
    Case("sum_rmsnorm_dgrad_add", lambda s, t: a.norm_beside(s, t, 2, again=False), COPY, roundings=2),
    Case("sum_rmsnorm_again_dgrad_add", lambda s, t: a.norm_beside(s, t, 2, again=True), COPY, roundings=2),
    Case(
        "sum_rmsnorm_again_quantise_dgrad_add",
        lambda s, t: a.norm_beside(s, t, 2, again=True),
        COPY,
        dtypes=(BF16,),
        roundings=2,
    ),
    Case(
        "permuted_rmsnorm_dgrad_add",
        lambda s, t: (*a.permute_sum(s, t), *a.norm_beside(s, t, 0, again=False)),
        MOVE,
        roundings=4,
    ),
    Case(
        "permuted_rmsnorm_again_dgrad_add",
        lambda s, t: (*a.permute_sum(s, t), *a.norm_beside(s, t, 0, again=True)),
        MOVE,
        roundings=4,
    ),
    Case("head_rmsnorm", lambda s, t: (*a.heads(s, t)[1:3], EPS), COPY),
    Case("head_rmsnorm_dgrad", a.heads, COPY),
    Case("head_rmsnorm_wgrad_", a.heads_wgrad, COPY, written=(0,)),
    Case("rmsnorm_quantise", lambda s, t: (*a.norm(s, t), EPS), COPY, dtypes=(BF16,)),
    Case("rmsnorm_quantise_wide", lambda s, t: (*a.norm(s, t), EPS), COPY, dtypes=(BF16,)),
    Case("add_rmsnorm_quantise", lambda s, t: (t(s.tokens, s.hidden), *a.norm(s, t), EPS), COPY, dtypes=(BF16,)),
    Case("add_rmsnorm_quantise_wide", lambda s, t: (t(s.tokens, s.hidden), *a.norm(s, t), EPS), COPY, dtypes=(BF16,)),
    # ---- residual streams
    *(
        Case(op, make, COPY, written=(0,) if op.endswith("_") else (), sizes=("odd",))
        for op, make in (
            ("hyper_products", lambda s, t: (*a.stream_products(s, t), EPS)),
            ("hyper_products_dgrad", a.stream_products_gradient),
            ("hyper_products_wgrad_", a.stream_products_wgrad),
            ("hyper_mix", a.mixing),
            ("hyper_mix_dgrad", a.mixing_gradient),
            ("hyper_collapse", a.collapsing),
            ("hyper_collapse_dgrad", lambda s, t: (t(s.tokens, s.hidden), *a.collapsing(s, t))),
            ("hyper_add", a.stream_sum),
            ("hyper_add_dgrad", lambda s, t: (a.streams(s, t), *a.stream_sum(s, t))),
            ("hyper_copy", lambda s, t: (t(s.tokens, s.hidden), a.STREAMS)),
            ("hyper_copy_dgrad", lambda s, t: (a.streams(s, t), a.STREAMS)),
        )
    ),
    *(
        Case(op, lambda s, t: (a.stream_logits(s, t), t(3)), Goal("µs", 10), sizes=("odd",))
        for op in ("scale_parts", "scale_parts_dgrad")
    ),
    Case(
        "scale_parts_wgrad_",
        lambda s, t: (t.wide(3), a.stream_logits(s, t), a.stream_logits(s, t)),
        Goal("µs", 10),
        written=(0,),
        dtypes=(FP32,),
        sizes=("odd",),
    ),
    # ---- convolutions and the delta rule
    Case("convolve", a.convolution, MOVE, sizes=("odd",)),
    Case("convolve_dgrad", a.convolution_gradient, MOVE, sizes=("odd",)),
    Case(
        "convolve_wgrad_",
        lambda s, t: (t.wide(s.hidden, 4), *a.convolution_gradient(s, t)),
        MOVE,
        written=(0,),
        sizes=("odd",),
    ),
    *(
        case
        for by_column, variant in ((False, "with decays of heads"), (True, "with decays of columns"))
        for case in (
            Case(
                "delta_rule",
                partial(a.delta_rule, by_column=by_column),
                Goal("share", 0.15),
                variant,
                state_flops(3, 5),
                roundings=8,
                sizes=("odd",),
            ),
            Case(
                "delta_rule_dgrad",
                partial(a.delta_rule_gradient, by_column=by_column),
                Goal("share", 0.15),
                variant,
                state_flops(9, 12),
                roundings=24,
                sizes=("odd",),
            ),
        )
    ),
    # ---- rotation before attention
    Case("rotate", a.rotation, COPY),
    Case("rotate_dgrad", a.rotation, COPY),
    Case("rotate", lambda s, t: (*a.rotation(s, t), a.starts(s, t)), COPY, DOCUMENTS),
    # ---- SwiGLU
    Case("swiglu", lambda s, t: a.dense(s, t)[1:], COPY),
    Case("swiglu_dgrad", a.dense, COPY),
    Case("gated_swiglu", lambda s, t: a.gated(s, t)[1:], COPY),
    Case("gated_swiglu_dgrad", a.gated, COPY),
    Case("swiglu_quantise", lambda s, t: a.dense(s, t)[1:], COPY, dtypes=(BF16,)),
    Case("swiglu_quantise_kept", lambda s, t: a.dense(s, t)[1:], COPY, dtypes=(BF16,)),
    Case("gated_swiglu_quantise", lambda s, t: a.gated(s, t)[1:], COPY, dtypes=(BF16,)),
    Case("gated_swiglu_quantise_kept", lambda s, t: a.gated(s, t)[1:], COPY, dtypes=(BF16,)),
    Case("swiglu_dgrad_quantise_both", a.dense, COPY, dtypes=(BF16,)),
    Case("gated_swiglu_dgrad_quantise_both", a.gated, COPY, dtypes=(BF16,)),
    Case("swiglu_fp8_dgrad_quantise_both", a.dense_fp8, COPY, dtypes=(BF16,)),
    Case("gated_swiglu_fp8_dgrad_quantise_both", a.gated_fp8, COPY, dtypes=(BF16,)),
    Case("swiglu_fp8_quantise_requantise", lambda s, t: a.dense_fp8(s, t)[1:], COPY, dtypes=(BF16,)),
    Case("gated_swiglu_fp8_quantise_requantise", lambda s, t: a.gated_fp8(s, t)[1:], COPY, dtypes=(BF16,)),
    Case("swiglu_fp8", lambda s, t: a.dense_fp8(s, t)[1:], COPY, dtypes=(BF16,)),
    Case("swiglu_fp8_dgrad", a.dense_fp8, COPY, dtypes=(BF16,)),
    Case("gated_swiglu_fp8", lambda s, t: a.gated_fp8(s, t)[1:], COPY, dtypes=(BF16,)),
    Case("gated_swiglu_fp8_dgrad", a.gated_fp8, COPY, dtypes=(BF16,)),
    # ---- other activations
    *(Case(op, lambda s, t: a.plain(s, t)[1:], COPY) for op in PLAIN),
    *(Case(f"{op}_dgrad", a.plain, COPY) for op in PLAIN),
    *(Case(op, lambda s, t: a.dense(s, t)[1:], COPY) for op in ("geglu", "geglu_tanh")),
    *(Case(f"{op}_dgrad", a.dense, COPY) for op in ("geglu", "geglu_tanh")),
    Case("clamped_swiglu", lambda s, t: (*a.dense(s, t)[1:], *a.CLAMP), COPY),
    Case("clamped_swiglu_dgrad", lambda s, t: (*a.dense(s, t), *a.CLAMP), COPY),
    # ---- quantising
    Case("quantise", lambda s, t: (t(s.rows, s.hidden),), CAST),
    Case("quantise_columns", lambda s, t: (t(s.rows, s.hidden),), CAST),
    Case("quantise_both", lambda s, t: (t(s.rows, s.hidden),), CAST),
    Case("quantise_requantise", lambda s, t: (t(s.rows, s.hidden),), CAST),
    Case("quantise_blocks", lambda s, t: (t(2 * s.dense, s.hidden),), CAST),
    Case("quantise_blocks", lambda s, t: (t(s.local_experts, 2 * s.inner, s.hidden),), CAST, "of experts"),
    Case("requantise", lambda s, t: a.quantise(t(s.rows, s.hidden)), CAST, dtypes=(BF16,)),
    Case("quantise_e5m6", lambda s, t: (a.attended(s, t),), CAST),
    Case("quantise_kept_e5m6", lambda s, t: (a.attended(s, t), True), CAST, dtypes=(BF16,)),
    Case("dequantise_e5m6", a.kept, CAST, dtypes=(BF16,)),
    Case("dequantise_quantise_requantise_e5m6", lambda s, t: (*a.kept(s, t), True), CAST, dtypes=(BF16,)),
    # ---- attention
    Case(
        "mla_attention",
        lambda s, t: (*a.attention(s, t), *a.attention_sizes(s)),
        Goal("share", 0.55),
        flops=causal_flops(forward_columns),
        roundings=3,
    ),
    Case(
        "mla_attention_dgrad",
        a.attention_gradient,
        Goal("share", 0.40),
        flops=causal_flops(backward_columns),
        roundings=4,
    ),
    Case(  # an E5M6 code that is off by one is as large as this many roundings
        "mla_attention_quantise_kept_e5m6",
        lambda s, t: (*a.attention(a.in_tiles(s), t), *a.attention_sizes(a.in_tiles(s)), True),
        Goal("share", 0.55),
        flops=causal_flops(lambda s: forward_columns(a.in_tiles(s))),
        roundings=24,
        coded=True,
        dtypes=(BF16,),
    ),
    *(
        Case(  # four roundings in the kernel, and four in the reference op, which also runs in BF16
            op,
            partial(a.attention_gradient_in_tiles, kept=from_e5m6, both=to_both),
            Goal("share", 0.40),
            flops=causal_flops(lambda s: backward_columns(a.in_tiles(s))),
            roundings=9,
            coded=True,
            dtypes=(BF16,),
        )
        for op, from_e5m6, to_both in (
            ("mla_attention_dgrad_quantise_both", False, True),
            ("dequantise_mla_attention_dgrad_e5m6", True, False),
            ("dequantise_mla_attention_dgrad_quantise_both_e5m6", True, True),
        )
    ),
    Case(  # all scores are computed, and most masked
        "chosen_attention",
        a.chosen_attention,
        Goal("share", 0.45),
        flops=causal_flops(forward_columns),
        roundings=3,
    ),
    Case(
        "chosen_attention_dgrad",
        a.chosen_attention_gradient,
        Goal("share", 0.35),
        flops=causal_flops(backward_columns),
        roundings=4,
    ),
    *(
        case
        for chosen, variant in ((True, "to chosen entries"), (False, "to all entries"))
        for case in (
            Case(
                "compressed_attention",
                partial(a.compressed, chosen=chosen),
                Goal("share", 0.35),
                variant,
                compressed_flops(chosen, products=2),
                roundings=3,
                dtypes=(BF16,),
            ),
            Case(
                "compressed_attention_dgrad",
                partial(a.compressed_gradient, chosen=chosen),
                Goal("share", 0.25),
                variant,
                compressed_flops(chosen, products=5),
                roundings=5,
                dtypes=(BF16,),
                sizes=("odd",),
            ),
        )
    ),
    Case(
        "gqa_attention",
        lambda s, t: (*a.grouped_queries(s, t), *a.grouped_queries_sizes(s)),
        Goal("share", 0.55),
        flops=causal_flops(lambda s: 2 * s.head_dim),
        roundings=3,
    ),
    Case(
        "gqa_attention_dgrad",
        a.grouped_queries_gradient,
        Goal("share", 0.40),
        flops=causal_flops(lambda s: 5 * s.head_dim),
        roundings=4,
    ),
    Case("bounded_attention", a.bounded, Goal("share", 0.55), flops=band_flops(2), roundings=3),
    Case("bounded_attention_dgrad", a.bounded_gradient, Goal("share", 0.40), flops=band_flops(5), roundings=4),
    *(
        case
        for op, make, share, products, off in (
            ("bounded_attention", a.bounded, 0.55, 2, 3),
            ("bounded_attention_dgrad", a.bounded_gradient, 0.40, 5, 4),
        )
        for case in (
            Case(
                op, partial(make, documents=True), Goal("share", share), DOCUMENTS, band_flops(products), roundings=off
            ),
            Case(
                op, partial(make, context=True), Goal("share", share), CONTEXT, band_flops(products, 2), roundings=off
            ),
        )
    ),
    Case("bounded_attention_wgrad_", a.sinks_gradient, COPY, written=(0,)),
    *(
        Case(op, make, Goal("share", 0.55), flops=flops, roundings=3)
        for op, make, flops in (
            (
                "mla_attention_peaks",
                lambda s, t: (*a.attention(s, t), *a.attention_sizes(s)),
                causal_flops(forward_columns),
            ),
            (
                "gqa_attention_peaks",
                lambda s, t: (*a.grouped_queries(s, t), *a.grouped_queries_sizes(s)),
                causal_flops(lambda s: 2 * s.head_dim),
            ),
            ("bounded_attention_peaks", a.windowed, band_flops(2)),
        )
    ),
    # ---- the indexer of sparse attention
    Case("select_keys", a.indexer, Goal("share", 0.40), flops=index_flops),
    Case("indexer_loss", a.indexer_loss, Goal("share", 0.30), flops=index_loss_flops, roundings=1),
    Case(
        "indexer_loss",
        partial(a.indexer_loss, chosen=True),
        Goal("share", 0.30),
        "of chosen keys",
        index_loss_flops,
        roundings=1,
    ),
    Case("indexer_loss_dgrad", a.indexer_loss_gradient, COPY),
    # ---- routing
    Case("route", lambda s, t: (*a.router(s, t), *a.routing(s)), Goal("µs", 10), dtypes=(FP32,)),
    Case("route_dgrad", a.chosen_gradient, Goal("µs", 10), dtypes=(FP32,)),
    Case("route_permute", lambda s, t: (*a.router(s, t), t(s.tokens, s.hidden), None, *a.routing(s)), MOVE),
    Case("permute", lambda s, t: (t(s.tokens, s.hidden), *a.chosen(s, t)[1:], s.experts), MOVE),
    Case("permute_placed", lambda s, t: (t(s.tokens, s.hidden), *a.chosen(s, t)[1:], a.slots(s, t)), MOVE),
    Case("permute_dgrad", lambda s, t: (*a.routed(s, t), s.top_k), MOVE),
    Case("permute_dgrad_add", a.permute_sum, MOVE, roundings=2),
    Case("permute_gate_dgrad", a.permute_gates, Goal("µs", 10), dtypes=(FP32,)),
    Case("permute_fp8", lambda s, t: (*a.tokens_fp8(s, t), *a.chosen(s, t)[1:], s.experts), MOVE, dtypes=(BF16,)),
    Case(
        "permute_placed_fp8",
        lambda s, t: (*a.tokens_fp8(s, t), *a.chosen(s, t)[1:], a.slots(s, t)),
        MOVE,
        dtypes=(BF16,),
    ),
    Case(
        "route_permute_fp8",
        lambda s, t: (*a.router(s, t), *a.tokens_fp8(s, t), None, *a.routing(s)),
        MOVE,
        dtypes=(BF16,),
    ),
    Case(
        "unpermute_fp8_dgrad",
        lambda s, t: (*a.tokens_fp8(s, t), a.routed(s, t)[1], s.top_k),
        MOVE,
        dtypes=(BF16,),
    ),
    Case("unpermute", lambda s, t: (*a.routed(s, t), s.top_k), MOVE),
    Case("unpermute_dgrad", a.unpermute_gradient, MOVE),
    Case("unpermute_dgrad_quantise", a.unpermute_gradient, MOVE, dtypes=(BF16,)),
    Case("unpermute_add", a.join, MOVE, roundings=2),
    Case("sequence_balance", a.balance, Goal("µs", 10), dtypes=(FP32,)),
    Case("sequence_balance_dgrad", a.balance_gradient, Goal("µs", 10), dtypes=(FP32,)),
    Case(
        "embedding",
        lambda s, t: (t.integers(s.vocab, s.tokens), t(s.vocab, s.hidden)),
        MOVE,
        moved=lambda s: s.tokens * (8 + (2 + 2) * s.hidden),
    ),
    Case(
        "embedding_wgrad_",
        lambda s, t: (t.wide(s.vocab, s.hidden), t(s.tokens, s.hidden), t.integers(s.vocab, s.tokens)),
        MOVE,
        moved=lambda s: s.tokens * (8 + (2 + 4 + 4) * s.hidden),
        written=(0,),
    ),
    # ---- products
    Case("grouped_linear", p.grouped(p.up), GROUPED, "up", product_flops(p.up)),
    Case("grouped_linear", p.grouped(p.down), GROUPED, "down", product_flops(p.down)),
    Case("grouped_linear_dgrad", p.grouped_dgrad(p.up), GROUPED, "up", product_flops(p.up)),
    Case("grouped_linear_dgrad", p.grouped_dgrad(p.down), GROUPED, "down", product_flops(p.down)),
    Case("grouped_linear_wgrad_", p.grouped_wgrad(p.up), GROUPED, "up", product_flops(p.up), written=(0,)),
    Case("grouped_linear_wgrad_", p.grouped_wgrad(p.down), GROUPED, "down", product_flops(p.down), written=(0,)),
    fp8("linear_fp8", p.fp8(p.out), Goal("ratio", 1.0, "BF16 product"), O_PROJ, p.out),
    fp8("linear_fp8", p.fp8(p.q_up), Goal("ratio", 1.0, "BF16 product"), Q_UP, p.q_up),
    fp8("linear_fp8_dgrad", p.fp8_dgrad(p.out), Goal("ratio", 1.0, "BF16 product"), O_PROJ, p.out),
    fp8("linear_fp8_dgrad", p.fp8_dgrad(p.q_up), Goal("ratio", 1.0, "BF16 product"), Q_UP, p.q_up),
    fp8("linear_fp8_wgrad_", p.fp8_wgrad(p.out), Goal("TFLOPS", 800), O_PROJ, p.out),
    fp8("linear_fp8_wgrad_", p.fp8_wgrad(p.q_up), Goal("TFLOPS", 800), Q_UP, p.q_up),
    fp8("grouped_linear_fp8", p.grouped_fp8(p.up), Goal("share", 0.75), "up", p.up),
    fp8("grouped_linear_fp8", p.grouped_fp8(p.down), Goal("share", 0.75), "down", p.down),
    fp8("grouped_linear_fp8_dgrad", p.grouped_fp8_dgrad(p.up), Goal("share", 0.75), "up", p.up),
    fp8("grouped_linear_fp8_dgrad", p.grouped_fp8_dgrad(p.down), Goal("share", 0.75), "down", p.down),
    fp8("grouped_linear_fp8_wgrad_", p.grouped_fp8_wgrad(p.up), Goal("TFLOPS", 800), "up", p.up),
    fp8("grouped_linear_fp8_wgrad_", p.grouped_fp8_wgrad(p.down), Goal("TFLOPS", 800), "down", p.down),
    # ---- head and optimizer
    Case("cross_entropy", a.logits, COPY),
    Case("cross_entropy_dgrad", a.logits_gradient, COPY),
    Case("linear_cross_entropy", a.head, Goal("ratio", 0.91, "its product"), flops=head_flops(1), roundings=1),
    Case(
        "linear_cross_entropy_dgrad",
        a.head_gradient,
        Goal("ratio", 0.91, "its products"),
        flops=head_flops(2),
        roundings=2,
    ),
    Case(
        "linear_cross_entropy_wgrad_",
        lambda s, t: (t.wide(s.vocab, s.hidden), *a.head_gradient(s, t)),
        Goal("ratio", 0.91, "its products"),
        flops=head_flops(2),
        roundings=2,
        written=(0,),
    ),
    # For a tensor rank's shard of the vocabulary.
    Case("cross_entropy_part", a.logits, COPY),
    Case("cross_entropy_part_dgrad", a.part_logits_gradient, COPY),
    Case("linear_cross_entropy_part", a.head, Goal("ratio", 0.91, "its product"), flops=head_flops(1), roundings=1),
    Case(
        "linear_cross_entropy_part_dgrad",
        a.part_head_gradient,
        Goal("ratio", 0.91, "its products"),
        flops=head_flops(2),
        roundings=2,
    ),
    Case(
        "linear_cross_entropy_part_wgrad_",
        lambda s, t: (t.wide(s.vocab, s.hidden), *a.part_head_gradient(s, t)),
        Goal("ratio", 0.91, "its products"),
        flops=head_flops(2),
        roundings=2,
        written=(0,),
    ),
    Case("adamw", a.update, Goal("share", 0.90), roundings=1, written=(0, 2, 3, 4), unread=(4,)),
)
