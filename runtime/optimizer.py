"""The end of a step: sum replicas' gradients, clip by the global norm, AdamW, balance the experts.

AdamW with decoupled decay (arXiv 1711.05101). Gradients of a bucket are summed over its holders, never averaged: the
loss is already normalised by the whole global batch. With zero = 1 a bucket's holders each update one shard of it and
gather the rest, in the dtype that segments read.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from runtime.comm.transport import Sums
from runtime.contract import Optimizer
from runtime.kernels import Op, on_cuda
from runtime.ops.adamw import adamw
from runtime.state import Bucket, State

NORM_ROW = 1024  # elements


def reduce_gradients(bucket: Bucket, sums: Sums) -> None:
    if len(bucket.holders) > 1:
        sums.reduce(bucket.gradients_name, bucket.holders, bucket.gradients)


def gradient_norm(state: State, rank: int, sums: Sums) -> float:
    """Global L2 norm: every logical element counted once, by its owner. A collective over the world."""
    total = torch.zeros((), dtype=torch.float64, device=state.device)
    for b in state.buckets:
        if sharded(b) or rank == b.holders[0]:
            total += square_sum(b.gradients[b.owned])
    sums.all_reduce(total)
    return math.sqrt(total.item())


def square_sum(flat: Tensor) -> Tensor:
    """Of all elements, in float64 but within `NORM_ROW` of them. A copy in float64 takes 30 times as long."""
    whole = flat.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1).to(torch.float64)
    if not rows.isfinite().all():  # a square may be too large for the elements' dtype
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    return rows.square().sum() + torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()


def update_of(emitted: Path | None) -> Op:
    """The `adamw` of a build: its kernel on CUDA, where it has emitted one, else the op."""
    return on_cuda(str(emitted), emitted.stem, adamw) if emitted else adamw


def update(state: State, recipe: Optimizer, rate: float, step: int, norm: float, sums: Sums, by: Op = adamw) -> None:
    """One AdamW update, `by` that op, with gradients scaled by min(1, clip / norm). `step` counts from 1."""
    factor = min(1.0, recipe.clip / norm) if recipe.clip is not None and norm > 0 else 1.0
    for b in state.buckets:
        for decay, part in ((recipe.weight_decay, slice(0, b.decayed)), (0.0, slice(b.decayed, b.gradients.numel()))):
            _adamw(b, _intersection(b.owned, part), recipe, factor, rate, decay, step, by)
        if sharded(b):
            sums.gather(b.parameters_name, b.holders, b.parameters, b.owned)


def sharded(b: Bucket) -> bool:
    """Whether this rank's optimizer state is of a part of the bucket only."""
    return b.owned != slice(0, b.gradients.numel())


def _intersection(a: slice, b: slice) -> slice:
    start = max(a.start, b.start)
    return slice(start, max(start, min(a.stop, b.stop)))


def _adamw(
    b: Bucket, part: slice, recipe: Optimizer, factor: float, rate: float, decay: float, step: int, by: Op
) -> None:
    if part.start == part.stop:
        return
    mine = slice(part.start - b.owned.start, part.stop - b.owned.start)
    rounded = b.parameters[part] if b.mixed else None
    tensors = b.master[mine], b.gradients[part], b.moment1[mine], b.moment2[mine], rounded
    by(*tensors, factor, rate, recipe.beta1, recipe.beta2, recipe.eps, decay, step)


def balance(bias_E: Tensor, load_E: Tensor, rate: float) -> None:
    """Loss-free balancing (arXiv 2412.19437, §2.1.2): `load_E` tokens of each expert over the whole global batch."""
    load = load_E.to(torch.float64)
    bias_E.add_(torch.sign(load.mean() - load).to(bias_E.dtype), alpha=rate)
