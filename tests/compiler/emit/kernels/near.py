"""Error bounds of the attention kernels, computed by running their steps on numbers that carry an error bound.

Rotations are computed in FP32 and rounded to the dtype. Products read that dtype and add up in FP32. Weights and
gradients of scores are rounded before the products that read them. With U = 2⁻²⁴ a sum of n products is off by at most
n·U of the sum of their magnitudes, and each further operation adds one U of its result; 2^x of the hardware is off by
4·U.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.ops.causal import rotate
from tests.compiler.emit.kernels.interpreted import STORED, U, run


@dataclass(frozen=True)
class Near:
    """Exact numbers in FP64, and the error bound of their computed values."""

    exact: Tensor
    off: Tensor

    @staticmethod
    def of(exact: Tensor) -> Near:
        return Near(exact.double(), torch.zeros_like(exact, dtype=torch.float64))

    @property
    def most(self) -> Tensor:
        return self.exact.abs() + self.off

    def rounded(self, dtype: torch.dtype = torch.float32, operations: int = 0) -> Near:
        return Near(self.exact, self.off + (STORED[dtype] + operations * U) * self.most)

    def __matmul__(self, other: Near) -> Near:
        return self.product(other)

    def product(self, other: Near, times: int = 1) -> Near:
        """The matrix product with its error bound; `times` sums over the inner dim follow each other."""
        terms = times * self.exact.shape[-1]
        off = self.most @ other.most * (1 + terms * U) - self.exact.abs() @ other.exact.abs()
        return Near(self.exact @ other.exact, off)

    def sum(self, dim: int) -> Near:
        terms = self.exact.shape[dim]
        return Near(self.exact.sum(dim), self.off.sum(dim) + terms * U * self.most.sum(dim))

    def __mul__(self, other: Near) -> Near:
        exact = self.exact * other.exact
        return Near(exact, self.most * other.most - exact.abs()).rounded(operations=1)

    def __sub__(self, other: Near) -> Near:
        return Near(self.exact - other.exact, self.off + other.off).rounded(operations=1)

    @property
    def mT(self) -> Near:
        return self.map(lambda x: x.mT)

    def map(self, move: Any) -> Near:
        """Both moved alike, as a view or a sum is."""
        return Near(move(self.exact), move(self.off))


def turned(x: Near, angles_Sr: Tensor) -> Near:
    """x [.., S, W], pairs turned in FP32 by a table in FP32: five roundings of two products."""
    exact = rotate(x.exact, angles_Sr)
    pairs = x.most.unflatten(-1, (-1, 2)).sum(-1, keepdim=True).expand(*x.off.shape[:-1], -1, 2).flatten(-2)
    off = x.off.unflatten(-1, (-1, 2)).sum(-1, keepdim=True).expand(*x.off.shape[:-1], -1, 2).flatten(-2)
    return Near(exact, off + 5 * U * pairs)


def cat(*parts: Near) -> Near:
    return Near(torch.cat([part.exact for part in parts], -1), torch.cat([part.off for part in parts], -1))


class Bounds(NamedTuple):
    """A window and a softcap, 0 for none; sinks of the P heads of all sequences, FP64, or none; where the document of
    each of their queries begins, or none; the positions of these Q queries, or none where they are those of all S. Or,
    in the place of what says which keys a query sees, a mask of those that it does not see."""

    window: int = 0
    softcap: float = 0.0
    sinks_P: Tensor | None = None
    starts_PQ: Tensor | None = None
    positions_PQ: Tensor | None = None
    unseen_PQS: Tensor | None = None


FREE = Bounds()


def scores_of(q: Near, k: Near, bounds: Bounds) -> tuple[Near, Near, Tensor]:
    """(logits, their derivative before a softcap, mask of unseen keys). Of P heads: q_PQC, k_PSC -> PQS;
    without documents and positions, the mask is one SS."""
    S, C = k.exact.shape[1:]
    key, cap = torch.arange(S), bounds.softcap
    position = (key if bounds.positions_PQ is None else bounds.positions_PQ)[..., None]
    unseen = (key > position) | (key <= position - (bounds.window or S))
    if bounds.unseen_PQS is not None:
        unseen = bounds.unseen_PQS
    if bounds.starts_PQ is not None:
        unseen = unseen | (key < bounds.starts_PQ[:, :, None])
    scores = (q @ k.mT).rounded(operations=1).map(lambda x: x * C**-0.5)  # the sum of two products of one
    if not cap:
        return scores, Near.of(torch.ones(())), unseen
    # tanh(x) = 1 - 2 / (1 + e^2x): e^2x is off by 4·U and by its argument's 3·U·2x, which moves tanh by less than half
    # each; then a sum, a quotient of at most 2 (error 2·U in hardware) and a difference.
    bent = Near(torch.tanh(scores.exact / cap), scores.off / cap + 12 * U)
    slope = Near(1 - bent.exact.square(), 2 * bent.off + 4 * U)
    return bent.rounded(operations=1).map(lambda x: x * cap), slope, unseen


def exponents(x: Near, largest: Tensor) -> Tensor:
    """The relative error of e^x, computed as 2^x, if the minuend of x is at most `largest`."""
    return torch.expm1(x.off + 4 * U * (x.most + largest) + 4 * U)


def attend(q: Near, k: Near, v: Near, dtype: torch.dtype, bounds: Bounds = FREE) -> tuple[Near, Near]:
    """o_PQV, lse_PQ1 of turned q and k."""
    (scores, _, unseen), S = scores_of(q, k, bounds), k.exact.shape[1]
    if bounds.sinks_P is not None:  # a key that all queries see, with the value 0
        sinks = Near.of(bounds.sinks_P[:, None, None].expand(-1, q.exact.shape[1], 1)).rounded(operations=2)
        scores, unseen = cat(scores, sinks), torch.cat([unseen, torch.zeros_like(unseen[..., :1])], -1)
        v = v.map(lambda x: torch.nn.functional.pad(x, (0, 0, 0, 1)))
    exact = scores.exact.masked_fill(unseen, -torch.inf)
    lse = exact.logsumexp(-1, keepdim=True)
    weights, largest = (exact - lse).exp(), scores.most.masked_fill(unseen, 0).amax(-1, keepdim=True)
    # Each of at most S/16 + 1 blocks scales the results of the earlier ones.
    shrunk = (S // 16 + 1) * 6 * U + 8 * U * largest
    weight_errors = (1 + exponents(scores, largest)) * (1 + shrunk) - 1
    total = (weights * weight_errors).sum(-1, keepdim=True) + (S + 2) * U
    share = (1 + weight_errors) * (1 + STORED[dtype]) * (1 + (S + 4) * U) / (1 - total) - 1
    o = Near(weights @ v.exact, (weights * share) @ v.exact.abs())
    return o.rounded(dtype), Near(
        lse, total / (1 - total) + 4 * U * (lse.abs() + largest + torch.tensor(2.0 * S).log())
    )


def gives_peaks(op: str, arguments: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> Tensor:
    """The largest logit of each head. Asserts that the other results are bit-identical to those of the plain op."""
    o, largest, lse = run(f"{op}_peaks", *arguments)
    assert torch.equal(o, results[0]) and torch.equal(lse, results[1])
    return largest


def peaks(q: Near, k: Near, bounds: Bounds, heads: int) -> Near:
    """The largest logit of each head over all sequences, H. Its error is at most the largest error of a logit."""
    scores, _, unseen = scores_of(q, k, bounds)
    largest, off = scores.exact.masked_fill(unseen, -torch.inf), scores.off.masked_fill(unseen, 0)
    return Near(largest.amax((1, 2)).view(-1, heads).amax(0), off.amax((1, 2)).view(-1, heads).amax(0))


def attend_dgrad(
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    q: Near,
    k: Near,
    v: Near,
    dtype: torch.dtype,
    group: int = 1,
    bounds: Bounds = FREE,
) -> tuple[Near, Near, Near]:
    """dq, dk (of turned q and k) and dv, each head's part of the sums over `group` heads."""
    scores, slope, unseen = scores_of(q, k, bounds)
    exact = (scores.exact - lse).masked_fill(unseen, -torch.inf).exp()
    weights = Near(exact, exact * exponents(scores, lse.abs()))
    delta = Near((do * o).sum(-1, keepdim=True), (do.shape[-1] + 1) * U * (do * o).abs().sum(-1, keepdim=True))
    bent = weights * slope if bounds.softcap else weights
    dscores = (bent * (Near.of(do) @ v.mT - delta)).rounded(dtype)
    dq, dk = dscores @ k, dscores.mT.product(q, group)
    dq, dk = (d.rounded(operations=1).map(lambda x: x * q.exact.shape[-1] ** -0.5) for d in (dq, dk))
    return dq, dk, weights.rounded(dtype).mT.product(Near.of(do), group)


def close(found: Tensor, near: Near, dtype: torch.dtype, expected: Tensor) -> None:
    """`found` is as near to `expected`, the op's result in FP64, as `near` allows."""
    assert found.dtype == dtype and found.is_contiguous() and found.shape == expected.shape
    torch.testing.assert_close(near.exact.reshape(expected.shape), expected, rtol=1e-10, atol=1e-12)
    off = near.rounded(dtype).off.reshape(expected.shape) + 1e-30
    worst = ((found.double() - expected).abs() / off).amax() if expected.numel() else torch.zeros(())
    assert worst <= 1, f"{worst:.3g} times the bound"
    if expected.numel() > 1000:  # the bound tells a result from none, in FP32 from one that is 1% off
        assert off.norm() < (1.0 if dtype == torch.bfloat16 else 0.01) * expected.norm()
