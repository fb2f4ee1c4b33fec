"""The gated delta rule, in chunks, and the logarithm of its decay.

Yang et al., "Gated Delta Networks", arXiv 2412.06464 (one decay per head); Kimi Team, "Kimi Linear", arXiv 2510.26692
(one decay per channel). T tokens in B sequences of S. Each head has a state S [K, V], 0 at the start of a sequence:

    S' = Diag(e^g)·S        u = sigmoid(beta)·(v - S'ᵀk)        S = S' + k·uᵀ        o = Sᵀq

q and k are normalized to length 1; q is then divided by √K. If sequences hold several documents, `starts` [T] gives,
for each token, the position in the sequence where its document starts; the state is reset to 0 there.

With G the sum of g from the beginning of a chunk, and S the state there, the rows of a chunk are

    (I + beta·P)·U = beta·(V - (e^G·K)·S)        O = (e^G·Q)·S + A·U        S → e^G_last·S + (e^(G_last - G)·K)ᵀ·U

with A_ij = Σ q_i·k_j·e^(G_i - G_j) for j ≤ i, and P_ij the same with k_i for q_i, for j < i. Only S passes from chunk
to chunk; everything else is computed for all chunks at once. The forward keeps only its arguments, and the backward
recomputes the rest.

N = B·H heads of sequences, m chunks of C tokens, W = K or 1 numbers per decay. Everything is at least FP32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, silu

from runtime.ops.causal import columns, split_heads
from runtime.ops.product import wide

CHUNK = 64  # tokens, as in both papers
EPS = 1e-6  # added to the squared length of q and k, as in the published models


def log_decay(logit_TN: Tensor, a_H: Tensor) -> Tensor:
    """logit_TN [T, H·W], at least FP32, a_H -> g_TN = -e^a·log(1 + e^logit): the logarithm of the decay factor."""
    return logsigmoid(-logit_TN).mul_(_rates(a_H, logit_TN))


def log_decay_dgrad(dg_TN: Tensor, g_TN: Tensor, a_H: Tensor) -> Tensor:
    """dg_TN, g_TN, a_H -> dlogit_TN = -e^a·sigmoid(logit)·dg; the sigmoid is 1 - e^(g / e^a)."""
    rates_N = _rates(a_H, g_TN)
    return torch.expm1(g_TN / rates_N).mul_(rates_N).mul_(dg_TN)


def log_decay_wgrad(dg_TN: Tensor, g_TN: Tensor, a_H: Tensor) -> Tensor:
    """dg_TN, g_TN, a_H -> da_H = Σ dg·g over rows and over the columns of each head."""
    return (dg_TN * g_TN).sum(dim=0).view(a_H.shape[0], -1).sum(dim=1).to(a_H.dtype)


def log_decay_wgrad_(acc_H: Tensor, dg_TN: Tensor, g_TN: Tensor, a_H: Tensor) -> None:
    """acc_H += da_H of (dg_TN, g_TN)."""
    acc_H.add_(log_decay_wgrad(dg_TN, g_TN, wide(a_H)))


def _rates(a_H: Tensor, x_TN: Tensor) -> Tensor:
    """Return e^a of each column's head, for the columns of x."""
    return wide(a_H).exp().repeat_interleave(x_TN.shape[1] // a_H.shape[0])


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    sequence: int,
    key_heads: int,
    starts: Tensor | None = None,
) -> Tensor:
    """q and k [T, G·K], v [T, H·V], beta [T, H], decay [T, H·W] of `log_decay` -> o [T, H·V].

    Each of the G query/key heads serves H/G consecutive value heads. q, k and v may be views of columns. `starts`:
    int32 [T].
    """
    return _Chunks(q, k, v, beta, decay, sequence, key_heads, starts).output().to(v.dtype)


