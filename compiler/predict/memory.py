"""The memory of a rank over a step: bytes by kind, the peak, and why a plan does not fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import comb, log10

from compiler.ir import Buffer, Cut, Instruction, Plan, Program
from compiler.ir.dtypes import extent_at, tensor_bytes
from compiler.ir.expert_placement import ReceivedRows, most_rows
from compiler.ir.names import is_gradient
from compiler.machine.rates import Rates
from compiler.plan.split_blocks import mixtures, most_held, planned_received_rows
from compiler.predict.memory_state import device_of, quantised_weight_bytes, rank_states, update_scratch
from compiler.predict.prediction import HeldTensor, RankMemory, RankPeak
from compiler.program.lower import Lowering
from compiler.program.proof.effects import Effects, LiveMemory, Rows, Staging, StagingBytes, Storage, is_staged
from compiler.program.proof.lifetimes import RankValues, received_rows
from compiler.program.proof.structure import EXCHANGES
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline
from dsl.closed_forms.memory import DeviceBytes
from dsl.facts.devices import group_nodes
from dsl.schema import Device, Moe, Spec
from runtime.contract.actions import Action, is_copy

# --- The values that a rank holds at its peak, by name and kind
#
# The kinds are
#
#     kept        outputs of segments, and received rows, that are kept for the backward of the segments that read them
#     saved       made by a forward for its own backward
#     deferred    made by a backward for later weight gradients, which other actions run
#     gradient    gradients of activations, in the action that runs
#     buffer      sent, received or staged by the exchanges of the action that runs
#     message     posted, received or sent between pipeline ranks, until it is known to have arrived
#     inside      needed for a moment inside one segment

NAMELESS = {"message": "between pipeline ranks", "inside": "of the segment that runs"}
_LAYER = re.compile(r"^(d_)?[LM]\d+_")


@dataclass(frozen=True)
class Peak:
    """The peak of the values of one rank."""

    bytes: int
    buffers: int  # of the action's exchanges, and of messages in flight
    held_tensors: tuple[HeldTensor, ...]  # summed by name over layers and micro-batches, the largest first


class _PeakMemory(LiveMemory):
    """A memory that records the storages that are live at its peak. A posted message has no storage until received."""

    def __init__(self, num_bytes: int, live: Iterable[Storage]) -> None:
        super().__init__(bytes=num_bytes, peak_bytes=num_bytes)
        self.live = {id(storage): storage for storage in live}
        self.at_peak, self.inside = tuple(self.live.values()), 0

    def hold(self, storage: Storage) -> None:
        self.live.setdefault(id(storage), storage)
        super().hold(storage)

    def drop(self, storage: Storage) -> None:
        if storage.holders == 1:
            self.live.pop(id(storage), None)
        super().drop(storage)

    def add(self, fixed_bytes: int, bytes: int) -> None:
        self._note(bytes, 0)
        super().add(fixed_bytes, bytes)

    def touch(self, fixed_bytes: int, bytes: int) -> None:
        self._note(bytes, bytes)
        super().touch(fixed_bytes, bytes)

    def _note(self, bytes: int, inside: int) -> None:
        if self.bytes + bytes > self.peak_bytes:
            self.at_peak, self.inside = tuple(self.live.values()), inside


def peak_of(values: RankValues, program: Program, schedule: Schedule, top: int, kinds: Mapping[str, str]) -> Peak:
    """The tensors that are live at the peak of a rank.

    `values`: the rank's values before its first invocation. `top`: the invocation of the peak. `kinds`: the result of
    `kinds_of_values`.
    """
    steps = list(zip(program.invocations[values.rank], schedule.actions[values.rank], strict=True))
    for invocation, step in steps[:top]:
        values.invoke(invocation, step)
    invocation, step = steps[top]
    spaces = values.spaces()
    before = {id(storage): storage for space in spaces.values() for storage in space.storages_on_device}
    watch = _PeakMemory(values.memory.bytes, before.values())
    values.watch(invocation, step, spaces, watch)

    instructions = values.bodies[invocation.body][0].instructions
    exchanges = [i for i in instructions if (i.wait or i.kind) in EXCHANGES]
    exchanged = {name for i in exchanges for name in (*i.reads, *(buffer.name for buffer in i.writes))}

    def kind(storage: Storage) -> str:
        if not storage.name:
            return "message"
        if is_staged(storage.name) or (id(storage) not in before and storage.name in exchanged):
            return "buffer"
        if is_gradient(storage.name):
            return "deferred" if id(storage) in before else "gradient"
        return kinds.get(storage.name, "kept")

    named, summed = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for storage in watch.at_peak:
        named[kind(storage), storage.name] += storage.bytes
    for (value_kind, name), size in named.items():
        summed[value_kind, _LAYER.sub(r"\1", name) or NAMELESS[value_kind]] += size
    summed["message", NAMELESS["message"]] += watch.peak_bytes - watch.inside - sum(s.bytes for s in watch.at_peak)
    summed["inside", NAMELESS["inside"]] += watch.inside
    rows = sorted(summed.items(), key=lambda row: (-row[1], row[0]))
    return Peak(
        bytes=watch.peak_bytes,
        buffers=sum(size for (value_kind, _), size in rows if value_kind in ("buffer", "message")),
        held_tensors=tuple(HeldTensor(name, size, value_kind) for (value_kind, name), size in rows if size),
    )


def kinds_of_values(plan: Plan) -> dict[str, str]:
    """By name, the kind of each value that segments make besides their outputs: saved or deferred."""
    kinds: dict[str, str] = {}
    for site, cut in plan.cuts.items():
        prefix = site.replace(".", "_")
        kinds |= {f"{prefix}_{buffer.name}": "saved" for buffer in cut.saved}
        kinds |= {f"{prefix}_{buffer.name}": "deferred" for buffer in cut.deferred}
    return kinds


# --- The staging of exchanges: copies in flight, besides the operands and results
#
# Ranks whose channels are collectives (NCCL, or gloo between machines) send and receive rows in one contiguous tensor.
# Rows that lie by expert are therefore packed before they are sent, and received into a buffer before they are moved to
# their places (runtime/comm/collective.py). With `route = nodes`, a rank gathers the rows to send for both hops, and
# adds rows on the way back (runtime/comm/nodes.py). These tensors are no values of the program, and a run's ledger does
# not see them.
INTEGERS = ("int32", "int64")  # tables and counts, which are not staged


def staging_of(spec: Spec) -> Staging | None:
    """A function that returns the staging of each exchange of a spec's program; None if no exchange stages anything."""
    parallel = spec.parallel
    if parallel.expert_group == parallel.tensor == parallel.context == 1 and parallel.zero < 2:
        return None
    across = _crosses_nodes(spec)
    collective = spec.has_hosts or (across and not spec.routes_by_nodes)

    def staged(
        start: Instruction, read: Sequence[Buffer], written: Sequence[Buffer], rows: ReceivedRows
    ) -> StagingBytes:
        if start.kind == "scatter_rows":  # sums go to a buffer as large as the operands
            return StagingBytes(sum(tensor.bytes_at(*rows) for tensor in read))
        if start.kind == "gather_sequences":  # reordered by sequence on arrival
            return StagingBytes(wait_bytes=sum(tensor.bytes_at(*rows) for tensor in written))
        if start.kind == "scatter_sequences":  # reordered by rank before they are sent
            return StagingBytes(2 * sum(tensor.bytes_at(*rows) for tensor in read))
        if start.kind == "scatter":
            # gloo has no reduce-scatter, so the other holders' parts arrive in a second buffer
            several = not spec.has_hosts and spec.cluster.num_nodes > 1
            return StagingBytes(sum(tensor.bytes_at(*rows) for tensor in read) if several else 0)
        if start.kind not in ("dispatch", "combine") or spec.parallel.expert_group == 1:
            return StagingBytes()
        forward = (start.kind == "dispatch") == (start.phase == "F")
        if not spec.routes_by_nodes:
            # to the experts: a buffer for the rows that arrive; back: the packed rows that are sent
            by_expert = written if forward else read
            return StagingBytes(
                sum(_bytes(tensor, rows.rows, rows) for tensor in _moved_tensors(by_expert)) if collective else 0
            )
        hops = [_two_hops(tensor, forward, rows, collective) for tensor in _moved_tensors(read)]
        return StagingBytes(sum(first for first, _ in hops), _peak_staged_bytes(hops))

    return staged


