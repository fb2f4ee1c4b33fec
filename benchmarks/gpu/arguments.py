"""Arguments of ops at given sizes: random tensors, and tensors that preceding ops compute from these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.sizes import Make, Sizes
from compiler.model.ops import RULES
from compiler.model.ops import Tensor as Abstract
from runtime import ops
from runtime.ops.quantise import quantise
from runtime.ops.quantise_e5m6 import quantise_e5m6
from runtime.state.optimizers import reference_update

EPS, THETA, SCALE, SOFTCAP = 1e-6, 10_000.0, 2.5, 30.0
CLAMP = 7.0, 1.702, 1.0  # limit, alpha and shift of GPT-OSS
STREAMS, ROUNDS = 4, 20  # of DeepSeek-V4's hyper-connections
BF16, FP32 = torch.bfloat16, torch.float32
Arguments = tuple[Any, ...]


def of(op: str, *arguments: Any) -> Any:
    """The results of an op. On the meta device, tensors with the shapes and dtypes of its rule."""
    if arguments[0].device.type != "meta":
        return ops.OPS[op](*arguments)
    results = RULES[op].infer(*map(abstract, arguments))
    tensors = tuple(torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in results)
    return tensors if len(tensors) > 1 else tensors[0]


def abstract(argument: Any) -> Any:
    """The shape and dtype of a tensor, as op rules take them. Constants are returned unchanged."""
    if not isinstance(argument, Tensor):
        return argument
    return Abstract(tuple(argument.shape), str(argument.dtype).removeprefix("torch."))


def reference(op: str) -> Callable[..., Any]:
    """The reference implementation of an op, or of the update of this kind of optimizer."""
    return ops.OPS[op] if op in ops.OPS else reference_update(op)


def norm(s: Sizes, t: Make) -> tuple[Tensor, Tensor]:
    return t(s.tokens, s.hidden), t(s.hidden)


def norm_gradient(s: Sizes, t: Make) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, x, w, rstd."""
    x, w = norm(s, t)
    return t(s.tokens, s.hidden), x, w, of("rmsnorm", x, w, EPS)[1]


def norm_beside(s: Sizes, t: Make, parts: int, again: bool) -> Arguments:
    """dy in parts, x, w, eps or rstd, the gradient of the residual."""
    _, x, w, rstd = norm_gradient(s, t)
    return *(t(s.tokens, s.hidden) for _ in range(parts)), x, w, EPS if again else rstd, t(s.tokens, s.hidden)


def heads(s: Sizes, t: Make) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, x, w, rstd of queries."""
    x, w = t(s.tokens, s.kv_heads * s.head_dim), t(s.head_dim)
    return t(*x.shape), x, w, of("head_rmsnorm", x, w, EPS)[1]


def norm_wgrad(s: Sizes, t: Make) -> Arguments:
    dy, x, _, rstd = norm_gradient(s, t)
    return t.wide(s.hidden), dy, x, rstd


def heads_wgrad(s: Sizes, t: Make) -> Arguments:
    dy, x, _, rstd = heads(s, t)
    return t.wide(s.head_dim), dy, x, rstd


def streams(s: Sizes, t: Make) -> Tensor:
    return t(s.tokens, STREAMS * s.hidden)


def stream_logits(s: Sizes, t: Make) -> Tensor:
    """The logits of pre, post and comb."""
    return t.wide(s.tokens, STREAMS * (STREAMS + 2))


def mixing(s: Sizes, t: Make) -> Arguments:
    return streams(s, t), stream_logits(s, t), ROUNDS, EPS


def mixing_gradient(s: Sizes, t: Make) -> Arguments:
    weights = t.wide(s.tokens, STREAMS), t.wide(s.tokens, STREAMS * STREAMS)
    return t(s.tokens, s.hidden), *weights, *mixing(s, t)


def collapsing(s: Sizes, t: Make) -> Arguments:
    return streams(s, t), t.wide(s.tokens, STREAMS), EPS


def stream_sum(s: Sizes, t: Make) -> Arguments:
    """h, y, post, comb."""
    weights = t.wide(s.tokens, STREAMS), t.wide(s.tokens, STREAMS * STREAMS)
    return streams(s, t), t(s.tokens, s.hidden), *weights


def stream_products(s: Sizes, t: Make) -> tuple[Tensor, Tensor]:
    """h, fn."""
    return streams(s, t), t(STREAMS * (STREAMS + 2), STREAMS * s.hidden)


def stream_products_gradient(s: Sizes, t: Make) -> Arguments:
    """dproducts, h, fn, products, rstd."""
    h, fn = stream_products(s, t)
    return stream_logits(s, t), h, fn, *of("hyper_products", h, fn, EPS)


def stream_products_wgrad(s: Sizes, t: Make) -> Arguments:
    dproducts, h, fn, _, rstd = stream_products_gradient(s, t)
    return t.wide(*fn.shape), dproducts, h, rstd


def convolution(s: Sizes, t: Make) -> tuple[Tensor, Tensor, int]:
    """x, four taps of each column, the sequence."""
    return t(s.tokens, s.hidden), t(s.hidden, 4), s.sequence


def convolution_gradient(s: Sizes, t: Make) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, x, w, the number of rows before each row."""
    x, w, sequence = convolution(s, t)
    return t(s.tokens, s.hidden), x, w, of("convolve", x, w, sequence)[1]


