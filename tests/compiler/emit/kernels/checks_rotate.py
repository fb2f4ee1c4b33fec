"""Checks of the rotation kernels in Triton's interpreter: against FP64."""

from __future__ import annotations

import torch

from runtime import ops
from tests.compiler.emit.kernels.interpreted import double, random, run, within

CHECKED = ("rotate", "rotate_dgrad")
RAMPS = {"pairs": (-0.5, 3.5, 0.0), "turns": (0.5, 2.0, 20.0), "plain": (0.0, 1.0, 0.0)}


def rotate(
    dtype: torch.dtype,
    sequence: int,
    heads: int,
    first: int,
    width: int,
    behind: int,
    ramp: str,
    documents: bool,
    some: bool = False,
    stride: int = 1,
) -> None:
    """Both ops on two sequences whose rows are columns of wider ones, for one head and for several. `documents`: a few
    in each, of random lengths. `some`: rows at random places of a sequence twice as long. `stride`: distance of rows in
    positions."""
    columns = first + width + behind
    x = random(2 * (sequence // abs(stride)), heads * columns + 3, dtype=dtype, seed=1)[:, : heads * columns]
    low, high, original = RAMPS[ramp]
    factor = 1.0 if ramp == "plain" else 8.0
    options = sequence, heads, first, width, 50.0, factor, low, high, original, 1.3, 0.7
    starts: tuple[torch.Tensor | int | None, ...] = ()
    if documents:
        begins = torch.rand(2, sequence, generator=torch.Generator().manual_seed(2)) < 0.3
        starts = (torch.where(begins, torch.arange(sequence), 0).cummax(1).values.flatten().to(torch.int32),)
    if some:
        behind_starts = torch.randint(0, sequence, (2 * sequence,), generator=torch.Generator().manual_seed(3))
        options = 2 * sequence, *options[1:]
        begins_at = starts[0] if starts and isinstance(starts[0], torch.Tensor) else 0
        starts = (*(starts or (None,)), (behind_starts + begins_at).to(torch.int32))
    if stride != 1:
        starts = (None, None, stride)
    rows = x.double().reshape(-1, heads, columns)
    largest = rows.abs()  # a rotated number is a sum of two terms, each at most the length of the pair
    largest[..., first : first + width] += (
        rows[..., first : first + width].unflatten(-1, (-1, 2)).flip(-1).flatten(-2).abs()
    )
    for name in ("rotate", "rotate_dgrad"):
        exact = ops.OPS[name](*double(x), *options, *starts)
        # The angle and each factor, product and sum round once.
        within(run(name, x, *options, *starts), exact, 1.3 * 0.7 * largest.reshape(exact.shape), 8)
