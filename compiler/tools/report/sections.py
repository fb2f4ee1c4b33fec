"""Spec and what was decided for it → `Report`: the page's values, before any run or after one."""

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
from compiler.program.lowered import Lowered
from compiler.schedule.costs import Costs
from compiler.tools.picture import Panel, panel_of
from compiler.tools.picture.comm_lane import lanes_of
from compiler.tools.report.lost_time import LostTime
from compiler.tools.report.measured_memory import MeasuredMemory, measured_line
from dsl.closed_forms.memory import DeviceBytes
from dsl.schema import Spec
from runtime.contract.mesh import Mesh
from runtime.contract.names import ProgramName

# --- What a report shows: plain frozen values, no torch. `Report` is the whole input of the page


@dataclass(frozen=True, slots=True)
class StageLine:
    """A stage, what it holds ("embed", "layers 0–2"), and its pipeline ranks: one per direction, the mirror second."""

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
    """The files of a run: rows of metrics.jsonl, meta.json of its data, load.json. A missing file is empty."""

    metrics: tuple[Mapping[str, Any], ...]
    data: Mapping[str, Any]
    load: Mapping[str, Any]
    memory: tuple[MeasuredMemory, ...] = ()  # of the values of every rank
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
    stages: tuple[StageLine, ...]
    ranks: tuple[RankRow, ...]
    capacity_bytes: int | None  # of one device
    experts: tuple[ExpertRow, ...]
    moe_layers: tuple[str, ...]  # names of the rows of load.json
    assumptions: tuple[str, ...]
    run: RunFigures | None = None
    planned: PlannedStep | None = None  # what the planner says of its largest batch
    fuller: tuple[int, int] | None = None  # rank and bytes, where steps of a smaller batch hold more than the largest


# --- sections


def report_of(spec: Spec, lowered: Lowered, run: RunFigures | None = None, step: PredictedStep | None = None) -> Report:
    """The report of a build; of a run of it if `run` is given. Times are predicted from the cluster, not measured.

    `step`: the predicted step, if it is known already.
    """
    plan = lowered.plan
    schedule = lowered.main_schedule
    program = lowered.programs[ProgramName.of("train", schedule.num_micro_batches)]
    lanes = lanes_of(program, rank_times(lowered.lowering))
    step = step or predict_step(spec, lowered)
    planned = step.planned
    elements = {replica.key: replica.num_elements for replica in plan.replicas if replica.role in HELD}
    held = _held(plan, elements)
    panel = panel_of(schedule, Costs(), lanes=lanes, timeline=step.timed.timeline)
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
            *((("values, measured", measured_line(run.memory)),) if run and run.memory else ()),
        ),
        schedule=panel,
        time_unit="milliseconds, as predicted from the cluster",
        stages=_stages(plan, elements),
        ranks=tuple(_rank(plan, memory, held[memory.pp_rank]) for memory in planned.ranks),
        fuller=fuller_of(planned.ranks, lowered.memories),
        capacity_bytes=spec.cluster.node.device.memory if spec.cluster.more is None else None,
        experts=_experts(plan),
        moe_layers=_moe_layers(plan),
        assumptions=plan.assumptions,
        run=run,
        planned=planned,
    )


def _moe_layers(plan: Plan) -> tuple[str, ...]:
    """Names of the blocks with experts, in the order of the rows of load.json."""
    metrics = [metric for stage in plan.stages for metric, _ in stage.records]
    return tuple(metric.removeprefix("load ") for metric in metrics if metric.startswith("load "))


def _stages(plan: Plan, elements: Mapping[str, int]) -> tuple[StageLine, ...]:
    """`elements`: of every row of the replica table, by key."""
    sizes: Counter[str] = Counter()
    for replica in plan.replicas:
        sizes[replica.tensor] += elements.get(replica.key, 0)
    rows = []
    for index, stage in enumerate(plan.stages):
        tensors = {tensor for step in stage.steps if isinstance(step, Use) for _, tensor in step.params}
        ranks = plan.ranks_of_stage(index)
        rows.append(StageLine(index, tuple(layers_of(stage)), ranks, sum(sizes[tensor] for tensor in tensors)))
    return tuple(rows)


def _held(plan: Plan, elements: Mapping[str, int]) -> tuple[int, ...]:
    """Parameters that column 0 of each pipeline rank holds: whole buckets, which have every parameter once."""
    firsts = [plan.mesh.rank(rank, 0) for rank in range(plan.mesh.pp)]
    mine = [[bucket for bucket in plan.held if first in bucket.holders] for first in firsts]
    return tuple(sum(elements[name] for bucket in buckets for name in bucket.replicas) for buckets in mine)


def _rank(plan: Plan, memory: RankMemory, parameters: int) -> RankRow:
    """`memory`: what `dsc plan` says of the rank in steps of the largest batch."""
    mesh, rank = plan.mesh, memory.pp_rank
    return RankRow(
        rank=rank,
        world_ranks=(mesh.rank(rank, 0), mesh.rank(rank, mesh.columns - 1)),
        stages=plan.stages_of(rank),
        parameters=parameters,
        memory=tuple((part, getattr(memory, part)) for part in PARTS if part != "buffers" or memory.buffers),
    )


def fuller_of(largest: Sequence[RankMemory], proven: Sequence[DeviceBytes]) -> tuple[int, int] | None:
    """The pipeline rank that holds most in steps of a smaller batch, and how much, if it is more than in the largest.

    `proven`: the most of each rank over steps of every size of the batch, without what segments need inside.
    """
    each = zip(largest, proven, strict=True)
    over = [(memory.total, rank.pp_rank) for rank, memory in each if memory.total > rank.peak_bytes]
    total, rank = max(over, default=(0, 0))
    return (rank, total) if over else None


def _degrees(mesh: Mesh) -> str:
    """The ranks of a world, and what they are made of."""
    context = f" · context {mesh.cp}" if mesh.cp > 1 else ""
    tensor = f" · tensor {mesh.tp}" if mesh.tp > 1 else ""
    slices = f" · expert_tensor {mesh.etp}" if mesh.etp > 1 else ""
    return f"{mesh.world} = pipeline {mesh.pp} · data {mesh.dp}{context}{tensor}, expert {mesh.ep}{slices}"


def _experts(plan: Plan) -> tuple[ExpertRow, ...]:
    """Which experts live on which expert rank: the same split in every MoE layer, but for a placement of a file."""
    if any(slots != tuple(sorted(slots)) for _, slots in plan.slots):
        return ()
    mesh = plan.mesh
    rank_of = {column: column % mesh.expert_group // mesh.etp for column in range(mesh.columns)}
    rows: dict[int, set[int]] = defaultdict(set)
    for bucket in plan.held:  # what is in one has the same holders
        numbers = {
            int(name.partition(".experts.")[2].partition(".")[0]) for name in bucket.replicas if ".experts." in name
        }
        if numbers:
            rows[rank_of[mesh.coordinates(bucket.holders[0])[1]]] |= numbers
    return tuple(
        ExpertRow(
            rank,
            min(experts),
            max(experts),
            tuple(dict.fromkeys(column // (mesh.cp * mesh.tp) for column, other in rank_of.items() if other == rank)),
        )
        for rank, experts in sorted(rows.items())
    )
