"""Checks of the kernels that choose keys, in Triton's interpreter.

On small integers all arithmetic is exact, so the choice must be that of the op in FP64 to the last key, with many ties.
On random numbers the kernel chooses by scores that it has rounded. If it prefers one key to another, its score of the
first is no smaller, so that the exact score is smaller by at most the errors of both. The kernel then gives, in
ascending order, as many keys as are visible, at most K, and the exact score of each is at least the K-th best exact
score less both errors.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiler.emit.kernels import select_keys
from runtime import ops
from runtime.ops.indexer import blocks, index_scores
from tests.compiler.emit.kernels.interpreted import U, double, random, run
from tests.runtime.ops.source import Source, places

CHECKED = ("select_keys",)
Sizes = tuple[int, int, int, int, int, int]  # B, S, heads, columns, K, rate


def spans_of(sizes: Sizes, documents: bool, some: bool) -> tuple[Tensor | None, Tensor | None]:
    """Where the documents of the queries start, and the positions of the queries, if only some are given."""
    return places(Source(torch.float32, 5), sizes[0], sizes[1], documents, some)


def operands(dtype: torch.dtype, sizes: Sizes, spans: tuple[Tensor | None, Tensor | None]) -> tuple[object, ...]:
    B, S, H, C, K, rate = sizes
    T = B * S if spans[1] is None else len(spans[1])
    wider = random(B * (S // rate), C + 16, dtype=dtype, seed=2)  # keys are a view of some of its columns
    return (
        random(T, H * C, dtype=dtype, seed=1),
        wider[:, 8 : 8 + C],
        random(T, H, dtype=dtype, seed=3),
        *(S, H, K, rate, *spans),
    )


def choice(*args: object, batch_bytes: int = 1) -> Tensor:
    """The choice of the kernel, from as many queries at a time as have this many bytes of scores, one tile at least."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select_keys, "SCRATCH_BYTES", batch_bytes)
        chosen: Tensor = run("select_keys", *args)
    return chosen


def twice(*args: object) -> Tensor:
    """The choice of the kernel, which is the same a second time."""
    chosen = choice(*args)
    assert torch.equal(choice(*args), chosen)
    return chosen


def exact(dtype: torch.dtype, sizes: Sizes, documents: bool, some: bool) -> None:
    q, k, weights, *options = operands(dtype, sizes, spans_of(sizes, documents, some))
    q, k, weights = ((x * 2).round().clamp(-3, 3) for x in (q, k, weights))
    chosen = twice(q, k, weights, *options)
    wanted = ops.OPS["select_keys"](*double(q, k, weights), *options)
    assert chosen.dtype == torch.int32 and torch.equal(chosen, wanted)


def long(dtype: torch.dtype) -> None:
    """Three queries at the end of 1,000 keys, of which most are chosen: blocks of 128 keys have fewer."""
    S, H, C, K = 1000, 2, 16, 700
    positions = torch.tensor([S - 1, 701, 20], dtype=torch.int32)
    q, k, weights = random(3, H * C, dtype=dtype), random(S, C, dtype=dtype, seed=1), random(3, H, dtype=dtype, seed=2)
    q, k, weights = ((x * 2).round().clamp(-3, 3) for x in (q, k, weights))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select_keys, "MAX_BLOCK", 128)
        chosen = twice(q, k, weights, S, H, K, 1, None, positions)
    assert torch.equal(chosen, ops.OPS["select_keys"](*double(q, k, weights), S, H, K, 1, None, positions))


def near(dtype: torch.dtype, sizes: Sizes, documents: bool, some: bool) -> None:
    (_, S, H, C, K, rate), spans = sizes, spans_of(sizes, documents, some)
    args = operands(dtype, sizes, spans)
    chosen, (q, k, weights) = twice(*args), double(*args[:3])
    seen_T = torch.zeros(len(q), dtype=torch.long)
    for block in blocks(q, k, H, S, rate, *spans):
        rows = chosen[block.rows]
        scores_RL = index_scores(q[block.rows], k[block.key_rows], weights[block.rows])
        magnitudes_RL = index_scores(q[block.rows].abs(), k[block.key_rows].abs(), weights[block.rows].abs())
        hidden_RL = block.hidden()
        errors_RL = ((C + H + 2) * U * magnitudes_RL).masked_fill_(hidden_RL, 0.0)
        seen_T[block.rows] = (~hidden_RL).sum(1)
        for row, scores_L, errors_L, hidden_L in zip(rows, scores_RL, errors_RL, hidden_RL, strict=True):
            picked, visible = row[row >= 0].long(), scores_L[~hidden_L]
            assert not hidden_L[picked].any()
            if len(picked):
                worst = visible.sort(descending=True).values[len(picked) - 1]
                assert (scores_L[picked] >= worst - errors_L[picked] - errors_L.amax()).all()
    num_T = (chosen >= 0).sum(1)
    assert torch.equal(num_T, seen_T.clamp(max=K))
    rank_K = torch.arange(K)
    assert ((chosen >= 0) == (rank_K < num_T[:, None])).all() and (chosen[rank_K >= num_T[:, None]] == -1).all()
    assert ((chosen[:, 1:] > chosen[:, :-1]) | (chosen[:, 1:] == -1)).all()


def any_number() -> None:
    """NaN is chosen first, −∞ last, and −0 equals 0: as the op does. One head: its score is its weight."""
    scores = torch.tensor([0.0, -0.0, -torch.inf, torch.nan, 1.0, torch.inf, -1.0, 0.0, -torch.nan, 1e-45, -1e-45, 2.0])
    S = len(scores)
    q, weights = torch.ones(S, 16), torch.ones(S, 1)
    k = torch.zeros(S, 16)
    k[:, 0] = scores.abs().masked_fill(scores.isnan(), torch.nan)
    for K in (1, 3, 7, S - 1):
        for sign in (1.0, -1.0):
            args = q, k, weights * sign, S, 1, K, 1
            assert torch.equal(choice(*args), ops.OPS["select_keys"](*args))


def in_batches() -> None:
    """A bound on the memory of scores changes no choice: of four tiles of queries, one or two at a time."""
    args = operands(torch.float32, (2, 34, 2, 16, 30, 1), (None, None))
    assert torch.equal(choice(*args), choice(*args, batch_bytes=4 * 2 * 32 * 48))
