"""What a report shows: plain frozen values, no torch. `Report` is the whole input of the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compiler.predict.memory_run import Measured
from compiler.predict.planned_step import Planned
from compiler.tools.picture import Panel
from compiler.tools.report.lost_time import LostTime


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage, what it holds ("embed", "layers 0–2"), and its pipeline ranks: one a direction, the mirror second."""

    index: int
    holds: tuple[str, ...]
    ranks: tuple[int, ...]
    parameters: int


@dataclass(frozen=True, slots=True)
class RankRow:
    """A pipeline rank: every world rank of it, [first, last], stores this much. `memory`: (kind, bytes) at its peak."""

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
    memory: tuple[Measured, ...] = ()  # of the values of every rank
    damaged_rows: int = 0  # lines of metrics.jsonl that are none
    lost: LostTime | None = None
    events: tuple[Mapping[str, Any], ...] = ()  # those of a step


@dataclass(frozen=True)
class Report:
    """A build, and a run of it if there is one."""

    name: str
    subtitle: str
    facts: tuple[tuple[str, str], ...]
    schedule: Panel
    time_unit: str  # what times are counted in: "forwards of a stage"
    stages: tuple[StageRow, ...]
    ranks: tuple[RankRow, ...]
    capacity_bytes: int | None  # of one device
    experts: tuple[ExpertRow, ...]
    moe_layers: tuple[str, ...]  # names of the rows of load.json
    assumptions: tuple[str, ...]
    run: RunFigures | None = None
    planned: Planned | None = None  # what the planner says of its largest batch
    fuller: tuple[int, int] | None = None  # rank and bytes, where steps of a smaller batch hold more than the largest
