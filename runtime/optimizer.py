"""The end of a step: sum replicas' gradients, clip by the global norm, update the weights, balance the experts.

Gradients of a bucket are summed over its holders, never averaged: the loss is already normalised by the whole global
batch. With zero = 1 a bucket's holders each update the part of it that they own and gather the rest, in the dtype that
segments read. What an update is, runtime/optimizers says.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runtime.comm.transport import Sums
from runtime.contract import Optimizer
from runtime.kernels import Op
from runtime.state import Bucket, Piece, State

NORM_ROW = 1024  # elements


def reduce_gradients(bucket: Bucket, sums: Sums) -> None:
    """Sum a bucket's gradients over its holders."""
    if len(bucket.holders) > 1:
        sums.reduce(bucket.gradients_name, bucket.holders, bucket.gradients)


def gradient_norm(state: State, rank: int, sums: Sums) -> float:
    """Global L2 norm: every logical element counted once, by its owner. A collective over the world."""
    total = torch.zeros((), dtype=torch.float64, device=state.device)
    for b in state.buckets:
        if b.shares or rank == b.holders[0]:
            for piece in b.owned:
                total += square_sum(b.gradients[piece.part])
    sums.all_reduce(total)
    return math.sqrt(total.item())


def square_sum(flat: Tensor) -> Tensor:
    """Sum the squares of all elements, in float64 but for rows of `NORM_ROW` of them: a copy in float64 takes 30 times
    as long."""
    whole = flat.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1).to(torch.float64)
    if not rows.isfinite().all():  # a square may be too large for the elements' dtype
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    return rows.square().sum() + torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()


def update(state: State, recipe: Optimizer, by: Op, rate: float, step: int, norm: float, sums: Sums) -> None:
    """Update all weights by the code of their optimizer, with gradients scaled by min(1, clip / norm).

    `step` counts from 1.
    """
    factor = min(1.0, recipe.clip / norm) if recipe.clip is not None and norm > 0 else 1.0
    for b in state.buckets:
        for piece in b.owned:
            for decay, begin, end in ((recipe.weight_decay, 0, b.decayed), (0.0, b.decayed, b.gradients.numel())):
                part = slice(max(begin, piece.part.start), min(end, piece.part.stop))
                if part.start < part.stop:
                    update_part(b, piece, part, by, (factor, rate, *recipe.settings.values(), decay, step))
        if b.shares:
            sums.gather(b.parameters_name, b.holders, b.parameters, b.shares)


def update_part(b: Bucket, piece: Piece, part: slice, by: Op, numbers: tuple[float, ...]) -> None:
    """Update a part of a piece, in the piece's shape if it is all of it and no vector."""
    mine = slice(part.start - piece.part.start, part.stop - piece.part.start)
    tensors = [piece.master[mine], b.gradients[part], *[tensor[mine] for tensor in piece.state.values()]]
    if part == piece.part and len(piece.shape) > 1:
        tensors = [tensor.view(piece.shape) for tensor in tensors]
    by(*tensors, b.parameters[part] if b.mixed else None, *numbers)


def balance(bias_E: Tensor, load_E: Tensor, rate: float) -> None:
    """Move the biases against `load_E`, the tokens of each expert over the whole global batch.

    Loss-free balancing: arXiv 2412.19437, §2.1.2.
    """
    load = load_E.to(torch.float64)
    bias_E.add_(torch.sign(load.mean() - load).to(bias_E.dtype), alpha=rate)
