"""Checks of the kernels of an indexer's loss, in Triton's interpreter: against FP64, within rounding.

The steps run on numbers that carry an error bound (near.py). The gradient of ReLU jumps at 0: where the sign of a
product is within its error, the gradient may be computed for either sign.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiler.emit.kernels import indexer_loss as family
from runtime import ops
from runtime.ops.indexer import blocks, is_chosen
from tests.compiler.emit.kernels.interpreted import STORED, U, double, random, run, within
from tests.compiler.emit.kernels.near import Near, exponents
from tests.runtime.ops.source import Source, places

CHECKED = ("indexer_loss", "indexer_loss_dgrad")
Sizes = tuple[int, int, int, int, int, int, int, int, int]  # B, S, heads and columns; heads, nope, rope; K, rate


def operands(dtype: torch.dtype, sizes: Sizes, documents: bool, some: bool) -> tuple[Any, ...]:
    """All arguments; keys are views of columns. Over all keys if K is 0; with nope 0 there is no kv."""
    B, S, H, C, A, nope, rope, K, rate = sizes
    starts, positions = places(Source(torch.float32, 5), B, S, documents, some)
    T, keys = B * S if positions is None else len(positions), B * (S // rate)
    wider = random(keys, C + rope + 16, dtype=dtype, seed=2)
    ours = random(T, H * C, dtype=dtype, seed=1), wider[:, 8 : 8 + C], random(T, H, dtype=dtype, seed=3)
    query, kv = random(T, A * (nope + rope), dtype=dtype, seed=4), random(keys, A * (nope + 5), dtype=dtype, seed=5)
    theirs = query, kv if nope else None, wider[:, 8 + C : 8 + C + rope]
    sizes_of_keys = S, H, K, rate, starts, positions
    chosen = ops.OPS["select_keys"](*ours, *sizes_of_keys) if K else None
    if chosen is not None:
        chosen[1::7] = -1  # some have chosen nothing
    return *ours, *theirs, chosen, S, H, A, nope, rate, starts, positions


def computed(*args: Any) -> tuple[Tensor, ...]:
    """The results of the kernels, which are the same a second time, from one tile of queries at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "SCRATCH_BYTES", 1)
        first, second = (run("indexer_loss", *args) for _ in range(2))
    assert all(map(torch.equal, first, second))
    return first


def loss(dtype: torch.dtype, sizes: Sizes, documents: bool = False, some: bool = False) -> None:
    args = operands(dtype, sizes, documents, some)
    found = computed(*args)
    wide = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
    wanted, bounds = ops.OPS["indexer_loss"](*wide), errors(dtype, wide)
    kinds = torch.float32, dtype, dtype, dtype
    for name, x, exact, off, kind in zip(("loss", "dq", "dk", "dweights"), found, wanted, bounds, kinds, strict=True):
        assert x.dtype == kind and x.shape == exact.shape and x.is_contiguous(), name
        bound = off + STORED[kind] * (exact.abs() + off) + 1e-30
        worst = ((x.double() - exact).abs() / bound).amax()
        assert worst <= 1, f"{name}: {worst:.3g} times the bound"
        assert off.norm() < (0.3 if dtype == torch.bfloat16 else 0.01) * exact.norm(), f"the bound of {name} is loose"


