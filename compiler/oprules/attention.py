"""Multi-head latent attention with RoPE inside, causal within each sequence of the micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from compiler.oprules.rule import Gradient, Rule, Tensor, statistics_dtype

_SHAPE = ("sequence", "heads", "nope", "rope", "value", "theta")


def _infer(
    q: Tensor, kv: Tensor, k_rope: Tensor, sequence: int, heads: int, nope: int, rope: int, value: int, theta: float
) -> tuple[Tensor, ...]:
    T = q.shape[0]
    assert q.shape[1] == heads * (nope + rope) and kv.shape == (T, heads * (nope + value)), (q, kv)
    assert k_rope.shape == (T, rope) and T % sequence == 0, (k_rope, sequence)
    return Tensor((T, heads * value), q.dtype), Tensor((T // sequence, heads, sequence), statistics_dtype(q.dtype))


def _flops(keys: int, values: int) -> Callable[[SimpleNamespace], int]:
    """FLOPs of `keys` products over the query's width and `values` over the value's: half of each is masked."""

    def flops(n: SimpleNamespace) -> int:
        return n.q[0] * n.sequence * n.heads * (keys * (n.nope + n.rope) + values * n.value)

    return flops


MLA_ATTENTION = Rule(
    args=("q", "kv", "k_rope", *_SHAPE),
    outputs=("y", "lse"),
    hidden=1,
    infer=_infer,
    flops=_flops(1, 1),  # q·k and p·v
    dgrad=Gradient(  # q·k again, dk and dq; dv and dp
        "mla_attention_dgrad",
        reads=("d_y", "q", "kv", "k_rope", "y", "lse", *_SHAPE),
        gives=("q", "kv", "k_rope"),
        flops=_flops(3, 2),
    ),
)
