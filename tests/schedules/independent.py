"""A judge of schedules that reads their text alone: legality, times and activations, by the rules of docs/schedules.md.

It shares no code with the product: neither its reader, nor its placements, costs or simulator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

Cell = tuple[str, int, int]  # kind, stage, micro-batch
Times = Mapping[str, Fraction]  # F, I, W, B and pairs such as BF, of one of the schedule's stages


class Judged(NamedTuple):
    """What a schedule takes, and the most activations that each rank holds, in those of its stages."""

    makespan: Fraction
    peaks: tuple[int, ...]


def judge(text: str, times: Times, latency: Fraction = Fraction(0)) -> Judged:
    """AssertionError where the order is not legal, or where ranks wait for each other for ever."""
    head, *lines = text.strip().splitlines()
    match = re.fullmatch(r"# \S+ ranks=(\d+) micro_batches=(\d+) placement=(v|bidirectional|loop\((\d+)\))", head)
    assert match is not None, head
    P, N, placement = int(match[1]), int(match[2]), match[3]
    stages = P * (2 if placement == "v" else int(match[4] or 1))
    rows = [[_cells(word) for word in line.split()] for line in lines]
    assert len(rows) == P

    def home(stage: int, micro_batch: int) -> int:
        if placement == "v":
            return stage if stage < P else 2 * P - 1 - stage
        if placement == "bidirectional":
            return stage if 2 * micro_batch < N else P - 1 - stage
        return stage % P

    ran = {cell: rank for rank, row in enumerate(rows) for step in row for cell in step}
    assert sum(len(step) for row in rows for step in row) == len(ran), "an action runs twice"
    split = {(stage, m) for kind, stage, m in ran if kind == "I"}
    wanted = {
        (kind, stage, m)
        for stage in range(stages)
        for m in range(N)
        for kind in (("F", "I", "W") if (stage, m) in split else ("F", "B"))
    }
    assert ran.keys() == wanted, "an action is missing, or of no stage"
    assert all(rank == home(stage, m) for (_, stage, m), rank in ran.items()), "an action is on another rank"

    ends: dict[Cell, Fraction] = {}
    now, at, spans = [Fraction(0)] * P, [0] * P, list[tuple[Fraction, Fraction, int, tuple[Cell, ...]]]()
    while any(at[rank] < len(rows[rank]) for rank in range(P)):
        moved = False
        for rank in range(P):
            while at[rank] < len(rows[rank]):
                step = rows[rank][at[rank]]
                needs = [
                    (need, latency if ran[need] != rank else Fraction(0))
                    for cell in step
                    for need in _needs(cell, stages, split)
                ]
                if any(need not in ends for need, _ in needs):
                    break
                start = max([now[rank], *(ends[need] + delay for need, delay in needs)])
                now[rank] = start + _time(step, times)
                spans.append((start, now[rank], rank, step))
                ends |= dict.fromkeys(step, now[rank])
                at[rank], moved = at[rank] + 1, True
        assert moved, "ranks wait for each other for ever"

    peaks = []
    for rank in range(P):
        held = most = 0
        for *_, step in (span for span in spans if span[2] == rank):
            held += sum(kind == "F" for kind, *_ in step)
            most = max(most, held)
            held -= sum(kind in "BW" for kind, *_ in step)
        assert held == 0
        peaks.append(most)
    return Judged(max(now), tuple(peaks))


def _cells(word: str) -> tuple[Cell, ...]:
    parts = word.strip("()").split("|")
    found = [re.fullmatch(r"([FBIW])(\d+)\.(\d+)", part) for part in parts]
    assert all(found) and len(found) in (1, 2), word
    return tuple((match[1], int(match[2]), int(match[3])) for match in found if match)


def _needs(cell: Cell, stages: int, split: set[tuple[int, int]]) -> list[Cell]:
    """What must have ended before an action begins."""
    kind, stage, m = cell
    if kind == "F":
        return [("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [("I", stage, m)]
    behind = [("I" if (stage + 1, m) in split else "B", stage + 1, m)] if stage + 1 < stages else []
    return [("F", stage, m), *behind]


def _time(step: tuple[Cell, ...], times: Times) -> Fraction:
    kinds = "".join(sorted(kind for kind, *_ in step))
    return times.get(kinds, sum((times[kind] for kind in kinds), Fraction(0)))
