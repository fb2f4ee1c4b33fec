"""Checks of cross entropy's kernels, of logits and fused with the linear layer that makes them.

The reference is FP64, rounded where the composition of the ops rounds: logits and their gradients to the dtype
of the arguments. A kernel's result before rounding is off by at most a bound, so it may round to another number
than the exact result if a rounding boundary lies between the two. `stored` gives the allowed difference per element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from tests.compiler.emit.kernels.interpreted import U, double, random, run, within

CHECKED = (
    "cross_entropy",
    "cross_entropy_dgrad",
    "cross_entropy_part",
    "cross_entropy_part_dgrad",
    "linear_cross_entropy",
    "linear_cross_entropy_dgrad",
    "linear_cross_entropy_part",
    "linear_cross_entropy_part_dgrad",
    "linear_cross_entropy_part_wgrad_",
    "linear_cross_entropy_wgrad_",
)


def targets_of(rows: int, vocab: int) -> Tensor:
    targets = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(4))
    targets[2::5] = -1
    targets[:2] = torch.tensor([vocab - 1, 0])[:rows]
    return targets


def stored(exact: Tensor, off: Tensor | float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(`exact` in the stored dtype, the distance from it that a number within `off` of `exact` may have stored)."""
    middle, low, high = (x.to(dtype).double() for x in (exact, exact - off, exact + off))
    return middle, torch.maximum(high - middle, middle - low)


