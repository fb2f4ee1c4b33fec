"""The end of a step: sum gradients over replicas, clip by the global norm, update the weights, balance the experts.

Gradients of a bucket are summed over its holders, never averaged: the loss is already normalised by the global batch.
With zero = 1 each holder of a bucket updates the shard that it owns and gathers the rest, in the dtype that segments
read. runtime/state/optimizers has the update rules. Heads whose logits were too large are clipped after the update.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.build.kernels import Op
from runtime.comm.transport import Sums, Work
from runtime.contract import OptimizerRecipe
from runtime.state.offload import Staging, Update
from runtime.state.qk_clip import Factors, clip_rows
from runtime.state.state import FlatBucket, State

NORM_ROW = 1024  # elements


def start_reduce(bucket: FlatBucket, sums: Sums) -> Work:
    """Start to sum a bucket's gradients over its peers: an all-reduce, or with shares a reduce-scatter."""
    return sums.start_reduce(bucket.gradients_name, bucket.peers, bucket.gradients, bucket.shares_of_peers)


def gradient_square(state: State, rank: int) -> Tensor:
    """Return the sum of squares of the gradients that this rank owns. Each logical element has one owner in the
    world."""
    total = torch.zeros((), dtype=torch.float64, device=state.device)
    for b in (bucket for bucket in state.buckets if not bucket.is_still):
        if b.shares or rank == b.holders[0]:
            for piece in b.owned:
                total += square_sum(b.gradients_of(piece.part))
    return total


def square_sum(flat: Tensor) -> Tensor:
    """Return the sum of squares of all elements, in float64 except within rows of `NORM_ROW` elements: converting all
    to float64 takes 30 times as long."""
    end = flat.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(flat[:end].view(-1, NORM_ROW), dim=1).to(torch.float64)
    if not rows.isfinite().all():  # a square may be too large for the elements' dtype
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    return rows.square().sum() + torch.linalg.vector_norm(flat[end:], dtype=torch.float64).square()


class Numbers(NamedTuple):
    """Numbers that all updates of a step share: step (from 1), learning rate, global gradient norm, and the QK-clip
    factors of rows."""

    step: int
    rate: float
    norm: float
    factors: Factors = MappingProxyType({})


def update(b: FlatBucket, recipe: OptimizerRecipe, update_op: Op, numbers: Numbers, staging: Staging) -> None:
    """Update the weights of a bucket that this rank owns. `update_op`: the update function of their optimizer.

    Gradients are scaled by min(1, clip / norm). `staging` copies offloaded state to the device.
    """
    step, rate, norm, factors = numbers
    factor = min(1.0, recipe.clip / norm) if recipe.clip is not None and norm > 0 else 1.0
    settings = (recipe.rest if b.is_of_rest and recipe.rest else recipe).settings.values()
    for portion, tensors in staging.stage_updates([*updates_of(b, recipe.weight_decay, staging.max_elements)]):
        update_part(portion, tensors, update_op, (factor, rate, *settings, portion.decay, step))
        clip_rows(b, portion.part, tensors[0], factors)


def gather_weights(bucket: FlatBucket, sums: Sums) -> None:
    """All-gather the updated weights of a bucket, as far as this rank keeps them."""
    if bucket.is_gathered:
        sums.gather(bucket.parameters_name, bucket.peers, bucket.parameters, bucket.shares_of_peers)
    else:
        sums.gather(bucket.parameters_name, bucket.holders, bucket.parameters, bucket.shares)


def updates_of(b: FlatBucket, decay: float, max_elements: int | None) -> Iterator[Update]:
    """Yield the updates of the owned part of a bucket, of at most `max_elements` elements unless they are matrices."""
    for piece in b.owned:
        ends = itertools.accumulate(map(math.prod, piece.shapes), initial=piece.part.start)
        for shape, (first, last) in zip(piece.shapes, itertools.pairwise(ends), strict=True):
            for of_part, begin, end in ((decay, 0, b.decayed), (0.0, b.decayed, b.padded)):
                start, stop = max(begin, first), min(end, last)
                size = max(1, stop - start) if max_elements is None or len(shape) > 1 else max_elements
                for offset in range(start, stop, size):
                    yield Update(b, piece, slice(offset, min(offset + size, stop)), of_part, shape)


def update_part(portion: Update, stored: Sequence[Tensor], update_op: Op, numbers: tuple[float, ...]) -> None:
    """Update a part of a piece, in its shape if it is a matrix. `stored`: master weights and state."""
    b, (master, *state) = portion.bucket, stored
    tensors = [master, b.gradients_of(portion.part), *state]
    if len(portion.shape) > 1:
        tensors = [tensor.view(portion.shape) for tensor in tensors]
    update_op(*tensors, b.weights_of(portion.part) if b.has_masters else None, *numbers)


def balance(bias_E: Tensor, load_E: Tensor, rate: float) -> None:
    """Move the biases against `load_E`, the tokens of each expert over the whole global batch.

    Loss-free balancing: arXiv 2412.19437, §2.1.2.
    """
    load = load_E.to(torch.float64)
    bias_E.add_(torch.sign(load.mean() - load).to(bias_E.dtype), alpha=rate)
