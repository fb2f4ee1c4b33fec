"""Permutations of range(num) by seed and epoch, with random access to any place.

A Feistel network permutes range(4^k) for the least 4^k ≥ num. Following its cycle until the value is below num gives a
permutation of range(num) (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002), in at most 4 steps on
average.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_ROUNDS = 6  # four make a Feistel network over a good round function indistinguishable from chance (Luby and Rackoff)

Numbers = npt.NDArray[np.int64]


def permute(place: int, num: int, seed: int, epoch: int) -> int:
    """Return the image of `place` under the permutation of range(num) for (seed, epoch)."""
    assert 0 <= place < num
    key, half = _network(num, seed, epoch)
    rounds = _view(key, half)
    place = _feistel(place, half, key, rounds)
    while place >= num:
        place = _feistel(place, half, key, rounds)
    return place


def permute_all(places: Numbers, num: int, seed: int, epoch: int) -> Numbers:
    """Return the images of several places, as `permute` does."""
    key, half = _network(num, seed, epoch)
    rounds = _rounds(key, half)
    images = _feistel_all(places, half, key, rounds)
    while (outside := np.flatnonzero(images >= num)).size:
        images[outside] = _feistel_all(images[outside], half, key, rounds)
    return images


def unpermute(window: int, num: int, seed: int, epoch: int) -> int:
    """Return the place whose image is `window`; the inverse of `permute`."""
    assert 0 <= window < num
    key, half = _network(num, seed, epoch)
    window = _feistel_back(window, half, key)
    while window >= num:
        window = _feistel_back(window, half, key)
    return window


@lru_cache(maxsize=8)  # as of the results of rounds
def _network(num: int, seed: int, epoch: int) -> tuple[bytes, int]:
    """Return the key of the network that permutes range(num), and half its number of bits."""
    key = hashlib.blake2b(f"{seed}\0{epoch}".encode(), digest_size=32).digest()
    return key, max(1, ((num - 1).bit_length() + 1) // 2)


def _feistel(value: int, half: int, key: bytes, rounds: memoryview) -> int:
    """Permute [0, 4^half). `rounds`: as of `_feistel_all`."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for number in range(_ROUNDS):
        image = rounds[number, right]
        if image < 0:
            image = rounds[number, right] = _round(number, right, key) & mask
        left, right = right, left ^ image
    return left << half | right


def _feistel_all(values: Numbers, half: int, key: bytes, rounds: Numbers) -> Numbers:
    """Apply `_feistel` to several values. `rounds`: cache of round results, [round, half of a value], -1 if missing."""
    mask = (1 << half) - 1
    left, right = values >> half, values & mask
    for number, table in enumerate(rounds):
        for missing in np.unique(right[table[right] < 0]).tolist():
            table[missing] = _round(number, missing, key) & mask
        left, right = right, left ^ table[right]
    return left << half | right


@lru_cache(maxsize=8)  # an epoch has one permutation, with phases two; a step may span two epochs
def _rounds(key: bytes, half: int) -> Numbers:
    """Return an empty cache of round results. There are few halves, and a run needs most of them again."""
    return np.full((_ROUNDS, 1 << half), -1, np.int64)


@lru_cache(maxsize=8)
def _view(key: bytes, half: int) -> memoryview:
    """Return the same cache, whose single results Python reads faster."""
    return _rounds(key, half).data


def _feistel_back(value: int, half: int, key: bytes) -> int:
    """The inverse of `_feistel`."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for number in reversed(range(_ROUNDS)):
        left, right = right ^ (_round(number, left, key) & mask), left
    return left << half | right


def _round(number: int, half: int, key: bytes) -> int:
    block = hashlib.blake2b(struct.pack("<BQ", number, half), key=key, digest_size=8).digest()
    return int.from_bytes(block, "little")
