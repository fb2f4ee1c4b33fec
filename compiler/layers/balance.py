"""Layers to pipeline stages: an exact dynamic program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate


def balance(layers: Sequence[int], first: int, last: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """(begin, end) of the layers of each stage: contiguous runs whose largest cost is the smallest possible.

    layers: cost of each layer; first, last: cost of what the first and the last stage have besides. Among the splits
    with the smallest maximum, the one with the smallest sum of squares, and of those the one with the earliest ends.
    The first and the last stage may be without layers, the others not: num_stages <= len(layers) + 2.
    """
    num_layers = len(layers)
    assert 1 <= num_stages <= num_layers + 2, f"{num_layers} layers cannot fill {num_stages} stages"
    before = [0, *accumulate(layers)]

    def cost(stage: int, begin: int, end: int) -> int:
        ends = (first if stage == 0 else 0) + (last if stage == num_stages - 1 else 0)
        return before[end] - before[begin] + ends

    def best(join: Callable[[int, int], int], limit: int | None) -> tuple[int, list[int]]:
        """Smallest `join` of the stage costs, none above `limit`, and where each stage ends."""
        table: dict[int, tuple[int, list[int]]] = {0: (0, [])}
        for stage in range(num_stages):
            inner = 0 < stage < num_stages - 1
            ends = (num_layers,) if stage == num_stages - 1 else range(num_layers + 1)
            following: dict[int, tuple[int, list[int]]] = {}
            for end in ends:
                options = [
                    (join(value, cost(stage, begin, end)), [*stops, end])
                    for begin, (value, stops) in table.items()
                    if begin + inner <= end and (limit is None or cost(stage, begin, end) <= limit)
                ]
                if options:
                    following[end] = min(options)
            table = following
        return table[num_layers]

    largest, _ = best(max, None)
    _, ends = best(lambda total, value: total + value * value, largest)
    return tuple(zip([0, *ends[:-1]], ends, strict=True))
