"""The short summary of a build that `dsc compile` prints. plan.txt has the details."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from compiler.emit.build_files import plan_head
from compiler.emit.kernels.libraries import LIBRARIES
from compiler.model.ops.implementations import stated_choices
from compiler.predict.memory import room_text
from compiler.predict.memory_state import device_of
from compiler.predict.prediction import RankMemory, size
from compiler.program.lower.estimate import Overlap
from compiler.program.lowered import LoweredPlan
from dsl.closed_forms.memory import DeviceBytes
from dsl.schema import Spec
from runtime.contract import GraphCalls
from runtime.contract.names import ProgramName


def summary(
    spec: Spec,
    lowered: LoweredPlan,
    overlaps: Mapping[ProgramName, Overlap],
    planned: Sequence[RankMemory],
    graphs: GraphCalls | None,
) -> str:
    """Model, mesh, steps, the schedule of the largest batch, what is proven, and the memory of the fullest rank.

    `planned`: the memory of each pipeline rank by `dsc plan`, which includes the memory inside calls of segments.
    `graphs`: the calls that ranks replay as CUDA graphs, if the run asks for that.
    """
    main = lowered.main_schedule
    overlap = overlaps[ProgramName.of("train", main.num_micro_batches)]
    num_instructions = sum(certificate.num_instructions for certificate in lowered.certificates.values())
    rank, memory = fullest(spec, lowered)
    lines = [
        *plan_head(spec, lowered),
        f"schedule: {main.name}, {count(main.num_micro_batches, 'micro-batch')} per step",
        f"proven: {count(len(lowered.certificates), 'program')}, {num_instructions:,} instructions on all ranks",
    ]
    if overlap.total.communication:
        lines.append(f"overlap: {overlap.total.hidden:.1%} of exchanges hidden under compute, predicted")
    parts = ", ".join(f"{kind} {size(amount)}" for kind, amount in parts_of(memory))
    moment = _peak_steps(lowered, rank)
    lines.append(f"memory: {size(memory.total)} on the fullest device, of pipeline rank {rank}{moment}: {parts}")
    peak = max(planned, key=lambda memory: memory.peak_bytes)
    if peak.peak_bytes > memory.total:
        lines.append(
            f"memory, planned: {size(peak.peak_bytes)} on rank {peak.pp_rank}, with temporary tensors inside segments"
        )
    if graphs:
        lines.append(f"graphs: {graphs.sentence}; the plan prices no launch less")
    return "\n".join([*lines, *_library_lines(spec)]) + "\n"


def _library_lines(spec: Spec) -> Iterator[str]:
    """A line for each library that the run names."""
    for key, name in stated_choices(spec.kernels).items():
        if name in LIBRARIES:
            library = LIBRARIES[name]
            bits = "" if library.is_deterministic else ", and two runs may differ in their last bits"
            yield f"library: {name} computes {key} on GPUs; ranks need the package {library.package}{bits}"


def memory_error_text(spec: Spec, lowered: LoweredPlan) -> str:
    """A warning if the devices are too small for the proven memory; "" if they are not.

    `dsc check` refuses specs that no schedule can fit. This uses the proofs' peak over the steps of every batch size,
    with even load on the experts. `dsc plan` describes the largest batch, and also counts the memory inside calls of
    segments.
    """
    memories = lowered.memories
    devices = [device_of(spec, lowered.plan, rank) for rank in range(len(memories))]
    excesses = [memory.total - device.room for memory, device in zip(memories, devices, strict=True)]
    rank = excesses.index(max(excesses))
    if excesses[rank] <= 0:
        return ""
    full_ranks = count(sum(excess > 0 for excess in excesses), "pipeline rank")
    worst = f"{size(memories[rank].total)}{_peak_steps(lowered, rank)}"
    capacity = f"the {room_text(devices[rank])}"
    if spec.cluster.more is not None:
        problem = f"need more memory than they have; rank {rank} needs the most, {worst}, and has only {capacity}"
    else:
        problem = f"need more than {capacity}; rank {rank} needs the most, {worst}"
    spare = [device.room - _of_largest(lowered, index) for index, device in enumerate(devices)]
    if min(spare) >= 0:
        hint = "steps of the largest batch, which `dsc plan` describes, fit: start with a larger batch"
    else:
        hint = "`dsc plan` lists what they hold and suggests edits that make it fit"
    return f"this does not fit: the devices of {full_ranks} of {lowered.plan.mesh.pp} {problem}; {hint}"


def _peak_steps(lowered: LoweredPlan, rank: int) -> str:
    """Name the steps at which a rank holds the most, if they are not those of the largest batch; else "".

    The first steps of a growing batch may have too few micro-batches for the run's schedule, and use another one.
    """
    peaks = {name: proven.peak_bytes[rank] for name, proven in lowered.certificates.items()}
    largest = lowered.main_schedule.num_micro_batches
    peak = max(peaks, key=peaks.__getitem__)
    if peaks[peak] == peaks[ProgramName.of("train", largest)]:
        return ""
    fullest = lowered.schedules[peak]
    steps = f"in steps of {count(fullest.num_micro_batches, 'micro-batch')}"
    return f" {steps} ({fullest.name}; {size(_of_largest(lowered, rank))} in those of {largest})"


def _of_largest(lowered: LoweredPlan, rank: int) -> int:
    """Bytes on a device of the rank in steps of the largest batch."""
    memory = lowered.memories[rank]
    proven = lowered.certificates[ProgramName.of("train", lowered.main_schedule.num_micro_batches)]
    return memory.total - memory.activations + proven.peak_bytes[rank]


def count(number: int, word: str) -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`, `3 batches`."""
    ending = "" if number == 1 else "es" if word.endswith("ch") else "s"
    return f"{number:,} {word}{ending}"


def fullest(spec: Spec, lowered: LoweredPlan) -> tuple[int, DeviceBytes]:
    """Return the pipeline rank whose devices hold the most, and their memory by kind."""
    memories = lowered.memories
    rank = max(range(len(memories)), key=lambda rank: memories[rank].total)
    return rank, memories[rank]


def parts_of(memory: DeviceBytes) -> tuple[tuple[str, int], ...]:
    """Return (kind, bytes) in the order in which they are printed."""
    return (
        ("parameters", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
    )
