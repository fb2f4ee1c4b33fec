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
# Random numbers come from a counter-based generator, Philox4x64 (Salmon et al., "Parallel random numbers: as easy as 1,
# 2, 3", 2011), so there is no state, and tokens do not depend on the rank, the order of draws, or other sequences.
# numpy's generator takes 11 µs for the first number of a counter, this 0.2 ms for the numbers of any few sequences.

NEVER = -1000.0  # below the largest logit: its exponential is 0
ROUNDS = 10
MULTIPLIERS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B  # added to the two words of the key after each round
HALF, LOW = np.uint64(32), np.uint64(2**32 - 1)

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class DrawnTokens(NamedTuple):
    """A token of each of N sequences, and the entropy of its distribution in nats."""

    tokens_N: Integers
    entropy_N: Floats


@dataclass(frozen=True)
class SoftmaxSampler:
    """Samples from the softmax of logits."""

    seed: int

    def uniform(self, sequence_N: Integers, position_N: Integers) -> Floats:
        """Return the random numbers in [0, 1) for positions of sequences. sequence_N: their numbers in the run."""
        ones_N = np.ones(len(sequence_N), np.uint64)
        counter = ones_N, position_N.astype(np.uint64), sequence_N.astype(np.uint64), ones_N - ones_N
        return (_philox(counter, (self.seed, 0)) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def draw(self, logits_NV: Floats, sequence_N: Integers, position_N: Integers) -> DrawnTokens:
        """logits_NV, FP64 -> the tokens at which the cumulative probability exceeds the random number of the
        position."""
        behind_NV = logits_NV - logits_NV.max(axis=1, keepdims=True)
        weights_NV = np.exp(behind_NV)
        sums_NV = np.cumsum(weights_NV, axis=1)
        total_N = sums_NV[:, -1]
        mean_N = (weights_NV * np.maximum(behind_NV, NEVER)).sum(axis=1) / total_N
        first_N = (sums_NV <= (self.uniform(sequence_N, position_N) * total_N)[:, None]).sum(axis=1)
        last_N = logits_NV.shape[1] - 1 - (weights_NV[:, ::-1] > 0).argmax(axis=1)
        return DrawnTokens(np.minimum(first_N, last_N), np.log(total_N) - mean_N)


def _philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> Words:
    """Return the first word of the numbers of counters, from the low word to the high."""
    a, b, c, d = counter
    for turn in range(ROUNDS):
        first, second = (np.uint64((word + turn * step) % 2**64) for word, step in zip(key, KEY_STEPS, strict=True))
        high, low = _product(MULTIPLIERS[0], a)
        high_2, low_2 = _product(MULTIPLIERS[1], c)
        a, b, c, d = high_2 ^ b ^ first, low_2, high ^ d ^ second, low
    return a


def _product(x: np.uint64, y: Words) -> tuple[Words, Words]:
    """Return the high and the low word of the products."""
    x_low, x_high, y_low, y_high = x & LOW, x >> HALF, y & LOW, y >> HALF
    middle = x_high * y_low + (x_low * y_low >> HALF)
    return x_high * y_high + (middle >> HALF) + (x_low * y_high + (middle & LOW) >> HALF), x * y


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
    _cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # see `_kept`
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

    def _kept(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the spans of the next tokens [N, 3], and two tensors [slots, S, width] that keep such rows of all
        tokens for the attention that runs now."""
        key = self._stage, self._calls
        self._calls += 1
        if key not in self._cache:
            room = self.slots, self.sequence
            self._cache[key] = first.new_zeros(*room, first.shape[1]), second.new_zeros(*room, second.shape[1])
        spans_N3 = np.array([(span.slot, span.start, span.count) for span in self.next], np.int32).reshape(-1, 3)
        return torch.from_numpy(spans_N3), *self._cache[key]

    def _gqa(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: int, heads: int, kv_heads: int, theta: float, *_: Any
    ) -> tuple[Tensor, None]:
        """q [T, H·C], k and v [T, G·C] -> o [T, H·C]."""
        angles_Sr = angles(sequence, q.shape[1] // heads, theta, q.dtype, q.device)
        return native.gqa_spans(q, k, v, angles_Sr, (heads, kv_heads), *self._kept(k, v)), None

    def _gqa_peaks(self, q: Tensor, *args: Any) -> tuple[Tensor, Tensor, None]:
        return self._gqa(q, *args)[0], _no_peaks(q, heads=args[3]), None

    def _mla(self, q: Tensor, kv: Tensor, k_rope: Tensor, *settings: Any) -> tuple[Tensor, None]:
        """q [T, H·(nope+rope)], kv [T, H·(nope+value)], k_rope [T, rope] -> o [T, H·value]."""
        sequence, heads, nope, rope, value, theta, *_ = settings
        angles_Sr = angles(sequence, rope, theta, q.dtype, q.device)
        return native.mla_spans(q, kv, k_rope, angles_Sr, (heads, nope, value), *self._kept(kv, k_rope)), None

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