def state_heads(s: Sizes) -> int:
    """Heads of values of a delta rule: 32 as in Qwen3-Next and Kimi Linear."""
    return 2 * -(-s.heads // 8)


def delta_rule(s: Sizes, t: Make, by_column: bool) -> Arguments:
    """q, k, v, β's logits, decays of a tenth; each head of keys has two of values if they are of heads."""
    H, K = state_heads(s), s.head_dim
    G = H if by_column else H // 2
    keys, decays = G * K, -t.wide(s.tokens, H * K if by_column else H).square() / 10
    tensors = t(s.tokens, keys), t(s.tokens, keys), t(s.tokens, H * K), t.wide(s.tokens, H), decays
    return *tensors, s.sequence, G


def delta_rule_gradient(s: Sizes, t: Make, by_column: bool) -> Arguments:
    arguments = delta_rule(s, t, by_column)
    return t(*arguments[2].shape), *arguments


def dense(s: Sizes, t: Make) -> tuple[Tensor, Tensor]:
    """dy, h of a dense layer."""
    return t(s.tokens, s.dense), t(s.tokens, 2 * s.dense)


def attended(s: Sizes, t: Make) -> Tensor:
    """The output of attention."""
    return t(s.tokens, s.heads * s.value)


def kept(s: Sizes, t: Make) -> Arguments:
    """The output of attention in E5M6, as planes."""
    return quantise_e5m6(attended(s, t))


def gated(s: Sizes, t: Make) -> tuple[Tensor, Tensor, Tensor]:
    """dy, h, gate for rows of experts."""
    return t(s.rows, s.inner), t(s.rows, 2 * s.inner), t.wide(s.rows)


def gated_fp8(s: Sizes, t: Make) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, the saved FP8 h, its scales, gate."""
    dy, h, gate = gated(s, t)
    return dy, *quantise(h), gate


def dense_fp8(s: Sizes, t: Make) -> tuple[Tensor, Tensor, Tensor]:
    dy, h = dense(s, t)
    return dy, *quantise(h)


def attention(s: Sizes, t: Make) -> tuple[Tensor, Tensor, Tensor]:
    """q, kv, k_rope."""
    return (
        t(s.tokens, s.heads * (s.nope + s.rope)),
        t(s.tokens, s.heads * (s.nope + s.value)),
        t(s.tokens, s.rope),
    )


def attention_sizes(s: Sizes) -> Arguments:
    return s.sequence, s.heads, s.nope, s.rope, s.value, THETA


def rotation(s: Sizes, t: Make) -> Arguments:
    """x, and the rotation of DeepSeek-V3's longer context: YaRN by 40, with the softmax scale on the queries."""
    x = t(s.tokens, s.heads * (s.nope + s.rope))
    return x, s.sequence, s.heads, s.nope, s.rope, THETA, 40.0, 10.0, 23.0, 0.0, 1.0, 1.87


def attention_gradient(s: Sizes, t: Make) -> Arguments:
    inputs = attention(s, t)
    o, lse = of("mla_attention", *inputs, *attention_sizes(s))
    return t(*o.shape), *inputs, o, lse, *attention_sizes(s)


def chosen_keys(s: Sizes, t: Make) -> Tensor:
    """Of each query the keys that it has chosen, at most half of a sequence and 2,048: evenly from all up to its own,
    so that every block of keys has some."""
    K = min(2048, -(-s.sequence // 2))
    seen = torch.arange(s.tokens, device=t.device)[:, None] % s.sequence + 1
    order = torch.arange(K, device=t.device)[None, :]
    return torch.where(seen > K, order * seen // K, torch.where(order < seen, order, -1)).to(torch.int32)


def chosen_attention(s: Sizes, t: Make) -> Arguments:
    return *attention(s, t), chosen_keys(s, t), *attention_sizes(s)[:-1]


def chosen_attention_gradient(s: Sizes, t: Make) -> Arguments:
    *inputs, chosen_TK = chosen_attention(s, t)[:4]
    o, lse = of("chosen_attention", *inputs, chosen_TK, *attention_sizes(s)[:-1])
    return t(*o.shape), *inputs, o, lse, chosen_TK, *attention_sizes(s)[:-1]


def index_heads(s: Sizes) -> int:
    """The heads of an indexer: half of those of attention, as in DeepSeek-V3.2."""
    return max(1, s.heads // 2)


def indexer(s: Sizes, t: Make) -> Arguments:
    """q, k and weights of an indexer that chooses half of the keys, as small integers: their scores are exact."""
    shapes = (s.tokens, index_heads(s) * s.head_dim), (s.tokens, s.head_dim), (s.tokens, index_heads(s))
    tensors = ((t.integers(7, *shape) - 3).to(t.dtype) for shape in shapes)
    return *tensors, s.sequence, index_heads(s), max(1, s.sequence // 2), 1


def indexer_loss(s: Sizes, t: Make, chosen: bool = False) -> Arguments:
    """An indexer, attention, and all keys or those that the indexer chooses."""
    *ours, sequence, heads, top_k, rate = indexer(s, t)
    keys = of("select_keys", *ours, sequence, heads, top_k, rate) if chosen else None
    ours = [x * 2.0**-4 for x in ours]  # scores of a few units
    return *ours, *attention(s, t), keys, sequence, heads, s.heads, s.nope, rate


def indexer_loss_gradient(s: Sizes, t: Make) -> Arguments:
    """The gradient of the loss, and those of q, k and weights that were computed with it."""
    q, k, weights, *_ = indexer(s, t)
    return t.wide(1)[0], t(*q.shape), t(*k.shape), t(*weights.shape)


def compressed(s: Sizes, t: Make, chosen: bool = True) -> Arguments:
    """The arguments of attention to a window and to chosen entries, as many as half of them, or to all. With heads of
    DeepSeek-V4's width, four of `head_dim`."""
    C, rate = min(512, 4 * s.head_dim), 4 if chosen else 128
    inputs = t(s.tokens, s.heads // 2 * C), t(s.tokens, C), t(s.tokens // s.sequence * (s.sequence // rate), C)
    seen = (torch.arange(s.tokens, device=t.device)[:, None] % s.sequence + 1) // rate
    order = torch.arange(max(1, s.sequence // rate // 2), device=t.device)[None, :]
    K = order.shape[1]
    entries = torch.where(seen > K, order * seen // K, torch.where(order < seen, order, -1)).to(torch.int32)
    options = entries if chosen else None, t(s.heads // 2), s.sequence, s.heads // 2, min(128, s.sequence), rate
    return *inputs, *options


def compressed_gradient(s: Sizes, t: Make, chosen: bool = True) -> Arguments:
    q, kv, entries, choices, sinks, *options = compressed(s, t, chosen)
    o, lse = of("compressed_attention", q, kv, entries, choices, sinks, *options)
    return t(*o.shape), q, kv, entries, choices, o, lse, *options


def in_tiles(s: Sizes) -> Sizes:
    """Sizes with heads of one tile, and whole tiles of rows per sequence."""
    sequence = -(-s.sequence // 128) * 128
    return replace(s, nope=128, value=128, sequence=sequence, tokens=s.tokens // s.sequence * sequence)


def attention_gradient_in_tiles(s: Sizes, t: Make, kept: bool, both: bool) -> Arguments:
    """The arguments with the forward's output in E5M6 if `kept`, and with the flag of FP32 scales if `both`."""
    *inputs, o, lse, _, _, _, _, _, _ = attention_gradient(in_tiles(s), t)
    return *inputs, *(quantise_e5m6(o) if kept else (o,)), lse, *attention_sizes(in_tiles(s)), *((False,) * both)


def grouped_queries(s: Sizes, t: Make) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v."""
    kv = s.kv_heads * s.head_dim
    return t(s.tokens, s.heads * s.head_dim), t(s.tokens, kv), t(s.tokens, kv)


def grouped_queries_sizes(s: Sizes) -> Arguments:
    return s.sequence, s.heads, s.kv_heads, THETA


def grouped_queries_gradient(s: Sizes, t: Make) -> Arguments:
    inputs = grouped_queries(s, t)
    o, lse = of("gqa_attention", *inputs, *grouped_queries_sizes(s))
    return t(*o.shape), *inputs, o, lse, *grouped_queries_sizes(s)


def window(s: Sizes) -> int:
    """The window of bounded attention: an eighth of a sequence."""
    return -(-s.sequence // 8)


def starts(s: Sizes, t: Make) -> Tensor:
    """Where the document of each token begins in its sequence. Each sequence has three documents."""
    length = -(-s.sequence // 3)
    return (torch.arange(s.tokens, device=t.device) % s.sequence // length * length).to(torch.int32)


def positions(s: Sizes, t: Make) -> Tensor:
    """The positions of the rows of the first of two context ranks: the first and the last quarter of each sequence."""
    quarter = s.sequence // 4
    row = torch.arange(2 * quarter, device=t.device).repeat(s.tokens // s.sequence)
    return torch.where(row < quarter, row, row + s.sequence - 2 * quarter).to(torch.int32)


def bounded(s: Sizes, t: Make, documents: bool = False, context: bool = False) -> Arguments:
    """q, k, v, sinks and the constants of attention with all bounds, for one document, several, or a context
    rank, whose queries and keys are rotated before."""
    q, k, v = grouped_queries(s, t)
    *sizes, theta = grouped_queries_sizes(s)
    if context:
        rows = positions(s, t)
        return q[: len(rows)], k, v, t(s.heads), *sizes, 0.0, window(s), SOFTCAP, None, rows
    arguments = q, k, v, t(s.heads), *sizes, theta, window(s), SOFTCAP
    return (*arguments, starts(s, t)) if documents else arguments


def windowed(s: Sizes, t: Make) -> Arguments:
    """q, k, v, no sinks and the constants of attention with only a window."""
    return *grouped_queries(s, t), None, *grouped_queries_sizes(s), window(s), 0.0


def bounded_gradient(s: Sizes, t: Make, documents: bool = False, context: bool = False) -> Arguments:
    q, k, v, sinks, *constants = bounded(s, t, documents, context)
    o, lse = of("bounded_attention", q, k, v, sinks, *constants)
    return t(*o.shape), q, k, v, o, lse, *constants


def sinks_gradient(s: Sizes, t: Make) -> Arguments:
    """acc, do, o, lse, sinks."""
    q, k, v, sinks, *constants = bounded(s, t)
    o, lse = of("bounded_attention", q, k, v, sinks, *constants)
    return t.wide(s.heads), t(*o.shape), o, lse, sinks


def plain(s: Sizes, t: Make) -> tuple[Tensor, Tensor]:
    """dy, h for an activation without a gate."""
    return t(s.tokens, s.dense), t(s.tokens, s.dense)


def routing(s: Sizes) -> Arguments:
    """softmax, groups, top_groups, top_k, normalize, scale."""
    return False, s.groups, s.top_groups, s.top_k, True, SCALE


def router(s: Sizes, t: Make) -> tuple[Tensor, Tensor]:
    """logits, bias: like DeepSeek-V3's, with spread scores and small biases; no choice depends on FP32 rounding."""
    logits, bias = t(s.tokens, s.experts, dtype=FP32), t(s.experts, dtype=FP32, scale=0.01)
    while t.device != "meta" and (close := _close(logits, bias, s)).any():
        logits[close] = t(int(close.sum()), s.experts, dtype=FP32)
    return logits, bias


def _close(logits: Tensor, bias: Tensor, s: Sizes) -> Tensor:
    """[tokens], bool: whether two scores or groups that the router chooses from differ by less than 10⁻⁵."""
    score = logits.double().sigmoid() + bias
    group_score = score.view(s.tokens, s.groups, -1).topk(2).values.sum(-1)
    ordered = group_score.sort(descending=True).values
    last = ordered[:, s.top_groups - 1 : s.top_groups]
    outside = (group_score < last).repeat_interleave(s.experts // s.groups, 1)
    best = score.masked_fill(outside, -1.0).topk(min(s.top_k + 1, s.experts)).values
    return ((last - ordered[:, s.top_groups :]) < 1e-5).any(1) | (-best.diff() < 1e-5).any(1)


def chosen(s: Sizes, t: Make) -> tuple[Tensor, Tensor, Tensor]:
    """logits, gate, expert."""
    logits, bias = router(s, t)
    return logits, *of("route", logits, bias, *routing(s))


def chosen_gradient(s: Sizes, t: Make) -> Arguments:
    logits, gate, expert = chosen(s, t)
    return t.wide(*gate.shape), logits, expert, False, True, SCALE


def balance(s: Sizes, t: Make) -> Arguments:
    logits, _, expert = chosen(s, t)
    return logits, expert, s.sequence, False


def balance_gradient(s: Sizes, t: Make) -> Arguments:
    return torch.full((), 1e-4, dtype=FP32, device=t.device), *balance(s, t)


def slots(s: Sizes, t: Make) -> Tensor:
    return t.permutation(s.experts)


def routed(s: Sizes, t: Make) -> tuple[Tensor, Tensor]:
    """The rows of all choices, and their order."""
    _, gate, expert = chosen(s, t)
    order = of("permute", t(s.tokens, 1), gate, expert, s.experts)[2]
    return t(s.tokens * s.top_k, s.hidden), order


def tokens_fp8(s: Sizes, t: Make) -> tuple[Tensor, Tensor]:
    return quantise(t(s.tokens, s.hidden))


def permute_sum(s: Sizes, t: Make) -> Arguments:
    """rows, order, top_k, the gradients of the shared experts and of the router's product."""
    return *routed(s, t), s.top_k, t(s.tokens, s.hidden), t(s.tokens, s.hidden)


def permute_gates(s: Sizes, t: Make) -> Arguments:
    return t.wide(s.tokens * s.top_k), routed(s, t)[1], s.top_k


def unpermute_gradient(s: Sizes, t: Make) -> Arguments:
    return t(s.tokens, s.hidden), routed(s, t)[1], s.top_k


def join(s: Sizes, t: Make) -> Arguments:
    """h, the output of the shared experts, rows, order, top_k."""
    return t(s.tokens, s.hidden), t(s.tokens, s.hidden), *routed(s, t), s.top_k


def logits(s: Sizes, t: Make) -> tuple[Tensor, Tensor]:
    """(logits, targets). The last targets are void."""
    return t(s.tokens, s.vocab), targets(s, t)


def logits_gradient(s: Sizes, t: Make) -> Arguments:
    x, target = logits(s, t)
    return slope(s, t), x, target, of("cross_entropy", x, target)[1]


def slope(s: Sizes, t: Make) -> Tensor:
    """dloss, a power of two: the gradient is nearly −dloss in every row, so any other number might round the same way
    in all of them."""
    return torch.full((), 2.0 ** -round(math.log2(s.tokens)), dtype=FP32, device=t.device)


def targets(s: Sizes, t: Make) -> Tensor:
    tokens = t.integers(s.vocab, s.tokens)
    tokens[-2:] = -1
    return tokens


def head(s: Sizes, t: Make) -> tuple[Tensor, Tensor, Tensor]:
    """h, w, targets; logits are about 1."""
    return t(s.tokens, s.hidden), t(s.vocab, s.hidden, scale=s.hidden**-0.5), targets(s, t)


def head_gradient(s: Sizes, t: Make) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dloss, h, w, targets, lse."""
    h, w, target = head(s, t)
    dloss = slope(s, t)
    lse = t.wide(s.tokens) if t.device == "meta" else ops.OPS["linear_cross_entropy"](h, w, target)[1]
    return dloss, h, w, target, lse


def part_tangents(s: Sizes, t: Make) -> tuple[Tensor, Tensor]:
    """dlse and dpicked of a shard of the vocabulary with half of the probability."""
    return (slope(s, t) / 2).expand(s.tokens).contiguous(), (-slope(s, t)).expand(s.tokens).contiguous()


def part_logits_gradient(s: Sizes, t: Make) -> Arguments:
    return *part_tangents(s, t), *logits_gradient(s, t)[1:]


def part_head_gradient(s: Sizes, t: Make) -> Arguments:
    """dlse, dpicked, h, w, targets, lse."""
    return *part_tangents(s, t), *head_gradient(s, t)[1:]


def update(s: Sizes, t: Make) -> Arguments:
    """The flat tensors of an update, with moments in the dtype of activations, and its settings."""
    moment1, moment2 = t(s.parameters, scale=1e-3), t(s.parameters, scale=1e-3).square_()
    rounded = torch.empty(s.parameters, dtype=BF16, device=t.device) if t.dtype == BF16 else None
    numbers = (0.5, 1e-3, 0.9, 0.95, 1e-8, 0.1, 7)  # factor, rate, betas, eps, decay, step
    return t.wide(s.parameters), t.wide(s.parameters), moment1, moment2, rounded, *numbers
