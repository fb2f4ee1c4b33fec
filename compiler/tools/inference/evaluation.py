"""The loss of a model on streams of tokens, each cut into windows as in training.

A window has as many tokens as a training sequence, and its targets are shifted by one token; the last window of a
stream may be shorter. So every token of a stream except the first is a target exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compiler.tools.inference.language_model import LanguageModel
from compiler.tools.inference.sources import InferenceError

TOKENS_AT_ONCE = 4096
NO_TARGET = -1
MOST_NATS = 690.0  # exp of it does not overflow
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EvaluatedLoss:
    """Cross entropy in nats, summed over `tokens` targets. `bytes`: the size of their text, None if unknown."""

    nats: float
    tokens: int
    bytes: int | None = None

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float | None:
        """Perplexity per token; None if it overflows."""
        return math.exp(self.mean) if self.mean < MOST_NATS else None

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def windows(stream: Ids, sequence: int) -> Iterator[tuple[Ids, Ids]]:
    """Tokens and targets of each window of a stream."""
    for first in range(0, len(stream) - 1, sequence):
        targets = stream[first + 1 : first + sequence + 1]
        yield stream[first : first + len(targets)], targets


def batches(streams: Sequence[Ids], sequence: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of tokens and targets [B, L] from the windows of all streams; shorter windows are padded."""
    pending: list[tuple[Ids, Ids]] = []
    at_once = max(1, TOKENS_AT_ONCE // sequence)
    for stream in streams:
        for window in windows(stream, sequence):
            pending.append(window)
            if len(pending) == at_once:
                yield padded_batch(pending)
                pending = []
    if pending:
        yield padded_batch(pending)


def padded_batch(window_ids: Sequence[tuple[Ids, Ids]]) -> tuple[Tensor, Tensor]:
    """Tokens and targets [B, L] of windows, padded at the end, which causal layers do not see."""
    tokens_BL = np.zeros((len(window_ids), max(len(targets) for _, targets in window_ids)), np.int64)
    targets_BL = np.full_like(tokens_BL, NO_TARGET)
    for row, (tokens, targets) in enumerate(window_ids):
        tokens_BL[row, : len(tokens)] = tokens
        targets_BL[row, : len(targets)] = targets
    tokens_BL ^= tokens_BL >> 63  # ~id is read as id, but is not a target
    return torch.from_numpy(tokens_BL), torch.from_numpy(targets_BL)


def loss_of(model: LanguageModel, streams: Sequence[Ids], progress: Callable[[str], None]) -> EvaluatedLoss:
    """The loss on all tokens of some streams except the first of each. An id below 0 is not a target.

    Raises InferenceError if there is nothing to predict or the loss is not finite.
    """
    total = sum(int((stream[1:] >= 0).sum()) for stream in streams)
    if not total:
        raise InferenceError("there is no token to predict: the loss is a mean over all tokens after the first one")
    nats, done = 0.0, 0
    for tokens_BL, targets_BL in batches(streams, model.sequence):
        progress(f"{done:,} of {total:,} tokens")
        nats += float(model.score(tokens_BL, targets_BL)[0].sum())
        done += int((targets_BL >= 0).sum())
    progress("")
    if not math.isfinite(nats):
        raise InferenceError(f"the loss is {nats}: the weights are not finite, or too large for this dtype")
    return EvaluatedLoss(nats, done)
