"""The keys that each query attends to, by the scores of an indexer: `select_keys`. Choices have no gradient.

A key stands for `rate` tokens, and a query sees those of its past. FLOPs are those of sequences of one document.
"""

from __future__ import annotations

from types import SimpleNamespace

from compiler.ops.rule import PLACES, Rule, Tensor, are_places


def _infer_select(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    sequence: int,
    heads: int,
    top_k: int,
    rate: int,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    keys = sequence // rate
    assert q.shape == (weights.shape[0], heads * k.shape[1]) and weights.shape[1] == heads, (q, k, weights)
    assert k.shape[0] % max(1, keys) == 0, (k, sequence, rate)
    assert are_places((starts, positions), q.shape[0]), (starts, positions)
    return (Tensor((q.shape[0], top_k), "int32"),)


def _select_flops(n: SimpleNamespace) -> int:
    """q·k of each head, half of it masked, and the sum over heads."""
    keys = n.sequence // n.rate
    return n.q[0] * keys * (n.q[1] + n.heads)


SELECT_KEYS = Rule(
    args=("q", "k", "weights", "sequence", "heads", "top_k", "rate", *PLACES),
    optional=PLACES,
    outputs=("chosen",),
    infer=_infer_select,
    kernel_class="attention",
    flops=_select_flops,
    kernel=lambda n: (n.q[0], n.sequence // n.rate, n.heads, n.k[1], 1),
    differentiable=(),
)

RULES = {"select_keys": SELECT_KEYS}
