"""Multi-head latent attention after its projections: RoPE, keys assembled from both parts, causal softmax attention.

DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1; Su et al., "RoFormer", 2021; blocks: Dao, "FlashAttention-2", 2023.
T tokens in B sequences of S, H heads. A head's query and key are [nope | rope] (width C), the rope part of the key is
shared by all heads; positions restart with every sequence. P = B·H: the heads of all sequences, a batch of products.

The scores are made block by block, a few query rows against the keys up to the last of them, so that a block stays in
the cache and most of the masked half is never computed. The whole op, forward / backward in ms, S 256, one core
(EPYC, shared; least CPU time of 15 calls, freed memory kept by the allocator):

    B H nope rope value | FP32: these blocks  torch's flash, value padded  bmm of all scores | FP64, the same three
    4 4   32   16    32 |       2.6 /  6.4           3.5 /  7.8                3.2 /  8.9    |  7.2/14  7.9/16  11/21
    4 8   32   16    32 |       5.5 / 13.2           6.7 / 15.8                8.0 / 19.5    |   14/27   15/32  22/43
    1 4  128   64   128 |       1.9 /  4.6           2.7 /  6.7                2.4 /  6.7    |  4.1/10  5.8/14  6.1/13
    1 8  128   64   128 |       3.9 /  8.9           5.7 / 13.0                4.9 / 12.5    |  8.9/21   12/27  12/27
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

BLOCK_ROWS = 64  # query rows of a block
BLOCK_BYTES = 2**20  # of its scores, with all keys; 0.5 to 2 MiB are equally fast where L2 has 1 MiB a core


def mla_attention(
    q: Tensor, kv: Tensor, k_rope: Tensor, sequence: int, heads: int, nope: int, rope: int, value: int, theta: float
) -> tuple[Tensor, Tensor]:
    """q [T, H·(nope+rope)], kv [T, H·(nope+value)], k_rope [T, rope] -> o [T, H·value], lse_BHS.

    Per head q is [nope | rope] and kv is [nope | value]; softmax(q·k/√(nope+rope)) over the keys at or before
    the query; lse is the logarithm of its denominator. k_rope may be a view of columns.
    """
    angles_Sr = _angles(sequence, rope, theta, q.dtype, q.device)
    q_PSC, k_PSC, v_PSV = _heads(q, kv, k_rope, sequence, heads, nope, value, angles_Sr)
    o_PSV = torch.empty_like(v_PSV)
    lse_PS = q.new_empty(o_PSV.shape[:2])
    future = _future(q)
    for p, new, past in _blocks(q_PSC):
        scores = torch.bmm(q_PSC[p, new], k_PSC[p, past].mT)
        scores[:, :, new].add_(future[: scores.shape[1], : scores.shape[1]])
        weights = torch.softmax(scores, dim=-1)
        torch.bmm(weights, v_PSV[p, past], out=o_PSV[p, new])
        torch.sub(scores.amax(dim=-1), weights.amax(dim=-1).log_(), out=lse_PS[p, new])
    return _columns(o_PSV, heads), lse_PS.unflatten(0, (-1, heads))


def mla_attention_dgrad(
    do: Tensor,
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    o: Tensor,
    lse_BHS: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """do [T, H·value], the forward's inputs and results -> dq, dkv, dk_rope, shaped like q, kv, k_rope."""
    angles_Sr = _angles(sequence, rope, theta, q.dtype, q.device)
    q_PSC, k_PSC, v_PSV = _heads(q, kv, k_rope, sequence, heads, nope, value, angles_Sr)
    do_PSV = _split_heads(do, sequence, heads).flatten(0, 1).contiguous()
    lse_PS1 = lse_BHS.flatten(0, 1)[:, :, None]
    delta_TH = (do * o).unflatten(1, (heads, value)).sum(dim=-1)  # Σ_key weight·dweight
    delta_PS1 = _split_heads(delta_TH, sequence, heads).flatten(0, 1)
    dq_PSC, dk_PSC, dv_PSV = torch.empty_like(q_PSC), torch.zeros_like(k_PSC), torch.zeros_like(v_PSV)
    future = _future(q)
    for p, new, past in _blocks(q_PSC):
        scores = torch.bmm(q_PSC[p, new], k_PSC[p, past].mT)
        scores[:, :, new].add_(future[: scores.shape[1], : scores.shape[1]])
        weights = scores.sub_(lse_PS1[p, new]).exp_()
        dscores = torch.bmm(do_PSV[p, new], v_PSV[p, past].mT).sub_(delta_PS1[p, new]).mul_(weights)
        dv_PSV[p, past].baddbmm_(weights.mT, do_PSV[p, new])
        dk_PSC[p, past].baddbmm_(dscores.mT, q_PSC[p, new])
        torch.bmm(dscores, k_PSC[p, past], out=dq_PSC[p, new])
    back_Sr = (
        angles_Sr.conj_physical()
    )  # .conj() is a flag, which an op called below torch's Conjugate key does not see
    return _from_heads(dq_PSC, dk_PSC, dv_PSV, heads, nope, back_Sr)