def _two_hops(tensor: Buffer, forward: bool, rows: ReceivedRows, collective: bool) -> tuple[int, int]:
    """Bytes that an exchange between nodes stages of a tensor in its first hop and in its second.

    A one-dimensional tensor holds the gate weight of each row. It is sent and returned without staging copies.
    """
    is_gate = len(tensor.shape) == 1
    by_expert = _bytes(tensor, rows.rows, rows) if collective else 0  # packed, or a buffer for arrivals
    forwarded, copies = _bytes(tensor, rows.forwarded, rows), _bytes(tensor, rows.copies, rows)
    if forward:  # copies to send; then rows for each expert, made from the copies that arrived
        return 0 if is_gate else copies, forwarded + by_expert
    return by_expert, forwarded if is_gate else 2 * copies  # rows by expert; then sums to send, and sums that arrive


def _peak_staged_bytes(tensors: Sequence[tuple[int, int]]) -> int:
    """The most bytes during a wait, in which each tensor in turn ends its first hop and begins its second."""
    first_hops = sum(first for first, _ in tensors)
    peak = second_hops = 0
    for first, second in tensors:
        first_hops, second_hops = first_hops - first, second_hops + second
        peak = max(peak, first_hops + second_hops)
    return peak


def _moved_tensors(read: Sequence[Buffer]) -> list[Buffer]:
    return [tensor for tensor in read if tensor.shape and tensor.dtype not in INTEGERS]


