"""The clipped policy loss of sampled tokens, which stands in the place of the cross entropy where a run is trained by
rewards (arXiv 2402.03300). Its logits are priced as those of a cross entropy are; all else is a few numbers a token.
"""

from __future__ import annotations

from compiler.model.ops.rule import Gradient, Rule, Tensor, elementwise, statistics_dtype


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
    each_T = Tensor(targets_T.shape, dtype)
    assert logits_TV.shape[:1] == targets_T.shape, (logits_TV, targets_T)
    assert old_T == advantage_T == weight_T == each_T, (old_T, advantage_T, weight_T)
    assert reference_T in (None, each_T) and (reference_T is None) == (kl == 0), (reference_T, kl)
    return Tensor((), dtype), each_T, each_T


_TOLD = ("old", "advantage", "weight", "reference", "low", "high", "kl", "corrected")

RULES = {
    "policy_loss": Rule(
        args=("logits", "targets", *_TOLD),
        outputs=("loss", "logp", "lse"),
        hidden=1,
        differentiable=("loss",),
        infer=_infer,
        kernel_class="cross_entropy",
        flops=elementwise("logits", 4),
        dgrad=Gradient(
            "policy_loss_dgrad",
            reads=("d_loss", "logits", "targets", *_TOLD, "lse"),
            gives=("logits",),
            flops=elementwise("logits", 4),
        ),
    )
}
