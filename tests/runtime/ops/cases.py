"""Random arguments of any size for every op, and for its gradient ops through its rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compiler.model.ops import RULES, Extent
from runtime.ops import OPS
from runtime.ops.product import wide
from tests.runtime.ops.attention_cases import bounded_attention as bounded_attention
from tests.runtime.ops.attention_cases import chosen_attention as chosen_attention
from tests.runtime.ops.attention_cases import gqa_attention as gqa_attention
from tests.runtime.ops.attention_cases import indexer_loss as indexer_loss
from tests.runtime.ops.attention_cases import mla_attention as mla_attention
from tests.runtime.ops.attention_cases import rotate as rotate
from tests.runtime.ops.attention_cases import select_keys as select_keys
from tests.runtime.ops.compress_cases import block_linear, compress, compressed_attention, unweighted_rmsnorm
from tests.runtime.ops.delta_cases import convolve as convolve
from tests.runtime.ops.delta_cases import delta_rule as delta_rule
from tests.runtime.ops.delta_cases import log_decay as log_decay
from tests.runtime.ops.source import Args as Args
from tests.runtime.ops.source import Source as Source

WIDE = {
    "decay",
    "gate",
    "logit",
    "logits",
    "score",
    "bias",
    "lse",
    "picked",
    "parts",
    "squares",
    "old",
    "advantage",
    "weight",
    "reference",
    "post",
    "comb",
    "scale",
}


def linear(source: Source, T: int = 5, K: int = 7, N: int = 3) -> Args:
    return source.normal(T, K), source.normal(N, K)


def rmsnorm(source: Source, T: int = 5, D: int = 7, eps: float = 1e-6) -> Args:
    return source.normal(T, D), source.normal(D), eps


def add_bias(source: Source, T: int = 5, N: int = 7) -> Args:
    return source.normal(T, N), source.normal(N)


def add_grouped_bias(source: Source, counts: tuple[int, ...] = (2, 0, 4), N: int = 5, gated: bool = True) -> Args:
    R, offsets_E = sum(counts), torch.tensor(counts).cumsum(0, dtype=torch.int32)
    return source.normal(R, N), source.normal(len(counts), N), offsets_E, source.normal(R) if gated else None


def gate_columns(source: Source, T: int = 5, N: int = 4, silu: bool = True) -> Args:
    return source.normal(T, N), source.normal(T, N), silu


def head_rmsnorm(source: Source, T: int = 5, H: int = 3, C: int = 7, eps: float = 1e-6) -> Args:
    return source.normal(T, H * C), source.normal(C), eps


def shared_rmsnorm(source: Source, T: int = 5, W: int = 6, ranks: int = 3, eps: float = 1e-6) -> Args:
    squares_T1 = source.normal(T, ranks * W).square().sum(1, keepdim=True)
    return source.normal(T, W), source.normal(W), squares_T1, ranks * W, eps


def route(
    source: Source,
    T: int = 6,
    groups: int = 4,
    members: int = 3,
    top_groups: int = 2,
    top_k: int = 4,
    normalize: bool = True,
    scale: float = 2.5,
    softmax: bool = False,
    biased: bool = True,
) -> Args:
    E = groups * members
    logits_TE, bias_E = source.normal(T, E), source.normal(E) if biased else None
    return logits_TE, bias_E, softmax, groups, top_groups, top_k, normalize, scale


def sequence_balance(source: Source, B: int = 3, S: int = 4, E: int = 6, K: int = 2, softmax: bool = False) -> Args:
    return source.normal(B * S, E), source.choices(B * S, E, K), S, softmax


def counted_balance(
    source: Source, B: int = 3, S: int = 8, E: int = 6, K: int = 2, ranks: int = 2, softmax: bool = False
) -> Args:
    """Arguments of the first of `ranks` that share B sequences of S tokens, with the choices on all of them."""
    rows = S // ranks
    chosen = source.choices(B * S, E, K).view(ranks * B, -1)
    counts_NE = torch.stack([torch.bincount(choices, minlength=E) for choices in chosen])
    return source.normal(B * rows, E), counts_NE, rows, S, softmax


def counted_balance_scores(source: Source) -> Args:
    logits_TE, *sizes, _ = counted_balance(source)
    return logits_TE.abs() + 0.1, *sizes


def blank_rows(source: Source, T: int = 6, N: int = 5) -> Args:
    return source.normal(T, N), source.below(2, T).to(torch.int32)


def real_balance(
    source: Source, B: int = 3, S: int = 8, E: int = 6, K: int = 2, ranks: int = 2, softmax: bool = False
) -> Args:
    """Arguments like those of `counted_balance`, for sequences of 1, 2 … tokens followed by padding."""
    rows = S // ranks
    real_BS = (torch.arange(S) < torch.arange(1, B + 1)[:, None]).to(torch.int32)
    chosen_BSK = source.choices(B * S, E, K).view(B, S, K)
    counts = [
        torch.bincount(chosen_BSK[b, part][real_BS[b, part] > 0].flatten(), minlength=E)
        for part in (slice(rank * rows, (rank + 1) * rows) for rank in range(ranks))
        for b in range(B)
    ]
    return source.normal(B * rows, E), torch.stack(counts), real_BS[:, :rows].flatten(), rows, K, softmax


def real_balance_scores(source: Source) -> Args:
    logits_TE, *sizes, _ = real_balance(source)
    return logits_TE.abs() + 0.1, *sizes


def permute(source: Source, T: int = 6, D: int = 5, E: int = 7, K: int = 3) -> Args:
    return source.normal(T, D), source.normal(T, K), source.choices(T, E, K), E


def permute_placed(source: Source, T: int = 6, D: int = 5, E: int = 7, K: int = 3) -> Args:
    return *permute(source, T, D, E, K)[:3], torch.randperm(E, generator=source.generator)


def slice_choices(source: Source, T: int = 6, E: int = 8, K: int = 3, slices: int = 2, apart: int = 4) -> Args:
    local_E = torch.randperm(E, generator=source.generator)  # maps each expert to one of the `apart` experts of a rank
    slots_E = local_E // apart * apart * slices + local_E % apart
    return source.normal(T, K), source.choices(T, E, K), slots_E, slices, apart


def unpermute(source: Source, T: int = 6, D: int = 5, E: int = 7, K: int = 3) -> Args:
    return source.normal(T * K, D), source.order(T, E, K), K


def grouped_linear(source: Source, R: int = 11, K: int = 4, N: int = 5, E: int = 3) -> Args:
    ends = source.below(R + 1, E).sort().values.to(torch.int32)
    ends[-1] = R
    return source.normal(R, K), source.normal(E, N, K), ends


def swiglu(source: Source, T: int = 5, I: int = 4) -> Args:
    return (source.normal(T, 2 * I),)


def gated_swiglu(source: Source, R: int = 5, I: int = 4) -> Args:
    gate_R = source.normal(R)
    gate_R[R // 2 :] = 0  # padding rows
    return source.normal(R, 2 * I), gate_R


def embedding(source: Source, T: int = 9, V: int = 6, D: int = 4) -> Args:
    """Some tokens are in another shard of the table."""
    tokens_T = source.below(V, T)
    tokens_T[2::5] = -1
    return tokens_T, source.normal(V, D)


def cross_entropy(source: Source, T: int = 7, V: int = 6) -> Args:
    targets_T = source.below(V, T)
    targets_T[::3] = -1
    return source.normal(T, V), targets_T


def place_parts(source: Source, T: int = 7, ranks: int = 3) -> Args:
    return source.normal(T), source.normal(T), torch.tensor([ranks - 2]), ranks


def cross_entropy_of_parts(source: Source, T: int = 7, ranks: int = 3) -> Args:
    return source.normal(T, ranks + 1), cross_entropy(source, T)[1]


def policy_loss(
    source: Source, T: int = 9, V: int = 6, kl: float = 0.04, near: float = 0.4, corrected: bool = True
) -> Args:
    """Ratios on both sides of the clipping bounds, with advantages of both signs."""
    logits_TV, targets_T = cross_entropy(source, T, V)
    logp_T = logits_TV.double().log_softmax(1).gather(1, targets_T.clamp(min=0)[:, None])[:, 0]
    old_T, reference_T = ((logp_T + near * source.normal(T)).to(source.dtype) for _ in range(2))
    per_token = old_T, source.normal(T), source.normal(T).abs(), reference_T if kl else None
    return logits_TV, targets_T, *per_token, 0.2, 0.28, kl, corrected


def clamped_swiglu(
    source: Source, T: int = 5, I: int = 4, limit: float = 0.7, alpha: float = 1.702, shift: float = 1.0
) -> Args:
    return source.normal(T, 2 * I), limit, alpha, shift


def gate_rows(source: Source, R: int = 5, I: int = 4) -> Args:
    return source.normal(R, I), gated_swiglu(source, R, I)[1]


def plain(source: Source, T: int = 5, I: int = 4) -> Args:
    return (source.normal(T, I),)


def sqrt_softplus(source: Source, T: int = 6, E: int = 7) -> Args:
    return (3 * source.normal(T, E),)


def route_scores(
    source: Source,
    T: int = 6,
    groups: int = 4,
    members: int = 3,
    top_groups: int = 2,
    top_k: int = 4,
    normalize: bool = True,
    scale: float = 2.5,
    biased: bool = True,
) -> Args:
    E = groups * members
    score_TE, bias_E = source.normal(T, E).abs(), source.normal(E) if biased else None
    return score_TE, bias_E, groups, top_groups, top_k, normalize, scale


def weigh_chosen(source: Source, T: int = 6, E: int = 7, K: int = 3, softmax: bool = True) -> Args:
    return 3 * source.normal(T, E), source.choices(T, E, K), softmax, True, 2.5


def weigh_chosen_scores(source: Source, T: int = 6, E: int = 7, K: int = 3) -> Args:
    return source.normal(T, E).abs(), source.choices(T, E, K), True, 2.5


def balance_scores(source: Source, B: int = 3, S: int = 4, E: int = 6, K: int = 2) -> Args:
    return source.normal(B * S, E).abs(), source.choices(B * S, E, K), S


def sigmoid_gate(source: Source, T: int = 5) -> Args:
    return (source.normal(T, 1),)


def scale(source: Source, T: int = 5, N: int = 4, factor: float = 0.22) -> Args:
    return source.normal(T, N), factor


FORWARD: dict[str, Callable[..., Args]] = {
    "balance_scores": balance_scores,
    "add_bias": add_bias,
    "block_linear": block_linear,
    "bounded_attention": bounded_attention,
    "bounded_attention_peaks": bounded_attention,
    "center": plain,
    "chosen_attention": chosen_attention,
    "clamped_swiglu": clamped_swiglu,
    "compress": compress,
    "compressed_attention": compressed_attention,
    "convolve": convolve,
    "cross_entropy": cross_entropy,
    "cross_entropy_of_parts": cross_entropy_of_parts,
    "cross_entropy_part": cross_entropy,
    "delta_rule": delta_rule,
    "embedding": embedding,
    "gate_columns": gate_columns,
    "gate_rows": gate_rows,
    "gated_swiglu": gated_swiglu,
    "geglu": swiglu,
    "geglu_tanh": swiglu,
    "gelu": plain,
    "gelu_tanh": plain,
    "gqa_attention": gqa_attention,
    "gqa_attention_peaks": gqa_attention,
    "add_grouped_bias": add_grouped_bias,
    "grouped_linear": grouped_linear,
    "head_rmsnorm": head_rmsnorm,
    "indexer_loss": indexer_loss,
    "linear": linear,
    "linear_detached": linear,
    "linear_wide": linear,
    "log_decay": log_decay,
    "mla_attention": mla_attention,
    "mla_attention_peaks": mla_attention,
    "permute": permute,
    "permute_placed": permute_placed,
    "place_parts": place_parts,
    "policy_loss": policy_loss,
    "relu2": plain,
    "rmsnorm": rmsnorm,
    "shared_rmsnorm": shared_rmsnorm,
    "rotate": rotate,
    "route": route,
    "route_scores": route_scores,
    "counted_balance": counted_balance,
    "counted_balance_scores": counted_balance_scores,
    "blank_rows": blank_rows,
    "real_balance": real_balance,
    "real_balance_scores": real_balance_scores,
    "sequence_balance": sequence_balance,
    "hyper_add": lambda source: (source.normal(5, 12), source.normal(5, 4), source.normal(5, 3), source.normal(5, 9)),
    "hyper_collapse": lambda source: (source.normal(5, 12), source.normal(5, 3), 1e-2),
    "hyper_copy": lambda source: (source.normal(5, 4), 3),
    "hyper_mix": lambda source: (source.normal(5, 12), source.normal(5, 15), 4, 1e-2),
    "hyper_products": lambda source: (source.normal(5, 12), source.normal(15, 12), 1e-2),
    "scale": scale,
    "scale_parts": lambda source: (source.normal(5, 15), source.normal(3)),
    "slice_choices": slice_choices,
    "sigmoid_gate": sigmoid_gate,
    "softcap": scale,
    "sqrt_softplus": sqrt_softplus,
    "swiglu": swiglu,
    "two_squares": lambda source: (source.normal(5, 9), 4, 2),
    "unpermute": unpermute,
    "unweighted_rmsnorm": unweighted_rmsnorm,
    "weigh_chosen": weigh_chosen,
    "weigh_chosen_scores": weigh_chosen_scores,
}
GRADIENTS = sorted({gradient.op for op in FORWARD for gradient in RULES[op].gradients if gradient.op})
ACCUMULATIONS = sorted(f"{rule.wgrad.op}_" for op in FORWARD if (rule := RULES[op]).wgrad)
PURE = sorted({*FORWARD, *GRADIENTS})


def as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def gradient_arguments(op: str, inputs: Args, source: Source) -> list[tuple[str, Args]]:
    """(gradient op, its arguments) for each gradient of a forward `op` called on `inputs`, with random tangents."""
    rule = RULES[op]
    values = dict(zip((*rule.args, *rule.outputs), (*inputs, *as_tuple(OPS[op](*inputs))), strict=True))
    outputs = {name: values[name] for name in rule.differentiable}
    values |= {f"d_{name}": source.normal(*output.shape).to(output.dtype) for name, output in outputs.items()}

    def given(read: str | Extent) -> Any:
        return values[read.argument].shape[read.dim] if isinstance(read, Extent) else values[read]

    return [
        (gradient.op, tuple(map(given, gradient.reads)))
        for gradient in rule.gradients
        if gradient.op and any(values[name] is not None for name in gradient.gives)
    ]


def given_gradients(op: str) -> set[str]:
    """The names of a forward op's arguments that have gradients."""
    return {name for gradient in RULES[op].gradients for name in gradient.gives}


def widened(op: str, args: Args) -> Args:
    """Arguments of a forward op with a run's dtypes: tensors derived from router scores are FP32 in a BF16 run."""
    return tuple(
        wide(arg) if name in WIDE and isinstance(arg, Tensor) else arg
        for name, arg in zip(RULES[op].args, args, strict=True)
    )


def arguments(op: str, dtype: torch.dtype, sizes: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Args:
    """Arguments of any op of `OPS`. A gradient op takes its forward's arguments and results and random tangents.

    `sizes` replaces default sizes of the cases of forward ops, by name.
    """
    source = Source(dtype, seed=0)
    if op in FORWARD:
        return widened(op, FORWARD[op](source, **sizes.get(op, {})))
    for name in FORWARD:
        inputs = widened(name, FORWARD[name](source, **sizes.get(name, {})))
        for gradient_op, args in gradient_arguments(name, inputs, source):
            if op == gradient_op:
                return args
            if op == f"{gradient_op}_":
                accumulator = wide(source.normal(*OPS[gradient_op](*args).shape))
                return accumulator, *(arg for arg in args if isinstance(arg, Tensor))
    raise AssertionError(f"no case gives {op}")
