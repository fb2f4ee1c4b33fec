"""Samples and weights that a test's ranks and its reference both make for themselves, from names alone."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def num_held_out(batch: int) -> int:
    """How many samples a test holds out: fewer than a batch, which is filled up."""
    return max(1, batch - 1)


class RandomSamples:
    """Random tokens; every third sample ends in tokens that are no valid targets. `read`: the samples that were."""

    num_windows = 1 << 40  # of which a run validates on the first

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
        """Where the document of each token begins: documents of one token and more."""
        begins = np.random.default_rng([index, 1]).random(self.sequence + 2) < 0.4
        begins[0] = True
        return np.maximum.accumulate(begins * np.arange(self.sequence + 2))

    def seen(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """By sample, pairs of a token of the sequence and one that it sees."""
        starts = np.array([self.starts(int(index))[: self.sequence] for index in indices])
        return (np.arange(self.sequence) - starts + 1).sum(axis=1)


def weight(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Norms around one, biases wide enough to change choices, the rest of the size that keeps activations alive."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    noise = np.random.default_rng(seed).standard_normal(shape)
    if name.endswith("norm"):
        return 1.0 + 0.2 * noise
    return 0.1 * noise if name.endswith("bias") else 0.3 * noise


def table(name: str, shape: tuple[int, ...], below: int) -> npt.NDArray[np.int32]:
    """Rows of different whole numbers below `below`."""
    generator = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
    rows = [generator.permutation(below)[: shape[1]] for _ in range(shape[0])]
    return np.array(rows, np.int32)


def steady_weight(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Noise that is smaller the wider a matrix is: neither values nor gradients grow from layer to layer."""
    return weight(name, shape) * (3 / np.sqrt(shape[-1]) if len(shape) > 1 else 1.0)
