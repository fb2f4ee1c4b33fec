"""Op tables for running layers in inference: the forward ops of `runtime.ops`, and ops that use a cache.

T new tokens · N tokens in all, including the new ones · H query heads · G key-value heads, each shared by r = H/G query
heads · C width of a head or of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from runtime.ops.rotate import ramped_angles, rotate_columns

# --- The caches of segments: rows of tokens, and states of a delta rule

STATES = 8  # last states to keep, so that rejected drafts can be undone


class GrowingRows:
    """One row per token in a tensor that grows. Putting rows at earlier positions overwrites them."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def store(self, start: int, new_TW: Tensor) -> Tensor:
        """Store the rows of tokens start … start + T -> all rows up to them [N, W], a view."""
        end = start + new_TW.shape[0]
        rows = self._rows
        if rows is None or end > rows.shape[0]:
            rows = self.reserve(start, max(64, 2 * end), new_TW)
        rows[start:end] = new_TW
        return rows[:end]

    def reserve(self, start: int, room: int, like_TW: Tensor) -> Tensor:
        """The tensor of all rows, with at least `room` of them. The first `start` rows are kept if it grows."""
        if self._rows is None or room > self._rows.shape[0]:
            grown = like_TW.new_empty((room, like_TW.shape[1]))
            if self._rows is not None:
                grown[:start] = self._rows[:start]
            self._rows = grown
        return self._rows


class States:
    """The states of a delta rule after each of the last calls, and all rows of its arguments, from which it recomputes
    states after tokens were dropped."""

    def __init__(self) -> None:
        self._rows = [GrowingRows() for _ in range(5)]
        self._states: dict[int, Tensor] = {}  # number of tokens → state after them

    def next(self, start: int, new: tuple[Tensor, ...], key_heads: int) -> Tensor:
        """The arguments of `delta_rule` for the tokens from `start` on -> o of these tokens [T, H·V]. Continues from
        the last kept state at or before `start`."""
        self._states = {end: state for end, state in self._states.items() if end <= start}
        begin = max(self._states, default=0)
        q, k, v, beta, decay = (rows.store(start, x)[begin:] for rows, x in zip(self._rows, new, strict=True))
        o, state = continued_delta_rule(q, k, v, beta, decay, key_heads, self._states.get(begin))
        self._states[begin + len(q)] = state
        for end in sorted(self._states)[:-STATES]:
            del self._states[end]
        return o[start - begin :]


# --- Op tables


