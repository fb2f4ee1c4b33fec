"""Third pass, over each rank alone: values are written once, read while live and freed in the end. It finds peak bytes.

Posts and releases have fixed places in a rank's program, so its memory does not depend on the interleaving. A value
lives in the namespace of its (stage, micro-batch), across bodies. A storage lives as long as a value in it, a value
that aliases it, or an unreleased send of it. The storage of a value that is told to the executor lives to the end. The
buffer of a receive lives from its post, and the results of an exchange from its start; with one expert rank the results
are the operands of the exchange, whose storage it keeps. A message that a rank sends to itself stays in its storage,
which passes from the send to the received value, so consecutive stages on one rank share a namespace. The second pass
has proven that each posted message is sent, awaited and released once, and that each message inside a rank is received
once.

The state of a namespace is a number, and the effect of a body on it is looked up (compiler/program/proof/effects.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

from compiler.ir import Body, Buffer, Instruction, Invocation, Message, Program
from compiler.ir.dtypes import has_rows
from compiler.ir.expert_placement import ReceivedRows
from compiler.program.proof.certificate import ProofError
from compiler.program.proof.channels import message_of
from compiler.program.proof.effects import (
    Effects,
    LiveMemory,
    Namespace,
    Place,
    Rows,
    Storage,
    Transitions,
    staging_name,
)
from compiler.program.proof.structure import EXCHANGES, Waits
from compiler.schedule.schedule import Schedule
from runtime.contract.actions import Action, Step, actions_of
from runtime.contract.names import BodyName, Site


def check_values(
    program: Program, schedule: Schedule, rank: int, rows: int | ReceivedRows | Rows, effects: Effects
) -> LiveMemory:
    """Check every read, write and free of `rank`; returns its memory with the peak bytes. Raises ProofError."""
    state = RankValues(program, schedule, rank, rows, effects)
    for invocation, step in zip(program.invocations[rank], schedule.actions[rank], strict=True):
        state.invoke(invocation, step)
    live_states = {number for number in set(state.numbers) if effects.states[number].live}
    for place, number in enumerate(state.numbers) if live_states else ():
        for (stage, name), _, _ in effects.states[number].live:
            micro_batch = place % program.num_micro_batches
            raise ProofError(f"rank {rank}, stage {stage}, micro-batch {micro_batch}: {name} is never freed")
    return state.memory


class RankValues:
    """The namespaces and memory of one rank while its program runs."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        rank: int,
        rows: int | ReceivedRows | Rows,
        effects: Effects,
        fixed_rows: int | ReceivedRows = 0,
    ) -> None:
        """`fixed_rows`: the received rows that count as fixed bytes; the same for all users of one `effects`."""
        self.schedule, self.fixed_rows = schedule, received_rows(fixed_rows)
        self.rows = rows if callable(rows) else received_rows(rows)
        self.rank, self.message, self.effects = rank, program.message, effects
        self.bodies = {body.name: (body, effects.bodies.waits(rank, body)) for body in program.bodies[rank]}
        self.places = _places(schedule, rank)
        self.slots = {
            body.name: [self.places[action.stage] for action in body.actions] for body in program.bodies[rank]
        }
        # By place, the number of the namespace's state.
        self.numbers = [0] * (1 + max((max(places) for places in self.places.values()), default=-1))
        self.transitions: dict[tuple[str, tuple[int, ...]], Transitions] = {}  # by body and `slots`
        self.sent: dict[str, tuple[list[Place], Transitions]] = {}  # by the action that produced a message
        self.message_number = effects.messages.setdefault(self.message, len(effects.messages))
        self.posted: Storage | None = None  # the buffer of a post
        self.memory = LiveMemory()

    def invoke(self, invocation: Invocation, step: Step) -> None:
        """Run one invocation, with the posts before it and the releases after it."""
        name, micro_batches, posts, releases = invocation
        if posts:
            self._post(invocation, step, self.memory)
        # Most of a proof's time is spent here and in `_release`.
        places, slots = _different([places[k] for places, k in zip(self.slots[name], micro_batches, strict=True)])
        if isinstance(self.rows, ReceivedRows):
            transitions = self.transitions.get((name, slots))
            if transitions is None:
                transitions = self.transitions[name, slots] = self._transitions(name, self.rows, slots)
        else:  # with recorded rows every micro-batch of every rank has its own sizes
            transitions = self._transitions(name, (self.rank, micro_batches), slots)
        numbers = self.numbers
        before = tuple([numbers[place] for place in places])
        effect = transitions.get(before)
        if effect is None:
            body, waits = self.bodies[name]
            act = partial(self._run, body, waits, actions_of(step), slots)
            effect = transitions[before] = self.effects.find(before, act)
        for place, number in zip(places, effect[0], strict=True):
            numbers[place] = number
        self.memory.follow(effect[1])
        for _, message in releases:
            self._release(message)

    def _transitions(self, name: BodyName, sizes: Hashable, slots: tuple[int, ...]) -> Transitions:
        """The effects that were found so far of a body, for given rows and slots."""
        number = self.effects.bodies.number(self.rank, self.bodies[name][0])
        return self.effects.transitions.setdefault((number, sizes, self.message_number, slots), {})

    def _release(self, message: Message) -> None:
        """Let go of the storage of a send."""
        action, micro_batch = message
        if action not in self.sent:
            self.sent[action] = self.places[action.stage], self.effects.transitions.setdefault(action, {})
        places, transitions = self.sent[action]
        place = places[micro_batch]
        before = (self.numbers[place],)
        effect = transitions.get(before)
        if effect is None:
            effect = transitions[before] = self.effects.find(before, partial(release, action))
        self.numbers[place] = effect[0][0]
        self.memory.follow(effect[1])

    def spaces(self) -> dict[Place, Namespace]:
        """A copy of the rank's current namespaces, for `watch`."""
        return {place: Namespace.of(self.effects.states[number]) for place, number in enumerate(self.numbers) if number}

    def watch(self, invocation: Invocation, step: Step, spaces: dict[Place, Namespace], memory: LiveMemory) -> None:
        """Run the next invocation up to its releases, instruction by instruction, on `spaces` and `memory`."""
        body, waits = self.bodies[invocation.body]
        actions = actions_of(step)
        places, slots = _different([self.places[action.stage][action.micro_batch] for action in actions])
        self._post(invocation, step, memory)
        self._run(body, waits, actions, slots, [spaces.setdefault(place, Namespace()) for place in places], memory)

    def _post(self, invocation: Invocation, step: Step, memory: LiveMemory) -> None:
        if not invocation.posts:
            return
        if self.message is None:
            message = invocation.posts[0][1]
            raise ProofError(f"rank {self.rank}, {step}: posts {message}, but the program has no message buffer")
        if self.posted is None:
            self.posted = self._storage(self.message, "", 0)
        count = len(invocation.posts)
        memory.add(count * self.posted.fixed_bytes, count * self.posted.bytes)

    def _run(
        self,
        body: Body,
        waits: Waits,
        actions: tuple[Action, ...],
        slots: tuple[int, ...],
        namespaces: list[Namespace],
        memory: LiveMemory,
    ) -> None:
        results: dict[int, dict[str, Storage]] = {}  # of exchanges under way, by the index of their wait
        staged: dict[int, tuple[Storage, Storage]] = {}  # likewise: staging that they hold, and that their wait needs
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
                    if buffer.alias:  # of an operand, which is live
                        storage = names.live[action.stage, buffer.alias][1]
                    memory.hold(storage)
                    results[waits[index]][buffer.name] = storage
                if self.effects.staging:
                    read = [names.live[action.stage, name][0] for name in instruction.reads]
                    writes = body.instructions[waits[index]].writes
                    staged[waits[index]] = self._staging_of(instruction, read, writes, action.micro_batch)
                    memory.hold(staged[waits[index]][0])
            elif instruction.kind == "to_host":
                _copy_to_host(action.stage, instruction, names)
            elif instruction.kind == "from_host":
                storages = self._return_from_host(action, instruction, names, memory)
                self._write(action, instruction, names, storages, memory)
            elif instruction.kind == "send":
                buffer, storage = names.live[action.stage, instruction.reads[0]]
                self._check_message(action, instruction, buffer)
                memory.hold(storage)
                names.sent[message_of(instruction, action.micro_batch).action] = storage
            elif instruction.kind == "tell":
                storage = names.live[action.stage, instruction.reads[0]][1]
                memory.hold(storage)
                names.reported[action.stage, instruction.site] = storage
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
                    counts = (self.fixed_rows, self._rows(instruction.site, action.micro_batch))
                    memory.touch(*(self.effects.inside(instruction.site, instruction.phase, r.rows) for r in counts))
                if index in staged:
                    until_wait, at_wait = staged.pop(index)
                    memory.drop(until_wait)
                    memory.hold(at_wait)
                    memory.drop(at_wait)

    def _staging_of(
        self, start: Instruction, read: Sequence[Buffer], written: Sequence[Buffer], micro_batch: int
    ) -> tuple[Storage, Storage]:
        """The staging that an exchange holds until its wait, and the staging that the wait needs."""
        assert self.effects.staging
        fixed = self.effects.staging(start, read, written, self.fixed_rows)
        actual = self.effects.staging(start, read, written, self._rows(start.site, micro_batch))
        name = staging_name(start.site)
        return Storage(fixed.held_bytes, actual.held_bytes, name=name), Storage(
            fixed.wait_bytes, actual.wait_bytes, name=name
        )

    def _storage(self, buffer: Buffer | None, site: str, micro_batch: int) -> Storage:
        assert buffer is not None, "the program has messages"
        if buffer.alias or not has_rows(buffer.shape):
            return Storage(fixed := buffer.fixed_bytes, fixed, name=buffer.name)
        num_bytes = buffer.bytes_at(*self._rows(site, micro_batch))
        return Storage(buffer.bytes_at(*self.fixed_rows), num_bytes, name=buffer.name)

    def _rows(self, site: str, micro_batch: int) -> ReceivedRows:
        """The rows that the rank receives in the layer of a site; the recorded ones if rows are recorded."""
        if isinstance(self.rows, ReceivedRows):
            return self.rows
        return received_rows(self.rows(self.rank, Site(site).block, micro_batch))

    def _write(
        self,
        action: Action,
        instruction: Instruction,
        names: Namespace,
        storages: dict[str, Storage],
        memory: LiveMemory,
    ) -> None:
        """Bind each written value to its storage in `storages`, to that of the value it aliases, or to a new one."""
        is_recomputed = instruction.phase == "F" != action.kind  # a backward recomputes a forward first
        pending = list(instruction.writes)
        while pending:
            later = []
            for buffer in pending:
                name, alias = (action.stage, buffer.name), (action.stage, buffer.alias)
                key = (*name, is_recomputed)
                if key in names.written or name in names.live:
                    raise self._error(action, instruction, f"{buffer.name} is written twice")
                storage = storages.get(buffer.name)
                if buffer.alias and storage is None:
                    if alias not in names.live:
                        later.append(buffer)
                        continue
                    storage = names.live[alias][1]
                if storage is None:
                    storage = self._storage(buffer, instruction.site, action.micro_batch)
                if buffer.name not in storages:
                    memory.hold(storage)
                names.live[name] = (buffer, storage)
                names.written.add(key)
            if len(later) == len(pending):
                raise self._error(action, instruction, f"{later[0].name} aliases {later[0].alias}, which is not live")
            pending = later

    def _return_from_host(
        self, action: Action, instruction: Instruction, names: Namespace, memory: LiveMemory
    ) -> dict[str, Storage]:
        """The storages of values that return from the host."""
        storages = {}
        for buffer in instruction.writes:
            storage = names.away.pop((action.stage, buffer.name), None)
            if storage is None:
                raise self._error(action, instruction, f"{buffer.name} is not on the host")
            memory.hold(storage)
            storages[buffer.name] = storage
        return storages

    def _check_message(self, action: Action, instruction: Instruction, buffer: Buffer) -> None:
        expected = self.message
        if expected is None or (buffer.shape, buffer.dtype) != (expected.shape, expected.dtype):
            shape = f"{expected.dtype}{list(expected.shape)}" if expected else "no tensor"
            raise self._error(
                action,
                instruction,
                f"{buffer.name} is {buffer.dtype}{list(buffer.shape)}, but a message of the program is {shape}",
            )

    def _free(self, action: Action, instruction: Instruction, names: Namespace, name: str, memory: LiveMemory) -> None:
        if (action.stage, name) not in names.live:
            raise self._error(action, instruction, f"{name} is not live")
        memory.drop(names.live.pop((action.stage, name))[1])

    def _error(self, action: Action, instruction: Instruction, fault: str) -> ProofError:
        words = (instruction.kind, instruction.wait, instruction.phase, instruction.site)
        return ProofError(f"rank {self.rank}, {action}: {' '.join(word for word in words if word)}: {fault}")


