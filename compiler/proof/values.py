"""Third pass, over each rank alone: values are written once, read while live, freed in the end; and peak bytes.

Posts and releases stand at fixed places of a rank's program, so its memory does not depend on the interleaving.
A value lives in the namespace of its (stage, micro-batch), across bodies. A storage lives as long as one of: a value
in it, a value that aliases it, an unreleased send of it. A receive's buffer lives from its post, an exchange's results
from its start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from compiler.ir import Body, Buffer, Instruction, Invocation, Message, Program
from compiler.proof.certificate import ProofError
from compiler.proof.channels import message_of
from compiler.proof.structure import EXCHANGES, waits_of
from compiler.schedules.schedule import Schedule
from runtime.actions import Action, Step, actions_of

Rows: TypeAlias = Callable[[int, str, int], int]  # (pipeline rank, layer, micro-batch) -> R


@dataclass
class Storage:
    """A piece of memory and how many values and sends hold it."""

    fixed_bytes: int
    bytes: int
    holders: int = 0


@dataclass
class _Namespace:
    """Values of one (stage, micro-batch)."""

    live: dict[str, tuple[Buffer, Storage]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)


@dataclass
class Memory:
    """Live and peak bytes of a rank: without received rows, and with them."""

    fixed_bytes: int = 0
    bytes: int = 0
    peak_fixed_bytes: int = 0
    peak_bytes: int = 0

    def hold(self, storage: Storage) -> None:
        if storage.holders == 0:
            self.fixed_bytes += storage.fixed_bytes
            self.bytes += storage.bytes
            self.peak_fixed_bytes = max(self.peak_fixed_bytes, self.fixed_bytes)
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        storage.holders += 1

    def drop(self, storage: Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            self.fixed_bytes -= storage.fixed_bytes
            self.bytes -= storage.bytes


def check_values(program: Program, schedule: Schedule, rank: int, rows: Rows) -> Memory:
    """Raise ProofError unless every read, write and free of `rank` is sound; returns its peak bytes."""
    state = _RankValues(program, rank, rows)
    for invocation, step in zip(program.invocations[rank], schedule.actions[rank], strict=True):
        state.invoke(invocation, step)
    for (stage, micro_batch), namespace in sorted(state.namespaces.items()):
        for name in namespace.live:
            raise ProofError(f"rank {rank}, stage {stage}, micro-batch {micro_batch}: {name} is never freed")
    return state.memory


class _RankValues:
    """The namespaces and memory of one rank as its program goes on."""

    def __init__(self, program: Program, rank: int, rows: Rows) -> None:
        self.rank, self.rows, self.message = rank, rows, program.message
        self.bodies = {body.name: (body, waits_of(rank, body)) for body in program.bodies[rank]}
        self.namespaces: dict[tuple[int, int], _Namespace] = {}
        self.memory = Memory()
        self.posted: dict[Message, Storage] = {}  # a message has one source, so its name is enough
        self.in_flight: dict[Message, Storage] = {}

    def invoke(self, invocation: Invocation, step: Step) -> None:
        body, waits = self.bodies[invocation.body]
        for _, message in invocation.posts:
            if self.message is None:
                raise ProofError(f"rank {self.rank}, {step}: posts {message}, but the program has no message buffer")
            self.posted[message] = self._allocate(self.message, "", 0)
        self._run(body, waits, actions_of(step))
        for _, message in invocation.releases:
            self.memory.drop(self.in_flight.pop(message))

    def _run(self, body: Body, waits: dict[int, int], actions: tuple[Action, ...]) -> None:
        results: dict[int, dict[str, Storage]] = {}  # of exchanges under way, by the index of their wait
        for index, instruction in enumerate(body.instructions):
            action = actions[instruction.slot]
            names = self.namespaces.setdefault((action.stage, action.micro_batch), _Namespace())
            for name in instruction.reads:
                if name not in names.live:
                    raise self._error(action, instruction, f"{name} is not live")
            if instruction.kind == "free":
                for name in instruction.reads:
                    self._free(action, instruction, names, name)
            elif instruction.kind in EXCHANGES:
                writes = body.instructions[waits[index]].writes
                own = [buffer for buffer in writes if not buffer.alias]
                results[waits[index]] = {b.name: self._allocate(b, instruction.site, action.micro_batch) for b in own}
            elif instruction.kind == "send":
                self._send(action, instruction, names)
            elif instruction.kind == "receive":
                self._receive(action, instruction, names)
            else:
                self._write(action, instruction, names, results.pop(index, {}))

    def _allocate(self, buffer: Buffer, site: str, micro_batch: int) -> Storage:
        rows = self.rows(self.rank, site.split(".")[0], micro_batch) if buffer.row_bytes else 0
        storage = Storage(buffer.fixed_bytes, buffer.fixed_bytes + buffer.row_bytes * rows)
        self.memory.hold(storage)
        return storage

    def _write(self, action: Action, instruction: Instruction, names: _Namespace, given: dict[str, Storage]) -> None:
        """Bind what an instruction writes: to storage it was given, to that of the value it aliases, or to its own."""
        pending = list(instruction.writes)
        while pending:
            later = []
            for buffer in pending:
                if buffer.name in names.written:
                    raise self._error(action, instruction, f"{buffer.name} is written twice")
                if buffer.alias and buffer.alias not in names.live:
                    later.append(buffer)
                    continue
                if buffer.alias:
                    storage = names.live[buffer.alias][1]
                    self.memory.hold(storage)
                else:
                    storage = given.get(buffer.name) or self._allocate(buffer, instruction.site, action.micro_batch)
                names.live[buffer.name] = (buffer, storage)
                names.written.add(buffer.name)
            if len(later) == len(pending):
                raise self._error(action, instruction, f"{later[0].name} aliases {later[0].alias}, which is not live")
            pending = later

    def _send(self, action: Action, instruction: Instruction, names: _Namespace) -> None:
        buffer, storage = names.live[instruction.reads[0]]
        self._check_message(action, instruction, buffer)
        self.memory.hold(storage)
        self.in_flight[message_of(instruction, action.micro_batch)] = storage

    def _receive(self, action: Action, instruction: Instruction, names: _Namespace) -> None:
        self._check_message(action, instruction, instruction.writes[0])
        storage = self.posted.pop(message_of(instruction, action.micro_batch))
        self._write(action, instruction, names, {instruction.writes[0].name: storage})

    def _check_message(self, action: Action, instruction: Instruction, buffer: Buffer) -> None:
        expected = self.message
        if expected is None or (buffer.shape, buffer.dtype) != (expected.shape, expected.dtype):
            shape = f"{expected.dtype}{list(expected.shape)}" if expected else "no tensor"
            raise self._error(
                action,
                instruction,
                f"{buffer.name} is {buffer.dtype}{list(buffer.shape)}, a message of the program {shape}",
            )

    def _free(self, action: Action, instruction: Instruction, names: _Namespace, name: str) -> None:
        if name not in names.live:
            raise self._error(action, instruction, f"{name} is not live")
        self.memory.drop(names.live.pop(name)[1])

    def _error(self, action: Action, instruction: Instruction, fault: str) -> ProofError:
        words = (instruction.kind, instruction.wait, instruction.phase, instruction.site)
        return ProofError(f"rank {self.rank}, {action}: {' '.join(word for word in words if word)}: {fault}")
