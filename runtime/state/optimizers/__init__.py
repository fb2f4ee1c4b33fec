"""The code of optimizers, a file of its kind's name each. What a plan must know of them is in dsl/schema/optimizers.py.

The file has a function of the kind's name, which updates some weights in place:

    kind(master, gradients, *state, rounded, factor, rate, *settings, decay, step)

`master`, `gradients` and the tensors of `state`, in the order of the row, have one shape: flat where the unit is an
element, else that of one whole matrix or vector. Weights change by `factor` times the gradients. `rounded`, if it is
there, is flat and becomes the weights in its dtype. `settings` are the fields of the row but for those of the rest,
`weight_decay`, which is `decay` here, or 0, and `clip`, which is in `factor`. `step` counts from 1. Where the unit is a
matrix, the keyword `dtype` is that of products. On CUDA the kernel of this name is called in its place, if
`compiler/emit/kernels` has one.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from runtime.build.kernels import Op, on_cuda


def reference_update(kind: str) -> Op:
    """The update of a kind as its file has it."""
    return getattr(import_module(f"{__name__}.{kind}"), kind)


def update_of(kind: str, kernel: Path | None, dtype: torch.dtype | None = None) -> Op:
    """The update of a kind in a build: the `kernel` that it emitted, on CUDA, else the reference.

    `dtype`: that of products, where the unit is a matrix.
    """
    reference = reference_update(kind)
    op = on_cuda(str(kernel), kind, reference) if kernel else reference
    return partial(op, dtype=dtype) if dtype else op
