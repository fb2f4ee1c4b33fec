"""Re-checks, before any rank starts, that the programs of a build are the proven ones. No torch.

`certificate/<program>.json` names the plan, program and stage modules (sha256 of each) and the schedule (sha256 of its
text) of the compiler's proof, and the messages of every body. These are re-checked here, in milliseconds:
- the certificate is for these files, and every program has one;
- the program, as the runtime parses it, executes the proven schedule;
- one maximal run of its messages under zero-buffer rendezvous: every channel is in order at both ends, no rank waits
  forever, everything posted is received, everything kept is taken, no send is released before its arrival is known.
Values, memory, operands and the plan's replicas are not checked again: they were proven for files with these digests.
This finds accidents, not malice: whoever edits a file can edit its certificate.

Measured on one core of a shared 2-core x86 machine, with the strict reading of both files: 1.6 ms for DualPipe on 4
ranks and 16 micro-batches, 65 ms on 16 ranks and 120 (14,328 events).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from runtime.contract import Call, Certificate, Collective, Exchanged, Opening, PlannedBucket, RunPlan, RunProgram
from runtime.contract.mesh import word_of
from runtime.contract.names import MessageName, ProgramName
from runtime.system.strict_json import FormError


class CertificateError(Exception):
    """A program differs from the proven one. The message says which and why."""


class Event(NamedTuple):
    """An operation on a message: `kind` is post, send, receive or release; `peer`: the other pipeline rank."""

    kind: str
    peer: int
    message: str  # F3.0
    label: str  # the step of the schedule, (F3.7|B4.2)


def recheck(files: Mapping[str, bytes], digests: Mapping[str, str]) -> dict[ProgramName, RunProgram]:
    """Return the programs of a build, by name. CertificateError unless each is the proven one. O(messages).

    files: files of the build, by path. digests: sha256 of each.
    """
    programs, certified = program_names(digests), _names(digests, "certificate")
    for name in sorted({*programs, *certified}):
        if name not in certified:
            raise CertificateError(f"program/{name}.json has no certificate: it was never proven")
        if name not in programs:
            raise CertificateError(f"certificate/{name}.json is of a program that is not there")
    return {name: _recheck(name, files, digests) for name in programs}


def program_names(files: Iterable[str]) -> list[ProgramName]:
    """Return the sorted names of the programs among the files of a build: train_8, evaluate_2, …"""
    return [ProgramName(name) for name in _names(files, "program")]


def _names(files: Iterable[str], folder: str) -> list[str]:
    start, suffix = f"{folder}/", ".json"
    return sorted(file.removeprefix(start).removesuffix(suffix) for file in files if file.startswith(start))


def _recheck(name: str, files: Mapping[str, bytes], digests: Mapping[str, str]) -> RunProgram:
    try:
        certificate = Certificate.from_json(files[f"certificate/{name}.json"])
        program = RunProgram.from_json(files[f"program/{name}.json"])
        _check(name, program, certificate, digests)
    except (ValueError, LookupError) as error:
        words = str(error) if isinstance(error, FormError) else f"{type(error).__name__}: {error}"
        raise CertificateError(f"program/{name}.json does not fit its certificate ({words})") from None
    return program


def _check(name: str, program: RunProgram, certificate: Certificate, digests: Mapping[str, str]) -> None:
    if not {"plan.json", f"program/{name}.json"} <= certificate.files.keys():
        raise CertificateError(f"certificate/{name}.json is not of program/{name}.json")
    for file, digest in certificate.files.items():
        if digests.get(file) != digest:
            raise CertificateError(
                f"{file} was changed after program {name} was proven: certificate/{name}.json is of another {file}"
            )
    if hashlib.sha256(schedule_text(program).encode()).hexdigest() != certificate.schedule:
        raise CertificateError(f"program/{name}.json carries out another schedule than certificate/{name}.json proves")
    fault = replay([events(row, certificate.bodies[rank]) for rank, row in enumerate(program.ranks)])
    if fault:
        raise CertificateError(f"program/{name}.json: {fault}")


def schedule_text(program: RunProgram) -> str:
    """Return the schedule of a program in the text form of schedules, where E is written as F."""
    sizes = f"ranks={len(program.ranks)} micro_batches={program.micro_batches} placement={program.placement}"
    rows = [" ".join(call.label.replace("E", "F") for call in row) for row in program.ranks]
    return "\n".join([f"# {program.schedule} {sizes}", *rows]) + "\n"


def events(calls: Sequence[Call], bodies: Mapping[str, Sequence[Exchanged]]) -> list[Event]:
    """Return the message events of one rank, in order. `calls`: from the program; `bodies`: from the certificate."""
    result: list[Event] = []
    for call in calls:
        label = call.label
        result += [Event("post", source, message, label) for source, message in call.posts]
        result += [
            Event(kind, peer, MessageName.of(producer, call.micro_batches[slot]), label)
            for kind, peer, producer, slot in bodies[call.body]
        ]
        result += [Event("release", destination, message, label) for destination, message in call.releases]
    return result


# ---------------------------------------------------------------- replay
def replay(ranks: Sequence[Sequence[Event]]) -> str:
    """Replay one maximal run, which represents all (straight-line code, named peers). Return the error, or ""."""
    state = _ProgramReplay(ranks)
    runnable = deque(range(len(ranks)))
    while runnable:
        rank = runnable.popleft()
        while state.done[rank] < len(ranks[rank]):
            event = ranks[rank][state.done[rank]]
            if event.kind == "receive" and event.peer != rank and (event.peer, rank, event.message) not in state.sent:
                state.waiting[event.peer, rank, event.message] = rank
                break
            state.done[rank] += 1
            fault = state.step(rank, event)
            if fault:
                return f"rank {rank}, {event.label}: {fault}"
            woken = state.waiting.pop((rank, event.peer, event.message), None) if event.kind == "send" else None
            if woken is not None:
                runnable.append(woken)
    return state.end()


class _ProgramReplay:
    """The progress of every rank, and the messages in flight."""

    def __init__(self, ranks: Sequence[Sequence[Event]]) -> None:
        self.ranks = ranks
        self.done = [0] * len(ranks)
        self.waiting: dict[tuple[int, int, str], int] = {}
        self.sent: dict[tuple[int, int, str], int] = {}  # (source, destination, message) → event index at the source
        self.received: dict[tuple[int, int, str], int] = {}  # → event index at the destination
        self.num_known: dict[tuple[int, int], int] = defaultdict(
            int
        )  # (rank, peer) → the peer's events known to be done
        self.order: dict[tuple[int, int, str], list[str]] = defaultdict(list)  # sends and posts of each channel
        self.open: set[tuple[str, int, int, str]] = set()  # posted and not received, in flight, or kept

    def step(self, rank: int, event: Event) -> str:
        """Execute an event. Return the error, or ""."""
        kind, peer, message, _ = event
        if peer == rank:
            return self._pass_to_itself(rank, kind, message)
        if not 0 <= peer < len(self.ranks):
            return f"there is no rank {peer}"
        if kind == "post":
            self.order[peer, rank, kind].append(message)
            return self._begin("posted", peer, rank, message)
        if kind == "send":
            self.order[rank, peer, kind].append(message)
            self.sent[rank, peer, message] = self.done[rank]
            return self._begin("in flight", rank, peer, message)
        if kind == "receive":
            self.received[peer, rank, message] = self.done[rank]
            self.num_known[rank, peer] = max(self.num_known[rank, peer], self.sent[peer, rank, message])
            return self._finish("posted", peer, rank, message)
        if kind == "release":
            arrival = self.received.get((rank, peer, message))
            if arrival is None or arrival > self.num_known[rank, peer]:
                return f"releases {message}, whose arrival at rank {peer} is not known by then"
            return self._finish("in flight", rank, peer, message)
        return f"there is no event {kind}"

    def _pass_to_itself(self, rank: int, kind: str, message: str) -> str:
        if kind == "send":
            return self._begin("kept", rank, rank, message)
        return self._finish("kept", rank, rank, message) if kind == "receive" else f"{kind}s {message} to itself"

    def _begin(self, state: str, source: int, destination: int, message: str) -> str:
        key = (state, source, destination, message)
        if key in self.open:
            return f"{message} is {state} twice"
        self.open.add(key)
        return ""

    def _finish(self, state: str, source: int, destination: int, message: str) -> str:
        key = (state, source, destination, message)
        if key not in self.open:
            return f"{message} is not {state}"
        self.open.remove(key)
        return ""

    def end(self) -> str:
        """Return the error when no rank can proceed, or ""."""
        for rank, row in enumerate(self.ranks):
            if self.done[rank] < len(row):
                event = row[self.done[rank]]
                return f"rank {rank}, {event.label}: waits for {event.message} from rank {event.peer} for ever"
        for source, destination, _ in sorted(self.order):
            sends, posts = self.order[source, destination, "send"], self.order[source, destination, "post"]
            if sends != posts:
                return f"rank {destination} posts messages from rank {source} in another order than they are sent"
        pending = sorted(key for key in self.open if key[0] != "in flight")
        return f"rank {pending[0][2]}: {pending[0][3]} is {pending[0][0]}, never received" if pending else ""


# --- Re-checks of the world as a whole: the collectives of every program, and the opening of channels. No torch
#
# A program has one list of collectives for all ranks; a rank skips the buckets that it does not hold. Any two ranks
# reach their common collectives in the same order, so none can hang. What remains to check is that the list matches the
# plan: nothing is missing, runs twice or runs in another place.
#
# The same holds for channels: all ranks open theirs in the order of one list. It must have every channel that a program
# uses, once: a missing one would be opened in the middle of a step, where it may block both of its ends forever.

TARGETS, RECORDS, NORM = (Collective("sum", name) for name in ("targets", "records", "norm"))
LOGITS = Collective("max", "logits")


def check_collectives(plan: RunPlan, programs: Mapping[ProgramName, RunProgram]) -> None:
    """Raise CertificateError unless every program has the collectives that its plan needs. O(buckets) of each."""
    shared = [bucket for bucket in plan.buckets if len(bucket.holders) > 1 and not bucket.still]
    alike = [bucket for bucket in shared if plan.is_reduced(bucket)]
    reduces = {Collective("reduce", bucket.name) for bucket in alike}
    parted = {0: [], 3: alike}.get(plan.zero, shared)
    gathers = {Collective("gather", bucket.name) for bucket in parted}
    groups = {(_pipeline_ranks(plan, bucket.holders), bucket.stages) for bucket in alike}
    averaged = plan.train.validate is not None and plan.train.validate.ema
    of_training = {RECORDS, NORM, *reduces, *((LOGITS,) if plan.clipped else ())}
    for name, program in programs.items():
        trains = name.trains
        lists = {
            "prologue": (program.prologue, {TARGETS}),
            "epilogue": (program.epilogue, of_training if trains else {RECORDS}),
            "update": (program.update, gathers if trains or averaged else set()),
        }
        for place, (listed, wanted) in lists.items():
            if len(listed) != len(wanted) or set(listed) != wanted:
                raise CertificateError(f"program/{name}.json: its {place} differs from the plan's buckets")
        if trains and program.epilogue[-1] != NORM:
            raise CertificateError(f"program/{name}.json: the norm is summed before all gradients are")
        if problem := _wrong_starts(program, groups if trains else set()):
            raise CertificateError(f"program/{name}.json: {problem}")


def _pipeline_ranks(plan: RunPlan, holders: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({holder // plan.mesh.columns for holder in holders}))


def _wrong_starts(program: RunProgram, shared: Collection[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Return the error in the starts of reductions, or "". Each rank starts its reductions once, after the last weight
    gradient of their stages, and all ranks of a channel start them in the same order.

    `shared`: the pipeline ranks and stages of each reduction of the program.
    """
    if shared and len(program.reductions) != len(program.ranks):
        return "its reductions are not those of its ranks"
    for rank, (row, calls) in enumerate(zip(program.reductions, program.ranks, strict=False)):
        if sorted(reduction.stages for reduction in row) != sorted(stages for ranks, stages in shared if rank in ranks):
            return f"the reductions that rank {rank} starts are not those of the plan's buckets"
        after = [reduction.after for reduction in row]
        if after != sorted(after) or any(index >= len(calls) for index in after):
            return f"the reductions of rank {rank} do not follow its calls in order"
        for index in range(min(after, default=len(calls)) + 1, len(calls)):
            added = {action.stage for action in calls[index].body.actions if action.adds_gradients}
            if any(reduction.after < index and not added.isdisjoint(reduction.stages) for reduction in row):
                return f"rank {rank} starts a reduction before {calls[index].label}, which adds to it"
    for ranks in {ranks for ranks, _ in shared}:
        if len({tuple(r.stages for r in program.reductions[k] if (ranks, r.stages) in shared) for k in ranks}) > 1:
            return f"ranks {', '.join(map(str, ranks))} start reductions in several orders"
    return ""


