"""Drawing a token: what is drawn depends on the logits, the seed, the sequence and the position alone.

The random number is one of a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011), so no state goes from token to token, and it does not matter which rank draws, in which order, or beside what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NEVER = -1000.0  # behind the largest logit: its exponential is 0


class Drawn(NamedTuple):
    """A token, and the entropy in nats of what it was drawn from."""

    token: int
    entropy: float


@dataclass(frozen=True)
class Sampler:
    """Draws with the probabilities of the softmax of logits."""

    seed: int

    def uniform(self, sequence: int, position: int) -> float:
        """The number in [0, 1) of a position of a sequence. `sequence`: its number in the run."""
        return float(
            np.random.Generator(np.random.Philox(key=[self.seed, 0], counter=[0, position, sequence, 0])).random()
        )

    def draw(self, logits_V: npt.NDArray[np.float64], sequence: int, position: int) -> Drawn:
        """logits_V, FP64 -> the token of which the sum of all probabilities before it is the last one below the number
        of the position."""
        behind_V = logits_V - logits_V.max()
        weights_V = np.exp(behind_V)
        sums_V = np.cumsum(weights_V)
        total = sums_V[-1]
        entropy = np.log(total) - np.dot(weights_V, np.maximum(behind_V, NEVER)) / total
        token = int(np.searchsorted(sums_V, self.uniform(sequence, position) * total, side="right"))
        return Drawn(min(token, int(np.flatnonzero(weights_V)[-1])), float(entropy))
