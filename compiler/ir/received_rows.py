"""How many rows an expert rank has of its experts, padding among them: each expert's are padded to a multiple."""

from __future__ import annotations

from typing import NamedTuple


class Received(NamedTuple):
    """What a rank receives in a layer and micro-batch."""

    rows: int  # R: of its experts, with their padding
    copies: int = 0  # P: of tokens from its column, to be forwarded inside its node
    forwarded: int = 0  # X: rows that it forwards


def even_rows(rows: int, experts: int, alignment: int) -> int:
    """Rows with their padding where `rows` are spread evenly over the experts of a rank."""
    each, more = divmod(rows, experts)
    tiles = more * -(-(each + 1) // alignment) + (experts - more) * -(-each // alignment)
    return tiles * alignment


def most_rows(rows: int, experts: int, alignment: int) -> int:
    """Rows with their padding where `rows` are spread over the experts so that padding is greatest: as many experts as
    can have one row beyond whole multiples."""
    begun = min(rows, experts)
    return (begun + (rows - begun) // alignment) * alignment
