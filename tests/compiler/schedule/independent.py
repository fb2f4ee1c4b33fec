"""A judge of schedules that reads their text alone: legality, times and activations, by the rules of docs/schedules.md.

It shares no code with the product: neither its reader, nor its placements, costs or simulator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

Cell = tuple[str, int, int]  # kind, stage, micro-batch
Times = Mapping[str, Fraction]  # F, I, W, B, pairs such as BF, and O and R, of one of the schedule's stages
Weights = Sequence[Mapping[str, Fraction]]  # factor of each kind, by stage


class Judged(NamedTuple):
    """The makespan of a schedule, and the peak activations of each rank, in activations of its stages."""

    makespan: Fraction
    peaks: tuple[int, ...]


def judge(text: str, times: Times, latency: Fraction = Fraction(0), weights: Weights = ()) -> Judged:
    """AssertionError if the order is not legal, or if ranks wait for each other forever."""
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

    rank_of = {cell: rank for rank, row in enumerate(rows) for step in row for cell in step}
    assert sum(len(step) for row in rows for step in row) == len(rank_of), "an action runs twice"
    split = {(stage, m) for kind, stage, m in rank_of if kind == "I"}
    offloaded = {(stage, m) for kind, stage, m in rank_of if kind == "O"}
    wanted = {
        (kind, stage, m)
        for stage in range(stages)
        for m in range(N)
        for kind in (("F", "I", "W") if (stage, m) in split else ("F", "B"))
    } | {(kind, *cell) for cell in offloaded for kind in "OR"}
    assert rank_of.keys() == wanted, "an action is missing, or of no stage"
    assert all(rank == home(stage, m) for (_, stage, m), rank in rank_of.items()), "an action is on another rank"

    ends: dict[Cell, Fraction] = {}
    clocks, positions, spans = [Fraction(0)] * P, [0] * P, list[tuple[Fraction, Fraction, int, tuple[Cell, ...]]]()
    lanes = {(kind, rank): Fraction(0) for kind in "OR" for rank in range(P)}  # when the last copy has ended
    while any(positions[rank] < len(rows[rank]) for rank in range(P)):
        moved = False
        for rank in range(P):
            while positions[rank] < len(rows[rank]):
                step = rows[rank][positions[rank]]
                needs = [
                    (need, latency if rank_of[need] != rank else Fraction(0))
                    for cell in step
                    for need in _needs(cell, stages, split, offloaded)
                ]
                if any(need not in ends for need, _ in needs):
                    break
                if step[0][0] in "OR":
                    _copy(step, rank, clocks, lanes, ends, times, spans)
                    positions[rank], moved = positions[rank] + 1, True
                    continue
                start = max([clocks[rank], *(ends[need] + delay for need, delay in needs)])
                clocks[rank] = start + _time(step, times, weights)
                spans.append((start, clocks[rank], rank, step))
                ends |= dict.fromkeys(step, clocks[rank])
                positions[rank], moved = positions[rank] + 1, True
        assert moved, "ranks wait for each other for ever"

    peaks = tuple(_peak([span for span in spans if span[2] == rank]) for rank in range(P))
    return Judged(max(clocks), peaks)


def _copy(
    step: tuple[Cell, ...],
    rank: int,
    now: list[Fraction],
    lanes: dict[tuple[str, int], Fraction],
    ends: dict[Cell, Fraction],
    times: Times,
    spans: list[tuple[Fraction, Fraction, int, tuple[Cell, ...]]],
) -> None:
    """A copy; a rank waits for its end at an O, and the backward waits for it at an R."""
    ((kind, stage, m),) = step
    start = max(lanes[kind, rank], ends["F", stage, m] if kind == "O" else now[rank])
    lanes[kind, rank] = ends[step[0]] = start + times[kind]
    if kind == "O":
        now[rank] = max(now[rank], start + times[kind])
    spans.append((now[rank], start + times[kind], rank, step))


def _peak(spans: list[tuple[Fraction, Fraction, int, tuple[Cell, ...]]]) -> int:
    """The most that a rank holds, counted in its order; it never holds more at any moment."""
    activations = peak = 0
    changes: list[tuple[Fraction, int]] = []
    for start, end, _, step in spans:
        kinds = [kind for kind, *_ in step]
        allocated, freed = sum(kind in "FR" for kind in kinds), sum(kind in "BWO" for kind in kinds)
        activations += allocated
        peak = max(peak, activations)
        activations -= freed
        changes += [(start, allocated), (end, -freed)]
    assert activations == 0
    if any(step[0][0] == "O" for *_, step in spans):
        assert max(sum(change for time, change in changes if time <= moment) for moment, _ in changes) <= peak
    return peak


def _cells(word: str) -> tuple[Cell, ...]:
    parts = word.strip("()").split("|")
    matches = [re.fullmatch(r"([FBIWOR])(\d+)\.(\d+)", part) for part in parts]
    assert all(matches) and len(matches) in (1, 2), word
    assert len(matches) == 1 or not set(word) & {"O", "R"}, "a copy is no half of a pair"
    return tuple((match[1], int(match[2]), int(match[3])) for match in matches if match)


def _needs(cell: Cell, stages: int, split: set[tuple[int, int]], away: set[tuple[int, int]]) -> list[Cell]:
    """The actions that must end before an action begins."""
    kind, stage, m = cell
    if kind == "F":
        return [("F", stage - 1, m)] if stage else []
    if kind in "WOR":
        return [({"W": "I", "O": "F", "R": "O"}[kind], stage, m)]
    behind = [("I" if (stage + 1, m) in split else "B", stage + 1, m)] if stage + 1 < stages else []
    return [("R" if (stage, m) in away else "F", stage, m), *behind]


def _time(step: tuple[Cell, ...], times: Times, weights: Weights) -> Fraction:
    kinds = "".join(sorted(kind for kind, *_ in step))
    apart = sum((times[kind] for kind in kinds), Fraction(0))
    time = times.get(kinds, apart)
    factors = [weights[stage][kind] if weights else Fraction(1) for kind, stage, _ in step]
    if len(set(factors)) == 1:
        return factors[0] * time
    lone = [times[kind] for kind, *_ in step]  # a pair saves the same share, and is no shorter than its longer action
    shared = time / apart * sum(a * b for a, b in zip(lone, factors, strict=True))
    return max(shared, *(min(a, time) * b for a, b in zip(lone, factors, strict=True)))
