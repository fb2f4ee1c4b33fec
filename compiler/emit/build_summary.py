"""What `dsc compile` says of a build in a few lines; plan.txt has all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiler.emit.build_files import plan_head
from compiler.predict.memory_state import device_of
from compiler.predict.prediction import RankMemory, size
from compiler.program.lower.estimate import Overlap
from compiler.program.lowered import Lowered
from dsl.closed_forms.memory import DeviceBytes
from dsl.schema import Spec
from runtime.contract.names import ProgramName


def summary(
    spec: Spec, lowered: Lowered, overlaps: Mapping[ProgramName, Overlap], planned: Sequence[RankMemory]
) -> str:
    """Model, mesh, steps, the schedule of the largest batch, what is proven, and the memory of the fullest rank.

    `planned`: what `dsc plan` says of each pipeline rank, with what segments need inside.
    """
    main = lowered.main_schedule
    overlap = overlaps[ProgramName.of("train", main.num_micro_batches)]
    num_instructions = sum(certificate.num_instructions for certificate in lowered.certificates.values())
    rank, memory = fullest(spec, lowered)
    lines = [
        *plan_head(spec, lowered),
        f"schedule: {main.name}, {count(main.num_micro_batches, 'micro-batch')} a step",
        f"proven: {count(len(lowered.certificates), 'program')}, {num_instructions:,} instructions on all ranks",
    ]
    if overlap.total.communication:
        lines.append(f"overlap: {overlap.total.hidden:.1%} of exchanges hidden under compute, predicted")
    parts = ", ".join(f"{kind} {size(amount)}" for kind, amount in parts_of(memory))
    when = _when(lowered, rank)
    lines.append(f"memory: {size(memory.total)} on the fullest device, of pipeline rank {rank}{when}: {parts}")
    most = max(planned, key=lambda each: each.peak_bytes)
    if most.peak_bytes > memory.total:
        lines.append(f"memory, planned: {size(most.peak_bytes)} on rank {most.pp_rank}, with what segments need inside")
    return "\n".join(lines) + "\n"


def does_not_fit(spec: Spec, lowered: Lowered) -> str:
    """Why the devices are too small for what is planned and proven; "" where they are not.

    `dsc check` refuses what no schedule could fit. This is the proofs' peak over the steps of every size of the batch,
    with even load on the experts. `dsc plan` is of the largest size, and counts what segments need inside as well.
    """
    memories = lowered.memories
    devices = [device_of(spec, lowered.plan, rank) for rank in range(len(memories))]
    over = [memory.total - device.memory for memory, device in zip(memories, devices, strict=True)]
    rank = over.index(max(over))
    if over[rank] <= 0:
        return ""
    full = count(sum(each > 0 for each in over), "pipeline rank")
    worst = f"{size(memories[rank].total)}{_when(lowered, rank)}"
    has = f"the {size(devices[rank].memory)} of device {devices[rank].name}"
    if spec.cluster.more is not None:
        said = f"hold more than they have, those of rank {rank} the most, {worst}, where {has} are all there is"
    else:
        said = f"hold more than {has}, those of rank {rank} the most, {worst}"
    largest = [device.memory - _of_largest(lowered, each) for each, device in enumerate(devices)]
    if min(largest) >= 0:
        mend = "steps of the largest batch fit, and `dsc plan` is of those: begin with a larger one"
    else:
        mend = "`dsc plan` says what they hold, and shows edits that mend it"
    return f"this does not fit: devices of {full} of {lowered.plan.mesh.pp} {said}; {mend}"


def _when(lowered: Lowered, rank: int) -> str:
    """Name the size of the steps that fill a rank most, if they are not those of the largest batch; else "".

    The first steps of a growing batch may have too few micro-batches for the run's schedule; another stands in for it.
    """
    peaks = {name: proven.peak_bytes[rank] for name, proven in lowered.certificates.items()}
    largest = lowered.main_schedule.num_micro_batches
    most = max(peaks, key=peaks.__getitem__)
    if peaks[most] == peaks[ProgramName.of("train", largest)]:
        return ""
    fullest = lowered.schedules[most]
    steps = f"in steps of {count(fullest.num_micro_batches, 'micro-batch')}"
    return f" {steps} ({fullest.name}; {size(_of_largest(lowered, rank))} in those of {largest})"


def _of_largest(lowered: Lowered, rank: int) -> int:
    """Bytes of a device of the rank in steps of the largest batch."""
    memory = lowered.memories[rank]
    proven = lowered.certificates[ProgramName.of("train", lowered.main_schedule.num_micro_batches)]
    return memory.total - memory.activations + proven.peak_bytes[rank]


def count(number: int, word: str) -> str:
    """`1 rank`, `2 ranks`, `3 batches`."""
    ending = "" if number == 1 else "es" if word.endswith("ch") else "s"
    return f"{number:,} {word}{ending}"


def fullest(spec: Spec, lowered: Lowered) -> tuple[int, DeviceBytes]:
    """The pipeline rank whose devices hold the most, and what they hold."""
    memories = lowered.memories
    rank = max(range(len(memories)), key=lambda rank: memories[rank].total)
    return rank, memories[rank]


def parts_of(memory: DeviceBytes) -> tuple[tuple[str, int], ...]:
    """Kinds and bytes, as they are shown."""
    return (
        ("parameters", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
    )
