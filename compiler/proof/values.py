"""Third pass, over each rank alone: values are written once, read while live, freed in the end; and peak bytes.

Posts and releases stand at fixed places of a rank's program, so its memory does not depend on the interleaving.
A value lives in the namespace of its (stage, micro-batch), across bodies. A storage lives as long as one of: a value
in it, a value that aliases it, an unreleased send of it. A receive's buffer lives from its post, an exchange's results
from its start; with one expert rank these are what it was given, whose storage it holds on to. What a rank sends to
itself stays in its storage: the send's hold goes over to the value received. So stages that follow each other on one
rank share a namespace. That all posted messages are sent, awaited and released once, and what is handed over is
received once, is the second pass's finding.

Namespaces with the same values in them are one state, and what a body does to a state is found once, however many
micro-batches meet it: a proof takes time for each invocation, not for each instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from compiler.ir import Body, Buffer, Instruction, Invocation, Plan, Program
from compiler.proof.certificate import ProofError
from compiler.proof.channels import message_of
from compiler.proof.operands import Cuts
from compiler.proof.structure import EXCHANGES, waits_of
from compiler.schedules.placement import direction, rank_of
from compiler.schedules.schedule import Schedule
from runtime.actions import Action, Step, actions_of

Name: TypeAlias = tuple[int, str]  # of a value: its stage, and its name there
Rows: TypeAlias = Callable[[int, str, int], int]  # (pipeline rank, layer, micro-batch) -> R
Inside: TypeAlias = Callable[[str, str, int], int]  # (site, phase, R) -> bytes


@dataclass
class Storage:
    """A piece of memory and how many values and sends hold it."""

    fixed_bytes: int
    bytes: int
    holders: int = 0
    name: str = ""  # of the value it was made for


@dataclass
class Memory:
    """Live and peak bytes of a rank: without received rows, and with them."""

    fixed_bytes: int = 0
    bytes: int = 0
    peak_fixed_bytes: int = 0
    peak_bytes: int = 0

    def hold(self, storage: Storage) -> None:
        if storage.holders == 0:
            self.add(storage.fixed_bytes, storage.bytes)
        storage.holders += 1

    def drop(self, storage: Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            self.add(-storage.fixed_bytes, -storage.bytes)

    def add(self, fixed_bytes: int, bytes: int) -> None:
        self.fixed_bytes += fixed_bytes
        self.bytes += bytes
        self.touch(0, 0)

    def touch(self, fixed_bytes: int, bytes: int) -> None:
        """These are there for a moment."""
        if self.fixed_bytes + fixed_bytes > self.peak_fixed_bytes:
            self.peak_fixed_bytes = self.fixed_bytes + fixed_bytes
        if self.bytes + bytes > self.peak_bytes:
            self.peak_bytes = self.bytes + bytes

    def follow(self, change: Memory) -> None:
        """Go through what was found from no live bytes on."""
        self.touch(change.peak_fixed_bytes, change.peak_bytes)
        self.fixed_bytes += change.fixed_bytes
        self.bytes += change.bytes


@dataclass(frozen=True)
class State:
    """A namespace as it stands between two bodies; storages are named by their place in `storages`."""

    live: tuple[tuple[Name, Buffer, int], ...] = ()
    written: frozenset[Name] = frozenset()
    sent: tuple[tuple[str, int], ...] = ()  # by the action that made the message; not yet released, or received here
    storages: tuple[tuple[int, int, int], ...] = ()  # fixed bytes, bytes, holders


@dataclass
class Namespace:
    """Values of one micro-batch, of stages that follow each other on the rank: mostly of one stage."""

    live: dict[Name, tuple[Buffer, Storage]] = field(default_factory=dict)
    written: set[Name] = field(default_factory=set)
    sent: dict[str, Storage] = field(default_factory=dict)

    @staticmethod
    def of(state: State) -> Namespace:
        storages = [Storage(*sizes) for sizes in state.storages]
        live = {name: (buffer, storages[at]) for name, buffer, at in state.live}
        for name, (buffer, storage) in live.items():
            storage.name = storage.name if buffer.alias and storage.name else name[1]
        return Namespace(live, set(state.written), {action: storages[at] for action, at in state.sent})

    def state(self) -> State:
        held = [*(storage for _, storage in self.live.values()), *self.sent.values()]
        storages = {id(storage): storage for storage in held}
        place = {key: at for at, key in enumerate(storages)}
        return State(
            tuple((name, buffer, place[id(storage)]) for name, (buffer, storage) in self.live.items()),
            frozenset(self.written),
            tuple((action, place[id(storage)]) for action, storage in self.sent.items()),
            tuple((storage.fixed_bytes, storage.bytes, storage.holders) for storage in storages.values()),
        )


@dataclass
class Effects:
    """What bodies and releases do to states, as far as it is known.

    Programs of one plan that share bodies, and have one number of rows, may share it; so do the other passes then:
    what they have found right of a body, or of the plan, they do not look at again.
    """

    plan: Plan | None = None  # whose replicas are right
    states: list[State] = field(default_factory=lambda: [State()])
    numbers: dict[State, int] = field(default_factory=lambda: {State(): 0})
    found: dict[Hashable, tuple[tuple[int, ...], Memory]] = field(default_factory=dict)
    messages: dict[Buffer | None, int] = field(default_factory=dict)  # numbers of the programs' messages
    cuts: Cuts = field(default_factory=Cuts)
    bodies: dict[int, Body] = field(default_factory=dict)  # by identity: kept, so that no other one gets it
    waits: dict[int, dict[int, int]] = field(default_factory=dict)  # of those
    inside: Inside | None = None  # bytes that segments need inside beside what they return; a ledger knows none

    def waits_of(self, rank: int, body: Body) -> dict[int, int]:
        """As `waits_of` of a body whose identity is known."""
        if id(body) not in self.waits:
            self.waits[id(body)] = waits_of(rank, body)
        return self.waits[id(body)]

    def find(
        self, key: Hashable, before: tuple[int, ...], act: Callable[[list[Namespace], Memory], None]
    ) -> tuple[tuple[int, ...], Memory]:
        """The numbers of the states after `act`, and the change of memory; `key` says everything `act` depends on."""
        names, change = [Namespace.of(self.states[number]) for number in before], Memory()
        act(names, change)
        self.found[key, before] = found = tuple(self._number(each.state()) for each in names), change
        return found

    def _number(self, state: State) -> int:
        if state not in self.numbers:
            self.numbers[state] = len(self.states)
            self.states.append(state)
        return self.numbers[state]


def check_values(program: Program, schedule: Schedule, rank: int, rows: int | Rows, effects: Effects) -> Memory:
    """Raise ProofError unless every read, write and free of `rank` is sound; returns its peak bytes."""
    state = RankValues(program, schedule, rank, rows, effects)
    for invocation, step in zip(program.invocations[rank], schedule.actions[rank], strict=True):
        state.invoke(invocation, step)
    for (_, micro_batch), number in sorted(state.numbers.items()):
        for (stage, name), _, _ in effects.states[number].live:
            raise ProofError(f"rank {rank}, stage {stage}, micro-batch {micro_batch}: {name} is never freed")
    return state.memory


class RankValues:
    """The namespaces and memory of one rank as its program goes on."""

    def __init__(
        self, program: Program, schedule: Schedule, rank: int, rows: int | Rows, effects: Effects, fixed_rows: int = 0
    ) -> None:
        """`fixed_rows`: how many received rows fixed bytes are to stand for; one `effects` knows one number."""
        self.schedule, self.fixed_rows = schedule, fixed_rows
        self.rank, self.rows, self.message, self.effects = rank, rows, program.message, effects
        effects.bodies |= {id(body): body for body in program.bodies[rank]}
        self.bodies = {body.name: (body, effects.waits_of(rank, body)) for body in program.bodies[rank]}
        self.numbers: dict[tuple[int, int], int] = {}  # of the states of `_place`s
        self.firsts: dict[tuple[int, int], int] = {}  # of `_place`, by stage and direction
        self.message_number = effects.messages.setdefault(self.message, len(effects.messages))
        self.posted: Storage | None = None  # what a post takes
        self.memory = Memory()

    def invoke(self, invocation: Invocation, step: Step) -> None:
        """Go through one invocation and what is posted before and released after it."""
        body, waits = self.bodies[invocation.body]
        actions = actions_of(step)
        self._post(invocation, step, self.memory)
        # With recorded rows every micro-batch of every rank has its own sizes.
        sizes = self.rows if isinstance(self.rows, int) else (self.rank, invocation.micro_batches)
        places, slots = self._places(actions)
        key = (id(body), sizes, self.message_number, slots)
        self._change(key, places, self._run, body, waits, actions, slots)
        for _, message in invocation.releases:
            place = self._place(int(message.action[1:]), message.micro_batch)
            self._change(message.action, [place], release, message.action)

    def spaces(self) -> dict[tuple[int, int], Namespace]:
        """The namespaces as they stand, to be gone on with without the rank."""
        return {place: Namespace.of(self.effects.states[number]) for place, number in self.numbers.items()}

    def watch(
        self, invocation: Invocation, step: Step, spaces: dict[tuple[int, int], Namespace], memory: Memory
    ) -> None:
        """Go through the next invocation, up to its releases, instruction by instruction, on `spaces` and `memory`."""
        body, waits = self.bodies[invocation.body]
        actions = actions_of(step)
        places, slots = self._places(actions)
        self._post(invocation, step, memory)
        self._run(body, waits, actions, slots, [spaces.setdefault(place, Namespace()) for place in places], memory)

    def _post(self, invocation: Invocation, step: Step, memory: Memory) -> None:
        if not invocation.posts:
            return
        if self.message is None:
            message = invocation.posts[0][1]
            raise ProofError(f"rank {self.rank}, {step}: posts {message}, but the program has no message buffer")
        if self.posted is None:
            self.posted = self._storage(self.message, "", 0)
        for _ in invocation.posts:
            memory.add(self.posted.fixed_bytes, self.posted.bytes)

    def _places(self, actions: tuple[Action, ...]) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
        """The namespaces of actions, and which of them is that of each."""
        wanted = [self._place(action.stage, action.micro_batch) for action in actions]
        if len(wanted) == 1:
            return wanted, (0,)
        places = list(dict.fromkeys(wanted))
        return places, tuple(map(places.index, wanted))

    def _place(self, stage: int, micro_batch: int) -> tuple[int, int]:
        """Where its values live: the first of the stages that follow each other on this rank, and the micro-batch."""
        of = self.schedule
        key = (stage, direction(of.placement, of.num_micro_batches, micro_batch))
        if key not in self.firsts:
            sizes = (of.placement, of.num_ranks, of.num_micro_batches)
            while stage > 0 and rank_of(*sizes, stage - 1, micro_batch) == self.rank:
                stage -= 1
            self.firsts[key] = stage
        return self.firsts[key], micro_batch

    def _change(self, key: Hashable, places: list[tuple[int, int]], act: Callable[..., None], *given: Any) -> None:
        """`act(*given, namespaces, memory)` on the namespaces of `places`, or what is known of it by its `key`."""
        numbers = self.numbers
        before = tuple([numbers.get(place, 0) for place in places])
        after, change = self.effects.found.get((key, before)) or self.effects.find(key, before, partial(act, *given))
        for place, number in zip(places, after, strict=True):
            numbers[place] = number
        self.memory.follow(change)

    def _run(
        self,
        body: Body,
        waits: dict[int, int],
        actions: tuple[Action, ...],
        slots: tuple[int, ...],
        namespaces: list[Namespace],
        memory: Memory,
    ) -> None:
        results: dict[int, dict[str, Storage]] = {}  # of exchanges under way, by the index of their wait
        for index, instruction in enumerate(body.instructions):
            action, names = actions[instruction.slot], namespaces[slots[instruction.slot]]
            for name in instruction.reads:
                if (action.stage, name) not in names.live:
                    raise self._error(action, instruction, f"{name} is not live")
            if instruction.kind == "free":
                for name in instruction.reads:
                    self._free(action, instruction, names, name, memory)
            elif instruction.kind in EXCHANGES:
                results[waits[index]] = {}
                for buffer in body.instructions[waits[index]].writes:
                    storage = self._storage(buffer, instruction.site, action.micro_batch)
                    if buffer.alias:  # one of what it reads, which is live
                        storage = names.live[action.stage, buffer.alias][1]
                    memory.hold(storage)
                    results[waits[index]][buffer.name] = storage
            elif instruction.kind == "send":
                buffer, storage = names.live[action.stage, instruction.reads[0]]
                self._check_message(action, instruction, buffer)
                memory.hold(storage)
                names.sent[message_of(instruction, action.micro_batch).action] = storage
            elif instruction.kind == "receive":
                self._check_message(action, instruction, instruction.writes[0])
                if instruction.peer == self.rank:
                    storage = names.sent.pop(message_of(instruction, action.micro_batch).action)
                else:
                    storage = self._storage(instruction.writes[0], "", 0)
                    storage.holders = 1  # since its post
                self._write(action, instruction, names, {instruction.writes[0].name: storage}, memory)
            else:
                self._write(action, instruction, names, results.pop(index, {}), memory)
                if instruction.kind == "run" and self.effects.inside:
                    both = (self.fixed_rows, self._rows(instruction.site, action.micro_batch))
                    memory.touch(*(self.effects.inside(instruction.site, instruction.phase, R) for R in both))

    def _storage(self, buffer: Buffer | None, site: str, micro_batch: int) -> Storage:
        assert buffer is not None, "a message of a program that has messages"
        row = buffer.row_bytes
        if not row:
            return Storage(buffer.fixed_bytes, buffer.fixed_bytes, name=buffer.name)
        return Storage(row * self.fixed_rows, row * self._rows(site, micro_batch), name=buffer.name)

    def _rows(self, site: str, micro_batch: int) -> int:
        """What its rank receives in a layer. A site without one receives nothing, and asks for nothing recorded."""
        if isinstance(self.rows, int):
            return self.rows
        return self.rows(self.rank, site.split(".")[0], micro_batch)

    def _write(
        self,
        action: Action,
        instruction: Instruction,
        names: Namespace,
        given: dict[str, Storage],
        memory: Memory,
    ) -> None:
        """Bind what an instruction writes: to storage it was given, to that of the value it aliases, or to its own."""
        pending = list(instruction.writes)
        while pending:
            later = []
            for buffer in pending:
                name, alias = (action.stage, buffer.name), (action.stage, buffer.alias)
                if name in names.written:
                    raise self._error(action, instruction, f"{buffer.name} is written twice")
                storage = given.get(buffer.name)
                if buffer.alias and storage is None:
                    if alias not in names.live:
                        later.append(buffer)
                        continue
                    storage = names.live[alias][1]
                if storage is None:
                    storage = self._storage(buffer, instruction.site, action.micro_batch)
                if buffer.name not in given:
                    memory.hold(storage)
                names.live[name] = (buffer, storage)
                names.written.add(name)
            if len(later) == len(pending):
                raise self._error(action, instruction, f"{later[0].name} aliases {later[0].alias}, which is not live")
            pending = later

    def _check_message(self, action: Action, instruction: Instruction, buffer: Buffer) -> None:
        expected = self.message
        if expected is None or (buffer.shape, buffer.dtype) != (expected.shape, expected.dtype):
            shape = f"{expected.dtype}{list(expected.shape)}" if expected else "no tensor"
            raise self._error(
                action,
                instruction,
                f"{buffer.name} is {buffer.dtype}{list(buffer.shape)}, a message of the program {shape}",
            )

    def _free(self, action: Action, instruction: Instruction, names: Namespace, name: str, memory: Memory) -> None:
        if (action.stage, name) not in names.live:
            raise self._error(action, instruction, f"{name} is not live")
        memory.drop(names.live.pop((action.stage, name))[1])

    def _error(self, action: Action, instruction: Instruction, fault: str) -> ProofError:
        words = (instruction.kind, instruction.wait, instruction.phase, instruction.site)
        return ProofError(f"rank {self.rank}, {action}: {' '.join(word for word in words if word)}: {fault}")


def release(action: str, namespaces: list[Namespace], memory: Memory) -> None:
    """A send of the namespace's action needs its storage no longer."""
    memory.drop(namespaces[0].sent.pop(action))
