"""QK-clip: scale down queries and keys of heads with logits above a bound. "Kimi K2", arXiv 2507.20534, §2.1.

It runs after the update of a step, on the master weights that a rank owns, so that gathered weights are clipped. Each
rank has the largest logits of all heads by then, so all use the same factors. Nothing is kept for later steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from runtime.checkpoint.loading import cut
from runtime.contract import ClippedAttention, ClippedRows
from runtime.ops.product import wide_dtype
from runtime.state.state import BucketEntry, FlatBucket

Factors = Mapping[str, Tensor]  # parameter → a factor for each row of the logical parameter, float64


def factors_of(clipped: Sequence[ClippedAttention], peaks: Tensor, clip: float) -> Factors:
    """Return the factors of rows, for the parameters that are clipped. `peaks`: the largest logit of each head, block
    after block.

    γ is `clip` divided by the largest logit of all query heads that share a key, or 1 if that logit is at most `clip`.
    """
    factors: dict[str, Tensor] = {}
    for block, peaks_H in zip(clipped, peaks.cpu().split([attention.heads for attention in clipped]), strict=True):
        peaks_G = peaks_H.view(block.key_heads, -1).amax(1)
        gamma_G = torch.where(peaks_G > clip, clip / peaks_G, 1.0)
        if (gamma_G < 1).any():
            for rows in block.rows:
                before = factors.get(rows.parameter, torch.ones(0, dtype=torch.float64))
                factors[rows.parameter] = _append_factors(before, rows, gamma_G)
    return factors


def _append_factors(before: Tensor, rows: ClippedRows, gamma_G: Tensor) -> Tensor:
    """Append the factors of later rows of a parameter; rows in between get 1."""
    gamma_H = gamma_G.repeat_interleave(rows.heads // len(gamma_G))
    of_head = [(gamma_H**exponent)[:, None].expand(-1, count) for count, exponent in rows.parts]
    between = before.new_ones(rows.first - len(before))
    return torch.cat([before, between, torch.cat(of_head, 1).flatten()])


def clip_rows(bucket: FlatBucket, part: slice, master: Tensor, factors: Factors) -> None:
    """Multiply rows by their factors in the elements `part` of a bucket. `master`: the master weights of the part."""
    changed = False
    for entry in bucket.entries if factors else ():
        start, end = max(entry.start, part.start), min(entry.end, part.stop)
        if start < end and entry.name in factors:
            _multiply(master[start - part.start : end - part.start], start - entry.start, entry, factors[entry.name])
            changed = True
    if changed and bucket.has_masters:
        bucket.weights_of(part).copy_(master)


def _multiply(flat: Tensor, start: int, entry: BucketEntry, factors: Tensor) -> None:
    """Multiply the elements of a parameter from `start` on. The first and last row may be incomplete."""
    rows, columns = entry.shape[0], prod(entry.shape[1:])
    whole_R = torch.cat([factors, factors.new_ones(rows - len(factors))])
    held_R = cut(whole_R, entry.parameter.slice).to(flat.device, wide_dtype(flat.dtype))
    row, head = start // columns, min(-start % columns, len(flat))
    if head:
        flat[:head].mul_(held_R[row : row + 1])
        row += 1
    count = (len(flat) - head) // columns
    flat[head : head + count * columns].view(count, columns).mul_(held_R[row : row + count, None])
    flat[head + count * columns :].mul_(held_R[row + count : row + count + 1])
