"""Causal softmax attention in blocks, and rotation: shared by the attention ops.

Su et al., "RoFormer", 2021; blocks: Dao, "FlashAttention-2", 2023.

T tokens in B sequences of S; positions restart with every sequence. If sequences hold several documents, `starts` [T]
gives, for each token, the position in the sequence where its document starts: keys before it are hidden, and positions
count from it. If the queries are only some rows of the sequences, Q per sequence, `positions` [B·Q] gives the position
of each, ascending within a sequence; otherwise Q = S. N: the key/value heads of all sequences, the batch of the
products. r query heads share a key/value head, so each has M = Q·r query rows, with the r rows of one position
adjacent. C columns of queries and keys, V of values.

Everything is at least FP32: the callers widen BF16 and round their results. This code runs for FP64 and on processors
without C++ ops (`runtime/ops/native/attention.cpp`, three times as fast).

Scores are computed in blocks: a few query rows against the keys up to the last of these rows. A block stays in the
cache, and most of the masked half is never computed; `mla_attention` has measurements. Keys outside a window are not
read either: a block of rows reads the keys of its own positions and the `window` - 1 before the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from runtime.ops.product import wide_dtype

BLOCK_ROWS = 64  # query rows per block; twice as many, of fewer positions, if several heads share a key
BLOCK_BYTES = 2**20  # of scores per block, with all keys; 0.5 to 2 MiB are equally fast with 1 MiB of L2 per core


def attend(
    q_NMC: Tensor,
    k_NSC: Tensor,
    v_NSV: Tensor,
    sinks_NM: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    starts_NQ: Tensor | None = None,
    positions_NQ: Tensor | None = None,
    peaks_NM: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q_NMC (scaled), k_NSC, v_NSV -> o_NMV = softmax(q·k)·v over the keys at or before the query, lse_NM, the
    logarithm of its denominator.

    `window` limits the keys to the last `window` of these, `starts` to the query's document. `softcap` maps logits s to
    softcap·tanh(s/softcap). Sinks are extra logits in the denominator. `peaks` receives the largest logit of each
    query, before the softcap and without the sinks.
    """
    o_NMV = q_NMC.new_empty((*q_NMC.shape[:2], v_NSV.shape[2]))
    lse_NM = q_NMC.new_empty(q_NMC.shape[:2])
    masked = _Masks(q_NMC, k_NSC, window, starts_NQ, positions_NQ)
    for n, rows, new, past in masked.blocks():
        scores = torch.bmm(q_NMC[n, rows], k_NSC[n, past].mT)
        if peaks_NM is not None:
            logits = scores.clone()
            masked.hide(logits, n, new, past)
            torch.amax(logits, dim=-1, out=peaks_NM[n, rows])
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        masked.hide(scores, n, new, past)
        if sinks_NM is None:
            weights = torch.softmax(scores, dim=-1)
            torch.sub(scores.amax(dim=-1), weights.amax(dim=-1).log_(), out=lse_NM[n, rows])
        else:
            torch.logaddexp(scores.logsumexp(dim=-1), sinks_NM[n, rows], out=lse_NM[n, rows])
            weights = scores.sub_(lse_NM[n, rows, None]).exp_()
        torch.bmm(weights, v_NSV[n, past], out=o_NMV[n, rows])
    return o_NMV, lse_NM