def _bytes(tensor: Buffer, count: int, rows: ReceivedRows) -> int:
    """Bytes of `count` rows of a tensor."""
    return tensor_bytes((count, *(extent_at(extent, *rows) for extent in tensor.shape[1:])), tensor.dtype)


def _crosses_nodes(spec: Spec) -> bool:
    """Whether an expert group spans several nodes."""
    return any(group_nodes(node.devices, spec.parallel.expert_group) != 1 for _, node in spec.cluster.parts)


# --- The memory of each pipeline rank over a step: its state, and the values of its schedule's actions
#
# The schedule is lowered to the program that would run, and that program is followed as in its proof: a value lives
# from the instruction that writes it to the one that frees it, and a message until it is known to have arrived. For
# specs that compile, the peak of values therefore equals that of the certificate, and of a run's ledger, to the byte.
# Two amounts are added that neither of them sees: what a segment needs inside, and what exchanges stage.

MAX_POINTS = 400  # of a curve
UPDATE = "update"  # in place of the action, if the peak is in the update


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of the values of a rank for each of its invocations."""

    peaks: tuple[int, ...]  # the most during it
    ends: tuple[int, ...]  # after it
    worst: tuple[int, ...]  # the most during it if the rank receives the most rows

    @property
    def top(self) -> int:
        """The first invocation with the peak."""
        return self.peaks.index(max(self.peaks))


def rank_memories(
    spec: Spec,
    lowering: Lowering,
    schedule: Schedule,
    timeline: Timeline | None = None,
    rows: Rows | None = None,
    program: Program | None = None,
) -> tuple[RankMemory, ...]:
    """The peak of a step and its parts, on a device of each pipeline rank. Takes O(actions) time.

    With a `timeline` (in milliseconds), the result also has the bytes over the seconds of the step. Each rank counts as
    receiving as many rows in a layer as it sends, with the most padding these can need. `worst_bytes` counts all rows
    of the expert group in every layer. With the `rows` that a run recorded, the result counts these rows, without the
    inside of segments and without staging, as the run's ledger does. `program`: of the schedule, if it was made before.
    """
    plan = lowering.plan
    program = program or lowering.program(schedule)
    effects = Effects() if rows else _effects_of(spec, lowering)
    worst_held, kinds = most_held(spec, worst_held_rows(spec)), kinds_of_values(plan)
    result = []
    scratch = update_scratch(spec, plan)
    for rank, state in enumerate(rank_states(spec, plan)):
        values = RankValues(program, schedule, rank, rows or planned_received_rows(spec), effects, worst_held)
        curve = curve_of(values, program, schedule)
        values = RankValues(program, schedule, rank, rows or planned_received_rows(spec), effects, worst_held)
        peak = peak_of(values, program, schedule, curve.top, kinds)
        assert peak.bytes == curve.peaks[curve.top], "both follow the same instructions"
        memory = RankMemory(
            pp_rank=rank,
            capacity_bytes=device_of(spec, plan, rank).room,
            peak_bytes=state.total + peak.bytes,
            weights=state.weights,
            gradients=state.gradients,
            optimizer=state.optimizer,
            activations=peak.bytes - peak.buffers,
            buffers=peak.buffers,
            peak_action=str(schedule.actions[rank][curve.top]),
            timeline=_over_time(curve, timeline, rank, state) if timeline else (),
            worst_bytes=None if rows else state.total + max(curve.worst),
            worst_action=None if rows else str(schedule.actions[rank][curve.worst.index(max(curve.worst))]),
            held_tensors=peak.held_tensors,
            host_bytes=state.host + host_buffers(spec, lowering, schedule, rank) if spec.has_hosts else state.host,
        )
        result.append(memory if rows else _add_update(memory, state, scratch[rank]))
    return tuple(result)


def rank_peaks(spec: Spec, lowering: Lowering, schedule: Schedule) -> tuple[RankPeak, ...]:
    """The peaks of `rank_memories`, without their parts, which take about as long again."""
    plan, program = lowering.plan, lowering.program(schedule)
    effects, rows, scratch = _effects_of(spec, lowering), planned_received_rows(spec), update_scratch(spec, plan)
    peaks = []
    for rank, state in enumerate(rank_states(spec, plan)):
        curve = curve_of(RankValues(program, schedule, rank, rows, effects), program, schedule)
        peak = state.total + max(*curve.peaks, scratch[rank])
        peaks.append(RankPeak(rank, device_of(spec, plan, rank).room, peak))
    return tuple(peaks)


def _effects_of(spec: Spec, lowering: Lowering) -> Effects:
    """What segments need inside, and what exchanges stage."""
    inside = cache(partial(_inside_bytes, lowering.plan.cuts, lowering.rates[0]))
    return Effects(inside=inside, staging=staging_of(spec))


def _inside_bytes(cuts: Mapping[str, Cut], rates: Rates, site: str, phase: str, rows: int) -> int:
    """The peak memory inside a call of a segment, with the temporary tensors of the op that needs the most."""
    works = [work for name, cost in cuts[site].costs if name == phase for work in cost.ops]
    return cuts[site].inside_bytes(phase, rows) + max((rates.temporary_bytes(*work) for work in works), default=0)


def host_buffers(spec: Spec, lowering: Lowering, schedule: Schedule, rank: int) -> int:
    """Bytes of the host buffers of a rank for offloaded activations: by stage, as many as are away at once."""
    away, buffers = Counter[int](), Counter[int]()
    for step in schedule.actions[rank]:
        if isinstance(step, Action) and is_copy(step):
            away[step.stage] += 1 if step.kind == "O" else -1
            buffers[step.stage] = max(buffers[step.stage], away[step.stage])
    rows = received_rows(planned_received_rows(spec))
    return sum(count * lowering.chains(stage, rank).offloaded_bytes(rows) for stage, count in buffers.items())


def _add_update(memory: RankMemory, state: DeviceBytes, scratch: int) -> RankMemory:
    """The memory of a rank with its update, which needs `scratch` bytes besides its state."""
    if state.total + scratch <= memory.peak_bytes:
        return memory
    return replace(
        memory,
        peak_bytes=state.total + scratch,
        activations=scratch,
        buffers=0,
        peak_action=UPDATE,
        worst_bytes=max(memory.worst_bytes or 0, state.total + scratch),
        held_tensors=(),
    )


def curve_of(values: RankValues, program: Program, schedule: Schedule) -> MemoryCurve:
    """A rank's bytes over all of its invocations."""
    points, memory = [], values.memory
    for invocation, step in zip(program.invocations[values.rank], schedule.actions[values.rank], strict=True):
        memory.peak_fixed_bytes, memory.peak_bytes = memory.fixed_bytes, memory.bytes
        values.invoke(invocation, step)
        points.append((memory.peak_bytes, memory.bytes, memory.peak_fixed_bytes))
    return MemoryCurve(*zip(*points, strict=True))


