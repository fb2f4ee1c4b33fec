"""Attention to the most recent tokens and to compressed entries of all tokens, in one softmax with a sink.

DeepSeek-AI, "DeepSeek-V4", arXiv 2606.19348, §2.3. T tokens in B sequences of S · H query heads of C columns, sharing
one head that serves as both keys and values · E = S // rate entries per sequence, each of `rate` tokens · K entries
chosen per query, if entries are chosen. Queries, keys and entries are already rotated.

The query at position t sees the keys of the last `window` tokens, including its own, and the entries before
(t + 1) // rate: those whose tokens are all at or before t. It attends to all of these entries (HCA), or to the chosen
ones (CSA).

Scores are computed in blocks of a few positions, against all keys and entries that any of them sees, in at least FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.ops.product import wide, wide_dtype

# --- Entries that each compress several tokens: per column, the sum of their values weighted by a softmax of their
# gates
#
# DeepSeek-AI, "DeepSeek-V4", arXiv 2606.19348, §2.3. T tokens in B sequences of S · E = S // rate windows per sequence
# · W columns of values, and as many of gates · C columns per entry. Tokens after the last full window are in no entry.
#
# Without overlap an entry compresses the `rate` tokens of its window, and C = W (HCA). With overlap each token has two
# series, W = 2·C: an entry compresses the second series of its window and the first series of the previous window
# (CSA). The first window has no previous one, so its entry compresses `rate` slots.


def compress(x: Tensor, bias: Tensor, sequence: int, overlap: bool) -> tuple[Tensor, Tensor]:
    """x [T, 2·W], values and gates; bias [rate, W], added to the gates of a window -> y [B·E, C], lse [B, E, C].

    lse is the logarithm of the softmax's denominator, in at least FP32. x may be a view of columns.
    """
    values_BEsC, gates_BEsC = _slots(x, bias, len(x) // sequence, overlap)
    lse_BEC = gates_BEsC.logsumexp(dim=2)
    y_BEC = ((gates_BEsC - lse_BEC[:, :, None]).exp() * values_BEsC).sum(dim=2)
    return y_BEC.flatten(0, 1).to(x.dtype), lse_BEC


def compress_dgrad(dy: Tensor, x: Tensor, bias: Tensor, lse: Tensor) -> Tensor:
    """dy [B·E, C] and the forward's inputs and results -> dx [T, 2·W]."""
    B, _, C = lse.shape
    dvalues_BErW, dgates_BErW = (
        _slots_adjoint(gradient, bias.shape[1] > C) for gradient in _gradients(dy, x, bias, lse)
    )
    dx_BsX = torch.cat((dvalues_BErW, dgates_BErW), dim=-1).flatten(1, 2)
    tail = len(x) // B - dx_BsX.shape[1]
    return pad(dx_BsX, (0, 0, 0, tail)).flatten(0, 1).to(x.dtype)


def compress_wgrad(dy: Tensor, x: Tensor, bias: Tensor, lse: Tensor) -> Tensor:
    """dy [B·E, C] and the forward's inputs and results -> dbias [rate, W]."""
    _, dgates_BEsC = _gradients(dy, x, bias, lse)
    return _slots_adjoint(dgates_BEsC, bias.shape[1] > lse.shape[2]).sum(dim=(0, 1)).to(bias.dtype)


def compress_wgrad_(acc: Tensor, dy: Tensor, x: Tensor, bias: Tensor, lse: Tensor) -> None:
    """acc [rate, W] += dbias of (dy, x, bias, lse), in the dtype of acc."""
    acc.add_(compress_wgrad(dy, x, bias.to(wide_dtype(bias.dtype)), lse))


