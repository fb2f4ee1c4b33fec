"""Runs the emitted forward of a rank on the next tokens of several sequences: the same code, with replacements for ops
that use more than one row.

A training forward computes whole sequences, T = B·S rows. Here the rows are the concatenated next tokens of some
sequences, and attention has a key-value cache. All other ops are those of training. On CPUs a row of any op does not
depend on the other rows, and attention in C++ reads the cache like the rows of a whole sequence, so results are
bit-identical to training (tests/runtime/rl/test_rows.py).

T rows · S positions of a sequence of training · H heads · G heads of keys and values · C width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.build.build import Build
from runtime.contract.names import ActionName, Site
from runtime.ops import OPS
from runtime.ops.causal import angles
from runtime.ops.native import ops as native

# --- Sampling: a token depends on the logits, the seed, the sequence and the position alone
#
# Random numbers come from a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
# 2011), so there is no state, and tokens do not depend on the rank, the order of draws, or other sequences.

NEVER = -1000.0  # below the largest logit: its exponential is 0


class DrawnToken(NamedTuple):
    """A token, and the entropy of its distribution in nats."""

    token: int
    entropy: float


@dataclass(frozen=True)
class SoftmaxSampler:
    """Samples from the softmax of logits."""

    seed: int

    def uniform(self, sequence: int, position: int) -> float:
        """Return the random number in [0, 1) for a position of a sequence. `sequence`: its number in the run."""
        return float(
            np.random.Generator(np.random.Philox(key=[self.seed, 0], counter=[0, position, sequence, 0])).random()
        )

    def draw(self, logits_V: npt.NDArray[np.float64], sequence: int, position: int) -> DrawnToken:
        """logits_V, FP64 -> the token at which the cumulative probability exceeds the random number of the position."""
        behind_V = logits_V - logits_V.max()
        weights_V = np.exp(behind_V)
        sums_V = np.cumsum(weights_V)
        total = sums_V[-1]
        entropy = np.log(total) - np.dot(weights_V, np.maximum(behind_V, NEVER)) / total
        token = int(np.searchsorted(sums_V, self.uniform(sequence, position) * total, side="right"))
        return DrawnToken(min(token, int(np.flatnonzero(weights_V)[-1])), float(entropy))


# --- next tokens

Body = Callable[..., None]
NOTHING = (
    *("sequence_balance", "balance_scores", "counted_balance", "counted_balance_scores"),
    *("real_counts", "real_balance", "real_balance_scores", "indexer_loss"),
)


@dataclass(frozen=True)
class Next:
    """The next `count` tokens of the sequence in a slot, after `start` others. `sequence`: its number in the step."""

    slot: int
    start: int
    count: int
    sequence: int


@dataclass
class _KeptRows:
    """The cache of one attention: a row for each token of each slot, in two tensors."""

    first: Tensor  # [slots, S, width]
    second: Tensor

    def store(self, tokens: Next, first_TW: Tensor, second_TW: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows of the next tokens. Return views of the rows of all tokens so far."""
        end = tokens.start + tokens.count
        self.first[tokens.slot, tokens.start : end] = first_TW
        self.second[tokens.slot, tokens.start : end] = second_TW
        return self.first[tokens.slot, :end], self.second[tokens.slot, :end]


