"""How many rows an expert rank has of its experts, padding among them: each expert's are padded to a multiple."""

from __future__ import annotations


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