def attend_dgrad(
    do_NMV: Tensor,
    delta_NM: Tensor,
    lse_NM: Tensor,
    q_NMC: Tensor,
    k_NSC: Tensor,
    v_NSV: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    starts_NQ: Tensor | None = None,
    positions_NQ: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """do_NMV, delta_NM = Σ_V do·o, the forward's lse and inputs -> dq_NMC, dk_NSC, dv_NSV, summed over the r heads.

    The lse includes the sinks.
    """
    lse_NM1, delta_NM1 = lse_NM[:, :, None], delta_NM[:, :, None]
    dq_NMC, dk_NSC, dv_NSV = torch.empty_like(q_NMC), torch.zeros_like(k_NSC), torch.zeros_like(v_NSV)
    masked = _Masks(q_NMC, k_NSC, window, starts_NQ, positions_NQ)
    for n, rows, new, past in masked.blocks():
        scores = torch.bmm(q_NMC[n, rows], k_NSC[n, past].mT)
        if softcap:
            slope = 1 - scores.div_(softcap).tanh_().square()
            scores.mul_(softcap)
        masked.hide(scores, n, new, past)
        weights = scores.sub_(lse_NM1[n, rows]).exp_()
        dscores = torch.bmm(do_NMV[n, rows], v_NSV[n, past].mT).sub_(delta_NM1[n, rows]).mul_(weights)
        if softcap:
            dscores.mul_(slope)
        dv_NSV[n, past].baddbmm_(weights.mT, do_NMV[n, rows])
        dk_NSC[n, past].baddbmm_(dscores.mT, q_NMC[n, rows])
        torch.bmm(dscores, k_NSC[n, past], out=dq_NMC[n, rows])
    return dq_NMC, dk_NSC, dv_NSV


# ---------------------------------------------------------------- blocks


class _Masks:
    """The keys each query sees: those at or before it, in its window and in its document."""

    def __init__(
        self,
        q_NMC: Tensor,
        k_NSC: Tensor,
        window: int,
        starts_NQ: Tensor | None,
        positions_NQ: Tensor | None,
    ) -> None:
        self._N, self._S = k_NSC.shape[:2]
        self._Q = self._S if positions_NQ is None else positions_NQ.shape[1]
        self._r = q_NMC.shape[1] // self._Q  # query rows per position
        self._block_positions = max(1, (BLOCK_ROWS if self._r == 1 else 2 * BLOCK_ROWS) // self._r)
        self._itemsize, self._window = q_NMC.itemsize, window
        self._starts_NQ, self._positions_NQ = starts_NQ, positions_NQ
        # [rows, positions] within a block: −inf where the key comes after the query.
        future = torch.full((self._block_positions,) * 2, -torch.inf, dtype=q_NMC.dtype, device=q_NMC.device).triu_(1)
        self._future = future.repeat_interleave(self._r, dim=0) if self._r > 1 else future

    def blocks(self) -> Iterator[tuple[slice, slice, slice, slice]]:
        """Yield, for each block, its heads, query rows, positions, and keys that include all that its queries see."""
        keys = min(self._S, self._window + self._block_positions) if self._window else self._S
        heads = max(1, BLOCK_BYTES // (self._block_positions * self._r * keys * self._itemsize))
        for head in range(0, self._N, heads):
            n = slice(head, head + heads)
            for start in range(0, self._Q, self._block_positions):
                new = slice(start, min(start + self._block_positions, self._Q))
                first, last = new.start, new.stop - 1
                if self._positions_NQ is not None and not self._positions_NQ.is_cpu:
                    first, last = 0, self._S - 1  # the host would wait for the device to know them
                elif self._positions_NQ is not None:
                    positions = self._positions_NQ[n, new]
                    first, last = int(positions[:, 0].min()), int(positions[:, -1].max())
                past = slice(max(0, first - self._window + 1) if self._window else 0, last + 1)
                yield n, slice(new.start * self._r, new.stop * self._r), new, past

    def hide(self, scores: Tensor, n: slice, new: slice, past: slice) -> None:
        """Set the scores of a block to −inf where its queries do not see its keys."""
        if self._positions_NQ is not None:
            position, key = self._positions_NQ[n, new, None], _keys(past, scores)
            hidden = key > position
            if self._window:
                hidden |= key <= position - self._window
            self._fill(scores, hidden)
        else:
            diagonal = slice(new.start - past.start, new.stop - past.start)
            scores[:, :, diagonal].add_(self._future[: scores.shape[1], : new.stop - new.start])
            before = new.stop - self._window - past.start  # number of columns that the last position does not see
            if self._window and before > 0:
                hidden = _keys(past, scores)[:before] <= _keys(new, scores)[:, None] - self._window
                self._fill(scores[:, :, :before], hidden[None])
        if self._starts_NQ is not None:
            self._fill(scores, _keys(past, scores) < self._starts_NQ[n, new, None])

    def _fill(self, scores: Tensor, hidden: Tensor) -> None:
        """Set the scores of hidden keys to −inf in all query rows of each position. hidden: [heads or 1, positions,
        keys]."""
        scores.masked_fill_(hidden.repeat_interleave(self._r, dim=1), -torch.inf)


def _keys(positions: slice, scores: Tensor) -> Tensor:
    """Return a slice of positions as a tensor of indices on the device of `scores`."""
    return torch.arange(positions.start, positions.stop, device=scores.device)


# ---------------------------------------------------------------- heads and rotation


def split_heads(x: Tensor, sequence: int, heads: int) -> Tensor:
    """x [T, H·W] -> a view [B, H, S, W]."""
    return x.view(-1, sequence, heads, x.shape[1] // heads).transpose(1, 2)


def columns(x_PSW: Tensor, heads: int) -> Tensor:
    """x_PSW -> [T, H·W], the inverse of `split_heads`; P = B·H."""
    return x_PSW.unflatten(0, (-1, heads)).transpose(1, 2).contiguous().flatten(2).flatten(0, 1)  # W = 1 is viewable


@lru_cache(maxsize=16)
def angles(sequence: int, rope: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return e^(i·pos·theta^(−2p/rope)) [S, rope/2], complex `dtype`, or complex FP32 for BF16; all 1 if theta is 0.

    Cached: it takes 0.04 ms for S 256 and rope 16, where the forward of one sequence and 4 heads takes 0.8.
    """
    pair_r = torch.arange(0, rope, 2, dtype=torch.float64)
    frequency_r = theta ** (-pair_r / rope) if theta else torch.zeros_like(pair_r)
    phase_Sr = torch.outer(torch.arange(sequence, dtype=torch.float64), frequency_r)
    return torch.polar(torch.ones_like(phase_Sr), phase_Sr).to(device, wide_dtype(dtype).to_complex())


def turns(angles_Sr: Tensor, starts: Tensor | None, positions: Tensor | None = None) -> Tensor:
    """Return the angles of each position, [S, r]; with `starts` [T], by position within the document, [B, S, r]; with
    `positions`, the angles of those positions, [1, T, r]."""
    if positions is not None:
        return angles_Sr[positions if starts is None else positions - starts][None]
    if starts is None:
        return angles_Sr
    S = angles_Sr.shape[0]
    return angles_Sr[torch.arange(S, device=starts.device) - starts.view(-1, S)]


def of_heads(places: Tensor | None, queries: int, heads: int) -> Tensor | None:
    """Repeat starts or positions [T] for every head, [B·heads, queries]; None stays None."""
    return None if places is None else places.view(-1, queries).repeat_interleave(heads, dim=0)


def inverse_angles(angles_Sr: Tensor) -> Tensor:
    """Return the inverse angles. Not by .conj(): ops called below torch's Conjugate key would miss that lazy flag."""
    return angles_Sr.conj_physical()


def new_peaks(q: Tensor, heads: int) -> Tensor:
    """Return a buffer for the largest logit of each query head, filled with −inf."""
    return q.new_full((heads,), -torch.inf, dtype=wide_dtype(q.dtype))


def rotate(x: Tensor, angles_Sr: Tensor | None, scale: float = 1.0) -> Tensor:
    """Return x [..., S, rope] with its pairs (x0, x1), (x2, x3) … rotated by the angles, if given, and scaled."""
    if angles_Sr is None:
        return x * scale
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).clone(memory_format=torch.contiguous_format))
    return torch.view_as_real(pairs * (angles_Sr if scale == 1 else angles_Sr * scale)).flatten(-2)