def _slots(x: Tensor, bias: Tensor, B: int, overlap: bool) -> tuple[Tensor, Tensor]:
    """Return values and gates of each entry's slots, [B, E, slots, C]: the previous window's slots, then its own."""
    rate, W = bias.shape
    S = len(x) // B
    x_BErX = wide(x).view(B, S, 2 * W)[:, : S // rate * rate].unflatten(1, (S // rate, rate))
    values_BErW, gates_BErW = x_BErX[..., :W], x_BErX[..., W:] + wide(bias)
    if not overlap:
        return values_BErW, gates_BErW
    return _with_previous(values_BErW, 0.0), _with_previous(gates_BErW, -torch.inf)


def _with_previous(x_BErW: Tensor, before: float) -> Tensor:
    """For each window, stack the first half of the previous window's columns on the second half of its own."""
    first_BErC, second_BErC = x_BErW.chunk(2, dim=-1)
    previous_BErC = pad(first_BErC, (0, 0, 0, 0, 1, 0), value=before)[:, : x_BErW.shape[1]]
    return torch.cat((previous_BErC, second_BErC), dim=2)


def _slots_adjoint(dx_BEsC: Tensor, overlap: bool) -> Tensor:
    """Map gradients of slots to gradients of the columns of windows, [B, E, rate, W]: the adjoint of `_slots`."""
    if not overlap:
        return dx_BEsC
    previous_BErC, second_BErC = dx_BEsC.chunk(2, dim=2)
    first_BErC = pad(previous_BErC[:, 1:], (0, 0, 0, 0, 0, min(1, dx_BEsC.shape[1])))
    return torch.cat((first_BErC, second_BErC), dim=-1)


def _gradients(dy: Tensor, x: Tensor, bias: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of values and of gates, [B, E, slots, C]: p·dy, and p·(v − Σ p·v)·dy."""
    values_BEsC, gates_BEsC = _slots(x, bias, len(lse), bias.shape[1] > lse.shape[2])
    shares_BEsC = (gates_BEsC - lse[:, :, None]).exp()
    y_BE1C = (shares_BEsC * values_BEsC).sum(dim=2, keepdim=True)
    dvalues_BEsC = shares_BEsC * wide(dy).view(lse.shape)[:, :, None]
    return dvalues_BEsC, dvalues_BEsC * (values_BEsC - y_BE1C)


# --- compressed attention

BLOCK_BYTES = {"cpu": 2**21}  # of scores and chosen entries per block; larger on other devices, for fewer launches
ELSEWHERE = 2**28
FEW_POSITIONS = 16  # a block larger than this and than the window wastes work on hidden keys


def compressed_attention(
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    sinks: Tensor | None,
    sequence: int,
    heads: int,
    window: int,
    rate: int,
) -> tuple[Tensor, Tensor]:
    """q [T, H·C], kv [T, C], entries [B·E, C], chosen int32 [T, K] or None, sinks [H] or None -> o [T, H·C], lse [B, 1,
    S, H], the logarithm of the softmax's denominator including the sink, in at least FP32.

    A row of `chosen` holds indices of entries within the sequence, all visible to the query, then −1. q and kv may be
    views of columns.
    """
    B, C = len(q) // sequence, q.shape[1] // heads
    o_BSHC = q.new_empty((B, sequence, heads, C))
    lse_BSH = q.new_empty((B, sequence, heads), dtype=wide_dtype(q.dtype))
    sinks_H = None if sinks is None else wide(sinks)
    for block in _blocks(q, kv, entries, chosen, sequence, heads, window, rate):
        scores_BPHX = block.scores()
        lse_BPH = scores_BPHX.logsumexp(dim=-1)
        lse_BSH[:, block.new] = lse_BPH if sinks_H is None else torch.logaddexp(lse_BPH, sinks_H)
        o_BSHC[:, block.new] = block.weighted_sum(scores_BPHX.sub_(lse_BSH[:, block.new, :, None]).exp_())
    return o_BSHC.view(q.shape), lse_BSH[:, None]


def compressed_attention_dgrad(
    do: Tensor,
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    o: Tensor,
    lse: Tensor,
    sequence: int,
    heads: int,
    window: int,
    rate: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """do [T, H·C], the forward's inputs and results -> dq, dkv, dentries, shaped like q, kv, entries."""
    B, C = len(q) // sequence, q.shape[1] // heads
    do_BSHC, o_BSHC = (x.reshape(B, sequence, heads, C) for x in (do, o))
    dq_BSHC, lse_BSH1 = q.new_empty(do_BSHC.shape), lse[:, 0, :, :, None]
    dkv_BSC, dentries_BEC = (wide(x).new_zeros((B, len(x) // B, C)) for x in (kv, entries))
    for block in _blocks(q, kv, entries, chosen, sequence, heads, window, rate):
        do_BPHC, o_BPHC = (wide(x[:, block.new]).contiguous() for x in (do_BSHC, o_BSHC))
        delta_BPH1 = (do_BPHC * o_BPHC).sum(dim=-1, keepdim=True)
        weights_BPHX = block.scores().sub_(lse_BSH1[:, block.new]).exp_()
        dscores_BPHX = block.products(do_BPHC).sub_(delta_BPH1).mul_(weights_BPHX)
        dq_BSHC[:, block.new] = block.weighted_sum(dscores_BPHX).mul_(C**-0.5)
        block.add_keys_(dkv_BSC, dentries_BEC, weights_BPHX, do_BPHC)
        block.add_keys_(dkv_BSC, dentries_BEC, dscores_BPHX, block.q_BPHC)
    return dq_BSHC.view(q.shape), dkv_BSC.flatten(0, 1).to(kv.dtype), dentries_BEC.flatten(0, 1).to(entries.dtype)


@dataclass(frozen=True)
class _QueryBlock:
    """P positions of all sequences, with the n keys and e entries that any of them sees; X = n + e.

    The entries are shared by all positions, [B, e, C], or chosen for each position, [B, P, e, C].
    """

    new: slice
    past: slice  # positions of the keys
    q_BPHC: Tensor  # divided by √C
    kv_BnC: Tensor
    entries: Tensor
    chosen_BPe: Tensor | None
    hidden_BPX: Tensor  # or [1, P, X], the same for all sequences

    def scores(self) -> Tensor:
        """Return q·k, with −inf for hidden keys and entries."""
        return self.products(self.q_BPHC).masked_fill_(self.hidden_BPX[:, :, None], -torch.inf)

    def products(self, x_BPHC: Tensor) -> Tensor:
        """Return x·k for all keys and entries, [B, P, H, X]."""
        of_keys = _bmm(x_BPHC, self.kv_BnC.mT)
        of_entries = _bmm(x_BPHC, self.entries.mT) if self.chosen_BPe is None else x_BPHC @ self.entries.mT
        return torch.cat((of_keys, of_entries), dim=-1)

    def weighted_sum(self, weights_BPHX: Tensor) -> Tensor:
        """Return Σ weights·k, [B, P, H, C]."""
        of_keys, of_entries = self._parts(weights_BPHX)
        entries = _bmm(of_entries, self.entries) if self.chosen_BPe is None else of_entries @ self.entries
        return _bmm(of_keys, self.kv_BnC).add_(entries)

    def add_keys_(self, dkv_BSC: Tensor, dentries_BEC: Tensor, weights_BPHX: Tensor, x_BPHC: Tensor) -> None:
        """Add Σ weights·x over heads and positions to the gradients of keys and entries."""
        of_keys, of_entries = (part.flatten(1, 2) for part in self._parts(weights_BPHX))
        x_BMC = x_BPHC.flatten(1, 2)
        dkv_BSC[:, self.past].baddbmm_(of_keys.mT, x_BMC)
        if self.chosen_BPe is None:
            dentries_BEC[:, : of_entries.shape[-1]].baddbmm_(of_entries.mT, x_BMC)
            return
        dchosen_BPeC = self._parts(weights_BPHX)[1].mT @ x_BPHC
        for b, dentries_EC in enumerate(dentries_BEC):  # unused slots of `chosen` add 0
            _add_rows_(dentries_EC, self.chosen_BPe[b].flatten(), dchosen_BPeC[b].flatten(0, 1))

    def _parts(self, x_BPHX: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.kv_BnC.shape[1]
        return x_BPHX[..., :keys], x_BPHX[..., keys:]


def _add_rows_(acc_EC: Tensor, index_R: Tensor, rows_RC: Tensor) -> None:
    """acc_EC[index_R] += rows_RC, deterministic. On GPUs `index_add_` adds by atomics in any order, where `index_put_`
    sorts the indices first; on CPUs `index_add_` adds row after row, where `index_put_` may use several threads."""
    if acc_EC.is_cpu:
        acc_EC.index_add_(0, index_R, rows_RC)
    else:
        acc_EC.index_put_((index_R,), rows_RC, accumulate=True)


def _bmm(x_BPHA: Tensor, y_BAZ: Tensor) -> Tensor:
    """Return x·y, with y shared by all positions."""
    return torch.bmm(x_BPHA.flatten(1, 2), y_BAZ).unflatten(1, x_BPHA.shape[1:3])


def _blocks(
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    sequence: int,
    heads: int,
    window: int,
    rate: int,
) -> Iterator[_QueryBlock]:
    """Yield blocks of positions, in order."""
    B, C = len(q) // sequence, q.shape[1] // heads
    q_BSHC = q.reshape(B, sequence, heads, C)
    kv_BSC, entries_BEC = (wide(x).reshape(B, len(x) // B, C) for x in (kv, entries))
    chosen_BSK = None if chosen is None else chosen.view(B, sequence, -1).long()
    max_entries = entries_BEC.shape[1] if chosen is None else chosen.shape[1]
    elements_per_position = heads * (window + max_entries) + (0 if chosen is None else max_entries * C)
    fitting = BLOCK_BYTES.get(q.device.type, ELSEWHERE) // (B * elements_per_position * wide(q[:0]).itemsize)
    size = max(1, min(fitting, max(FEW_POSITIONS, window)))
    for first in range(0, sequence, size):
        new = slice(first, min(first + size, sequence))
        past = slice(max(0, first - window + 1), new.stop)
        position_P1, key_n = (torch.arange(part.start, part.stop, device=q.device) for part in (new, past))
        position_P1 = position_P1[:, None]
        hidden_Pn = (key_n > position_P1) | (key_n <= position_P1 - window)
        num_visible = new.stop // rate  # entries visible to the last position
        if chosen_BSK is None:
            seen_BEC, chosen_BPe = entries_BEC[:, :num_visible], None
            hidden_BPe = (torch.arange(num_visible, device=q.device) >= (position_P1 + 1) // rate)[None]
        else:
            indices_BPe = chosen_BSK[:, new, :num_visible]
            hidden_BPe, chosen_BPe = indices_BPe < 0, indices_BPe.clamp(min=0)
            rows_BPe = chosen_BPe + torch.arange(B, device=q.device)[:, None, None] * entries_BEC.shape[1]
            seen_BEC = entries_BEC.flatten(0, 1)[rows_BPe]
        hidden_BPX = torch.cat((hidden_Pn[None].expand(len(hidden_BPe), -1, -1), hidden_BPe), dim=-1)
        yield _QueryBlock(new, past, wide(q_BSHC[:, new]) * C**-0.5, kv_BSC[:, past], seen_BEC, chosen_BPe, hidden_BPX)


OPS = (
    compress,
    compress_dgrad,
    compress_wgrad,
    compress_wgrad_,
    compressed_attention,
    compressed_attention_dgrad,
)
