"""Bytes of activations, and of what a rank holds besides them; converts a cap in bytes to one in activations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from compiler.files.text import object_of
from dsl.facts import units

GIGA = 10**9
MAX_BYTES = 10**18  # bytes
MOST_GIGABYTES = 10**5  # a larger number without a unit is taken for bytes
_AMOUNT = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:([kmgt])(i?)|b?)b?\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Bytes:
    """Bytes of activations, and of everything else on a rank."""

    activation: Fraction = Fraction(0)  # of one stage and micro-batch; 0 if unknown
    beside: tuple[Fraction, ...] = ()  # besides activations: by rank, or one value for all ranks

    def scale_activation(self, scale: Fraction) -> Bytes:
        """Bytes for stages that are `scale` times as large. `beside` belongs to the rank and stays."""
        return replace(self, activation=self.activation * scale)

    def of_rank(self, rank: int) -> Fraction:
        """The bytes that a rank holds besides activations."""
        return self.beside[rank if len(self.beside) > 1 else 0] if self.beside else Fraction(0)

    def held_bytes(self, activations: Sequence[Fraction]) -> tuple[Fraction, ...]:
        """By rank, the bytes of the given numbers of activations and of everything else."""
        return tuple(self.of_rank(rank) + count * self.activation for rank, count in enumerate(activations))

    def caps(self, memory: Fraction, num_ranks: int) -> tuple[Fraction, ...]:
        """By rank, the number of activations that fit. Raises ValueError if a rank has no room for one."""
        if not self.activation:
            raise ValueError(
                "a cap in bytes needs the bytes of an activation: write "
                '"bytes": {"activation": "2GB", "beside": "30GB"} in a file of costs'
            )
        caps = tuple((memory - self.of_rank(rank)) / self.activation for rank in range(num_ranks))
        if min(caps) < 1:
            rank = caps.index(min(caps))
            holds = f"{gigabytes(self.of_rank(rank))} besides activations, which take {gigabytes(self.activation)}"
            least = max(self.of_rank(rank) for rank in range(num_ranks)) + self.activation
            raise ValueError(f"rank {rank} holds {holds} each: use {gigabytes(least)} or more")
        return caps


UNKNOWN = Bytes()


def bytes_of_json(value: Any) -> Bytes:
    """Parse the bytes of activations and of everything else. Raises ValueError with the mistake."""
    fields = object_of(value, {"activation": object, "beside": object}, '"bytes"')
    if fields in ({}, {"activation": 0, "beside": []}):  # the second is printed for unknown bytes
        return UNKNOWN
    meanings = {"activation": "the size of an activation", "beside": "what a rank holds besides activations"}
    for key, meaning in meanings.items():
        if fields.get(key, []) == []:
            raise ValueError(f'"bytes" has no "{key}", {meaning}: write it too, as "{key}": "30GB", or 0')
    beside = fields["beside"] if isinstance(fields["beside"], list) else [fields["beside"]]
    sizes = Bytes(_amount(fields["activation"]), tuple(map(_amount, beside)))
    if not sizes.activation:
        raise ValueError('"bytes": "activation" is 0: write the size of an activation, as "2GB", or remove "bytes"')
    return sizes


def _amount(value: Any) -> Fraction:
    if isinstance(value, str):
        return parse_bytes(value)
    if not isinstance(value, Fraction):
        raise ValueError('"bytes" must have numbers of bytes, or strings such as "80GB"')
    return value


def parse_bytes(text: str) -> Fraction:
    """Parse bytes as a spec writes them: `80GB` or `79.1GiB`. Raises ValueError."""
    quantity = units.quantity(text) if units.NUMBER.fullmatch(text) else None
    if len(text) > 40 or quantity is None or quantity.dimension != (("byte", 1),) or quantity.value > MAX_BYTES:
        raise ValueError(f"{text[:40]!r} is not an amount of memory: write it as {_suggested_amount(text)}")
    return quantity.value


def _suggested_amount(text: str) -> str:
    """The probable meaning of `41`, `41 GB`, `41gb` or `41G`. Without a unit these are GB or, if large, bytes."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        return "80GB or 79.1GiB"
    number, prefix, binary = match.groups(default="")
    if prefix:
        return f"{number}{prefix.upper()}{binary.lower()}B"
    return f"{number}GB" if Fraction(number) < MOST_GIGABYTES else gigabytes(Fraction(number))


def gigabytes(value: Fraction) -> str:
    """Bytes in GB, rounded up: 71.25GB."""
    integer, thousandths = divmod(-(-value * 1000 // GIGA), 1000)
    return f"{integer}.{thousandths:03}".rstrip("0").rstrip(".") + "GB"