def worst_rows(spec: Spec) -> int:
    """Rows that a rank receives if every token of its expert group chooses as many of the rank's experts as it can."""
    p = spec.parallel
    rows_of_token = max((min(moe.top_k, moe.experts // p.expert) for moe in mixtures(spec)), default=0)
    return p.expert_group * spec.tokens_of_rank * rows_of_token


def worst_held_rows(spec: Spec) -> int:
    """`worst_rows`, with the most padding that they can need."""
    rows, ranks, alignment = worst_rows(spec), spec.parallel.expert, spec.row_alignment
    return max((most_rows(rows, moe.experts // ranks, alignment) for moe in mixtures(spec)), default=0)


# ---------------------------------------------------------------- over time
def _over_time(curve: MemoryCurve, timeline: Timeline, rank: int, state: DeviceBytes) -> tuple[tuple[float, int], ...]:
    """(second, all bytes held) of a device: three points per step of the schedule, thinned to `MAX_POINTS`."""
    points: list[tuple[float, int]] = [(0.0, state.total)]
    unit = float(timeline.unit) / 1000
    for (start, end), peak, after in zip(timeline.ticks[rank], curve.peaks, curve.ends, strict=True):
        points += [(start * unit, points[-1][1]), ((start + end) / 2 * unit, state.total + peak)]
        points.append((end * unit, state.total + after))
    return tuple(thin_points(points, MAX_POINTS))


def thin_points(points: Sequence[tuple[float, int]], max_points: int) -> list[tuple[float, int]]:
    """At most `max_points` of the points, in order: the least and the greatest of each run of neighbouring points."""
    if len(points) <= max_points:
        return list(points)
    size = -(-2 * len(points) // (max_points - 2))
    inner = points[1:-1]
    chosen = [points[0]]
    for begin in range(0, len(inner), size):
        run = range(begin, min(begin + size, len(inner)))
        ends = {min(run, key=lambda k: inner[k][1]), max(run, key=lambda k: inner[k][1])}
        chosen += [inner[k] for k in sorted(ends)]
    return [*chosen, points[-1]]


# --- Why a plan does not fit: which rank holds too much, at which action, by how many bytes, and in which parts

GIB = 2**30
WORDS = {
    "kept": "inputs kept for the backward",
    "saved": "saved by forwards",
    "deferred": "kept for deferred weight gradients",
    "gradient": "gradients of activations",
    "buffer": "buffers of exchanges",
    "message": "pipeline messages",
    "inside": "temporaries of one segment",
}


@dataclass(frozen=True, slots=True)
class Overflow:
    """A device whose peak exceeds its memory. `parts`: everything that it holds at the peak, by kind, largest first."""

    pp_rank: int
    action: str
    peak_bytes: int
    capacity_bytes: int
    parts: tuple[HeldTensor, ...]
    largest: tuple[HeldTensor, ...]  # values, summed by name over layers and micro-batches

    @property
    def over_bytes(self) -> int:
        """Bytes by which the peak exceeds the device's memory."""
        return self.peak_bytes - self.capacity_bytes


def overflows(memories: Sequence[RankMemory]) -> tuple[Overflow, ...]:
    """The pipeline ranks whose devices hold too much, the fullest first and equally full ones in order."""
    full = [_overflow(memory) for memory in memories if not memory.fits]
    return tuple(sorted(full, key=lambda overflow: (-overflow.over_bytes, overflow.pp_rank)))


def _overflow(memory: RankMemory) -> Overflow:
    kinds = Counter[str]()
    for tensor in memory.held_tensors:
        kinds[WORDS[tensor.kind]] += tensor.bytes
    parts = [("weights", memory.weights), ("optimizer", memory.optimizer)]
    parts.append(("gradients of weights", memory.gradients))
    rows = sorted((*parts, *kinds.items()), key=lambda row: (-row[1], row[0]))
    return Overflow(
        pp_rank=memory.pp_rank,
        action=memory.peak_action,
        peak_bytes=memory.peak_bytes,
        capacity_bytes=memory.capacity_bytes,
        parts=tuple(HeldTensor(name, size) for name, size in rows if size),
        largest=memory.held_tensors,
    )


def explain_memory(spec: Spec, plan: Plan, memories: Sequence[RankMemory], max_tensors: int = 5) -> tuple[str, ...]:
    """Lines that say which device is too full and by how much, then what it holds; none if everything fits."""
    full = overflows(memories)
    if not full:
        return ()
    worst = full[0]
    device = device_of(spec, plan, worst.pp_rank)
    lines = [
        f"pipeline rank {worst.pp_rank} holds {gib(worst.peak_bytes)} at {worst.action}, {gib(worst.over_bytes)} more "
        f"than the {room_text(device)}"
    ]
    if len(full) > 1:
        ranks = ", ".join(str(rank) for rank in sorted(overflow.pp_rank for overflow in full[1:]))
        several = len(full) > 2
        lines.append(f"pipeline rank{'s' * several} {ranks} {'do' if several else 'does'} not fit either")
    lines += [f"  {gib(part.bytes):>10}  {part.name}" for part in worst.parts]
    lines.append("the largest values, summed over layers and micro-batches:")
    lines += [
        f"  {gib(tensor.bytes):>10}  {tensor.name}, {WORDS[tensor.kind]}" for tensor in worst.largest[:max_tensors]
    ]
    return tuple(lines)


def room_text(device: Device) -> str:
    """Describe the memory that plans may use of a device: `73.5 GiB of device h800, besides the 5.6 GiB reserved`."""
    besides = f", besides the {gib(device.reserved_bytes)} reserved" if device.reserved_bytes else ""
    return f"{gib(device.room)} of device {device.name}{besides}"


def gib(num_bytes: int) -> str:
    """Bytes in a suitable unit, such as `84.1 GiB`."""
    for scale, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


# ---------------------------------------------------------------- assumptions
def memory_assumptions(spec: Spec, plan: Plan, memories: Sequence[RankMemory]) -> tuple[str, ...]:
    """The assumptions behind the memory of a plan, a sentence each."""
    mixed = any(isinstance(layers.ffn, Moe) for layers in spec.model.layers) and spec.parallel.expert_group > 1
    rows = "every expert rank receives as many rows as it sends; " if mixed else ""
    reserved = dict.fromkeys(gib(device.reserved_bytes) for device in spec.cluster.devices if device.reserved_bytes)
    overhead = (
        f"{' or '.join(reserved)} of a device are left to CUDA contexts, NCCL, cuBLAS and fragmentation"
        if reserved
        else "the allocator loses nothing to fragmentation"
    )
    lines = [
        f"memory: {rows}{overhead}",
        *_of_eight_bits(spec, plan),
        *_of_rows(spec, memories),
    ]
    return tuple(lines)


def _of_eight_bits(spec: Spec, plan: Plan) -> list[str]:
    copies = max(quantised_weight_bytes(plan))
    if not copies:
        return []
    dtype = spec.precision.attention_output or spec.precision.compute
    return [
        f"memory: besides its weights, a device holds two copies of them in {spec.precision.linear} for products, one "
        f"transposed for input gradients: {gib(copies)} at most",
        f"memory: the output of attention is kept in {dtype}, as its backward reads it, and quantised again for the "
        "weight gradient that follows",
    ]


RARE = -12  # the logarithm of a probability at which nobody plans for it


def _of_rows(spec: Spec, memories: Sequence[RankMemory]) -> list[str]:
    """The worst case, and whether even and independent choices of experts lead to it."""
    mixtures = [layers.ffn for layers in spec.model.layers if isinstance(layers.ffn, Moe)]
    ranks, group = spec.parallel.expert, spec.parallel.expert_group
    worst = max((memory.worst_bytes or 0 for memory in memories), default=0)
    if not mixtures or ranks == 1 or worst == 0:
        return []
    moe = max(mixtures, key=lambda mixture: min(mixture.top_k, mixture.experts // ranks))
    local, tokens = moe.experts // ranks, group * spec.tokens_of_rank
    num_choices = comb(moe.experts - local, moe.top_k - local) if moe.top_k >= local else comb(local, moe.top_k)
    chance = tokens * (log10(num_choices) - log10(comb(moe.experts, moe.top_k))) + log10(ranks)
    often = f"in {10**chance:.1g} of the layers" if chance > RARE else "practically never"
    return [
        f"memory: if all {tokens:,} tokens of an expert group went to one rank in each layer ({worst_rows(spec):,} "
        f"rows), the rank would hold {gib(worst)}; with even and independent choices of experts, this happens {often}"
    ]
