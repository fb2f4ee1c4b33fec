"""Checks of AdamW's kernel. The reference is the op in FP64 on the same numbers."""

from __future__ import annotations

import torch

from tests.compiler.emit.kernels.interpreted import random, reference, run, within

CHECKED = ("adamw",)
RATE, BETA1, BETA2, EPS = 1e-2, 0.9, 0.95, 1e-8


def adamw(moments: torch.dtype, elements: int, rounded: bool, factor: float, decay: float, step: int) -> None:
    master, gradients = random(elements, seed=1), random(elements, seed=2)
    moment1, moment2 = (0.1 * random(elements, seed=3)).to(moments), random(elements, seed=4).square().to(moments)
    if elements > 3:
        master[0], gradients[1], moment2[2] = 0.0, 0.0, 0.0
        gradients[3], moment1[3], moment2[3] = 0.0, 0.0, 0.0  # a row of the embedding that no token has met
    before = [x.clone() for x in (master, gradients, moment1, moment2)]
    copy = torch.empty(elements, dtype=torch.bfloat16) if rounded else None
    numbers = factor, RATE, BETA1, BETA2, EPS, decay, step
    assert run("adamw", master, gradients, moment1, moment2, copy, *numbers) is None

    exact, g, m1, m2 = (x.double() for x in before)
    terms1 = (BETA1 * m1).abs() + ((1 - BETA1) * factor * g).abs()
    decayed = (1 - RATE * decay) * exact.abs()
    reference("adamw")(exact, g, m1, m2, None, *numbers)
    scale = RATE / (1 - BETA1**step) / ((m2 / (1 - BETA2**step)).sqrt() + EPS)
    assert torch.equal(gradients, before[1])
    # Of the first moment: two products, a sum and constants; of the second one product more, and all terms positive.
    within(moment1, m1, terms1, 6)
    within(moment2, m2, m2, 10)
    # The root halves the 10; root, factor and eps add 4, quotient and numerator 3, the difference 2.
    within(master, exact, 3 * decayed + scale * (6 * terms1 + 16 * m1.abs()), 1)
    if copy is not None:
        assert torch.equal(copy, master.bfloat16())


def gradients_that_are_no_numbers() -> None:
    """NaN gradients change only their own elements."""
    tensors = [random(2100, seed=seed) for seed in (1, 2, 3)]
    results = []
    for bad in (1.0, torch.nan):
        master, gradients, moment1 = (x.clone() for x in tensors)
        moment2 = moment1.square()
        gradients[[5, 2099]] = bad
        run("adamw", master, gradients, moment1, moment2, None, 0.5, RATE, BETA1, BETA2, EPS, 0.1, 2)
        results.append((master, moment1, moment2))
    is_good = torch.ones(2100, dtype=torch.bool)
    is_good[[5, 2099]] = False
    for output, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(output[is_good], expected[is_good]) and output[~is_good].isnan().all()