@lru_cache(maxsize=16)
def _angles(sequence: int, rope: int, theta: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """e^(i·pos·theta^(−2p/rope)) [S, rope/2], complex of `dtype`.

    Made once: 0.04 ms for S 256 and rope 16, where the forward of one sequence and 4 heads takes 0.8.
    """
    frequency_r = theta ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
    phase_Sr = torch.outer(torch.arange(sequence, dtype=torch.float64), frequency_r)
    return torch.polar(torch.ones_like(phase_Sr), phase_Sr).to(device, dtype.to_complex())


def _rotate(x: Tensor, angles_Sr: Tensor) -> Tensor:
    """x [..., S, rope] with its pairs (x0, x1), (x2, x3) … turned by the angles."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).clone(memory_format=torch.contiguous_format))
    return torch.view_as_real(pairs * angles_Sr).flatten(-2)


def _split_heads(x: Tensor, sequence: int, heads: int) -> Tensor:
    """x [T, H·W] -> a view [B, H, S, W]."""
    return x.view(-1, sequence, heads, x.shape[1] // heads).transpose(1, 2)


def _columns(x_PSW: Tensor, heads: int) -> Tensor:
    """x_PSW -> [T, H·W], the inverse of `_split_heads`."""
    return x_PSW.unflatten(0, (-1, heads)).transpose(1, 2).contiguous().flatten(2).flatten(0, 1)  # W = 1 is viewable


def _heads(
    q: Tensor, kv: Tensor, k_rope: Tensor, sequence: int, heads: int, nope: int, value: int, angles_Sr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The attention's inputs -> q_PSC, rotated and scaled by 1/√C; k_PSC, both parts together, rotated; v_PSV."""
    q_BHSC, kv_BHSW = _split_heads(q, sequence, heads), _split_heads(kv, sequence, heads)
    k_rope_B1Sr = _split_heads(k_rope, sequence, 1)
    queries, keys = q.new_empty(q_BHSC.shape), q.new_empty(q_BHSC.shape)
    scale = q_BHSC.shape[3] ** -0.5
    torch.mul(q_BHSC[..., :nope], scale, out=queries[..., :nope])
    queries[..., nope:] = _rotate(q_BHSC[..., nope:], angles_Sr * scale)
    keys[..., :nope] = kv_BHSW[..., :nope]
    keys[..., nope:] = _rotate(k_rope_B1Sr, angles_Sr)
    return queries.flatten(0, 1), keys.flatten(0, 1), kv_BHSW[..., nope:].flatten(0, 1).contiguous()


def _from_heads(
    dq_PSC: Tensor, dk_PSC: Tensor, dv_PSV: Tensor, heads: int, nope: int, back_Sr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what `_heads` gave -> dq, dkv, dk_rope. `back_Sr` turns back what its angles turned."""
    dq_BHSC, dk_BHSC, dv_BHSV = (d.unflatten(0, (-1, heads)) for d in (dq_PSC, dk_PSC, dv_PSV))
    (B, H, S, C), V = dq_BHSC.shape, dv_BHSV.shape[3]
    scale = C**-0.5
    dq_BSHC, dkv_BSHW = dq_PSC.new_empty((B, S, H, C)), dq_PSC.new_empty((B, S, H, nope + V))
    torch.mul(dq_BHSC[..., :nope].transpose(1, 2), scale, out=dq_BSHC[..., :nope])
    dq_BSHC[..., nope:] = _rotate(dq_BHSC[..., nope:], back_Sr * scale).transpose(1, 2)
    dkv_BSHW[..., :nope] = dk_BHSC[..., :nope].transpose(1, 2)
    dkv_BSHW[..., nope:] = dv_BHSV.transpose(1, 2)
    dk_rope_BSr = _rotate(dk_BHSC[..., nope:].sum(dim=1), back_Sr)
    return dq_BSHC.view(B * S, H * C), dkv_BSHW.view(B * S, H * (nope + V)), dk_rope_BSr.flatten(0, 1)


def _future(like: Tensor) -> Tensor:
    """[BLOCK_ROWS, BLOCK_ROWS]: −inf where a key of a block's own rows comes after the query."""
    return torch.full((BLOCK_ROWS, BLOCK_ROWS), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)


def _blocks(q_PSC: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """The causal blocks: heads, query rows, and the keys up to the last of these rows."""
    P, S, _ = q_PSC.shape
    heads = max(1, BLOCK_BYTES // (BLOCK_ROWS * S * q_PSC.itemsize))
    for head in range(0, P, heads):
        for row in range(0, S, BLOCK_ROWS):
            end = min(row + BLOCK_ROWS, S)
            yield slice(head, head + heads), slice(row, end), slice(0, end)
