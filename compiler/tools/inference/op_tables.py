"""The op tables that layers are called with here: the forward ops of `runtime.ops`, and those on top of a cache.

T tokens · H heads · G heads of keys and values, each of r = H/G query heads · N tokens before and with the T new ones ·
C width of a head, or of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from compiler.ir.module import INPUT, Module
from compiler.model.ops import RULES
from compiler.model.segments.torch_calls import compute
from compiler.model.segments.torch_ops import TORCH
from runtime.ops import OPS
from runtime.ops.causal import angles, rotate
from runtime.ops.delta_rule import continued_delta_rule
from runtime.ops.indexer import is_chosen
from runtime.ops.product import wide
from runtime.ops.rotate import ramped_angles, rotated_by

# --- What segments keep of the tokens before: rows, and the states of a delta rule

STATES = 8  # that are kept: the last ones, as a draft that is refused is forgotten soon


class GrowingRows:
    """A row for each token so far, in one tensor that grows. Rows of tokens that come again replace those before."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def put(self, start: int, new_TW: Tensor) -> Tensor:
        """Rows of tokens start … start + T -> all rows up to them [N, W], a view."""
        end = start + new_TW.shape[0]
        if self._rows is None or end > self._rows.shape[0]:
            grown = new_TW.new_empty((max(64, 2 * end), new_TW.shape[1]))
            if self._rows is not None:
                grown[:start] = self._rows[:start]
            self._rows = grown
        self._rows[start:end] = new_TW
        return self._rows[:end]


class States:
    """The states of a delta rule behind each of the last calls, and the rows of its arguments, from which it goes on
    where tokens are forgotten."""

    def __init__(self) -> None:
        self._rows = [GrowingRows() for _ in range(5)]
        self._states: dict[int, Tensor] = {}  # by the number of tokens that they are behind

    def next(self, start: int, new: tuple[Tensor, ...], key_heads: int) -> Tensor:
        """The arguments of `delta_rule` of the tokens from `start` on -> o of these tokens [T, H·V]. Tokens between the
        last states and them are read again."""
        self._states = {end: state for end, state in self._states.items() if end <= start}
        begin = max(self._states, default=0)
        q, k, v, beta, decay = (rows.put(start, x)[begin:] for rows, x in zip(self._rows, new, strict=True))
        o, state = continued_delta_rule(q, k, v, beta, decay, key_heads, self._states.get(begin))
        self._states[begin + len(q)] = state
        for end in sorted(self._states)[:-STATES]:
            del self._states[end]
        return o[start - begin :]


# --- op tables

FEW_ROWS = 16  # a product of fewer reads its matrix where it lies: see `Forward.linear`