def continued_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, key_heads: int, state_HKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Continue one sequence: its next rows, as in `delta_rule`, and the states before them, None at the start of the
    sequence -> o [T, H·V], and the states after them."""
    chunks = _Chunks(q, k, v, beta, decay, q.shape[0], key_heads, None, state_HKV)
    return chunks.output().to(v.dtype), chunks.last


def delta_rule_dgrad(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    sequence: int,
    key_heads: int,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """do [T, H·V] and the forward's arguments -> dq, dk, dv, dbeta, ddecay, shaped like q, k, v, beta, decay."""
    x = _Chunks(q, k, v, beta, decay, sequence, key_heads, starts)
    do_NmCV = x.to_chunks(do, beta.shape[1])
    u_NmCV, before_NmKV = (torch.stack(parts, dim=1) for parts in list(zip(*x.scan(), strict=True))[1:])

    # Backwards from chunk to chunk: the gradients of U, and of the state after each chunk.
    du_NmCV, behind_NmKV = x.scores.mT @ do_NmCV, torch.empty_like(before_NmKV)
    dstate_NKV = torch.zeros_like(before_NmKV[:, 0])
    for chunk in reversed(range(do_NmCV.shape[1])):
        behind_NmKV[:, chunk] = dstate_NKV
        du_NmCV[:, chunk].baddbmm_(x.k_out[:, chunk], dstate_NKV)
        dstate_NKV = x.through[:, chunk] * dstate_NKV
        dstate_NKV.baddbmm_(x.q_in[:, chunk].mT, do_NmCV[:, chunk]).baddbmm_(
            x.w[:, chunk].mT, du_NmCV[:, chunk], alpha=-1
        )

    # For all chunks at once: the gradients of beta·(V - K_in·S) and of I + beta·P.
    dright_NmCV = torch.linalg.solve_triangular(x.system.mT, du_NmCV, upper=True, unitriangular=True)
    dsystem_NmCC = -(dright_NmCV @ u_NmCV.mT)
    rest_NmCV = x.v - x.k_in @ before_NmKV
    dbeta_NmC1 = (dright_NmCV * rest_NmCV).sum(-1, keepdim=True) + (dsystem_NmCC * x.pairs).sum(-1, keepdim=True)
    drest_NmCV = dright_NmCV * x.beta

    dscores_2NmCC = torch.stack((do_NmCV @ u_NmCV.mT * x.visible, dsystem_NmCC * x.beta * x.earlier))
    drows_2NmCK, dcolumns_NmCK = _scores_dgrad(dscores_2NmCC, torch.stack((x.q, x.k)), x.k, x.sums)
    dq_NmCK = (do_NmCV @ before_NmKV.mT).mul_(x.decay_in).add_(drows_2NmCK[0])
    dk_row_NmCK = (drest_NmCV @ before_NmKV.mT).mul_(-x.decay_in).add_(drows_2NmCK[1])
    dk_out_NmCK = (u_NmCV @ behind_NmKV.mT).mul_(x.decay_out)

    # Decays: the sum G_i of a row enters with a plus where i is the row, and with a minus where it is the column.
    dout_NmCK = x.k * dk_out_NmCK
    dsums_NmCK = (x.q * dq_NmCK).add_(x.k * (dk_row_NmCK - dcolumns_NmCK)).sub_(dout_NmCK)
    through_NmK = (before_NmKV * behind_NmKV).sum(-1).mul_(x.through[..., 0])
    dsums_NmCK[:, :, -1].add_(dout_NmCK.sum(2)).add_(through_NmK)
    if decay.shape[1] == beta.shape[1]:
        dsums_NmCK = dsums_NmCK.sum(-1, keepdim=True)
    ddecay = x.visible.mT @ dsums_NmCK

    dbeta = dbeta_NmC1 * x.beta * (1 - x.beta)
    dk_NmCK = dk_row_NmCK.add_(dk_out_NmCK).add_(dcolumns_NmCK)
    return (
        x.rows(x.of_keys(dq_NmCK, x.q_unit, x.q_inverse) * x.scale).to(q.dtype),
        x.rows(x.of_keys(dk_NmCK, x.k_unit, x.k_inverse)).to(k.dtype),
        x.rows(drest_NmCV).to(v.dtype),
        x.rows(dbeta).to(beta.dtype),
        x.rows(ddecay).to(decay.dtype),
    )


