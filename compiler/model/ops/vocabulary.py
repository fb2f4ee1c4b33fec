"""The two ends of the model: embedding and cross entropy. An embedding touches only the rows of its tokens.

With vocabulary parallelism each tensor rank has the logits of one shard. Per row, a shard gives its log-sum-exp and the
logit of the target; `place_parts` puts these next to those of the other ranks.
"""

from __future__ import annotations

from types import SimpleNamespace

from compiler.model.ops.rule import Extent, Gradient, Rule, Shape, Tensor, elementwise, statistics_dtype


def _infer_embedding(tokens_T: Tensor, w_VD: Tensor) -> tuple[Tensor, ...]:
    return (Tensor((tokens_T.shape[0], w_VD.shape[1]), w_VD.dtype),)


def _rows(n: SimpleNamespace) -> Shape:
    return n.tokens[0], n.w[1]


def _infer_cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, ...]:
    assert logits_TV.shape[:1] == targets_T.shape, (logits_TV, targets_T)
    dtype = statistics_dtype(logits_TV.dtype)
    return Tensor((), dtype), Tensor(targets_T.shape, dtype)


def _infer_cross_entropy_part(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, ...]:
    _, lse_T = _infer_cross_entropy(logits_TV, targets_T)
    return lse_T, lse_T


def _infer_place_parts(lse_T: Tensor, picked_T: Tensor, rank: Tensor, ranks: int) -> tuple[Tensor, ...]:
    assert lse_T == picked_T and rank.shape == (1,), (lse_T, picked_T, rank)
    return (Tensor((*lse_T.shape, ranks + 1), lse_T.dtype),)


def _infer_cross_entropy_of_parts(parts_TR: Tensor, targets_T: Tensor) -> tuple[Tensor, ...]:
    assert parts_TR.shape[:1] == targets_T.shape, (parts_TR, targets_T)
    return Tensor((), parts_TR.dtype), Tensor(targets_T.shape, parts_TR.dtype)


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
CROSS_ENTROPY_PART = Rule(
    args=("logits", "targets"),
    outputs=("lse", "picked"),
    differentiable=("lse", "picked"),
    infer=_infer_cross_entropy_part,
    kernel_class="cross_entropy",
    flops=elementwise("logits", 4),
    dgrad=Gradient(
        "cross_entropy_part_dgrad",
        reads=("d_lse", "d_picked", "logits", "targets", "lse"),
        gives=("logits",),
        flops=elementwise("logits", 4),
    ),
)
PLACE_PARTS = Rule(
    args=("lse", "picked", "rank", "ranks"),
    outputs=("y",),
    infer=_infer_place_parts,
    kernel_class="copy",
    dgrad=Gradient("place_parts_dgrad", reads=("d_y", "rank"), gives=("lse", "picked")),
)
CROSS_ENTROPY_OF_PARTS = Rule(
    args=("parts", "targets"),
    outputs=("loss", "lse"),
    hidden=1,
    differentiable=("loss",),
    infer=_infer_cross_entropy_of_parts,
    kernel_class="cross_entropy",
    flops=elementwise("parts", 4),
    dgrad=Gradient(
        "cross_entropy_of_parts_dgrad",
        reads=("d_loss", "parts", "targets", "lse"),
        gives=("parts",),
        flops=elementwise("parts", 4),
    ),
)


# --- The clipped policy loss of sampled tokens (arXiv 2402.03300), which replaces the cross entropy in GRPO runs
#
# Its cost is that of a cross entropy over the logits; everything else is a few numbers per token.


def _infer(
    logits_TV: Tensor,
    targets_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    reference_T: Tensor | None,
    low: float,
    high: float,
    kl: float,
    corrected: bool,
) -> tuple[Tensor, ...]:
    dtype = statistics_dtype(logits_TV.dtype)
    per_token_T = Tensor(targets_T.shape, dtype)
    assert logits_TV.shape[:1] == targets_T.shape, (logits_TV, targets_T)
    assert old_T == advantage_T == weight_T == per_token_T, (old_T, advantage_T, weight_T)
    assert reference_T in (None, per_token_T) and (reference_T is None) == (kl == 0), (reference_T, kl)
    return Tensor((), dtype), per_token_T, per_token_T


_POLICY_ARGUMENTS = ("old", "advantage", "weight", "reference", "low", "high", "kl", "corrected")


RULES = {
    "embedding": EMBEDDING,
    "cross_entropy": CROSS_ENTROPY,
    "cross_entropy_of_parts": CROSS_ENTROPY_OF_PARTS,
    "cross_entropy_part": CROSS_ENTROPY_PART,
    "place_parts": PLACE_PARTS,
    "policy_loss": Rule(
        args=("logits", "targets", *_POLICY_ARGUMENTS),
        outputs=("loss", "logp", "lse"),
        hidden=1,
        differentiable=("loss",),
        infer=_infer,
        kernel_class="cross_entropy",
        flops=elementwise("logits", 4),
        dgrad=Gradient(
            "policy_loss_dgrad",
            reads=("d_loss", "logits", "targets", *_POLICY_ARGUMENTS, "lse"),
            gives=("logits",),
            flops=elementwise("logits", 4),
        ),
    ),
}
