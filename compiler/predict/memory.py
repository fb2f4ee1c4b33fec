"""Memory of every pipeline rank over a step: what it always holds, and what the actions of its schedule hold.

The schedule is lowered to the program that would run, and that is gone through as the proof goes through it: a value
lives from the instruction that writes it to the one that frees it, a message until it is known to have arrived. So for
what compiles, the peak of values is that of the certificate, and of the ledger of a run, to the byte. Beside it stand
what a segment needs inside, between its instructions, and what exchanges stage, which neither of them sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiler.ir import Buffer, Instruction, Program
from compiler.ir.dtypes import extent_at, tensor_bytes
from compiler.ir.expert_placement import Received, most_rows
from compiler.plan.split_blocks import held, mixtures, most_held
from compiler.predict.memory_peak import peak_of, saved_and_deferred
from compiler.predict.memory_state import device_of, rank_states, update_scratch
from compiler.predict.prediction import RankMemory
from compiler.program.lower import Lowering
from compiler.program.proof.effects import Effects, Rows, Staged, Staging
from compiler.program.proof.lifetimes import RankValues, received
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline
from dsl.closed_forms.memory import DeviceBytes
from dsl.facts.devices import group_nodes
from dsl.schema import Spec
from runtime.contract.actions import Action, is_copy

# --- What exchanges need beside the tensors that they are given and return: copies that are under way
#
# Ranks whose channels are collectives (NCCL, or gloo between machines) send and receive rows in one contiguous tensor.
# Rows that lie by expert are therefore packed before they are sent and get room before they are moved to their places
# (runtime/comm/collective.py). With `route = nodes` a rank chooses the rows to send for both hops, and adds rows on the
# way back (runtime/comm/nodes.py). A run's ledger does not see these tensors, and they are no values of the program.

INTEGERS = ("int32", "int64")  # tables and counts, which are not moved


def staging_of(spec: Spec) -> Staging | None:
    """What each exchange of a spec's program stages; None where none stages anything."""
    parallel = spec.parallel
    if parallel.expert_group == parallel.tensor == parallel.context == 1 and parallel.zero < 2:
        return None
    across = _crosses_nodes(spec)
    collective = spec.has_hosts or (across and not spec.by_nodes)

    def staged(start: Instruction, read: Sequence[Buffer], written: Sequence[Buffer], rows: Received) -> Staged:
        if start.kind == "scatter_rows":  # the sums are made in a room as large as what is summed
            return Staged(sum(each.bytes_at(*rows) for each in read))
        if start.kind == "gather_sequences":  # which are put in the order of sequences when they are there
            return Staged(at_wait=sum(each.bytes_at(*rows) for each in written))
        if start.kind == "scatter_sequences":  # which is put in the order of ranks first
            return Staged(2 * sum(each.bytes_at(*rows) for each in read))
        if start.kind == "scatter":
            # gloo has no reduce-scatter: the parts of the other holders come to a second buffer
            several = not spec.has_hosts and spec.cluster.num_nodes > 1
            return Staged(sum(each.bytes_at(*rows) for each in read) if several else 0)
        if start.kind not in ("dispatch", "combine") or spec.parallel.expert_group == 1:
            return Staged()
        forward = (start.kind == "dispatch") == (start.phase == "F")
        if not spec.by_nodes:
            # forward: room for the rows that come; back: the rows that go, packed
            lying = written if forward else read
            return Staged(sum(_bytes(each, rows.rows, rows) for each in _moved(lying)) if collective else 0)
        tensors = [_two_hops(each, forward, rows, collective) for each in _moved(read)]
        return Staged(sum(first for first, _ in tensors), _most(tensors))

    return staged


def _two_hops(tensor: Buffer, forward: bool, rows: Received, collective: bool) -> tuple[int, int]:
    """What an exchange between nodes stages of a tensor in its first hop and in its second.

    A tensor of one dimension has a gate weight for each row: it goes as it is, and comes back as it went.
    """
    is_gate = len(tensor.shape) == 1
    by_expert = _bytes(tensor, rows.rows, rows) if collective else 0  # packed, or room for what comes
    forwarded, copies = _bytes(tensor, rows.forwarded, rows), _bytes(tensor, rows.copies, rows)
    if forward:  # the copies that go; rows for each expert, of the copies that came
        return 0 if is_gate else copies, forwarded + by_expert
    return by_expert, forwarded if is_gate else 2 * copies  # rows by expert; sums that go, and those that come


def _most(tensors: Sequence[tuple[int, int]]) -> int:
    """The most bytes in a wait: the second hop of each tensor begins behind its first, one tensor after another."""
    firsts = sum(first for first, _ in tensors)
    most = seconds = 0
    for first, then in tensors:
        firsts, seconds = firsts - first, seconds + then
        most = max(most, firsts + seconds)
    return most


def _moved(read: Sequence[Buffer]) -> list[Buffer]:
    return [each for each in read if each.shape and each.dtype not in INTEGERS]


def _bytes(tensor: Buffer, count: int, rows: Received) -> int:
    """Bytes of `count` rows of a tensor."""
    return tensor_bytes((count, *(extent_at(each, *rows) for each in tensor.shape[1:])), tensor.dtype)


def _crosses_nodes(spec: Spec) -> bool:
    """Whether an expert group lies on several nodes."""
    return any(group_nodes(node.devices, spec.parallel.expert_group) != 1 for _, node in spec.cluster.parts)


# --- memory

