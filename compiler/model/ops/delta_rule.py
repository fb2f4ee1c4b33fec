"""Linear attention: the gated delta rule, the logarithm of its decay, and the short convolution before it.

The delta rule and the convolution restart with each sequence of the micro-batch and, where sequences hold several
documents, with each document: `starts` has for each token the position in its sequence where its document starts. Both
read whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from compiler.model.ops.rule import PLACES, Gradient, Rule, Shape, Tensor, are_places, elementwise, statistics_dtype

CHUNK = 64  # tokens per chunk; within a chunk all pairs are multiplied (runtime/ops/delta_rule.py)
STARTS = PLACES[:1]
_DELTA = ("q", "k", "v", "beta", "decay", "sequence", "key_heads", *STARTS)


def _infer_decay(logit_TN: Tensor, a_H: Tensor) -> tuple[Tensor, ...]:
    assert logit_TN.shape[1] % a_H.shape[0] == 0, (logit_TN, a_H)
    assert logit_TN.dtype == statistics_dtype(logit_TN.dtype), logit_TN
    return (logit_TN,)


def _infer_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    sequence: int,
    key_heads: int,
    starts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    (T, width), H = q.shape, beta.shape[1]
    assert q == k and width % key_heads == 0 and H % key_heads == 0, (q, k, key_heads, beta)
    assert v.shape[0] == beta.shape[0] == decay.shape[0] == T and v.shape[1] % H == 0, (q, v, beta, decay)
    assert decay.shape[1] in (H, H * width // key_heads) and decay.dtype == statistics_dtype(q.dtype), (q, decay)
    assert T % sequence == 0 and are_places((starts,), T), (q, sequence, starts)
    return (v,)


def _infer_convolve(x_TN: Tensor, w_NJ: Tensor, sequence: int, starts: Tensor | None = None) -> tuple[Tensor, ...]:
    assert w_NJ.shape[0] == x_TN.shape[1] and x_TN.shape[0] % sequence == 0, (x_TN, w_NJ, sequence)
    assert are_places((starts,), x_TN.shape[0]), starts
    return x_TN, Tensor(x_TN.shape[:1], "int32")


def _delta_flops(state: int, keys: int, values: int) -> Callable[[SimpleNamespace], int]:
    """FLOPs of `state` products of each row with a state, and of `keys` and `values` products among the rows of a chunk
    over the width of a key and of a value. Half of each of the latter is masked, or is a triangular system."""

    def flops(n: SimpleNamespace) -> int:
        (T, H), C = n.beta, min(CHUNK, n.sequence)
        K, V = n.q[1] // n.key_heads, n.v[1] // H
        return T * H * (2 * state * K * V + C * (keys * K + values * V))

    return flops


def _delta_kernel(n: SimpleNamespace) -> Shape:
    """(tokens, sequence, heads, width of a key, width of a value)."""
    H = n.beta[1]
    return n.q[0], n.sequence, H, n.q[1] // n.key_heads, n.v[1] // H


def _convolve_gradient(op: str, argument: str) -> Gradient:
    """The gradient of the input or of the taps. It computes the input of the SiLU again."""
    flops = lambda n: n.x[0] * n.x[1] * (4 * n.w[1] + 5)  # noqa: E731
    return Gradient(op, reads=("d_y", "x", "w", "before"), gives=(argument,), flops=flops)


LOG_DECAY = Rule(
    args=("logit", "a"),
    outputs=("g",),
    infer=_infer_decay,
    kernel_class="norm",
    flops=elementwise("logit", 4),
    differentiable=("g",),
    dgrad=Gradient("log_decay_dgrad", reads=("d_g", "g", "a"), gives=("logit",), flops=elementwise("d_g", 4)),
    wgrad=Gradient("log_decay_wgrad", reads=("d_g", "g", "a"), gives=("a",), flops=elementwise("d_g", 2)),
)

DELTA_RULE = Rule(
    args=_DELTA,
    optional=STARTS,
    outputs=("o",),
    differentiable=("o",),
    infer=_infer_delta,
    kernel_class="delta_rule",
    flops=_delta_flops(3, 3, 2),  # w·S, q·S, k·u; scores of q and k, w of the system; its y, scores·u
    kernel=_delta_kernel,
    dgrad=Gradient(  # the forward except its outputs; then 7 with states, 4 over keys, 4 over values
        "delta_rule_dgrad",
        reads=("d_o", *_DELTA),
        gives=("q", "k", "v", "beta", "decay"),
        flops=_delta_flops(9, 7, 5),
        kernel=_delta_kernel,
        kernel_class="delta_rule_backward",
    ),
)

CONVOLVE = Rule(
    args=("x", "w", "sequence", *STARTS),
    optional=STARTS,
    outputs=("y", "before"),
    hidden=1,
    infer=_infer_convolve,
    kernel_class="norm",
    flops=lambda n: n.x[0] * n.x[1] * (2 * n.w[1] + 3),
    dgrad=_convolve_gradient("convolve_dgrad", "x"),
    wgrad=_convolve_gradient("convolve_wgrad", "w"),
)

RULES = {"convolve": CONVOLVE, "delta_rule": DELTA_RULE, "log_decay": LOG_DECAY}
