"""What a run's values took, by the ledger of a step, beside the plan replayed with the rows it received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, log10
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from compiler.files.text import read_form
from compiler.ir import Plan
from compiler.ir.expert_placement import Received
from compiler.predict.memory import rank_memories, worst_rows
from compiler.predict.memory_state import device_of, quantised_weights
from compiler.predict.prediction import Held, RankMemory
from compiler.program.lower import Lowering
from compiler.schedule.schedule import Schedule
from dsl.schema import Moe, Spec
from runtime.build import files

# --- Why a plan does not fit: which rank holds too much, at which action, by how many bytes, and what that is made of

GIB = 2**30
WORDS = {
    "kept": "inputs kept for the backward",
    "saved": "saved by forwards",
    "deferred": "kept for weight gradients that are put off",
    "gradient": "gradients of activations",
    "buffer": "buffers of exchanges",
    "message": "pipeline messages",
    "inside": "inside of one segment",
}


@dataclass(frozen=True, slots=True)
class Overflow:
    """A device that holds more than it has. `parts`: all that it holds at its peak, by kind, the largest first."""

    pp_rank: int
    action: str
    peak_bytes: int
    capacity_bytes: int
    parts: tuple[Held, ...]
    largest: tuple[Held, ...]  # values of one name in any layer and micro-batch together

    @property
    def over_bytes(self) -> int:
        """By how much."""
        return self.peak_bytes - self.capacity_bytes


def overflows(memories: Sequence[RankMemory]) -> tuple[Overflow, ...]:
    """The pipeline ranks whose devices hold too much, the fullest first; of equally full ones the first."""
    full = [_overflow(memory) for memory in memories if not memory.fits]
    return tuple(sorted(full, key=lambda each: (-each.over_bytes, each.pp_rank)))


def _overflow(memory: RankMemory) -> Overflow:
    kinds = Counter[str]()
    for held in memory.held:
        kinds[WORDS[held.kind]] += held.bytes
    parts = [("weights", memory.weights), ("optimizer", memory.optimizer)]
    parts.append(("gradients of weights", memory.gradients))
    rows = sorted((*parts, *kinds.items()), key=lambda row: (-row[1], row[0]))
    return Overflow(
        pp_rank=memory.pp_rank,
        action=memory.peak_action,
        peak_bytes=memory.peak_bytes,
        capacity_bytes=memory.capacity_bytes,
        parts=tuple(Held(name, size) for name, size in rows if size),
        largest=memory.held,
    )


def explain_memory(spec: Spec, plan: Plan, memories: Sequence[RankMemory], most: int = 5) -> tuple[str, ...]:
    """Lines: what is too full and by how much, then what it is made of; none where everything fits."""
    found = overflows(memories)
    if not found:
        return ()
    worst = found[0]
    device = device_of(spec, plan, worst.pp_rank)
    lines = [
        f"pipeline rank {worst.pp_rank} holds {gib(worst.peak_bytes)} at {worst.action}, {gib(worst.over_bytes)} more "
        f"than the {gib(worst.capacity_bytes)} of device {device.name}"
    ]
    if len(found) > 1:
        ranks = ", ".join(str(rank) for rank in sorted(each.pp_rank for each in found[1:]))
        lines.append(f"so do pipeline ranks {ranks}" if len(found) > 2 else f"so does pipeline rank {ranks}")
    lines += [f"  {gib(part.bytes):>10}  {part.name}" for part in worst.parts]
    lines.append("the largest values, of all layers and micro-batches together:")
    lines += [f"  {gib(held.bytes):>10}  {held.name}, {WORDS[held.kind]}" for held in worst.largest[:most]]
    return tuple(lines)


def gib(num_bytes: int) -> str:
    """`84.1 GiB`, and smaller numbers in the unit that suits them."""
    for scale, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


# ---------------------------------------------------------------- what is assumed
def memory_assumptions(spec: Spec, plan: Plan, memories: Sequence[RankMemory]) -> tuple[str, ...]:
    """What the memory of a plan takes for granted, for people."""
    mixed = any(isinstance(layers.ffn, Moe) for layers in spec.model.layers) and spec.parallel.expert_group > 1
    rows = "every expert rank receives as many rows as it sends; " if mixed else ""
    lines = [
        f"memory: {rows}allocators lose nothing to fragments; contexts and libraries take none",
        *_of_eight_bits(spec, plan),
        *_of_rows(spec, memories),
    ]
    return tuple(lines)


def _of_eight_bits(spec: Spec, plan: Plan) -> list[str]:
    copies = max(quantised_weights(plan))
    if not copies:
        return []
    kept = spec.precision.attention_output or spec.precision.compute
    return [
        f"memory: beside its weights a device holds those of products in {spec.precision.linear} twice, one transposed "
        f"for input gradients: {gib(copies)} at most",
        f"memory: what attention returns is kept in {kept}, as its backward reads it, and quantised again for the "
        "weight gradient behind it",
    ]


def _of_rows(spec: Spec, memories: Sequence[RankMemory]) -> list[str]:
    """The worst case, and how likely it is if every token chose its experts evenly and by itself."""
    mixtures = [layers.ffn for layers in spec.model.layers if isinstance(layers.ffn, Moe)]
    ranks, group = spec.parallel.expert, spec.parallel.expert_group
    worst = max((memory.worst_bytes or 0 for memory in memories), default=0)
    if not mixtures or ranks == 1 or worst == 0:
        return []
    moe = max(mixtures, key=lambda each: min(each.top_k, each.experts // ranks))
    local, tokens = moe.experts // ranks, group * spec.tokens_of_rank
    ways = comb(moe.experts - local, moe.top_k - local) if moe.top_k >= local else comb(local, moe.top_k)
    chance = tokens * (log10(ways) - log10(comb(moe.experts, moe.top_k))) + log10(ranks)
    return [
        f"memory: if in every layer all {tokens:,} tokens of an expert group sent one rank the {worst_rows(spec):,} "
        f"rows they can, it would hold {gib(worst)}; even and independent choices do so in one layer with a chance of "
        f"10^{chance:,.0f}"
    ]


# --- memory run

MOST_BYTES = 64 << 20  # of a ledger
Amount = Annotated[int, Field(ge=0, lt=1 << 60)]


class LedgerForm(BaseModel):
    """memory/rank_<r>.json, as runtime/step/ledger.py writes it."""

    model_config = ConfigDict(strict=True, extra="ignore")
    program: str
    of: str
    peak: Amount
    rows: dict[str, Amount | tuple[Amount, Amount, Amount]]


@dataclass(frozen=True, slots=True)
class Measured:
    """Peak bytes of the values of one world rank."""

    rank: int
    planned: int
    measured: int


def measured_memories(
    run: Path, spec: Spec, lowering: Lowering, schedules: Mapping[str, Schedule]
) -> tuple[Measured, ...]:
    """The peak of every rank of a run folder, planned and measured; empty where no step of its build was measured.

    `schedules`: by program, train_8.

    Raises ValueError, which names the file, where one is not as a run leaves it.
    """
    mesh = lowering.plan.mesh
    paths = [run / "memory" / f"rank_{rank}.json" for rank in range(mesh.world)]
    if not all(path.exists() for path in paths):
        return ()
    found = [read_form(path, MOST_BYTES, LedgerForm) for path in paths]
    digest = files.digest(files.of_run(run))
    if any(each.of != digest for each in found):  # of a build that the run began with
        return ()
    result: dict[int, Measured] = {}
    for column in range(mesh.columns):
        world = [mesh.rank(rank, column) for rank in range(mesh.pp)]

        def rows(rank: int, layer: str, micro_batch: int, world: list[int] = world) -> Received:
            name, at = f"{layer} {micro_batch}", world[rank]
            if name not in found[at].rows:
                raise ValueError(f"{paths[at]} has no `rows` of {name}")
            given = found[at].rows[name]
            return Received(given) if isinstance(given, int) else Received(*given)

        program = found[world[0]].program
        if program not in schedules:
            raise ValueError(f"{paths[world[0]]}: `program` is none of {', '.join(schedules)}")
        schedule = schedules[program]
        for at, memory in zip(world, rank_memories(spec, lowering, schedule, rows=rows), strict=True):
            result[at] = Measured(at, memory.activations + memory.buffers, found[at].peak)
    return tuple(result[rank] for rank in sorted(result))


def measured_line(ranks: tuple[Measured, ...]) -> str:
    """One line for people."""
    most = max(ranks, key=lambda each: each.measured)
    found = f"{gib(most.measured)} on rank {most.rank}"
    unlike = [each for each in ranks if each.planned != each.measured]
    if not unlike:
        return f"{found}; on every rank as planned for the rows it received, to the byte"
    worst = max(unlike, key=lambda each: abs(each.measured - each.planned))
    return (
        f"{found}; {len(unlike)} of {len(ranks)} ranks differ from their plan, rank {worst.rank} the most: "
        f"planned {worst.planned:,} bytes, measured {worst.measured:,}"
    )
