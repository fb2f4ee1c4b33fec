"""Samples and weights that a test's ranks and its reference generate independently, from names."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def num_held_out(batch: int) -> int:
    """The number of held-out samples: fewer than a batch, which is padded."""
    return max(1, batch - 1)


class RandomSamples:
    """Random tokens. Every third sample ends in tokens that are not valid targets. `read`: the samples read so far."""

    num_windows = 1 << 40  # a run validates on the first ones

    def __init__(self, vocab: int, sequence: int) -> None:
        self.vocab, self.sequence = vocab, sequence
        self.read: list[int] = []

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        self.read.append(index)
        z = np.random.default_rng(index).integers(0, self.vocab, self.sequence + 2)
        if index % 3 == 0:
            z[-(1 + index % self.sequence) :] = -1
        return z

    def starts(self, index: int) -> npt.NDArray[np.int64]:
        """The start of each token's document. Documents have one token or more."""
        begins = np.random.default_rng([index, 1]).random(self.sequence + 2) < 0.4
        begins[0] = True
        return np.maximum.accumulate(begins * np.arange(self.sequence + 2))

    def causal_pairs(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each sample, the number of pairs of a token and a token that it sees."""
        starts = np.array([self.starts(int(index))[: self.sequence] for index in indices])
        return (np.arange(self.sequence) - starts + 1).sum(axis=1)


def weight(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Norms around one, biases large enough to change choices, other weights of a size that keeps activations alive."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    noise = np.random.default_rng(seed).standard_normal(shape)
    if name.endswith("norm"):
        return 1.0 + 0.2 * noise
    return 0.1 * noise if name.endswith("bias") else 0.3 * noise


def table(name: str, shape: tuple[int, ...], below: int) -> npt.NDArray[np.int32]:
    """Rows of distinct integers below `below`."""
    generator = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
    rows = [generator.permutation(below)[: shape[1]] for _ in range(shape[0])]
    return np.array(rows, np.int32)


def steady_weight(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Noise that is smaller for wider matrices, so that neither values nor gradients grow from layer to layer."""
    return weight(name, shape) * (3 / np.sqrt(shape[-1]) if len(shape) > 1 else 1.0)