@dataclass
class NextTokens:
    """The forward bodies of a rank for the next tokens of sequences.

    `slots`: most sequences; `sequence`: most positions of each. Set `next` before a program runs. Afterwards `logits`
    are [T, V] on the rank with the last stage, else None.
    """

    build: Build
    pp_rank: int
    slots: int
    sequence: int
    next: Sequence[Next] = ()
    routes: dict[int, Tensor] | None = None  # by layer, [N, S, K]: recorded choices of routers, else −1
    logits: Tensor | None = None
    _cache: dict[tuple[int, int], _KeptRows] = field(default_factory=dict)  # by stage and index of the attention
    _stage: int = 0
    _calls: int = 0  # attention calls so far in the running body

    def bodies(self) -> Mapping[str, Body]:
        """Return the bodies of the evaluation programs, by name."""
        replaced = {id(OPS[name]): function for name, function in self._functions().items()}
        module = self.build.import_changed_module(
            f"stages.rank_{self.pp_rank}", lambda loaded: replace_ops(loaded, replaced)
        )
        return {
            name: self._wrap_with_stage(body, name.stage)
            for name, body in ((ActionName(name), body) for name, body in module.BODIES.items())
            if name.kind == "E"
        }

    def forget(self) -> None:
        """Free the caches of all sequences."""
        self._cache.clear()
        self.logits = None

    def _wrap_with_stage(self, body: Body, stage: int) -> Body:
        def begin(c: Any, p: Any, g: Any, micro_batch: int) -> None:
            self._stage, self._calls = stage, 0
            body(c, p, g, micro_batch)

        return begin

    def _functions(self) -> dict[str, Callable[..., Any]]:
        functions: dict[str, Callable[..., Any]] = {
            "gqa_attention": self._gqa,
            "gqa_attention_peaks": self._gqa_peaks,
            "mla_attention": self._mla,
            "mla_attention_peaks": self._mla_peaks,
            "rotate": self._rotate,
            "replay_choices": self._note_choices,
            "cross_entropy": partial(self._take_logits, 2),
            "policy_loss": partial(self._take_logits, 3),
            "policy_loss_kl": partial(self._take_logits, 3),
        }
        return {name: function for name, function in functions.items() if name in OPS} | {
            name: self._no_loss for name in NOTHING if name in OPS
        }

    # ---- attention

    def _attend(self, q: Tensor, first: Tensor, second: Tensor, width: int, attend: Callable[..., Tensor]) -> Tensor:
        """Return o [T, width] for the rows of all sequences. `attend`: (q, first, second, number of tokens) of one
        sequence -> o."""
        key = self._stage, self._calls
        self._calls += 1
        if key not in self._cache:
            self._cache[key] = _KeptRows(*(x.new_zeros(self.slots, self.sequence, x.shape[1]) for x in (first, second)))
        kept_rows, o, row = self._cache[key], q.new_zeros((len(q), width)), 0
        for span in self.next:
            rows = slice(row, row + span.count)
            context = kept_rows.store(span, first[rows], second[rows])
            o[rows] = attend(q[rows], *context, span.start + span.count)
            row += span.count
        return o

    def _gqa(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: int, heads: int, kv_heads: int, theta: float, *_: Any
    ) -> tuple[Tensor, None]:
        """q [T, H·C], k and v [T, G·C] -> o [T, H·C]."""
        angles_Sr = angles(sequence, q.shape[1] // heads, theta, q.dtype, q.device)

        def attend(q: Tensor, k: Tensor, v: Tensor, tokens: int) -> Tensor:
            return native.gqa_attention(q, k, v, angles_Sr[:tokens], heads, kv_heads, None)[0]

        return self._attend(q, k, v, q.shape[1], attend), None

    def _gqa_peaks(self, q: Tensor, *args: Any) -> tuple[Tensor, Tensor, None]:
        return self._gqa(q, *args)[0], _no_peaks(q, heads=args[3]), None

    def _mla(self, q: Tensor, kv: Tensor, k_rope: Tensor, *settings: Any) -> tuple[Tensor, None]:
        """q [T, H·(nope+rope)], kv [T, H·(nope+value)], k_rope [T, rope] -> o [T, H·value]."""
        sequence, heads, nope, rope, value, theta, *_ = settings
        angles_Sr = angles(sequence, rope, theta, q.dtype, q.device)

        def attend(q: Tensor, kv: Tensor, k_rope: Tensor, tokens: int) -> Tensor:
            return native.mla_attention(q, kv, k_rope, angles_Sr[:tokens], heads, nope, value, None)[0]

        return self._attend(q, kv, k_rope, heads * value, attend), None

    def _mla_peaks(self, q: Tensor, *args: Any) -> tuple[Tensor, Tensor, None]:
        return self._mla(q, *args)[0], _no_peaks(q, heads=args[3]), None

    def _rotate(self, x: Tensor, sequence: int, *settings: Any) -> Tensor:
        """x [T, H·C] -> y [T, H·C], each row rotated by its position in its sequence."""
        positions = [torch.arange(span.start, span.start + span.count) for span in self.next]
        num_padding = len(x) - sum(map(len, positions))
        positions_T = torch.cat([*positions, torch.zeros(num_padding, dtype=torch.int64)]).to(x.device, torch.int32)
        return OPS["rotate"](x, sequence, *settings[:10], None, positions_T)

    # ---- routers

    def no_choices(self, router: Site, rows: int, device: torch.device) -> Tensor:
        """Return the input [1, rows, 1] of a router that replays choices: no choice, but the index of its layer."""
        assert router.layer is not None, router
        return torch.full((1, rows, 1), -1 - router.layer, device=device)

    def _note_choices(self, expert_TK: Tensor, given_T1: Tensor) -> Tensor:
        """Record the experts that a router chooses for each token, and return them unchanged."""
        if self.routes is not None and self.next:
            layer, row = -1 - int(given_T1[0, 0]), 0
            for span in self.next:
                self.routes[layer][span.sequence, span.start : span.start + span.count] = expert_TK[
                    row : row + span.count
                ].cpu()
                row += span.count
        return expert_TK

    # ---- losses

    def _take_logits(self, results: int, logits_TV: Tensor, *_: Any) -> tuple[Tensor, ...]:
        """Keep the logits. Return zeros as the results of the loss op."""
        self.logits = logits_TV
        return (logits_TV.new_zeros(()),) * results

    def _no_loss(self, x: Tensor, *_: Any) -> Tensor:
        return x.new_zeros(())


def _no_peaks(q: Tensor, heads: int) -> Tensor:
    """Return dummy values for the largest logit of each head, which is not needed here."""
    return torch.full((heads,), -torch.inf, device=q.device)


def replace_ops(module: ModuleType, replaced: Mapping[int, Callable[..., Any]]) -> None:
    """Replace ops of an emitted segment by other functions, by id of the op."""
    for name, value in list(vars(module).items()):
        if id(value) in replaced:
            setattr(module, name, replaced[id(value)])