def check_start(plan: RunPlan, programs: Mapping[ProgramName, RunProgram]) -> None:
    """Raise CertificateError unless all channels that programs use are opened once, and no others. O(messages)."""
    used, opened = Counter({*_used_openings(plan, programs)}), Counter(plan.openings)
    for opening in (*used, *opened):
        if used[opening] != opened[opening]:
            ranks = ", ".join(map(str, opening.ranks))
            raise CertificateError(
                f"plan.json: the channels `{opening.kind}` of pipeline ranks {ranks} are opened {opened[opening]} times"
                f" instead of {used[opening]}"
            )


def _opening_of(plan: RunPlan, bucket: PlannedBucket, members: tuple[int, ...]) -> Opening:
    """Return the channel of some holders of a bucket, with the same columns on each of their pipeline ranks."""
    ranks = _pipeline_ranks(plan, members)
    columns = [member % plan.mesh.columns for member in members[: len(members) // len(ranks)]]
    opening = Opening("reduce", ranks, word_of(columns, plan.mesh) or "all")  # "all" fails the next check
    if opening.channel_of(plan.mesh, members[0]) != members:
        raise CertificateError(f"plan.json: bucket {bucket.name} has holders that no channel has")
    return opening


def _used_openings(plan: RunPlan, programs: Mapping[ProgramName, RunProgram]) -> Iterator[Opening]:
    mesh = plan.mesh
    rows = [(rank, calls) for program in programs.values() for rank, calls in enumerate(program.ranks)]
    for source, rank in {(source, rank) for rank, calls in rows for call in calls for source, _ in call.posts}:
        yield Opening("edge", (source, rank), "each")
    if mesh.expert_group > 1:
        for rank in range(mesh.pp):
            if not mesh.node:
                yield from (Opening("expert", (rank,), "block"), Opening("counts", (rank,), "block"))
                continue
            yield from (Opening("expert", (rank,), "across"), Opening("counts", (rank,), "across"))
            if mesh.node > 1:
                yield from (Opening("expert", (rank,), "node"), Opening("counts", (rank,), "node"))
    if mesh.tp > 1:
        yield from (Opening("tensor", (rank,), "tensor") for rank in range(mesh.pp))
    if mesh.cp > 1:
        yield from (Opening("context", (rank,), "context") for rank in range(mesh.pp))
    if mesh.sq > 1:
        yield from (Opening("choices", (rank,), "sequence") for rank in range(mesh.pp))
    for bucket in plan.buckets:
        if len(bucket.holders) > 1 and not bucket.still:
            first, opening = bucket.holders[0], _opening_of(plan, bucket, bucket.holders)
            if not bucket.sites:
                yield opening
                continue
            of_shards = _opening_of(plan, bucket, plan.dividers(bucket, first))
            yield from (of_shards._replace(ranks=(rank,)) for rank in opening.ranks)
            if len(peers := plan.peers(bucket, first)) > 1:
                yield _opening_of(plan, bucket, peers)
                yield from [opening] if plan.zero == 2 else []
    if mesh.world > 1:
        yield Opening("world", tuple(range(mesh.pp)), "all")