class Forward:
    """The forward ops on sequences of `length` tokens each, without what they keep for a backward.

    An op of sequences takes `length` in the place of the constant `sequence` of its layer. The head's cross entropy
    gives the logits that it is of.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op not in RULES:
            raise AttributeError(f"no op {op}")
        rule, function = RULES[op], TORCH.get(op) or OPS[op]
        at = rule.args.index("sequence") if "sequence" in rule.args else None

        def call(*args: Any) -> Any:
            if at is not None:
                args = (*args[:at], self.length, *args[at + 1 :])
            result = function(*args)
            if not rule.hidden:
                return result
            return result[0] if rule.visible == 1 else result[: rule.visible]

        setattr(self, op, call)  # found without `__getattr__` from now on
        return call

    def module(self, module: Module, x_TD: Tensor, *params: Tensor) -> Tensor:
        """x_TD, of whole sequences, and the parameters of a traced module -> y_TD. It is computed on as many tokens as
        it was traced for at a time; zeros fill up the last ones."""
        tokens = module.tokens
        filled_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, -len(x_TD) % tokens))
        given = dict(zip(module.locals, params, strict=True))
        parts = []
        for x_tD in filled_TD.split(tokens):
            values = {INPUT: x_tD, **given}
            compute(module.forward, values, x_TD.device)
            parts.append(values[module.y])
        return torch.cat(parts)[: len(x_TD)]

    def linear(self, x_TK: Tensor, w_NK: Tensor) -> Tensor:
        """x_TK, w_NK -> y_TN. A product of a few rows is torch's: that of `runtime.ops` packs its matrix first."""
        few = x_TK.shape[0] < FEW_ROWS
        return torch.nn.functional.linear(x_TK, w_NK) if few else OPS["linear"](x_TK, w_NK)

    def grouped_linear(self, x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
        """x_RK, w_ENK, offsets_E -> y_RN, by the rule of `linear`."""
        if x_RK.shape[0] >= FEW_ROWS:
            return OPS["grouped_linear"](x_RK, w_ENK, offsets_E)
        ends = offsets_E.tolist()
        groups = [(expert, start, end) for expert, (start, end) in enumerate(pairwise([0, *ends])) if start < end]
        return torch.cat([torch.nn.functional.linear(x_RK[start:end], w_ENK[expert]) for expert, start, end in groups])

    def cross_entropy(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """logits_TV."""
        return logits_TV

    def sequence_balance(self, *_: Any) -> None:
        """Nothing: a loss of training alone."""

    def balance_scores(self, *_: Any) -> None:
        """Nothing, likewise."""

    def indexer_loss(self, *_: Any) -> None:
        """Nothing, likewise."""


class Continued(Forward):
    """The forward ops of one segment on the next tokens of one sequence, whose `start` tokens before are cached.

    Grouped-query attention keeps keys, rotated, and values: 2·G·C numbers a token; of those that a window leaves out
    nothing is read. Latent attention keeps the normed latent and the rotated rope key, C + rope numbers a token, and
    multiplies with the up-projection on the side of the queries and of what is read (DeepSeek-V2, arXiv 2405.04434,
    §2.1.2): expanding N tokens at each step would cost N·C·H·(nope + value) products. Compressed attention keeps keys,
    and entries and what the next of them are made of, an indexer its keys. Where nothing is cached yet, all run the op
    of training.

    A delta rule keeps its states, and the rows of its arguments, from which it goes on where tokens are forgotten.

    Any other op of sequences keeps the rows of its arguments and is computed again on all of them: right for whatever
    is causal, and slow.
    """

    def __init__(self, weights: Iterable[Tensor], up: Tensor | None = None) -> None:
        super().__init__(0)
        self.start = 0
        self._weights = {id(each) for each in weights}  # arguments that are no rows of tokens
        self._up = up  # of latent attention, from the latent to keys and values
        self._kept: dict[tuple[str, int], GrowingRows] = {}  # by op and argument, or call
        self._calls = 0
        self._states = States()

    def begin(self, start: int, new: int) -> None:
        """Say which tokens the next call of the segment is about."""
        self.start, self.length, self._calls = start, start + new, 0

    def __getattr__(self, op: str) -> Callable[..., Any]:
        call = super().__getattr__(op)
        if "sequence" not in RULES[op].args:
            return call
        again = lambda *args: self._again(op, call, args)  # noqa: E731
        setattr(self, op, again)
        return again

    def _rows(self, op: str, part: int = 0) -> GrowingRows:
        return self._kept.setdefault((op, part), GrowingRows())

    def _again(self, op: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The rows of the new tokens of an op on all tokens."""
        self._calls += 1
        whole = [
            self._rows(f"{op} {self._calls}", part).put(self.start, arg)
            if isinstance(arg, Tensor) and id(arg) not in self._weights
            else arg
            for part, arg in enumerate(args)
        ]
        result = call(*whole)
        return tuple(each[self.start :] for each in result) if isinstance(result, tuple) else result[self.start :]

    def rotate(self, x: Tensor, sequence: int, heads: int, first: int, width: int, *how: float) -> Tensor:
        """x [T, H·C] of the new tokens, or of all entries of a `stride` of tokens -> y, likewise: needs no cache."""
        (*frequencies, magnitude, scale), stride = how[:7], int(how[9]) if len(how) > 7 else 1
        rows = slice(0, len(x)) if stride > 1 else slice(self.start, self.length)
        turns_Tr = None
        if width:
            turns_Tr = ramped_angles(self._room, width, *frequencies, x.dtype, x.device, stride)[rows]
        return rotated_by(x, x.shape[0], heads, first, width, turns_Tr, magnitude, scale)

    # ------------------------------------------------------------ grouped queries

    def gqa_attention(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: int, heads: int, kv_heads: int, theta: float
    ) -> Tensor:
        """q [T, H·C], k and v [T, G·C] of the new tokens -> o [T, H·C]."""
        found = self._grouped(q, k, v, None, heads, kv_heads, theta)
        return OPS["gqa_attention"](q, k, v, self.length, heads, kv_heads, theta)[0] if found is None else found

    def bounded_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        sequence: int,
        heads: int,
        kv_heads: int,
        theta: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """q [T, H·C], k and v [T, G·C] of the new tokens, sinks [H] -> o [T, H·C]."""
        found = self._grouped(q, k, v, sinks, heads, kv_heads, theta, window, softcap)
        if found is not None:
            return found
        return OPS["bounded_attention"](q, k, v, sinks, self.length, heads, kv_heads, theta, window, softcap)[0]

    def _grouped(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        heads: int,
        kv_heads: int,
        theta: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor | None:
        """What both kinds return, or None where no token is cached yet. Tokens before all windows are not read."""
        T, C = q.shape[0], q.shape[1] // heads
        turns_TXr = self._turns(C, theta, q)
        k_TGC = rotate(wide(k).unflatten(1, (kv_heads, C)), turns_TXr).to(k.dtype)
        kept = self._rows("grouped").put(self.start, torch.cat((k_TGC.flatten(1), v), dim=1))
        if not self.start:
            return None
        seen = kept[max(0, self.start - window + 1) :] if window else kept
        k_NGC, v_NGC = wide(seen).unflatten(1, (2, kv_heads, C)).unbind(1)
        q_THC = rotate(wide(q).unflatten(1, (heads, C)), turns_TXr * C**-0.5)
        q_GMC = q_THC.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)  # M = T·r
        scores_GMN = torch.bmm(q_GMC, k_NGC.permute(1, 2, 0))
        if softcap:
            scores_GMN.div_(softcap).tanh_().mul_(softcap)
        sinks_GM = None if sinks is None else wide(sinks).view(kv_heads, -1).repeat(1, T)
        o_GMC = torch.bmm(_weights_of(scores_GMN, T, window, sinks_GM), v_NGC.transpose(0, 1))
        return o_GMC.unflatten(1, (T, -1)).transpose(0, 1).flatten(1).to(q.dtype)

    # ------------------------------------------------------------ states

    def convolve(self, x: Tensor, w: Tensor, sequence: int) -> Tensor:
        """x [T, N] of the new tokens, w [N, J] -> y [T, N]: of J - 1 tokens before nothing else is read."""
        kept = self._rows("convolve").put(self.start, x)
        seen = kept[max(0, self.start - w.shape[1] + 1) :]
        return OPS["convolve"](seen, w, len(seen))[0][-len(x) :]

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, sequence: int, key_heads: int
    ) -> Tensor:
        """q and k [T, G·K], v [T, H·V], beta [T, H], decay of the new tokens -> o [T, H·V]."""
        return self._states.next(self.start, (q, k, v, beta, decay), key_heads)

    # ------------------------------------------------------------ latents

    def linear(self, x_TK: Tensor, w_NK: Tensor) -> Any:
        """x_TK, w_NK -> y_TN; of the up-projection of latents where tokens are cached, the latents as they are."""
        if w_NK is self._up:
            kept = self._rows("latent").put(self.start, x_TK)
            if self.start:
                return kept
        return super().linear(x_TK, w_NK)

    def mla_attention(
        self,
        q: Tensor,
        kv: Tensor,
        k_rope: Tensor,
        sequence: int,
        heads: int,
        nope: int,
        rope: int,
        value: int,
        theta: float,
    ) -> Tensor:
        """q [T, H·(nope+rope)], k_rope [T, rope] of the new tokens, kv of `linear` -> o [T, H·value]."""
        found = self._latent(q, kv, k_rope, heads, nope, rope, value, theta, None)
        if found is not None:
            return found
        return OPS["mla_attention"](q, kv, k_rope, q.shape[0], heads, nope, rope, value, theta)[0]

    def select_keys(
        self, q: Tensor, k: Tensor, weights: Tensor, sequence: int, heads: int, top_k: int, rate: int
    ) -> Tensor:
        """q [T, H·C] and weights [T, H] of the new tokens, k [T, C] of these, or of all entries of `rate` tokens ->
        chosen [T, K] among all tokens, or entries."""
        kept = self._rows("index").put(self.start, k) if rate == 1 else k
        at = torch.arange(self.start, self.length, dtype=torch.int32, device=q.device)
        return OPS["select_keys"](q, kept, weights, self.length, heads, top_k, rate, None, at)

    def chosen_attention(
        self,
        q: Tensor,
        kv: Tensor,
        k_rope: Tensor,
        chosen: Tensor,
        sequence: int,
        heads: int,
        nope: int,
        rope: int,
        value: int,
    ) -> Tensor:
        """What `mla_attention` returns, over the chosen tokens. Nothing is rotated here."""
        found = self._latent(q, kv, k_rope, heads, nope, rope, value, 0.0, chosen)
        if found is not None:
            return found
        return OPS["chosen_attention"](q, kv, k_rope, chosen, q.shape[0], heads, nope, rope, value)[0]

    def _latent(
        self,
        q: Tensor,
        kv: Tensor,
        k_rope: Tensor,
        heads: int,
        nope: int,
        rope: int,
        value: int,
        theta: float,
        chosen: Tensor | None,
    ) -> Tensor | None:
        """What both return, or None where no token is cached yet."""
        T = q.shape[0]
        turns_TXr = self._turns(rope, theta, q)
        turned = rotate(wide(k_rope)[:, None], turns_TXr)[:, 0].to(k_rope.dtype)
        kept = self._rows("rope").put(self.start, turned)
        if not self.start:
            return None
        assert self._up is not None
        latent_NC, up_HWC = wide(kv), wide(self._up).unflatten(0, (heads, nope + value))
        q_THX = wide(q).unflatten(1, (heads, nope + rope)) * (nope + rope) ** -0.5
        q_HTC = torch.bmm(q_THX[..., :nope].transpose(0, 1), up_HWC[:, :nope])
        q_HTr = rotate(q_THX[..., nope:], turns_TXr).transpose(0, 1)
        scores_HTN = torch.matmul(q_HTC, latent_NC.t()) + torch.matmul(q_HTr, wide(kept).t())
        if chosen is not None:
            scores_HTN.masked_fill_(~is_chosen(chosen, len(kept)), -torch.inf)
        o_HTC = torch.matmul(_weights_of(scores_HTN, T), latent_NC)
        o_HTV = torch.bmm(o_HTC, up_HWC[:, nope:].transpose(1, 2))
        return o_HTV.transpose(0, 1).flatten(1).to(q.dtype)

    # ------------------------------------------------------------ entries

    def compress(self, x: Tensor, bias: Tensor, sequence: int, overlap: bool) -> Tensor:
        """x [T, 2·W] of the new tokens -> y [E, C]: the entries of all tokens, each of which is made once."""
        self._calls += 1
        rate, op = len(bias), f"compress {self._calls}"
        there = self.start // rate
        first = max(0, there - overlap)  # entries are of two windows then
        kept = self._rows(op).put(self.start, x)[first * rate :]
        entries = OPS["compress"](kept, bias, len(kept), overlap)[0]
        return self._rows(op, 1).put(there, entries[there - first :])

    def compressed_attention(
        self,
        q: Tensor,
        kv: Tensor,
        entries: Tensor,
        chosen: Tensor | None,
        sinks: Tensor | None,
        sequence: int,
        heads: int,
        window: int,
        rate: int,
    ) -> Tensor:
        """q [T, H·C], kv [T, C] and chosen [T, K] of the new tokens, all entries [E, C], sinks [H] -> o [T, H·C]."""
        kept = self._rows("window").put(self.start, kv)
        if not self.start:
            sizes = self.length, heads, window, rate
            return OPS["compressed_attention"](q, kv, entries, chosen, sinks, *sizes)[0]
        first, (E, C) = max(0, self.start - window + 1), entries.shape
        position_T1 = torch.arange(self.start, self.length, device=q.device)[:, None]
        key_N = torch.arange(first, self.length, device=q.device)
        unseen_TE = torch.arange(E, device=q.device) >= (position_T1 + 1) // rate
        if chosen is not None:
            picked = torch.zeros(len(q), E + 1, dtype=torch.bool, device=q.device).scatter_(1, chosen.long() + 1, True)
            unseen_TE |= ~picked[:, 1:]
        hidden_TX = torch.cat(((key_N > position_T1) | (key_N <= position_T1 - window), unseen_TE), dim=1)
        keys_XC = wide(torch.cat((kept[first:], entries)))
        scores_THX = wide(q).unflatten(1, (heads, C)) * C**-0.5 @ keys_XC.t()
        scores_THX.masked_fill_(hidden_TX[:, None], -torch.inf)
        return (_shares(scores_THX, None if sinks is None else wide(sinks)) @ keys_XC).flatten(1).to(q.dtype)

    # ------------------------------------------------------------ all

    @property
    def _room(self) -> int:
        """Positions of a table of angles: few different ones, as tables are cached."""
        return max(64, 1 << (self.length - 1).bit_length())

    def _turns(self, width: int, theta: float, like: Tensor) -> Tensor:
        """What turns the pairs of the new tokens, [T, 1, width/2]."""
        return angles(self._room, width, theta, like.dtype, like.device)[self.start : self.length, None]


def _weights_of(scores: Tensor, new: int, window: int = 0, sinks: Tensor | None = None) -> Tensor:
    """The softmax of scores [.., M, N] over the tokens that each row sees: those up to its own, or the last `window`.

    Rows are those of the `new` last of the N tokens, token by token. `sinks` [.., M] are logits besides.
    """
    num_keys = scores.shape[-1]
    if new > 1:
        key_N = torch.arange(num_keys, device=scores.device)
        query_T1 = key_N[num_keys - new :, None]
        hidden_TN = key_N > query_T1
        if window:
            hidden_TN |= key_N <= query_T1 - window
        scores.masked_fill_(hidden_TN.repeat_interleave(scores.shape[-2] // new, dim=0), -torch.inf)
    return _shares(scores, sinks)


def _shares(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [.., M, N], with logits `sinks` [.., M] besides."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    return (scores - torch.logaddexp(scores.logsumexp(dim=-1), sinks)[..., None]).exp()