def errors(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The error bounds of the loss and of the gradients before they are rounded, for arguments in FP64."""
    q, k, weights, query, kv, k_rope, chosen, S, H, A, nope, rate, starts, positions = args
    of_loss = torch.zeros((), dtype=torch.float64)
    of_q, of_k, of_weights = (torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, weights))
    total = torch.zeros((), dtype=torch.float64)
    for block in blocks(q, k, H, S, rate, starts, positions):
        rows, keys = block.rows, block.key_rows
        counts_RL = ~block.hidden() if chosen is None else is_chosen(chosen[rows], block.keys)
        k_LC = Near.of(k[keys])
        hits, index = [], None
        for h in range(H):
            products = Near.of(q[rows].unflatten(1, (H, -1))[:, h]) @ k_LC.mT
            hits.append(products)
            weight = Near.of(weights[rows, h, None])
            part = weight * Near(products.exact.relu(), products.off)
            index = (
                part if index is None else Near(index.exact + part.exact, index.off + part.off).rounded(operations=1)
            )
        assert index is not None
        log, share = softmax(index, counts_RL)
        p = Near.of(torch.zeros_like(index.exact))
        for a in range(A):
            key_parts = [k_rope[keys]] if kv is None else [kv[keys].unflatten(1, (A, -1))[:, a, :nope], k_rope[keys]]
            of_head, key = query[rows].unflatten(1, (A, -1))[:, a], torch.cat(key_parts, 1)
            scale = of_head.shape[1] ** -0.5
            logits = (Near.of(of_head) @ Near.of(key).mT).rounded(operations=3).map(lambda x, scale=scale: x * scale)
            weight = softmax(logits, counts_RL)[1]
            p = Near(p.exact + weight.exact / A, p.off + weight.off / A).rounded(operations=2)
        d = share - p
        # x·log x moves by (1 + |log x|) times its error, and by less than the error's own x·log x at 0.
        magnitude = p.most.clamp(min=1e-30)
        moved = p.off * (2 + magnitude.log().abs()) + p.off.clamp(min=1e-300) * p.off.clamp(min=1e-300).log().abs()
        terms = (p * log).rounded(operations=2)
        log_error = 4 * U * p.most * (1 + magnitude.log().abs())
        size = (p.exact * p.exact.clamp(min=1e-300).log()).abs() + terms.most
        total += size.sum()
        of_loss += (moved + log_error + terms.off).masked_fill(~counts_RL, 0.0).sum()
        d = d.map(lambda x, counts=counts_RL: x.masked_fill(~counts, 0.0))
        for h in range(H):
            head = slice(h * k.shape[1], (h + 1) * k.shape[1])
            products = hits[h]
            unclear = products.exact.abs() <= products.off
            positive = products.exact > 0
            given = (Near.of(weights[rows, h, None]) * d).rounded(dtype)
            given = Near(given.exact * positive, torch.where(unclear, given.most, given.off * positive))
            of_q[rows, head] += (given @ k_LC).off
            of_k[keys] += (given.mT.product(Near.of(q[rows, head]))).off
            of_weights[rows, h] += (Near(products.exact.relu(), products.off) * d).sum(1).off
    # Sums over blocks, tiles and parts: every partial sum is rounded again.
    of_loss += (q.shape[0] + k.shape[0]) * U * total
    more = 1 + 2 * (q.shape[0] * H + k.shape[0]) * U
    return of_loss, of_q * more, of_k * more, of_weights * more


def softmax(x: Near, counts: Tensor) -> tuple[Near, Near]:
    """(logarithms, numbers) of a softmax over the keys that count, from a logarithm of the denominator in FP32."""
    exact = x.exact.masked_fill(~counts, -torch.inf)
    none = ~counts.any(1, keepdim=True)
    lse = exact.logsumexp(1, keepdim=True).masked_fill(none, 0.0)
    weights = (exact - lse).exp()
    largest = x.most.masked_fill(~counts, 0.0).amax(1, keepdim=True)
    keys = x.exact.shape[1]
    relative = exponents(x, largest) + (keys + 10) * U * (1 + largest)
    lse_off = (weights * relative).sum(1, keepdim=True) * 1.01 + 8 * U * (lse.abs() + largest + 1)
    log = Near((x.exact - lse).masked_fill(~counts, 0.0), (x.off + lse_off).masked_fill(~counts, 0.0))
    log = log.rounded(operations=3)
    off = weights * torch.expm1(log.off + 8 * U * (x.most + lse.abs() + 1))
    return log, Near(weights, off.masked_fill(~counts, 0.0))


def scaled(dtype: torch.dtype) -> None:
    """Gradients times that of the loss, rounded once."""
    dloss = torch.tensor(-1.7)
    gradients = random(7, 300, dtype=dtype), random(1, 5, dtype=dtype, seed=1), random(0, 3, dtype=dtype, seed=2)
    found = run("indexer_loss_dgrad", dloss, *gradients)
    for x, exact in zip(found, ops.OPS["indexer_loss_dgrad"](*double(dloss, *gradients)), strict=True):
        within(x, exact, exact.abs(), 1)