def magnitude_of_lse(logits: Tensor, lse: Tensor) -> Tensor:
    """Error of the lse in units u: of each exponential's argument and value, their sum, its logarithm, the added term;
    of each block's largest, by which the sum is scaled."""
    vocab, spread = logits.shape[1], logits.amax(1) - logits.masked_fill(logits.isinf(), torch.inf).amin(1)
    return vocab + 8 * (vocab // 32 + 1) + 4 * spread + 2 * lse.abs() + 4


def gradients_of(dloss: Tensor, logits: Tensor, targets: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(dlogits in FP64, how large the numbers are that they are made of, in units u)."""
    dloss_T = dloss * (targets >= 0)
    return part_gradients_of(dloss_T, -dloss_T, logits, targets, lse)


def part_gradients_of(
    dlse: Tensor, dpicked: Tensor, logits: Tensor, targets: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """`gradients_of` a part of a vocabulary."""
    exact = ops.cross_entropy_part_dgrad(dlse, dpicked, logits, targets, lse)
    weights = (logits - lse[:, None]).exp() * dlse.abs()[:, None]
    size = weights * (4 + 2 * (logits - lse[:, None]).abs().nan_to_num(posinf=0.0)) + 2 * exact.abs()
    return exact, size


def tangents_of(rows: int) -> tuple[Tensor, Tensor]:
    """dlse, the share of a part in rows, times dloss; and dpicked."""
    return -0.37 * random(rows, seed=7).sigmoid(), torch.full((rows,), 0.37)


def cross_entropy(dtype: torch.dtype, rows: int, vocab: int) -> None:
    logits = 8 * random(rows, vocab + 3, dtype=dtype, seed=1)[:, 1 : vocab + 1]
    targets, dloss = targets_of(rows, vocab), torch.tensor(-0.37)
    if rows:
        logits[0, :-1] = -torch.inf  # as of words that are ruled out: the first blocks are of nothing else
    loss, lse = run("cross_entropy", logits, targets)
    logits64 = logits.double()
    loss_exact, lse_exact = ops.cross_entropy(logits64, targets)
    size = magnitude_of_lse(logits64, lse_exact)
    assert loss.dtype == lse.dtype == torch.float32
    within(lse, lse_exact, size, 1)
    losses = (lse_exact - logits64.gather(1, targets.clamp(min=0)[:, None])[:, 0]).abs()
    within(loss, loss_exact, ((size + losses) * (targets >= 0)).sum() + loss_exact.abs(), 1)

    exact, size = gradients_of(dloss.double(), logits64, targets, lse.double())
    within(run("cross_entropy_dgrad", dloss, logits, targets, lse), exact, size, 1)

    part_lse, picked = run("cross_entropy_part", logits, targets)
    assert torch.equal(part_lse, lse) and torch.equal(picked, ops.cross_entropy_part(logits, targets)[1])
    dlse, dpicked = tangents_of(rows)
    exact, size = part_gradients_of(dlse.double(), dpicked.double(), logits64, targets, lse.double())
    within(run("cross_entropy_part_dgrad", dlse, dpicked, logits, targets, lse), exact, size, 1)


def linear_cross_entropy(dtype: torch.dtype, rows: int, vocab: int, hidden: int, below: float = 0.0) -> None:
    h, w = random(rows, hidden, dtype=dtype, seed=1), random(vocab, hidden, dtype=dtype, seed=2) * 3 / hidden**0.5
    if below:
        h[:, 0], w[:, 0] = below**0.5, -(below**0.5)
    targets, dloss = targets_of(rows, vocab), torch.tensor(-0.37)
    h64, w64 = double(h, w)
    logits, distance = stored(h64 @ w64.T, hidden * U * (h64.abs() @ w64.T.abs()), dtype)

    loss, lse = run("linear_cross_entropy", h, w, targets)
    loss_exact, lse_exact = ops.cross_entropy(logits, targets)
    weights = (logits - lse_exact[:, None]).exp()
    moved = (weights * distance.expm1()).sum(1).log1p() / U  # of the logarithm of a sum, if all its logits are another
    size = magnitude_of_lse(logits, lse_exact) + moved
    within(lse, lse_exact, size, 1)
    column = targets.clamp(min=0)[:, None]
    losses = (lse_exact - logits.gather(1, column)[:, 0]).abs() + distance.gather(1, column)[:, 0] / U
    within(loss, loss_exact, ((size + losses) * (targets >= 0)).sum() + loss_exact.abs(), 1)

    part_lse, picked = run("linear_cross_entropy_part", h, w, targets)
    assert torch.equal(part_lse, lse)
    within(picked, logits.gather(1, column)[:, 0] * (targets >= 0), distance.gather(1, column)[:, 0] / U, 1)

    dloss_T, dlse, dpicked = dloss * (targets >= 0), *tangents_of(rows)
    for op, tangents, by_row in (
        ("linear_cross_entropy", (dloss,), (dloss_T, -dloss_T)),
        ("linear_cross_entropy_part", (dlse, dpicked), (dlse, dpicked)),
    ):
        dlse64, dpicked64 = double(*by_row)
        exact, size = part_gradients_of(dlse64, dpicked64, logits, targets, lse.double())
        weights = (logits - lse.double()[:, None]).exp() * dlse64.abs()[:, None]
        dlogits, off = stored(exact, U * size + weights * distance.expm1(), dtype)
        product, sizes = dlogits @ w64, dlogits.abs() @ w64.abs() * (vocab + 2)
        args = (*tangents, h, w, targets, lse)
        within(run(f"{op}_dgrad", *args), product, sizes + off @ w64.abs() / U, 1)

        acc = random(vocab, hidden, seed=3)
        expected = acc.double() + dlogits.T @ h64
        sizes = (rows + 2) * (expected.abs() + dlogits.T.abs() @ h64.abs()) + off.T @ h64.abs() / U
        assert run(f"{op}_wgrad_", acc, *args) is None
        within(acc, expected, sizes, 1)


def what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    """A row of NaN and an invalid target affect the loss, and otherwise only their own rows."""
    rows, vocab, hidden, bad = 70, 300, 24, [3, 66]
    h, w = random(rows, hidden, dtype=dtype, seed=1), random(vocab, hidden, dtype=dtype, seed=2)
    good, dloss, good_rows = targets_of(rows, vocab), torch.tensor(0.5), [t for t in range(rows) if t not in bad]
    h_bad, bad_targets = h.clone(), good.clone()
    h_bad[3], bad_targets[66] = torch.nan, vocab

    def results(h: Tensor, targets: Tensor) -> list[Tensor]:
        loss, lse = run("linear_cross_entropy", h, w, targets)
        acc = torch.zeros(vocab, hidden)
        run("linear_cross_entropy_wgrad_", acc, dloss, h[good_rows], w, targets[good_rows], lse[good_rows])
        logits = ops.linear(h, w)
        plain, plain_lse = run("cross_entropy", logits, targets)
        dlogits = run("cross_entropy_dgrad", dloss, logits, targets, plain_lse)
        assert torch.isnan(loss) == torch.isnan(plain)
        dh = run("linear_cross_entropy_dgrad", dloss, h, w, targets, lse)
        return [loss[None], acc, lse, plain_lse, dlogits, dh]

    (loss, acc, *by_row), (_, acc_good, *good_by_row) = results(h_bad, bad_targets), results(h, good)
    assert loss.isnan() and torch.equal(acc, acc_good)
    for output, expected in zip(by_row, good_by_row, strict=True):
        assert torch.equal(output[good_rows], expected[good_rows]) and output[3].isnan().all()
    for gradient in by_row[2:]:
        assert gradient[66].isnan().all()


def logits_far_below_zero(dtype: torch.dtype) -> None:
    """Columns of a tile beyond V are zeros: they must not count, with e²⁵⁶ times the weight of any word."""
    linear_cross_entropy(dtype, 70, 300, 24, below=256.0)


def weights_at_any_address(dtype: torch.dtype) -> None:
    """Parameters are parts of one flat tensor; block copies need addresses that are multiples of 16 bytes."""
    flat, h, targets = random(1 + 60 * 16, dtype=dtype, seed=1), random(9, 16, dtype=dtype, seed=2), targets_of(9, 60)
    w = flat[1:].view(60, 16)
    outputs, expected = (run("linear_cross_entropy", h, weight, targets) for weight in (w, w.clone()))
    assert all(torch.equal(output, wanted) for output, wanted in zip(outputs, expected, strict=True))