# ---------------------------------------------------------------- chunks
class _Chunks:
    """The arguments of all heads, split into chunks, and everything that is computed for all chunks at once."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        decay: Tensor,
        sequence: int,
        key_heads: int,
        starts: Tensor | None,
        first_NKV: Tensor | None = None,
    ) -> None:
        H = beta.shape[1]
        self._sequence, self._batch, self._share = sequence, q.shape[0] // sequence, H // key_heads
        self._chunk = min(CHUNK, 1 << (sequence - 1).bit_length())
        self.scale = (q.shape[1] // key_heads) ** -0.5
        self.q_unit, self.q_inverse = _unit(self.to_chunks(q, key_heads))
        self.k_unit, self.k_inverse = _unit(self.to_chunks(k, key_heads))
        self.q, self.k = (x.repeat_interleave(self._share, dim=0) for x in (self.q_unit * self.scale, self.k_unit))
        self.v, self.beta = self.to_chunks(v, H), torch.sigmoid(self.to_chunks(beta, H))
        C = self._chunk
        # 1 where a row sees another of its chunk: at or before it, in its document. Decays are summed over these rows,
        # so nothing leaks from one document into another, not even a rounding error.
        self.visible = self.v.new_ones(1, 1, C, C).tril()
        enters = leaves = self.v.new_ones(1)
        if starts is not None:
            starts_NmC1 = self.to_chunks(starts[:, None], 1).repeat_interleave(H, dim=0)
            place_mC1 = torch.arange(self.v.shape[1] * C, device=q.device).view(-1, C, 1)
            self.visible = self.visible * (starts_NmC1 <= place_mC1.mT)
            # A document that starts at the start of a chunk takes no state from the chunk before.
            enters, leaves = starts_NmC1 < place_mC1[:, :1], starts_NmC1[:, :, -1:] <= place_mC1
        self.earlier = self.visible.tril(-1)
        self.sums = self.visible @ self.to_chunks(decay, H)
        self.decay_in, self.decay_out = self.sums.exp() * enters, _decay(self.sums[:, :, -1:] - self.sums) * leaves
        self.through = self.decay_in[:, :, -1:].mT
        self.q_in, self.k_in, self.k_out = self.q * self.decay_in, self.k * self.decay_in, self.k * self.decay_out

        scores, pairs = _scores(torch.stack((self.q, self.k)), self.k, self.sums)
        self.scores, self.pairs = scores * self.visible, pairs * self.earlier
        self.system = self.pairs * self.beta  # the solver does not read the unit diagonal
        right = torch.cat((self.v, self.k_in), dim=-1) * self.beta
        solved = torch.linalg.solve_triangular(self.system, right, upper=False, unitriangular=True)
        self.y, self.w = solved.split([self.v.shape[-1], self.k.shape[-1]], dim=-1)
        self.last = self.v.new_zeros(self.v.shape[0], self.k.shape[-1], self.v.shape[-1])
        self.last = self.last if first_NKV is None else first_NKV  # the states; after `scan`, those after all rows

    def output(self) -> Tensor:
        """o [T, H·V]."""
        o_NmCV = torch.empty_like(self.v)
        for chunk, u_NCV, before_NKV in self.scan():
            torch.baddbmm(self.q_in[:, chunk] @ before_NKV, self.scores[:, chunk], u_NCV, out=o_NmCV[:, chunk])
        return self.rows(o_NmCV)

    def scan(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each chunk's index with its U [N, C, V] and the state before it [N, K, V]."""
        for chunk in range(self.v.shape[1]):
            before_NKV = self.last
            u_NCV = torch.baddbmm(self.y[:, chunk], self.w[:, chunk], before_NKV, alpha=-1)
            self.last = torch.baddbmm(self.through[:, chunk] * before_NKV, self.k_out[:, chunk].mT, u_NCV)
            yield chunk, u_NCV, before_NKV

    def to_chunks(self, x: Tensor, heads: int) -> Tensor:
        """x [T, heads·X] -> [B·heads, m, C, X], padded with zeros; at least FP32, or integers."""
        x_BHSX = split_heads(wide(x), self._sequence, heads)
        return pad(x_BHSX, (0, 0, 0, -self._sequence % self._chunk)).flatten(0, 1).unflatten(1, (-1, self._chunk))

    def rows(self, x_NmCX: Tensor) -> Tensor:
        """x_NmCX, of all heads or of the key heads -> [T, heads·X], the inverse of `to_chunks`."""
        return columns(x_NmCX.flatten(1, 2)[:, : self._sequence], x_NmCX.shape[0] // self._batch)

    def of_keys(self, d_NmCK: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
        """Return the gradient of the input that `unit` normalizes, from the gradient of its copies for all value
        heads."""
        d = d_NmCK.unflatten(0, (-1, self._share)).sum(1)
        return (d - unit * (d * unit).sum(-1, keepdim=True)) * inverse


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., K] normalized to length 1, and the inverse of its length."""
    inverse = torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
    return x * inverse, inverse


# ---------------------------------------------------------------- scores
def _scores(x_2NmCK: Tensor, k_NmCK: Tensor, sums_NmCW: Tensor) -> Tensor:
    """Return Σ_K x_i·k_j·e^(G_i - G_j) [2, N, m, C, C] for each j that i sees; the other elements are unspecified.

    No exponent is above 0: with one decay per channel, the second halves of blocks of 2, 4 … C rows are multiplied by
    the first halves, both relative to the last row of the first half.
    """
    if sums_NmCW.shape[-1] == 1:
        return (x_2NmCK @ k_NmCK.mT).mul_(_of_heads(sums_NmCW))
    found_2NmCC = x_2NmCK.new_zeros(*x_2NmCK.shape[:-1], x_2NmCK.shape[-2])
    found_2NmCC.diagonal(dim1=-2, dim2=-1).copy_(torch.linalg.vecdot(x_2NmCK, k_NmCK))
    for size, down, up in _levels(sums_NmCW):
        _blocks(found_2NmCC, size).copy_((_second(x_2NmCK, size) * down) @ (_first(k_NmCK, size) * up).mT)
    return found_2NmCC


def _scores_dgrad(d_2NmCC: Tensor, x_2NmCK: Tensor, k_NmCK: Tensor, sums_NmCW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and k from that of the scores, which is 0 where a row does not see another."""
    if sums_NmCW.shape[-1] == 1:
        d_2NmCC = d_2NmCC * _of_heads(sums_NmCW)
        return d_2NmCC @ k_NmCK, (d_2NmCC.mT @ x_2NmCK).sum(0)
    d_2NmC1 = d_2NmCC.diagonal(dim1=-2, dim2=-1)[..., None]
    dx_2NmCK, dk_NmCK = d_2NmC1 * k_NmCK, (d_2NmC1 * x_2NmCK).sum(0)
    for size, down, up in _levels(sums_NmCW):
        block = _blocks(d_2NmCC, size)
        _second(dx_2NmCK, size).add_((block @ (_first(k_NmCK, size) * up)).mul_(down))
        _first(dk_NmCK, size).add_((block.mT @ (_second(x_2NmCK, size) * down)).sum(0).mul_(up))
    return dx_2NmCK, dk_NmCK


def _of_heads(sums_NmC1: Tensor) -> Tensor:
    """Return e^(G_i - G_j) [N, m, C, C]."""
    return _decay(sums_NmC1 - sums_NmC1.mT)


def _decay(apart: Tensor) -> Tensor:
    """Return e^apart, clamped to 1: for rows that do not see each other it could be infinite."""
    return apart.clamp_(max=0).exp_()


def _levels(sums_NmCK: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield, for each block size, half its rows, e^(G - G_edge) of the second halves, and e^(G_edge - G) of the
    first."""
    size = 1
    while size < sums_NmCK.shape[-2]:
        first, second = _first(sums_NmCK, size), _second(sums_NmCK, size)
        edge = first[..., -1:, :]
        yield size, _decay(second - edge), _decay(edge - first)
        size *= 2


def _first(x: Tensor, size: int) -> Tensor:
    """Return the first halves of the blocks of x [..., C, X], a view [..., C / 2·size, size, X]."""
    return x.unflatten(-2, (-1, 2, size))[..., 0, :, :]


def _second(x: Tensor, size: int) -> Tensor:
    """Return the second halves."""
    return x.unflatten(-2, (-1, 2, size))[..., 1, :, :]


def _blocks(x: Tensor, size: int) -> Tensor:
    """Return rows of second halves × columns of first halves of x [..., C, C], a view [..., C / 2·size, size, size]."""
    tiles = x.unflatten(-1, (-1, 2, size)).unflatten(-4, (-1, 2, size))[..., 1, :, :, 0, :]
    return tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


# --- A short causal convolution of each column and a SiLU, used before a delta rule: y = silu(Σ_j w_j·x[t - j])
#
# T rows in B sequences of S, N columns, J taps; the last tap applies to the row itself. Each sequence is preceded by
# zeros, and so is each document if sequences hold several: `starts` [T] gives, for each row, the position in the
# sequence where its document starts.


def convolve(x_TN: Tensor, w_NJ: Tensor, sequence: int, starts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x_TN, w_NJ -> y_TN, and the number of rows before each row in its sequence or document: int32 [T].

    `x` may be a view of columns. `starts` int32 [T].
    """
    before_T = torch.arange(sequence, dtype=torch.int32, device=x_TN.device).repeat(x_TN.shape[0] // sequence)
    before_T = before_T if starts is None else before_T - starts
    return silu(_sums(x_TN, w_NJ, before_T)).to(x_TN.dtype), before_T


def convolve_dgrad(dy_TN: Tensor, x_TN: Tensor, w_NJ: Tensor, before_T: Tensor) -> Tensor:
    """dy_TN, x_TN, w_NJ, before_T -> dx_TN."""
    dsum_TN, dx_TN = _dsums(dy_TN, x_TN, w_NJ, before_T), torch.zeros_like(x_TN, dtype=wide(x_TN[:0]).dtype)
    for back, w_N, has_T1 in _taps(w_NJ, before_T):
        dx_TN.add_(_shift_rows(dsum_TN * has_T1, -back).mul_(w_N))
    return dx_TN.to(x_TN.dtype).contiguous()


def convolve_wgrad(dy_TN: Tensor, x_TN: Tensor, w_NJ: Tensor, before_T: Tensor) -> Tensor:
    """dy_TN, x_TN, w_NJ, before_T -> dw_NJ."""
    dsum_TN, x_TN = _dsums(dy_TN, x_TN, w_NJ, before_T), wide(x_TN)
    of_taps = [(_shift_rows(x_TN, back) * has_T1 * dsum_TN).sum(0) for back, _, has_T1 in _taps(w_NJ, before_T)]
    return torch.stack(of_taps[::-1], dim=1).to(w_NJ.dtype)


def convolve_wgrad_(acc_NJ: Tensor, dy_TN: Tensor, x_TN: Tensor, w_NJ: Tensor, before_T: Tensor) -> None:
    """acc_NJ += dw_NJ of (dy_TN, x_TN, w_NJ, before_T), in at least FP32."""
    acc_NJ.add_(convolve_wgrad(dy_TN, x_TN, wide(w_NJ), before_T))


def _sums(x_TN: Tensor, w_NJ: Tensor, before_T: Tensor) -> Tensor:
    """Return the input of the SiLU, in at least FP32."""
    x_TN = wide(x_TN)
    sum_TN = torch.zeros_like(x_TN, memory_format=torch.contiguous_format)
    for back, w_N, has_T1 in _taps(w_NJ, before_T):
        sum_TN.add_((_shift_rows(x_TN, back) * has_T1).mul_(w_N))
    return sum_TN


def _dsums(dy_TN: Tensor, x_TN: Tensor, w_NJ: Tensor, before_T: Tensor) -> Tensor:
    """Return the gradient of the input of the SiLU."""
    sum_TN = _sums(x_TN, w_NJ, before_T)
    share_TN = torch.sigmoid(sum_TN)
    return sum_TN.mul_(1 - share_TN).add_(1).mul_(share_TN).mul_(wide(dy_TN))


def _taps(w_NJ: Tensor, before_T: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield, for each tap, how many rows back it reads, its factors, and which rows have that many rows before them."""
    for back in range(w_NJ.shape[1]):
        yield back, wide(w_NJ[:, -1 - back]), (before_T >= back)[:, None]


def _shift_rows(x_TN: Tensor, shift: int) -> Tensor:
    """Return x_TN with each row moved down by `shift` rows, or up if negative; zeros fill the gap."""
    T = x_TN.shape[0]
    shift = max(-T, min(T, shift))
    return pad(x_TN, (0, 0, shift, -shift))


OPS = (
    log_decay,
    log_decay_dgrad,
    log_decay_wgrad,
    log_decay_wgrad_,
    delta_rule,
    delta_rule_dgrad,
    convolve,
    convolve_dgrad,
    convolve_wgrad,
    convolve_wgrad_,
)
