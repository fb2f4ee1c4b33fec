"""Update rules of optimizers, one file per kind. dsl/schema/optimizers.py has what a plan needs to know of them.

Each file has a function with the name of the kind, which updates weights in place:

    kind(master, gradients, *state, rounded, factor, rate, *settings, decay, step)

`master`, `gradients` and the tensors of `state` (in the order of the schema row) have one shape: flat if the unit is an
element, else that of one whole matrix or vector. Gradients are multiplied by `factor`. `rounded` is flat or None, and
gets the weights in its dtype. `settings` are the fields of the row except those of the rest, `weight_decay` (here
`decay`, or 0) and `clip` (part of `factor`). `step` counts from 1. If the unit is a matrix, the keyword `dtype` is the
dtype of matrix products. On CUDA the kernel of the same name is called instead, if `compiler/emit/kernels` has one.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from runtime.build.kernels import Op, on_cuda


def reference_update(kind: str) -> Op:
    """Return the update function of a kind."""
    return getattr(import_module(f"{__name__}.{kind}"), kind)


def update_of(kind: str, kernel: Path | None, dtype: torch.dtype | None = None) -> Op:
    """Return the update function of a kind in a build: on CUDA its emitted `kernel`, else the reference.

    `dtype`: dtype of matrix products, if the unit is a matrix.
    """
    reference = reference_update(kind)
    op = on_cuda(str(kernel), kind, reference) if kernel else reference
    return partial(op, dtype=dtype) if dtype else op
