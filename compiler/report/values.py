"""What a report shows: plain frozen values, no torch. `Report` is the whole input of the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from compiler.schedules.placement import BIDIRECTIONAL, direction, stages_of
from compiler.schedules.schedule import Schedule
from compiler.schedules.simulate import Timeline
from runtime.actions import Action, ActionKind, actions_of

Time = float | Fraction


@dataclass(frozen=True, slots=True)
class Drawn:
    """One action. `direction` 0 or 1 chooses the tint: the end its micro-batch enters from, or the rank's stage."""

    label: str  # F3.7
    kind: ActionKind
    direction: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Cell:
    """A step of a rank: one action, or the two of an overlapped pair, from `start` to `end`."""

    actions: tuple[Drawn, ...]
    start: Time
    end: Time


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage, what it holds ("embed", "layers 0–2"), and its pipeline ranks: one a direction, the mirror second."""

    index: int
    holds: tuple[str, ...]
    ranks: tuple[int, ...]
    parameters: int


@dataclass(frozen=True, slots=True)
class RankRow:
    """A pipeline rank: every world rank of it, [first, last], stores this much. `memory`: (kind, bytes)."""

    rank: int
    world_ranks: tuple[int, int]
    stages: tuple[int, ...]
    parameters: int
    memory: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """An expert rank: experts [first, last] of every MoE layer, on these data ranks of every pipeline rank."""

    rank: int
    first: int
    last: int
    data_ranks: tuple[int, ...]


@dataclass(frozen=True)
class RunFigures:
    """What a run left: the rows of metrics.jsonl, meta.json of its data, load.json; empty where there is none."""

    metrics: tuple[Mapping[str, Any], ...]
    data: Mapping[str, Any]
    load: Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """A build, and a run of it if there is one."""

    name: str
    subtitle: str
    facts: tuple[tuple[str, str], ...]
    schedule_name: str  # "dualpipe, 4 ranks, 10 micro-batches"
    schedule: tuple[tuple[Cell, ...], ...]  # per pipeline rank
    time_unit: str  # what times are counted in: "forwards of a stage"
    directions: tuple[str, ...]  # what direction 0, and 1 where there is one, means
    stages: tuple[StageRow, ...]
    ranks: tuple[RankRow, ...]
    capacity_bytes: int | None  # of one device
    experts: tuple[ExpertRow, ...]
    moe_layers: tuple[str, ...]  # names of the rows of load.json
    assumptions: tuple[str, ...]
    run: RunFigures | None = None


def drawn_schedule(schedule: Schedule, timeline: Timeline) -> tuple[tuple[tuple[Cell, ...], ...], tuple[str, ...]]:
    """The cells of a simulated schedule, and what their directions mean: fields `schedule` and `directions`."""
    P, N, placement = schedule.num_ranks, schedule.num_micro_batches, schedule.placement

    def drawn(rank: int, action: Action) -> Drawn:
        tint = direction(placement, N, action.micro_batch)
        if placement != BIDIRECTIONAL:
            tint = stages_of(placement, P, rank).index(action.stage) % 2
        return Drawn(str(action), action.kind, tint, action.micro_batch)

    cells = tuple(
        tuple(
            Cell(tuple(drawn(rank, action) for action in actions_of(step)), start, end)
            for step, (start, end) in zip(steps, spans, strict=True)
        )
        for rank, (steps, spans) in enumerate(zip(schedule.actions, timeline.spans, strict=True))
    )
    if placement == BIDIRECTIONAL:
        return cells, ("from the first rank on", "from the last rank back")
    return cells, ("stage",) if len(stages_of(placement, P, 0)) == 1 else ("even pass", "odd pass")
