"""Bytes of activations, and those that a rank holds beside them: from a cap in bytes to one in activations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from compiler.files.text import object_of
from dsl.facts import units

GIGA = 10**9
MOST = 10**18  # bytes
MOST_GIGABYTES = 10**5  # a larger number without a unit is one of bytes
_AMOUNT = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:([kmgt])(i?)|b?)b?\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Bytes:
    """What one stage's activation of one micro-batch takes; by rank, what is held beside activations, or one for all.

    `activation` 0: nobody knows.
    """

    activation: Fraction = Fraction(0)
    beside: tuple[Fraction, ...] = ()

    def longer(self, by: Fraction) -> Bytes:
        """Bytes where a stage is so many times as large; what is beside is of the rank, whatever its stages."""
        return replace(self, activation=self.activation * by)

    def of_rank(self, rank: int) -> Fraction:
        """What a rank holds beside activations."""
        return self.beside[rank if len(self.beside) > 1 else 0] if self.beside else Fraction(0)

    def held(self, activations: Sequence[Fraction]) -> tuple[Fraction, ...]:
        """By rank, the bytes of so many activations and of what is beside them."""
        return tuple(self.of_rank(rank) + count * self.activation for rank, count in enumerate(activations))

    def caps(self, memory: Fraction, num_ranks: int) -> tuple[Fraction, ...]:
        """By rank, the activations for which there is room; ValueError where there is none for a single one."""
        if not self.activation:
            raise ValueError(
                "a cap in bytes needs those of an activation: write "
                '"bytes": {"activation": "2GB", "beside": "30GB"} in a file of costs'
            )
        caps = tuple((memory - self.of_rank(rank)) / self.activation for rank in range(num_ranks))
        if min(caps) < 1:
            rank = caps.index(min(caps))
            holds = f"{gigabytes(self.of_rank(rank))} beside activations, which take {gigabytes(self.activation)}"
            least = max(self.of_rank(rank) for rank in range(num_ranks)) + self.activation
            raise ValueError(f"rank {rank} holds {holds} each: use {gigabytes(least)} or more")
        return caps


UNKNOWN = Bytes()


def bytes_of_json(value: Any) -> Bytes:
    """What JSON says of activations and of what is beside them; ValueError says what is wrong."""
    said = object_of(value, {"activation": object, "beside": object}, '"bytes"')
    if said in ({}, {"activation": 0, "beside": []}):  # the second is what is printed where nobody knows
        return UNKNOWN
    for key, what in (("activation", "what an activation takes"), ("beside", "what a rank holds beside activations")):
        if said.get(key, []) == []:
            raise ValueError(f'"bytes" has no "{key}", {what}: write it too, as "{key}": "30GB", or 0')
    each = said["beside"] if isinstance(said["beside"], list) else [said["beside"]]
    found = Bytes(_amount(said["activation"]), tuple(map(_amount, each)))
    if not found.activation:
        raise ValueError('"bytes": "activation" is 0: write what an activation takes, as "2GB", or leave "bytes" out')
    return found


def _amount(value: Any) -> Fraction:
    if isinstance(value, str):
        return parse_bytes(value)
    if not isinstance(value, Fraction):
        raise ValueError('"bytes" has numbers of bytes, or texts as "80GB"')
    return value


def parse_bytes(text: str) -> Fraction:
    """Bytes as a spec writes them, `80GB` or `79.1GiB`; ValueError for what is none."""
    found = units.quantity(text) if units.NUMBER.fullmatch(text) else None
    if len(text) > 40 or found is None or found.dimension != (("byte", 1),) or found.value > MOST:
        raise ValueError(f"{text[:40]!r} is no amount of memory: write it as {_meant(text)}")
    return found.value


def _meant(text: str) -> str:
    """What was probably meant by `41`, `41 GB`, `41gb` or `41G`; without a unit GB, or of a large number, bytes."""
    found = _AMOUNT.fullmatch(text)
    if found is None:
        return "80GB or 79.1GiB"
    number, prefix, binary = found.groups(default="")
    if prefix:
        return f"{number}{prefix.upper()}{binary.lower()}B"
    return f"{number}GB" if Fraction(number) < MOST_GIGABYTES else gigabytes(Fraction(number))


def gigabytes(value: Fraction) -> str:
    """Bytes for people, never fewer than they are: 71.25GB."""
    whole, part = divmod(-(-value * 1000 // GIGA), 1000)
    return f"{whole}.{part:03}".rstrip("0").rstrip(".") + "GB"