class Forward:
    """The forward ops on sequences of `length` tokens each, without the results saved for a backward.

    Ops with an argument `sequence` get `length` instead of the constant of their layer. The head's cross entropy
    returns its logits.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op not in RULES:
            raise AttributeError(f"no op {op}")
        rule, function = RULES[op], TORCH.get(op) or OPS[op]
        index = rule.args.index("sequence") if "sequence" in rule.args else None

        def call(*args: Any) -> Any:
            if index is not None:
                args = (*args[:index], self.length, *args[index + 1 :])
            result = function(*args)
            if not rule.hidden:
                return result
            return result[0] if rule.visible == 1 else result[: rule.visible]

        setattr(self, op, call)  # found without `__getattr__` from now on
        return call

    def module(self, module: Module, x_TD: Tensor, *params: Tensor) -> Tensor:
        """x_TD of whole sequences, and the parameters of a traced module -> y_TD. Runs on as many tokens at a time as
        the module was traced for, the last of them padded with zeros."""
        tokens = module.tokens
        filled_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, -len(x_TD) % tokens))
        weights = dict(zip(module.locals, params, strict=True))
        parts = []
        for x_tD in filled_TD.split(tokens):
            values = {INPUT: x_tD, **weights}
            compute(module.forward, values, x_TD.device)
            parts.append(values[module.y])
        return torch.cat(parts)[: len(x_TD)]

    def ends(self, counts_E: Tensor) -> Tensor:
        """The row after the last of each expert, from the counts that `permute` returns."""
        return counts_E.cumsum(0).to(torch.int32)

    def cross_entropy(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """logits_TV, targets_T -> logits_TV."""
        return logits_TV

    def sequence_balance(self, *_: Any) -> None:
        """Does nothing: this loss is for training only."""

    def balance_scores(self, *_: Any) -> None:
        """Does nothing: this loss is for training only."""

    def indexer_loss(self, *_: Any) -> None:
        """Does nothing: this loss is for training only."""


class CachedForward(Forward):
    """The forward ops of one segment on the next tokens of one sequence, whose first `start` tokens are cached.

    Grouped-query attention caches rotated keys and values, 2·G·C numbers per token, and reads only those in the window.
    Latent attention caches the normed latent and the rotated rope key, C + rope numbers per token, and absorbs the
    up-projection into the queries and the output (DeepSeek-V2, arXiv 2405.04434, §2.1.2): expanding N tokens at each
    step would cost N·C·H·(nope + value) multiplications. Compressed attention caches keys, compressed entries and the
    inputs of the next entries; an indexer caches its keys. With an empty cache all of them run the training op.

    A delta rule caches its states, and its argument rows, from which it continues after tokens were dropped.

    Any other op with an argument `sequence` caches its argument rows and is recomputed on all of them, which is correct
    for every causal op, but slow.
    """

    def __init__(self, weights: Iterable[Tensor], up: Tensor | None = None) -> None:
        super().__init__(0)
        self.start = 0
        self._weights = {id(weight) for weight in weights}  # arguments that are not rows of tokens
        self.up = up  # the up-projection of latent attention, from the latent to keys and values
        self._cached: dict[tuple[str, int], GrowingRows] = {}  # (op or call, argument) → cached rows
        self._calls = 0
        self._states = States()

    def begin(self, start: int, new: int) -> None:
        """Set the tokens of the segment's next call: `new` tokens after the first `start`."""
        self.start, self.length, self._calls = start, start + new, 0

    def __getattr__(self, op: str) -> Callable[..., Any]:
        call = super().__getattr__(op)
        if "sequence" not in RULES[op].args:
            return call
        run_op = lambda *args: self._run_on_all_tokens(op, call, args)  # noqa: E731
        setattr(self, op, run_op)
        return run_op

    def reserve(self, name: str, start: int, room: int, like_TW: Tensor) -> Tensor:
        """The rows of a cache of attention, with room for `room` tokens, of which `start` are cached."""
        return self._rows(name).reserve(start, room, like_TW)

    def _rows(self, op: str, part: int = 0) -> GrowingRows:
        return self._cached.setdefault((op, part), GrowingRows())

    def _run_on_all_tokens(self, op: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run an op on all tokens and return the rows of the new ones."""
        self._calls += 1
        all_args = [
            self._rows(f"{op} {self._calls}", part).store(self.start, arg)
            if isinstance(arg, Tensor) and id(arg) not in self._weights
            else arg
            for part, arg in enumerate(args)
        ]
        result = call(*all_args)
        return tuple(output[self.start :] for output in result) if isinstance(result, tuple) else result[self.start :]

    def rotate(self, x: Tensor, sequence: int, heads: int, first: int, width: int, *settings: float) -> Tensor:
        """x [T, H·C] of the new tokens, or of all compressed entries of `stride` tokens each -> y of the same shape.
        Needs no cache."""
        (*frequencies, magnitude, scale), stride = settings[:7], int(settings[9]) if len(settings) > 7 else 1
        rows = slice(0, len(x)) if stride > 1 else slice(self.start, self.length)
        turns_Tr = None
        if width:
            turns_Tr = ramped_angles(self._room, width, *frequencies, x.dtype, x.device, stride)[rows]
        return rotate_columns(x, x.shape[0], heads, first, width, turns_Tr, magnitude, scale)

    # ------------------------------------------------------------ grouped queries

    def gqa_attention(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: int, heads: int, kv_heads: int, theta: float
    ) -> Tensor:
        """q [T, H·C], k and v [T, G·C] of the new tokens -> o [T, H·C]."""
        output = self._grouped_query_attention(q, k, v, None, heads, kv_heads, theta)
        return OPS["gqa_attention"](q, k, v, self.length, heads, kv_heads, theta)[0] if output is None else output

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
        output = self._grouped_query_attention(q, k, v, sinks, heads, kv_heads, theta, window, softcap)
        if output is not None:
            return output
        return OPS["bounded_attention"](q, k, v, sinks, self.length, heads, kv_heads, theta, window, softcap)[0]

    def _grouped_query_attention(
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
        """Grouped-query attention on the cache, or None if no token is cached yet. Skips tokens before all windows."""
        T, C = q.shape[0], q.shape[1] // heads
        turns_TXr = self._turns(C, theta, q)
        k_TGC = rotate(wide(k).unflatten(1, (kv_heads, C)), turns_TXr).to(k.dtype)
        cached = self._rows("grouped").store(self.start, torch.cat((k_TGC.flatten(1), v), dim=1))
        if not self.start:
            return None
        visible = cached[max(0, self.start - window + 1) :] if window else cached
        k_NGC, v_NGC = wide(visible).unflatten(1, (2, kv_heads, C)).unbind(1)
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
        """x [T, N] of the new tokens, w [N, J] -> y [T, N]. Reads the J - 1 tokens before them from the cache."""
        cached = self._rows("convolve").store(self.start, x)
        visible = cached[max(0, self.start - w.shape[1] + 1) :]
        return OPS["convolve"](visible, w, len(visible))[0][-len(x) :]

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, sequence: int, key_heads: int
    ) -> Tensor:
        """q and k [T, G·K], v [T, H·V], beta [T, H], decay of the new tokens -> o [T, H·V]."""
        return self._states.next(self.start, (q, k, v, beta, decay), key_heads)

    # ------------------------------------------------------------ latents

    def linear(self, x_TK: Tensor, w_NK: Tensor) -> Any:
        """x_TK, w_NK -> y_TN. For the up-projection of latents with cached tokens, returns all latents unprojected."""
        if w_NK is self.up:
            cached = self._rows("latent").store(self.start, x_TK)
            if self.start:
                return cached
        return OPS["linear"](x_TK, w_NK)

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
        """q [T, H·(nope+rope)], k_rope [T, rope] of the new tokens, kv from `linear` -> o [T, H·value]."""
        output = self._latent(q, kv, k_rope, heads, nope, rope, value, theta, None)
        if output is not None:
            return output
        return OPS["mla_attention"](q, kv, k_rope, q.shape[0], heads, nope, rope, value, theta)[0]

    def select_keys(
        self, q: Tensor, k: Tensor, weights: Tensor, sequence: int, heads: int, top_k: int, rate: int
    ) -> Tensor:
        """q [T, H·C] and weights [T, H] of the new tokens, k [T, C] of the new tokens, or of all compressed entries if
        `rate` > 1 -> chosen [T, K], indices of tokens or entries."""
        cached = self._rows("index").store(self.start, k) if rate == 1 else k
        position_T = torch.arange(self.start, self.length, dtype=torch.int32, device=q.device)
        return OPS["select_keys"](q, cached, weights, self.length, heads, top_k, rate, None, position_T)

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
        """`mla_attention` over the chosen tokens, without rotation."""
        output = self._latent(q, kv, k_rope, heads, nope, rope, value, 0.0, chosen)
        if output is not None:
            return output
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
        """Latent attention on the cache, or None if no token is cached yet. `chosen`: None for all tokens."""
        T = q.shape[0]
        turns_TXr = self._turns(rope, theta, q)
        turned = rotate(wide(k_rope)[:, None], turns_TXr)[:, 0].to(k_rope.dtype)
        cached = self._rows("rope").store(self.start, turned)
        if not self.start:
            return None
        assert self.up is not None
        latent_NC, up_HWC = wide(kv), wide(self.up).unflatten(0, (heads, nope + value))
        q_THX = wide(q).unflatten(1, (heads, nope + rope)) * (nope + rope) ** -0.5
        q_HTC = torch.bmm(q_THX[..., :nope].transpose(0, 1), up_HWC[:, :nope])
        q_HTr = rotate(q_THX[..., nope:], turns_TXr).transpose(0, 1)
        scores_HTN = torch.matmul(q_HTC, latent_NC.t()) + torch.matmul(q_HTr, wide(cached).t())
        if chosen is not None:
            scores_HTN.masked_fill_(~is_chosen(chosen, len(cached)), -torch.inf)
        o_HTC = torch.matmul(_weights_of(scores_HTN, T), latent_NC)
        o_HTV = torch.bmm(o_HTC, up_HWC[:, nope:].transpose(1, 2))
        return o_HTV.transpose(0, 1).flatten(1).to(q.dtype)

    # ------------------------------------------------------------ entries

    def compress(self, x: Tensor, bias: Tensor, sequence: int, overlap: bool) -> Tensor:
        """x [T, 2·W] of the new tokens -> y [E, C], the compressed entries of all tokens. Each is computed once."""
        self._calls += 1
        rate, op = len(bias), f"compress {self._calls}"
        complete = self.start // rate
        first = max(0, complete - overlap)  # with overlap an entry covers two windows
        cached = self._rows(op).store(self.start, x)[first * rate :]
        entries = OPS["compress"](cached, bias, len(cached), overlap)[0]
        return self._rows(op, 1).store(complete, entries[complete - first :])

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
        cached = self._rows("window").store(self.start, kv)
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
        keys_XC = wide(torch.cat((cached[first:], entries)))
        scores_THX = wide(q).unflatten(1, (heads, C)) * C**-0.5 @ keys_XC.t()
        scores_THX.masked_fill_(hidden_TX[:, None], -torch.inf)
        return (_shares(scores_THX, None if sinks is None else wide(sinks)) @ keys_XC).flatten(1).to(q.dtype)

    # ------------------------------------------------------------ all

    @property
    def _room(self) -> int:
        """Positions in a table of angles, rounded to a power of two, so that few tables are cached."""
        return max(64, 1 << (self.length - 1).bit_length())

    def _turns(self, width: int, theta: float, like: Tensor) -> Tensor:
        """The rotations of the new tokens' pairs, [T, 1, width/2]."""
        return angles(self._room, width, theta, like.dtype, like.device)[self.start : self.length, None]


def _weights_of(scores: Tensor, new: int, window: int = 0, sinks: Tensor | None = None) -> Tensor:
    """The causal softmax of scores [.., M, N], limited to the last `window` tokens if it is not 0.

    The M rows belong to the last `new` of the N tokens, grouped by token. `sinks` [.., M] are extra logits.
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
    """The softmax of scores [.., M, N], with extra logits `sinks` [.., M]."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    return (scores - torch.logaddexp(scores.logsumexp(dim=-1), sinks)[..., None]).exp()
