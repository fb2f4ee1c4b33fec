"""Index scores of keys, and the keys that a query attends to by them. DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556.

The score of key s for a query t is I(t, s) = Σ_h weights(t, h) · ReLU(q(t, h) · k(s)), with one key for all heads. T
queries in B sequences · H heads of the indexer · C columns of each · L keys of a sequence · K chosen.

A key stands for `rate` tokens: a query at position t may see the keys before (t + 1) // rate, which at rate 1 is the
causal rule. With `starts` it sees none that stands for a token in front of its document.

Scores are made block by block, a few queries against the keys that any of them sees, and are FP32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.ops.wide import wide

BLOCK_BYTES = {"cpu": 2**22}  # of the products of all heads with all keys; elsewhere launches are to be few
ELSEWHERE = 2**28


def select_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    sequence: int,
    heads: int,
    top_k: int,
    rate: int,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """q [T, H·C], k [B·L, C], weights [T, H] -> chosen int32 [T, K]: numbers of keys in their sequence, L = sequence //
    rate, ascending. −1 fills up the rows of queries that see fewer than K. Of equal scores the key in front is chosen.

    `starts` int32 [T]: where the document of a query begins in its sequence. With `positions` int32 [T] the queries are
    those at these positions, as many of each sequence.
    """
    chosen = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    for block in blocks(q, k, heads, sequence, rate, starts, positions):
        scores_RL = index_scores(q[block.rows], k[block.key_rows], weights[block.rows])
        first_R1, end_R1 = block.first_R1, block.end_R1
        scores_RL.masked_fill_(block.hidden(), -torch.inf)
        order_RK = scores_RL.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        rank_K = torch.arange(order_RK.shape[1], device=q.device)
        unused = block.keys  # no number of a key, and behind all of them
        order_RK = order_RK.masked_fill(rank_K >= end_R1 - first_R1, unused).sort(dim=1).values
        chosen[block.rows, : order_RK.shape[1]] = order_RK.masked_fill(order_RK == unused, -1).to(torch.int32)
    return chosen


def index_scores(q_RX: Tensor, k_LC: Tensor, weights_RH: Tensor) -> Tensor:
    """q [R, H·C], k_LC, weights_RH -> I_RL, FP32 at least."""
    return _weighed(products(q_RX, k_LC).relu_(), weights_RH)


def products(q_RX: Tensor, k_LC: Tensor) -> Tensor:
    """q·k of each head, [R, H, L]."""
    q_MC = wide(q_RX).reshape(-1, k_LC.shape[1])
    return torch.mm(q_MC, wide(k_LC).mT).unflatten(0, (q_RX.shape[0], -1))


def _weighed(hits_RHL: Tensor, weights_RH: Tensor) -> Tensor:
    return torch.bmm(wide(weights_RH)[:, None], hits_RHL)[:, 0]


def is_chosen(chosen_RK: Tensor, keys: int) -> Tensor:
    """[R, keys]: which keys each query has chosen."""
    place_RK = chosen_RK.long().where(chosen_RK >= 0, keys)
    marks = torch.zeros((len(chosen_RK), keys + 1), dtype=torch.bool, device=chosen_RK.device)
    return marks.scatter_(1, place_RK, True)[:, :keys]


# ---------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Block:
    """Queries of one sequence, and the keys in front of it that any of them sees."""

    rows: slice
    first_key: int  # of the sequence, in k
    keys: int  # from there on
    first_R1: Tensor  # the first key that each query sees, in its sequence
    end_R1: Tensor  # the one behind the last

    @property
    def key_rows(self) -> slice:
        """The rows of the keys."""
        return slice(self.first_key, self.first_key + self.keys)

    def hidden(self) -> Tensor:
        """[R, keys]: which keys each query does not see."""
        key_L = torch.arange(self.keys, device=self.end_R1.device)
        return (key_L >= self.end_R1) | (key_L < self.first_R1)


def blocks(
    q: Tensor,
    k: Tensor,
    heads: int,
    sequence: int,
    rate: int,
    starts: Tensor | None,
    positions: Tensor | None,
) -> Iterator[Block]:
    """Blocks of all queries, but for those that see no key."""
    keys = sequence // rate
    if not keys:
        return
    B = k.shape[0] // keys
    Q = q.shape[0] // B
    size = max(1, BLOCK_BYTES.get(q.device.type, ELSEWHERE) // (heads * keys * wide(q[:0]).itemsize))
    for first in range(0, Q, size):
        for b in range(B):
            rows = slice(b * Q + first, b * Q + min(first + size, Q))
            position_R = torch.arange(rows.start - b * Q, rows.stop - b * Q, device=q.device)
            last = rows.stop - b * Q - 1
            if positions is not None:
                position_R = positions[rows].long()
                last = int(position_R.max())
            first_R = torch.zeros_like(position_R) if starts is None else (starts[rows].long() + rate - 1) // rate
            end_R = torch.maximum((position_R + 1) // rate, first_R)
            if seen := min(keys, (last + 1) // rate):
                yield Block(rows, b * keys, seen, first_R[:, None], end_R[:, None])


OPS = (select_keys,)