def _copy_to_host(stage: int, instruction: Instruction, names: Namespace) -> None:
    """Copy live values to the host. Values that share a storage will share one again when they return."""
    copies: dict[int, Storage] = {}
    for name in instruction.reads:
        storage = names.live[stage, name][1]
        copy = copies.setdefault(id(storage), Storage(storage.fixed_bytes, storage.bytes, name=storage.name))
        names.away[stage, name] = copy


def received_rows(rows: int | ReceivedRows) -> ReceivedRows:
    """Rows as a `ReceivedRows`; a plain number stands for rows that no rank forwards."""
    return rows if isinstance(rows, ReceivedRows) else ReceivedRows(rows)


def _places(schedule: Schedule, rank: int) -> dict[int, list[Place]]:
    """By stage and micro-batch, the place of its values on a rank. Consecutive stages share one."""
    turn, count = min(schedule.turn, schedule.num_micro_batches), schedule.num_micro_batches

    def first(stage: int, micro_batch: int) -> int:
        while stage and schedule.rank_of(stage - 1, micro_batch) == rank:
            stage -= 1
        return stage

    firsts = {stage: (first(stage, 0), first(stage, turn)) for stage in schedule.stages_of(rank)}
    rows = {
        stage: row * count
        for row, stage in enumerate(sorted({first_stage for pair in firsts.values() for first_stage in pair}))
    }
    return {
        stage: [
            *range(rows[before_turn], rows[before_turn] + turn),
            *range(rows[after_turn] + turn, rows[after_turn] + count),
        ]
        for stage, (before_turn, after_turn) in firsts.items()
    }


def _different(places: list[Place]) -> tuple[list[Place], tuple[int, ...]]:
    """The distinct places, and for each given place its index among them."""
    if len(places) == 1:
        return places, (0,)
    first, second = places
    return ([first], (0, 0)) if first == second else (places, (0, 1))


def release(action: str, namespaces: list[Namespace], memory: LiveMemory) -> None:
    """Let go of the storage of an action's send in the namespace."""
    memory.drop(namespaces[0].sent.pop(action))
