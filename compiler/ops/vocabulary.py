"""The two ends of the model: embedding and cross entropy. An embedding touches the rows of its tokens only."""

from __future__ import annotations

from types import SimpleNamespace

from compiler.ops.rule import Extent, Gradient, Rule, Shape, Tensor, elementwise, statistics_dtype


def _infer_embedding(tokens_T: Tensor, w_VD: Tensor) -> tuple[Tensor, ...]:
    return (Tensor((tokens_T.shape[0], w_VD.shape[1]), w_VD.dtype),)


def _rows(n: SimpleNamespace) -> Shape:
    return n.tokens[0], n.w[1]


def _infer_cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, ...]:
    assert logits_TV.shape[:1] == targets_T.shape, (logits_TV, targets_T)
    dtype = statistics_dtype(logits_TV.dtype)
    return Tensor((), dtype), Tensor(targets_T.shape, dtype)


EMBEDDING = Rule(
    args=("tokens", "w"),
    outputs=("y",),
    infer=_infer_embedding,
    kernel_class="embedding",
    touched=lambda n: n.tokens[0] * (1 + 2 * n.w[1]),
    kernel=_rows,
    wgrad=Gradient(
        "embedding_wgrad",
        reads=("d_y", "tokens", Extent("w", 0)),
        gives=("w",),
        flops=elementwise("d_y", 1),
        touched=lambda n: n.tokens[0] * (1 + 3 * n.w[1]),
        kernel=_rows,
    ),
)

CROSS_ENTROPY = Rule(
    args=("logits", "targets"),
    outputs=("loss", "lse"),
    hidden=1,
    differentiable=("loss",),
    infer=_infer_cross_entropy,
    kernel_class="cross_entropy",
    flops=elementwise("logits", 4),
    dgrad=Gradient(
        "cross_entropy_dgrad",
        reads=("d_loss", "logits", "targets", "lse"),
        gives=("logits",),
        flops=elementwise("logits", 4),
    ),
)

RULES = {"embedding": EMBEDDING, "cross_entropy": CROSS_ENTROPY}
