"""Make the `Report`, the values of the page, from a spec and its lowered program, before or after a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.emit.build_files import layers_of
from compiler.ir import Plan, Use
from compiler.plan.plan import HELD
from compiler.predict.planned_step import PARTS, PlannedStep, PredictedStep, predict_step
from compiler.predict.prediction import RankMemory
from compiler.program.lower.estimate import rank_times
from compiler.program.lowered import LoweredPlan
from compiler.schedule.costs import Costs
from compiler.tools.picture.comm_lane import lanes_of
from compiler.tools.picture.drawing import Panel
from compiler.tools.picture.panel import panel_of
from compiler.tools.report.lost_time import LostTime
from compiler.tools.report.measured_memory import MeasuredMemory, device_line, summarize_peaks
from dsl.closed_forms.memory import DeviceBytes
from dsl.schema import Spec
from runtime.contract.mesh import Mesh
from runtime.contract.names import ProgramName

# --- The values of a report, plain and frozen, without torch. `Report` is the whole input of the page


@dataclass(frozen=True, slots=True)
class StageLine:
    """A stage, its contents ("embed", "layers 0–2"), and its pipeline ranks: one per direction, the mirror second."""

    index: int
    holds: tuple[str, ...]
    ranks: tuple[int, ...]
    parameters: int


@dataclass(frozen=True, slots=True)
class RankRow:
    """A pipeline rank and its world ranks [first, last]. Each of these holds `parameters`, and `memory` at its peak, as
    (kind, bytes)."""

    rank: int
    world_ranks: tuple[int, int]
    stages: tuple[int, ...]
    parameters: int
    memory: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """An expert rank: its experts [first, last] of every MoE layer, and its data ranks in every pipeline rank."""

    rank: int
    first: int
    last: int
    data_ranks: tuple[int, ...]


@dataclass(frozen=True)
class RunFigures:
    """The contents of a run's files: rows of metrics.jsonl, meta.json of its data, load.json. Empty if missing."""

    metrics: tuple[Mapping[str, Any], ...]
    data: Mapping[str, Any]
    load: Mapping[str, Any]
    memory: tuple[MeasuredMemory, ...] = ()  # by rank
    damaged_rows: int = 0  # lines of metrics.jsonl that are no rows
    lost: LostTime | None = None
    events: tuple[Mapping[str, Any], ...] = ()  # events that have a step


@dataclass(frozen=True)
class Report:
    """The values of a report on a build, and on a run of it if there is one."""

    name: str
    subtitle: str
    facts: tuple[tuple[str, str], ...]
    schedule: Panel
    time_unit: str  # unit of times in the schedule, such as "forwards of a stage"
    stages: tuple[StageLine, ...]
    ranks: tuple[RankRow, ...]
    capacity_bytes: int | None  # of one device
    experts: tuple[ExpertRow, ...]
    moe_layers: tuple[str, ...]  # names of the rows of load.json
    assumptions: tuple[str, ...]
    run: RunFigures | None = None
    planned: PlannedStep | None = None  # the predicted step of the largest batch
    fuller: tuple[int, int] | None = None  # rank and bytes, if a step of a smaller batch holds more than the largest


# --- sections


def report_of(
    spec: Spec, lowered: LoweredPlan, run: RunFigures | None = None, step: PredictedStep | None = None
) -> Report:
    """Return the report of a build, or of a run of it if `run` is given. Times of the schedule are predicted.

    `step`: the predicted step, if it is known already.
    """
    plan = lowered.plan
    schedule = lowered.main_schedule
    program = lowered.programs[ProgramName.of("train", schedule.num_micro_batches)]
    lanes = lanes_of(program, rank_times(lowered.lowering))
    step = step or predict_step(spec, lowered)
    planned = step.planned
    elements = {replica.key: replica.num_elements for replica in plan.replicas if replica.role in HELD}
    held_elements = _held_elements(plan, elements)
    panel = panel_of(schedule, Costs(), lanes=lanes, timeline=step.timed.timeline)
    device = device_line(run.metrics, planned.ranks) if run else None
    return Report(
        name=spec.name,
        subtitle=f"{spec.model.name} on {spec.cluster.name}",
        facts=(
            ("parameters", f"{sum(elements.values()):,}"),
            ("ranks", _degrees(plan.mesh)),
            ("sequences per step", ", ".join(str(n) for n in sorted({n for _, n in lowered.batches}))),
            ("tokens per sequence", f"{spec.train.sequence:,}"),
            ("steps", f"{lowered.num_steps:,}"),
            ("precision", spec.precision.name),
            ("idle in the schedule, predicted", f"{panel.idle:.1%}"),
            *((("values, measured", summarize_peaks(run.memory)),) if run and run.memory else ()),
            *((("memory of a device, measured", device),) if device else ()),
        ),
        schedule=panel,
        time_unit="milliseconds, as predicted from the cluster",
        stages=_stages(plan, elements),
        ranks=tuple(_rank(plan, memory, held_elements[memory.pp_rank]) for memory in planned.ranks),
        fuller=fuller_of(planned.ranks, lowered.memories),
        capacity_bytes=spec.cluster.node.device.room if spec.cluster.more is None else None,
        experts=_experts(plan),
        moe_layers=_moe_layers(plan),
        assumptions=plan.assumptions,
        run=run,
        planned=planned,
    )


