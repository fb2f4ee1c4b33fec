"""What the fullest device lacks at least, however layers are split over stages: known before they are.

Ranks that store the same stages are a cell. The fullest device of a cell holds no less than the mean of its ranks, each
at a moment of its own, and a layer adds no less to that mean than in the stage where it adds least. So layers of one
kind, and those that nowhere add less, are given one after the other to the cell that then holds least: what the fullest
cell has in the end, it has on any split.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from statistics import fmean

from compiler.ir.stage_placement import StagePlacement
from compiler.plan.layer_runs import Bytes, Holding, Moment, Runs, held_by


def missing_with(holding: Holding, placement: StagePlacement, runs: Runs) -> tuple[int, int]:
    """The most bytes that the device of a pipeline rank lacks at least with these layers on each stage, and the rank;
    below 0 where all may fit."""
    num_ranks, last = len(holding.room), len(runs) - 1
    blocks: list[list[Bytes]] = [[*holding.layers[begin:end]] for begin, end in runs]
    blocks[0].append(holding.first)
    blocks[last].append(holding.last)
    totals: list[Bytes] = [
        (sum(a for a, _, _ in each), sum(f for _, f, _ in each), sum(i for *_, i in each)) for each in blocks
    ]
    missing = []
    for rank, moments in enumerate(holding.moments):
        stages = placement.stages_of(num_ranks, rank)
        most = max(sum(held_by(often, totals[s]) for s, often in zip(stages, each, strict=True)) for each in moments)
        missing.append((most - _shared(holding, stages, last) - holding.room[rank], rank))
    return max(missing, key=lambda each: (each[0], -each[1]))


def missing_anywhere(holding: Holding, placement: StagePlacement) -> int:
    """Bytes that the fullest device lacks at least on any split of the layers; below 0 where all may fit."""
    kinds = Counter(holding.layers)
    cells = _cells(holding, placement, kinds)
    return int(max(_fullest(cells, kind, kinds) for kind in kinds)) - max(holding.room)


def _shared(holding: Holding, stages: Sequence[int], last: int) -> int:
    """What a rank that has both ends holds once and not twice."""
    return holding.shared if {0, last} <= {*stages} else 0


@dataclass(frozen=True)
class _Cell:
    """Bytes of the fullest device of a cell at least: without layers that may be anywhere, and what each adds."""

    empty: float
    adds: Mapping[Bytes, float]


def _fullest(cells: Sequence[_Cell], kind: Bytes, kinds: Mapping[Bytes, int]) -> float:
    """What the fullest cell has in the end, of layers of a kind and of those that nowhere add less."""
    count = sum(n for other, n in kinds.items() if all(cell.adds[other] >= cell.adds[kind] for cell in cells))
    waiting = [(cell.empty + cell.adds[kind], cell.adds[kind]) for cell in cells]
    most = max(cell.empty for cell in cells)
    heapify(waiting)
    for _ in range(count):
        held, adds = waiting[0]
        most = max(most, held)
        heapreplace(waiting, (held + adds, adds))
    return most


def _cells(holding: Holding, placement: StagePlacement, kinds: Mapping[Bytes, int]) -> list[_Cell]:
    """The cells of a pipeline. Of the moments of a rank, those count at which it holds most of all its stages."""
    num_ranks = len(holding.room)
    last = placement.num_stages(num_ranks) - 1
    found: dict[tuple[int, ...], list[tuple[int, Moment]]] = defaultdict(list)
    for rank, moments in enumerate(holding.moments):
        stages = placement.stages_of(num_ranks, rank)
        fullest = max(
            moments, key=lambda each: sum(n * held_by(often, kind) for often in each for kind, n in kinds.items())
        )
        held = max(holding.room) - holding.room[rank] - _shared(holding, stages, last)
        for stage, often in zip(stages, fullest, strict=True):
            held += held_by(often, holding.first) if stage == 0 else 0
            held += held_by(often, holding.last) if stage == last else 0
        found[stages].append((held, fullest))
    return [_cell(stages, moments, kinds, last) for stages, moments in found.items()]


def _cell(stages: Sequence[int], moments: Sequence[tuple[int, Moment]], kinds: Iterable[Bytes], last: int) -> _Cell:
    """The mean of the ranks of a cell, each at its moment. Every stage but the two outer ones has a layer."""
    held = fmean(each for each, _ in moments)
    means = {
        kind: [fmean(held_by(moment[run], kind) for _, moment in moments) for run in range(len(stages))]
        for kind in kinds
    }
    for run, stage in enumerate(stages):
        if stage not in (0, last):
            held += min(mean[run] - min(mean) for mean in means.values())
    return _Cell(held, {kind: min(mean) for kind, mean in means.items()})
