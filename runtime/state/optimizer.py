"""The end of a step: sum replicas' gradients, clip by the global norm, update the weights, balance the experts.

Gradients of a bucket are summed over its holders, never averaged: the loss is already normalised by the whole global
batch. With zero = 1 a bucket's holders each update the part of it that they own and gather the rest, in the dtype that
segments read. What an update is, runtime/state/optimizers says. Heads whose logits were too large are clipped behind
it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.build.kernels import Op
from runtime.checkpoint.loading import cut
from runtime.comm.transport import Sums, Work
from runtime.contract import ClippedAttention, Optimizer, Rows
from runtime.ops.product import wide_dtype
from runtime.state.offload import Staging, Update
from runtime.state.state import Bucket, Entry, State

# --- QK-clip: smaller queries and keys for heads that had logits above a bound. "Kimi K2", arXiv 2507.20534, §2.1
#
# It follows the update of a step, on the master weights that a rank owns, so that what is gathered is clipped. Each
# rank has the largest logits of all heads by then, so all multiply by the same numbers. Nothing is kept for later
# steps.

Factors = Mapping[str, Tensor]  # by parameter: of each row of the logical one, float64


def factors_of(clipped: Sequence[ClippedAttention], peaks: Tensor, clip: float) -> Factors:
    """What rows are multiplied by, of the parameters of which any is. `peaks`: the largest logit of each head, block
    after block.

    γ is clip / the largest logit of all query heads that share a key, where this is above `clip`, and else 1.
    """
    found: dict[str, Tensor] = {}
    for block, peaks_H in zip(clipped, peaks.cpu().split([each.heads for each in clipped]), strict=True):
        peaks_G = peaks_H.view(block.key_heads, -1).amax(1)
        gamma_G = torch.where(peaks_G > clip, clip / peaks_G, 1.0)
        if (gamma_G < 1).any():
            for rows in block.rows:
                before = found.get(rows.parameter, torch.ones(0, dtype=torch.float64))
                found[rows.parameter] = _with_rows(before, rows, gamma_G)
    return found


def _with_rows(before: Tensor, rows: Rows, gamma_G: Tensor) -> Tensor:
    """The factors of a parameter with those of rows further behind; rows between are left as they are."""
    gamma_H = gamma_G.repeat_interleave(rows.heads // len(gamma_G))
    of_head = [(gamma_H**exponent)[:, None].expand(-1, count) for count, exponent in rows.parts]
    between = before.new_ones(rows.first - len(before))
    return torch.cat([before, between, torch.cat(of_head, 1).flatten()])


def clip_rows(bucket: Bucket, part: slice, master: Tensor, factors: Factors) -> None:
    """Multiply rows by their factors in elements `part` of a bucket, whose master weights are `master`."""
    changed = False
    for entry in bucket.entries if factors else ():
        start, end = max(entry.start, part.start), min(entry.end, part.stop)
        if start < end and entry.name in factors:
            _multiply(master[start - part.start : end - part.start], start - entry.start, entry, factors[entry.name])
            changed = True
    if changed and bucket.mixed:
        bucket.weights_of(part).copy_(master)


def _multiply(flat: Tensor, at: int, entry: Entry, factors: Tensor) -> None:
    """Multiply the elements of a parameter from `at` on, of which the first and the last may lie in parts of rows."""
    rows, columns = entry.shape[0], prod(entry.shape[1:])
    whole_R = torch.cat([factors, factors.new_ones(rows - len(factors))])
    held_R = cut(whole_R, entry.parameter.slice).to(flat.device, wide_dtype(flat.dtype))
    row, head = at // columns, min(-at % columns, len(flat))
    if head:
        flat[:head].mul_(held_R[row : row + 1])
        row += 1
    count = (len(flat) - head) // columns
    flat[head : head + count * columns].view(count, columns).mul_(held_R[row : row + count, None])
    flat[head + count * columns :].mul_(held_R[row + count : row + count + 1])


# --- optimizer

NORM_ROW = 1024  # elements


def start_reduce(bucket: Bucket, sums: Sums) -> Work:
    """Begin to sum a bucket's gradients over those who keep the same: all, or on each holder those that it owns."""
    return sums.start_reduce(bucket.gradients_name, bucket.peers, bucket.gradients, bucket.shares_of_peers)