def _moe_layers(plan: Plan) -> tuple[str, ...]:
    """Return the names of blocks with experts, in the order of the rows of load.json."""
    metrics = [metric for stage in plan.stages for metric, _ in stage.records]
    return tuple(metric.removeprefix("load ") for metric in metrics if metric.startswith("load "))


def _stages(plan: Plan, elements: Mapping[str, int]) -> tuple[StageLine, ...]:
    """Return the stages. `elements`: element counts of the replica table, by key."""
    sizes: Counter[str] = Counter()
    for replica in plan.replicas:
        sizes[replica.tensor] += elements.get(replica.key, 0)
    rows = []
    for index, stage in enumerate(plan.stages):
        tensors = {tensor for step in stage.steps if isinstance(step, Use) for _, tensor in step.params}
        ranks = plan.ranks_of_stage(index)
        rows.append(StageLine(index, tuple(layers_of(stage)), ranks, sum(sizes[tensor] for tensor in tensors)))
    return tuple(rows)


def _held_elements(plan: Plan, elements: Mapping[str, int]) -> tuple[int, ...]:
    """Return the parameters that column 0 of each pipeline rank holds, counting whole buckets."""
    firsts = [plan.mesh.rank(rank, 0) for rank in range(plan.mesh.pp)]
    buckets_of_ranks = [[bucket for bucket in plan.all_buckets if first in bucket.holders] for first in firsts]
    return tuple(sum(elements[name] for bucket in buckets for name in bucket.replicas) for buckets in buckets_of_ranks)


def _rank(plan: Plan, memory: RankMemory, parameters: int) -> RankRow:
    """Return the row of a rank. `memory`: predicted memory of the rank in a step of the largest batch."""
    mesh, rank = plan.mesh, memory.pp_rank
    return RankRow(
        rank=rank,
        world_ranks=(mesh.rank(rank, 0), mesh.rank(rank, mesh.columns - 1)),
        stages=plan.stages_of(rank),
        parameters=parameters,
        memory=tuple((part, getattr(memory, part)) for part in PARTS if part != "buffers" or memory.buffers),
    )


def fuller_of(largest: Sequence[RankMemory], proven: Sequence[DeviceBytes]) -> tuple[int, int] | None:
    """Return the fullest pipeline rank and its bytes if a step of a smaller batch holds more than one of the largest.

    `proven`: the maximum of each rank over all batch sizes, without memory inside segments.
    """
    pairs = zip(largest, proven, strict=True)
    fuller = [(memory.total, rank.pp_rank) for rank, memory in pairs if memory.total > rank.peak_bytes]
    total, rank = max(fuller, default=(0, 0))
    return (rank, total) if fuller else None


def _degrees(mesh: Mesh) -> str:
    """Return the world size and its factors as text."""
    context = f" · context {mesh.cp}" if mesh.cp > 1 else ""
    tensor = f" · tensor {mesh.tp}" if mesh.tp > 1 else ""
    slices = f" · expert_tensor {mesh.etp}" if mesh.etp > 1 else ""
    return f"{mesh.world} = pipeline {mesh.pp} · data {mesh.dp}{context}{tensor}, expert {mesh.ep}{slices}"


def _experts(plan: Plan) -> tuple[ExpertRow, ...]:
    """Return the experts of each expert rank; empty if a placement file makes them differ between layers."""
    if any(slots != tuple(sorted(slots)) for _, slots in plan.slots):
        return ()
    mesh = plan.mesh
    rank_of = {column: column % mesh.expert_group // mesh.etp for column in range(mesh.columns)}
    rows: dict[int, set[int]] = defaultdict(set)
    for bucket in plan.all_buckets:  # all parameters of a bucket have the same holders
        numbers = {
            int(name.partition(".experts.")[2].partition(".")[0]) for name in bucket.replicas if ".experts." in name
        }
        if numbers:
            rows[rank_of[mesh.coordinates(bucket.holders[0]).column]] |= numbers
    return tuple(
        ExpertRow(
            rank,
            min(experts),
            max(experts),
            tuple(
                dict.fromkeys(
                    column // (mesh.cp * mesh.tp) for column, expert_rank in rank_of.items() if expert_rank == rank
                )
            ),
        )
        for rank, experts in sorted(rows.items())
    )
