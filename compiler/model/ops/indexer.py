"""An indexer's choice of the keys that each query attends to, attention over them, and the loss of the indexer.

Choices have no gradient. In `select_keys` a key stands for `rate` tokens, and a query sees the keys of its past. FLOPs
count one document per sequence and the chosen keys only: kernels compute at least as many.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from compiler.model.ops.rule import PLACES, Gradient, Rule, Shape, Tensor, are_places, elementwise, statistics_dtype


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


def _infer_chosen(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    chosen: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
) -> tuple[Tensor, ...]:
    B = kv.shape[0] // sequence
    assert q.shape[1] == heads * (nope + rope) and kv.shape[1] == heads * (nope + value), (q, kv)
    assert kv.shape[0] == B * sequence and k_rope.shape == (kv.shape[0], rope) and q.shape[0] % B == 0, (q, kv, k_rope)
    assert chosen.shape[0] == q.shape[0] and chosen.dtype == "int32", (q, chosen)
    lse = Tensor((B, heads, q.shape[0] // B), statistics_dtype(q.dtype))
    return Tensor((q.shape[0], heads * value), q.dtype), lse


def _infer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    query: Tensor,
    kv: Tensor | None,
    k_rope: Tensor,
    chosen: Tensor | None,
    sequence: int,
    index_heads: int,
    heads: int,
    nope: int,
    rate: int,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    _infer_select(q, k, weights, sequence, index_heads, 1, rate, starts, positions)
    assert query.shape == (q.shape[0], heads * (nope + k_rope.shape[1])), (q, query, k_rope)
    assert k_rope.shape[0] == k.shape[0] and (kv is None) == (nope == 0), (k, kv, k_rope, nope)
    assert kv is None or (kv.shape[0] == k.shape[0] and kv.shape[1] > heads * nope), (k, kv)
    assert chosen is None or chosen.shape[0] == q.shape[0], (q, chosen)
    return Tensor((), statistics_dtype(q.dtype)), q, k, weights


def twice_seen(sequence: int, max_keys: int | None, rate: int) -> int:
    """Twice the number of keys that the queries of a sequence see in total: of their past, at most `max_keys` each.

    A key stands for `rate` tokens and is seen from its last token on. With rate 1 the keys form a band.
    """
    keys = sequence // rate if max_keys is None else min(max_keys, sequence // rate)
    return (2 * sequence - keys) * keys if rate == 1 else 2 * keys * (sequence + 1) - rate * keys * (keys + 1)


def _twice_seen(queries: int, sequence: int, max_keys: int | None, rate: int = 1) -> int:
    """Twice the number of keys that `queries` queries see in total."""
    return queries * twice_seen(sequence, max_keys, rate) // sequence


def _chosen_flops(keys: int, values: int) -> Callable[[SimpleNamespace], int]:
    """FLOPs of `keys` products over the width of a query and `values` over that of a value."""

    def flops(n: SimpleNamespace) -> int:
        width = keys * (n.nope + n.rope) + values * n.value
        return _twice_seen(n.q[0], n.sequence, n.chosen[1]) * n.heads * width

    return flops


def _chosen_kernel(n: SimpleNamespace) -> Shape:
    """The extents of plain causal attention with the same average number of keys per query, at most half a sequence."""
    return n.q[0], min(n.sequence, 2 * n.chosen[1]), n.heads, n.nope + n.rope, n.value


def _loss_flops(n: SimpleNamespace) -> int:
    """q·k of attention's heads; for the indexer's heads q·k and the gradients of q and of k."""
    return _twice_seen(n.q[0], n.sequence, _chosen(n), n.rate) * (n.query[1] + 3 * n.q[1])


def _chosen(n: SimpleNamespace) -> int | None:
    """The most keys in the loss of a query, or None if the loss covers all keys."""
    return None if n.chosen is None else n.chosen[1]


CHOSEN_ATTENTION = Rule(
    args=("q", "kv", "k_rope", "chosen", "sequence", "heads", "nope", "rope", "value"),
    outputs=("o", "lse"),
    hidden=1,
    differentiable=("o",),
    infer=_infer_chosen,
    kernel_class="attention",
    flops=_chosen_flops(1, 1),  # q·k and p·v
    kernel=_chosen_kernel,
    dgrad=Gradient(  # q·k again, dk and dq; dv and dp
        "chosen_attention_dgrad",
        reads=("d_o", "q", "kv", "k_rope", "o", "lse", "chosen", "sequence", "heads", "nope", "rope", "value"),
        gives=("q", "kv", "k_rope"),
        flops=_chosen_flops(3, 2),
        kernel=_chosen_kernel,
        kernel_class="attention_backward",
    ),
)

INDEX_LOSS = Rule(
    args=(
        *("q", "k", "weights", "query", "kv", "k_rope", "chosen"),
        *("sequence", "index_heads", "heads", "nope", "rate", *PLACES),
    ),
    optional=PLACES,
    outputs=("loss", "q_gradient", "k_gradient", "weights_gradient"),
    hidden=3,
    differentiable=("loss",),
    infer=_infer_loss,
    kernel_class="attention",
    flops=_loss_flops,
    kernel=lambda n: (
        n.q[0],
        max(1, _twice_seen(1, n.sequence, _chosen(n), n.rate)),
        n.heads,
        n.query[1] // n.heads,
        1,
    ),
    dgrad=Gradient(
        "indexer_loss_dgrad",
        reads=("d_loss", "q_gradient", "k_gradient", "weights_gradient"),
        gives=("q", "k", "weights"),
        flops=elementwise("q_gradient", 1),
        kernel_class="add",
    ),
)

RULES = {"select_keys": SELECT_KEYS, "chosen_attention": CHOSEN_ATTENTION, "indexer_loss": INDEX_LOSS}