def gradient_square(state: State, rank: int) -> Tensor:
    """Sum of the squares of the gradients that this rank owns: every logical element has one owner in the world."""
    total = torch.zeros((), dtype=torch.float64, device=state.device)
    for b in (each for each in state.buckets if not each.still):
        if b.shares or rank == b.holders[0]:
            for piece in b.owned:
                total += square_sum(b.gradients_of(piece.part))
    return total


def square_sum(flat: Tensor) -> Tensor:
    """Sum the squares of all elements, in float64 but for rows of `NORM_ROW` of them: a copy in float64 takes 30 times
    as long."""
    whole = flat.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1).to(torch.float64)
    if not rows.isfinite().all():  # a square may be too large for the elements' dtype
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    return rows.square().sum() + torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()


class Numbers(NamedTuple):
    """What the updates of a step have in common: its number, from 1, the learning rate, the norm of all gradients, and
    what rows of new weights are multiplied by."""

    step: int
    rate: float
    norm: float
    factors: Factors = MappingProxyType({})


def update(b: Bucket, recipe: Optimizer, by: Op, numbers: Numbers, staging: Staging) -> None:
    """Update the weights of a bucket that this rank owns, by the code of their optimizer.

    Gradients are scaled by min(1, clip / norm). `staging` brings what is offloaded to the device.
    """
    step, rate, norm, factors = numbers
    factor = min(1.0, recipe.clip / norm) if recipe.clip is not None and norm > 0 else 1.0
    settings = (recipe.rest if b.rest and recipe.rest else recipe).settings.values()
    for each, kept in staging.through([*updates_of(b, recipe.weight_decay, staging.most)]):
        update_part(each, kept, by, (factor, rate, *settings, each.decay, step))
        clip_rows(b, each.part, kept[0], factors)


def gather_weights(bucket: Bucket, sums: Sums) -> None:
    """Take the weights that the other holders of a bucket have updated, as far as they are kept here."""
    if bucket.gathered:
        sums.gather(bucket.parameters_name, bucket.peers, bucket.parameters, bucket.shares_of_peers)
    else:
        sums.gather(bucket.parameters_name, bucket.holders, bucket.parameters, bucket.shares)


def updates_of(b: Bucket, decay: float, most: int | None) -> Iterator[Update]:
    """The calls that update what is owned of a bucket, of at most `most` elements where a piece may be cut."""
    for piece in b.owned:
        ends = itertools.accumulate(map(math.prod, piece.shapes), initial=piece.part.start)
        for shape, (first, last) in zip(piece.shapes, itertools.pairwise(ends), strict=True):
            for of_part, begin, end in ((decay, 0, b.decayed), (0.0, b.decayed, b.padded)):
                start, stop = max(begin, first), min(end, last)
                size = max(1, stop - start) if most is None or len(shape) > 1 else most
                for at in range(start, stop, size):
                    yield Update(b, piece, slice(at, min(at + size, stop)), of_part, shape)


def update_part(each: Update, kept: Sequence[Tensor], by: Op, numbers: tuple[float, ...]) -> None:
    """Update a part of a piece, in its shape if it is no vector. `kept`: master and state."""
    b, (master, *state) = each.bucket, kept
    tensors = [master, b.gradients_of(each.part), *state]
    if len(each.shape) > 1:
        tensors = [tensor.view(each.shape) for tensor in tensors]
    by(*tensors, b.weights_of(each.part) if b.mixed else None, *numbers)


def balance(bias_E: Tensor, load_E: Tensor, rate: float) -> None:
    """Move the biases against `load_E`, the tokens of each expert over the whole global batch.

    Loss-free balancing: arXiv 2412.19437, §2.1.2.
    """
    load = load_E.to(torch.float64)
    bias_E.add_(torch.sign(load.mean() - load).to(bias_E.dtype), alpha=rate)
