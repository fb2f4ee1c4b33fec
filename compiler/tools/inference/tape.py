"""The calls of C++ functions for a few tokens, recorded once and then made again for the tokens after them.

For one token an op takes less time than Python takes to call it, so a token would cost ten times what reading the
weights costs. But the next token needs the same calls with the same addresses, if each op writes where it wrote before.
Only the token and the number of cached tokens change, and these are read from memory.

A tape has the ops of models with grouped-query or latent attention, in FP32 and BF16. Others are not recorded: their
ops run one by one.

T tokens · K choices of experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from compiler.tools.inference.op_tables import CachedForward, Forward
from runtime.ops.causal import angles
from runtime.ops.native import library
from runtime.ops.rotate import ramped_angles

MOST = library.FEW  # tokens; more are better multiplied by other products
OpTables = Callable[[str], Forward]  # by the site of a segment
Function = Callable[..., Tensor]  # (op tables, *inputs) -> output


class UnrecordedError(Exception):
    """An op or a dtype cannot be recorded."""


class Tape:
    """Calls with fixed operands. `room`: tokens for which its operands have room."""

    def __init__(self, start: int, room: int, inputs: tuple[Tensor, ...]) -> None:
        self.start, self.room = torch.tensor([start]), room
        self.inputs, self.output = tuple(x.clone() for x in inputs), inputs[0]
        self._start = self.start.numpy()
        self._calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._operands: list[Any] = []

    def call(self, name: str, dtype: torch.dtype, *args: Tensor | float | None) -> None:
        """Call a C++ function, and record the call."""
        try:
            function, values = library.prepare(name, dtype, *args)
        except KeyError:
            raise UnrecordedError(f"{name} of {dtype}") from None
        function(*values)
        self._calls.append((function, values))
        self._operands.append(args)

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self, start: int, inputs: tuple[Tensor, ...]) -> Tensor:
        """Make all calls again, for other inputs of the same shapes after `start` tokens. Returns the output."""
        self._start[0] = start
        for operand, x in zip(self.inputs, inputs, strict=True):
            operand.copy_(x)
        for function, values in self._calls:
            function(*values)
        return self.output.clone()


class Tapes:
    """The tapes of functions of a model. `tables`: the op tables of segments that have caches."""

    def __init__(self, tables: Mapping[str, CachedForward]) -> None:
        self._tables = tables
        self._tapes: dict[tuple[str, int], Tape] = {}
        self._room = 0  # tokens for which the caches have room
        self._refused: set[str] = set()

    def run(self, function: Function, start: int, *inputs: Tensor) -> Tensor | None:
        """Return what a function returns for inputs [T, ..] after `start` tokens, or None if it cannot be recorded."""
        name, new = function.__name__, inputs[0].shape[0]
        if start + new > self._room:  # caches grow, so the addresses on the tapes become wrong
            self._tapes.clear()
            self._room = max(64, 2 * (start + new))
        is_first = bool(self._tables) and not start  # training ops run on tokens without others before them
        if new > MOST or is_first or name in self._refused or not inputs[0].is_cpu:
            return None
        if tape := self._tapes.get((name, new)):
            return tape.replay(start, inputs)
        tape = Tape(start, self._room, inputs)
        try:
            tape.output = function(lambda site: RecordedForward(tape, self._tables.get(site)), *tape.inputs)
        except UnrecordedError:
            self._refused.add(name)
            return None
        self._tapes[name, new] = tape
        return tape.output.clone()


class RecordedForward(Forward):
    """The forward ops of a segment on the next tokens of one sequence. They are recorded on a tape while they run.

    `cached`: the table with the caches of the segment, if it has any.
    """

    def __init__(self, tape: Tape, cached: CachedForward | None) -> None:
        super().__init__(0)
        self._tape, self._cached = tape, cached
        self._latent: Tensor | None = None  # what the up-projection of latent attention would project

    def __getattr__(self, op: str) -> Callable[..., Any]:
        raise UnrecordedError(op)

    # ------------------------------------------------------------ rows

    def embedding(self, tokens_T: Tensor, w_VD: Tensor) -> Tensor:
        y_TD = w_VD.new_empty(len(tokens_T), w_VD.shape[1])
        self._tape.call("embedding", w_VD.dtype, *y_TD.shape, tokens_T, w_VD, y_TD)
        return y_TD

    def rmsnorm(self, x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
        y_TD, rstd_T = _one_dtype(x_TD, w_D).new_empty(x_TD.shape), x_TD.new_empty(len(x_TD), dtype=torch.float32)
        self._tape.call("rmsnorm", x_TD.dtype, *x_TD.shape, x_TD, None, w_D, eps, None, y_TD, rstd_T)
        return y_TD

    def head_rmsnorm(self, x_TW: Tensor, w_C: Tensor, eps: float) -> Tensor:
        rows_TW = x_TW.new_empty(x_TW.shape)
        self._copy(x_TW, rows_TW)
        return self.rmsnorm(rows_TW.view(-1, len(w_C)), w_C, eps).view(x_TW.shape)

    def cat2(self, x_TM: Tensor, y_TN: Tensor) -> Tensor:
        joined = _one_dtype(x_TM, y_TN).new_empty(len(x_TM), x_TM.shape[1] + y_TN.shape[1])
        self._copy(x_TM, joined[:, : x_TM.shape[1]])
        self._copy(y_TN, joined[:, x_TM.shape[1] :])
        return joined

    def _copy(self, x_TW: Tensor, to_TW: Tensor) -> None:
        self._tape.call("decode_copy", x_TW.dtype, *x_TW.shape, x_TW, to_TW)

    def add(self, x_TD: Tensor, y_TD: Tensor) -> Tensor:
        sum_TD = _one_dtype(x_TD, y_TD).new_empty(x_TD.shape)
        self._tape.call("decode_add", x_TD.dtype, x_TD.numel(), x_TD, y_TD, sum_TD)
        return sum_TD

    def add_bias(self, x_TN: Tensor, b_N: Tensor) -> Tensor:
        y_TN = _one_dtype(x_TN, b_N).new_empty(x_TN.shape)
        for x_N, y_N in zip(x_TN, y_TN, strict=True):
            self._tape.call("decode_add", x_TN.dtype, len(b_N), x_N, b_N, y_N)
        return y_TN

    def scale(self, x_TN: Tensor, factor: float) -> Tensor:
        return self._turn(x_TN, 1, 0, None, 0, factor, factor)

    def rotate(self, x: Tensor, sequence: int, heads: int, first: int, width: int, *settings: float) -> Tensor:
        (*frequencies, magnitude, scale), more = settings[:7], settings[7:]
        if more:
            raise UnrecordedError("rotated entries of several tokens")
        turns = ramped_angles(self._tape.room, width, *frequencies, x.dtype, x.device) if width else None
        return self._turn(x, heads, first, turns, width, magnitude * scale, scale)

    def _turn(
        self, x: Tensor, heads: int, first: int, turns: Tensor | None, width: int, turned: float, scale: float
    ) -> Tensor:
        """x [T, H·C] -> y [T, H·C]: some columns of each head are rotated by the angles of the position."""
        y, sizes = x.new_empty(x.shape), (heads, x.shape[1] // heads, first, width)
        self._tape.call("decode_rotate", x.dtype, len(x), self._tape.start, *sizes, x, turns, turned, scale, y)
        return y

    def split2(self, x_TM: Tensor, width: int) -> tuple[Tensor, Tensor]:
        return x_TM[:, :width], x_TM[:, width:]

    def swiglu(self, h_TM: Tensor, gate_T: Tensor | None = None) -> Tensor:
        y_TI = h_TM.new_empty(len(h_TM), h_TM.shape[1] // 2)
        self._tape.call("swiglu", h_TM.dtype, *y_TI.shape, h_TM, gate_T, y_TI)
        return y_TI

    def cross_entropy(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        return logits_TV

    def sequence_balance(self, *_: Any) -> None:
        pass

    def gated_swiglu(self, h_RM: Tensor, gate_R: Tensor) -> Tensor:
        return self.swiglu(h_RM, gate_R)

    # ------------------------------------------------------------ products

    def linear(self, x_TK: Tensor, w_NK: Tensor) -> Tensor:
        if self._cached is not None and w_NK is self._cached.up:
            self._latent = x_TK
            return x_TK
        return self._product("few_rows", x_TK, w_NK, x_TK.dtype)

    def linear_wide(self, x_TK: Tensor, w_NK: Tensor) -> Tensor:
        function = "few_rows" if x_TK.dtype == torch.float32 else "few_rows_wide"
        return self._product(function, x_TK, w_NK, torch.float32)

    def _product(self, function: str, x_TK: Tensor, w_NK: Tensor, dtype: torch.dtype) -> Tensor:
        y_TN = _one_dtype(x_TK, w_NK).new_empty((len(x_TK), len(w_NK)), dtype=dtype)
        self._tape.call(function, x_TK.dtype, len(x_TK), *w_NK.shape, x_TK, w_NK, y_TN)
        return y_TN

    def grouped_linear(self, x_RK: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
        y_RN = _one_dtype(x_RK, w_ENK).new_empty(len(x_RK), w_ENK.shape[1])
        self._tape.call("decode_experts", x_RK.dtype, len(w_ENK), ends_E, *w_ENK.shape[1:], x_RK, w_ENK, y_RN)
        return y_RN

    # ------------------------------------------------------------ experts

    def route(
        self,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        softmax: bool,
        groups: int,
        top_groups: int,
        top_k: int,
        normalize: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        score_TE, gate_TK = logits_TE.new_empty(logits_TE.shape), logits_TE.new_empty(len(logits_TE), top_k)
        expert_TK = logits_TE.new_empty(gate_TK.shape, dtype=torch.int64)
        if bias_E is not None:
            _one_dtype(logits_TE, bias_E)
        self._tape.call("scores", logits_TE.dtype, *logits_TE.shape, softmax, logits_TE, score_TE)
        sizes = *logits_TE.shape, top_k, groups, top_groups, 1 if softmax else 2, normalize
        self._tape.call("choose", logits_TE.dtype, *sizes, scale, score_TE, bias_E, gate_TK, expert_TK)
        return gate_TK, expert_TK

    def permute(
        self, x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (S, K), D = (expert_TK.numel(), expert_TK.shape[1]), x_TD.shape[1]
        rows_SD, gate_S = x_TD.new_empty(S, D), gate_TK.new_empty(S)
        order_S, counts_E = expert_TK.new_empty(S), expert_TK.new_empty(num_experts)
        sizes, results = (S, K, num_experts, D * x_TD.itemsize), (rows_SD, gate_S, order_S, counts_E)
        self._tape.call("permute", gate_TK.dtype, *sizes, expert_TK, x_TD, gate_TK, *results)
        return results

    def ends(self, counts_E: Tensor) -> Tensor:
        ends_E = counts_E.new_empty(len(counts_E), dtype=torch.int32)
        self._tape.call("ends", torch.float32, len(counts_E), counts_E, ends_E)
        return ends_E

    def unpermute(self, y_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
        y_TD = y_SD.new_empty(len(y_SD) // top_k, y_SD.shape[1])
        self._tape.call("unpermute", y_SD.dtype, *y_TD.shape, top_k, y_SD, order_S, None, None, None, y_TD)
        return y_TD

    # ------------------------------------------------------------ attention

    def gqa_attention(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: int, heads: int, kv_heads: int, theta: float
    ) -> Tensor:
        C, o = q.shape[1] // heads, q.new_empty(q.shape)
        rows, turns = self._cache("grouped", k, 2 * k.shape[1]), angles(self._tape.room, C, theta, q.dtype, q.device)
        sizes = len(q), self._tape.start, heads, kv_heads, C
        self._tape.call("decode_gqa", q.dtype, *sizes, q, k, v, turns, rows, o)
        return o

    def mla_attention(self, q: Tensor, kv: Tensor, k_rope: Tensor, *settings: Any) -> Tensor:
        """`settings`: sequence, heads, nope, rope, value, theta."""
        _, heads, nope, rope, value, theta = settings
        assert self._cached is not None
        if self._latent is None or self._cached.up is None:
            raise UnrecordedError("latents that are not projected by `linear`")
        latent_TC, up, o = self._latent, self._cached.up, q.new_empty(len(q), heads * value)
        C, turns = latent_TC.shape[1], angles(self._tape.room, rope, theta, q.dtype, q.device)
        rows = self._cache("latent", latent_TC, C), self._cache("rope", k_rope, rope)
        sizes = len(q), self._tape.start, heads, nope, rope, value, C
        self._tape.call("decode_mla", q.dtype, *sizes, q, latent_TC, k_rope, up, turns, *rows, o)
        return o

    def _cache(self, name: str, like: Tensor, width: int) -> Tensor:
        """The rows of a cache, with room for all tokens of the tape."""
        assert self._cached is not None, "attention has a cache"
        return self._cached.reserve(name, int(self._tape.start), self._tape.room, like.new_empty(0, width))


def _one_dtype(*operands: Tensor) -> Tensor:
    """The first operand, if all are of one dtype."""
    if len({x.dtype for x in operands}) > 1:
        raise UnrecordedError("operands of several dtypes")
    return operands[0]
