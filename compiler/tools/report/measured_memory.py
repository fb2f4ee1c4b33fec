"""The measured memory of a step, beside the plan for the rows that the step received."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from compiler.files.text import read_form
from compiler.ir.expert_placement import ReceivedRows
from compiler.predict.memory import gib, rank_memories
from compiler.predict.prediction import RankMemory
from compiler.program.lower import Lowering
from compiler.schedule.schedule import Schedule
from dsl.schema import Spec
from runtime.build import run_copy
from runtime.contract.names import ProgramName

MOST_BYTES = 64 << 20  # largest ledger that is read
Amount = Annotated[int, Field(ge=0, lt=1 << 60)]


class LedgerForm(BaseModel):
    """memory/rank_<r>.json, as runtime/step/ledger.py writes it."""

    model_config = ConfigDict(strict=True, extra="ignore")
    program: str
    of: str
    peak: Amount
    rows: dict[str, Amount | tuple[Amount, Amount, Amount]]


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Peak bytes of the values of one world rank."""

    rank: int
    planned: int
    measured: int


def peaks_of_ranks(
    run: Path, spec: Spec, lowering: Lowering, schedules: Mapping[ProgramName, Schedule]
) -> tuple[MeasuredMemory, ...]:
    """Return the planned and measured peak of every rank of a run; empty if no step of its build was measured.

    `schedules`: by program, such as train_8. Raises ValueError with the path if a ledger is damaged.
    """
    mesh = lowering.plan.mesh
    paths = [run / "memory" / f"rank_{rank}.json" for rank in range(mesh.world)]
    if not all(path.exists() for path in paths):
        return ()
    ledgers = [read_form(path, MOST_BYTES, LedgerForm) for path in paths]
    digest = run_copy.digest(run_copy.files_of_run(run))
    if any(ledger.of != digest for ledger in ledgers):  # measured with an earlier build of the run
        return ()
    result: dict[int, MeasuredMemory] = {}
    for column in range(mesh.columns):
        world = [mesh.rank(rank, column) for rank in range(mesh.pp)]

        def rows(rank: int, layer: str, micro_batch: int, world: list[int] = world) -> ReceivedRows:
            name, world_rank = f"{layer} {micro_batch}", world[rank]
            if name not in ledgers[world_rank].rows:
                raise ValueError(f"{paths[world_rank]} has no `rows` for {name}")
            received = ledgers[world_rank].rows[name]
            return ReceivedRows(received) if isinstance(received, int) else ReceivedRows(*received)

        program = ProgramName(ledgers[world[0]].program)
        if program not in schedules:
            raise ValueError(f"{paths[world[0]]}: `program` is not one of {', '.join(schedules)}")
        schedule = schedules[program]
        for world_rank, memory in zip(world, rank_memories(spec, lowering, schedule, rows=rows), strict=True):
            result[world_rank] = MeasuredMemory(
                world_rank, memory.activations + memory.buffers, ledgers[world_rank].peak
            )
    return tuple(result[rank] for rank in sorted(result))


def summarize_peaks(ranks: tuple[MeasuredMemory, ...]) -> str:
    """Return one line of text for the report."""
    fullest = max(ranks, key=lambda memory: memory.measured)
    peak = f"{gib(fullest.measured)} on rank {fullest.rank}"
    differing = [memory for memory in ranks if memory.planned != memory.measured]
    if not differing:
        return f"{peak}; every rank matches the plan for the rows it received, to the byte"
    worst = max(differing, key=lambda memory: abs(memory.measured - memory.planned))
    return (
        f"{peak}; {len(differing)} of {len(ranks)} ranks differ from their plan, rank {worst.rank} the most: "
        f"planned {worst.planned:,} bytes, measured {worst.measured:,}"
    )


def device_line(metrics: Sequence[Mapping[str, Any]], planned: Sequence[RankMemory]) -> str | None:
    """Return one line that compares the memory of devices with the plan; None if no row of metrics has it.

    `planned`: the memory of each pipeline rank. A row has the most of any rank so far.
    """
    tensors, reserved = (
        max((row[key] for row in metrics if type(row.get(key)) is int), default=None)
        for key in ("memory_bytes", "reserved_bytes")
    )
    if tensors is None:
        return None
    fullest = max(planned, key=lambda rank: rank.peak_bytes)
    words = [f"{gib(tensors)} of tensors, planned {gib(fullest.peak_bytes)} on pipeline rank {fullest.pp_rank}"]
    if reserved is not None:
        words.append(f"{gib(reserved)} reserved by the allocator, of {gib(fullest.capacity_bytes)} that plans may use")
    return "; ".join(words)
