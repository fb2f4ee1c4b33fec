"""The load of the fullest expert rank if tokens choose their experts evenly and independently."""

from __future__ import annotations

from collections import Counter
from math import sqrt
from statistics import NormalDist

from dsl.schema import Moe, Spec


def load_by_chance(spec: Spec, quantile: float) -> float:
    """A quantile of the fullest rank's rows in a layer and micro-batch, over the mean; 1 with one expert rank.

    Tokens choose independently, so the rows of a rank are nearly normal, and ranks are nearly independent. The layer
    with the widest spread counts.
    """
    p = spec.parallel
    kinds = [layers.ffn for layers in spec.model.layers if isinstance(layers.ffn, Moe)]
    if p.expert == 1 or not kinds:
        return 1.0
    tokens = spec.train.micro_batch * spec.train.sequence * p.expert_group / (p.tensor * p.context)
    score = NormalDist().inv_cdf(quantile ** (1 / p.expert))
    return max(1 + score * sqrt(variance(moe, p.expert) / tokens) * p.expert / moe.top_k for moe in kinds)


def variance(moe: Moe, ranks: int) -> float:
    """The variance of the number of a token's experts that are on one rank, for the rank where it is largest.

    A token chooses `top_groups` of the groups, and then `top_k` of the experts in them. Ranks and groups have equally
    many consecutive experts, and a rank may have parts of several groups.
    """
    chosen = moe.top_groups / moe.groups  # chance of a group, and of two groups
    chosen_both = chosen * (moe.top_groups - 1) / max(1, moe.groups - 1)
    among, of_group, of_rank = (
        moe.experts * moe.top_groups // moe.groups,
        moe.experts // moe.groups,
        moe.experts // ranks,
    )
    largest = 0.0
    for rank in range(ranks):
        members = Counter(expert // of_group for expert in range(rank * of_rank, (rank + 1) * of_rank)).values()
        squares = sum(count**2 for count in members)
        # Mean and mean square of how many of the experts among which a token chooses are on the rank.
        mean, mean_square = chosen * of_rank, chosen * squares + chosen_both * (of_rank**2 - squares)
        spread = moe.top_k * (among - moe.top_k) / max(1, among - 1) * (mean / among - mean_square / among**2)
        largest = max(largest, spread + (moe.top_k / among) ** 2 * (mean_square - mean**2))
    return largest
