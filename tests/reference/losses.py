"""What the reference minimises."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Losses:
    """Scalars of a whole global batch: `mtp` without its weight (zero without MTP), `sequence` with its α.

    loads: tokens of each expert ([E] int64) by MoE block, "layers.3", …, "mtp.0" last.
    """

    main: Tensor
    mtp: Tensor
    sequence: Tensor
    loads: dict[str, Tensor]
    index: Tensor  # of indexers, with its weight

    def total(self, mtp_weight: float) -> Tensor:
        """What is minimised."""
        return self.main + mtp_weight * self.mtp + self.sequence + self.index


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Σ cross entropy / number of valid targets, over the whole batch; a target of −1 is not valid."""
    num_valid = int((targets_BS >= 0).sum())
    assert num_valid > 0, "a batch without a valid target has no loss"
    return (
        functional.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=-1, reduction="sum")
        / num_valid
    )