MAX_POINTS = 400  # of a curve
UPDATE = "update"  # stands where a peak has its action


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of the values of a rank over its invocations: the most during each, what is left behind it, and the most
    during each if the most rows came."""

    peaks: tuple[int, ...]
    ends: tuple[int, ...]
    worst: tuple[int, ...]

    @property
    def top(self) -> int:
        """The invocation of the peak, the first of them."""
        return self.peaks.index(max(self.peaks))


def rank_memories(
    spec: Spec,
    lowering: Lowering,
    schedule: Schedule,
    timeline: Timeline | None = None,
    rows: Rows | None = None,
    program: Program | None = None,
) -> tuple[RankMemory, ...]:
    """The peak of a step and its parts, on a device of each pipeline rank; with a `timeline` (in milliseconds) the
    bytes over the seconds of the step too. Torch-free; O(actions).

    Every rank receives as many rows in a layer as it sends, with the most padding these can need; `worst_bytes` is what
    the fullest would hold if in every layer all rows of its expert group came to it. With `rows`, as a run recorded
    them, it is those rows, and what segments need inside and what exchanges stage are left out: the view of the run's
    ledger. `program`: of the schedule, if it is there.
    """
    plan, cuts = lowering.plan, lowering.plan.cuts
    program = program or lowering.program(schedule)
    effects = Effects(
        inside=None if rows else lambda site, phase, rows: cuts[site].inside_bytes(phase, rows),
        staging=None if rows else staging_of(spec),
    )
    most, kinds = most_held(spec, worst_held_rows(spec)), saved_and_deferred(plan)
    result = []
    scratch = update_scratch(spec, plan)
    for rank, state in enumerate(rank_states(spec, plan)):
        values = RankValues(program, schedule, rank, rows or held(spec), effects, most)
        curve = curve_of(values, program, schedule)
        values = RankValues(program, schedule, rank, rows or held(spec), effects, most)
        peak = peak_of(values, program, schedule, curve.top, kinds)
        assert peak.bytes == curve.peaks[curve.top], "both go through the same instructions"
        found = RankMemory(
            pp_rank=rank,
            capacity_bytes=device_of(spec, plan, rank).memory,
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
            held=peak.held,
            host_bytes=state.host + host_buffers(spec, lowering, schedule, rank) if spec.has_hosts else state.host,
        )
        result.append(found if rows else _at_least(found, state, scratch[rank]))
    return tuple(result)


def host_buffers(spec: Spec, lowering: Lowering, schedule: Schedule, rank: int) -> int:
    """Bytes of the buffers of a rank's host for activations: for each stage as many as are away at once."""
    away, most = Counter[int](), Counter[int]()
    for step in schedule.actions[rank]:
        if isinstance(step, Action) and is_copy(step):
            away[step.stage] += 1 if step.kind == "O" else -1
            most[step.stage] = max(most[step.stage], away[step.stage])
    rows = received(held(spec))
    return sum(count * lowering.chains(stage, rank).copied_bytes(rows) for stage, count in most.items())


def _at_least(found: RankMemory, state: DeviceBytes, scratch: int) -> RankMemory:
    """The memory of a rank whose update, after the last action, needs `scratch` bytes besides its state."""
    if state.total + scratch <= found.peak_bytes:
        return found
    return replace(
        found,
        peak_bytes=state.total + scratch,
        activations=scratch,
        buffers=0,
        peak_action=UPDATE,
        worst_bytes=max(found.worst_bytes or 0, state.total + scratch),
        held=(),
    )


def curve_of(values: RankValues, program: Program, schedule: Schedule) -> MemoryCurve:
    """A rank's bytes over its invocations, from its first on."""
    points, memory = [], values.memory
    for invocation, step in zip(program.invocations[values.rank], schedule.actions[values.rank], strict=True):
        memory.peak_fixed_bytes, memory.peak_bytes = memory.fixed_bytes, memory.bytes
        values.invoke(invocation, step)
        points.append((memory.peak_bytes, memory.bytes, memory.peak_fixed_bytes))
    return MemoryCurve(*zip(*points, strict=True))


def worst_rows(spec: Spec) -> int:
    """Rows it receives if every token of its expert group chooses as many of its experts as a token can."""
    p = spec.parallel
    most = max((min(moe.top_k, moe.experts // p.expert) for moe in mixtures(spec)), default=0)
    return p.expert_group * spec.tokens_of_rank * most


def worst_held_rows(spec: Spec) -> int:
    """Those rows with the most padding that they can need."""
    rows, ranks, alignment = worst_rows(spec), spec.parallel.expert, spec.row_alignment
    return max((most_rows(rows, moe.experts // ranks, alignment) for moe in mixtures(spec)), default=0)


# ---------------------------------------------------------------- over time
def _over_time(curve: MemoryCurve, timeline: Timeline, rank: int, state: DeviceBytes) -> tuple[tuple[float, int], ...]:
    """(second, bytes) of a device, all that it holds: three points a step, or fewer where these are too many."""
    points: list[tuple[float, int]] = [(0.0, state.total)]
    unit = float(timeline.unit) / 1000
    for (start, end), peak, left in zip(timeline.ticks[rank], curve.peaks, curve.ends, strict=True):
        points += [(start * unit, points[-1][1]), ((start + end) / 2 * unit, state.total + peak)]
        points.append((end * unit, state.total + left))
    return tuple(thinned(points, MAX_POINTS))


def thinned(points: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """At most `most` of the points, in order: the least and the greatest of each run of points that fall together."""
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // (most - 2))
    inner = points[1:-1]
    chosen = [points[0]]
    for at in range(0, len(inner), size):
        run = range(at, min(at + size, len(inner)))
        ends = {min(run, key=lambda k: inner[k][1]), max(run, key=lambda k: inner[k][1])}
        chosen += [inner[k] for k in sorted(ends)]
    return [*chosen, points[-1]]
