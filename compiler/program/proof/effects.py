"""The states of namespaces and of a rank's memory, and the effects of bodies on them.

Namespaces with the same values share one state, and the effect of a body on a state is found once for all
micro-batches. So the time of a proof grows with the number of invocations, not of instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from compiler.ir import Buffer, Instruction
from compiler.ir.expert_placement import ReceivedRows
from compiler.program.proof.structure import Bodies

Name: TypeAlias = tuple[int, str]  # (stage, name of a value in it)
Rows: TypeAlias = Callable[
    [int, str, int], int | ReceivedRows
]  # (pipeline rank, layer, micro-batch) -> R, or with P and X
Inside: TypeAlias = Callable[[str, str, int], int]  # (site, phase, R) -> bytes
_STAGED = "_staged"


def staging_name(site: str) -> str:
    """The name of the staging buffers of a layer's exchanges."""
    return f"{site}{_STAGED}"


def is_staged(name: str) -> bool:
    return name.endswith(_STAGED)


class StagingBytes(NamedTuple):
    """Bytes of staging that an exchange holds from its start to its wait, and that its wait then needs instead."""

    held_bytes: int = 0
    wait_bytes: int = 0


# (start of an exchange, buffers it reads, buffers its wait writes, rows) -> staging
Staging: TypeAlias = Callable[[Instruction, Sequence[Buffer], Sequence[Buffer], ReceivedRows], StagingBytes]
Change: TypeAlias = tuple[int, int, int, int]  # of memory: fixed bytes, bytes, and the peaks of both on the way
Transitions: TypeAlias = dict[
    tuple[int, ...], tuple[tuple[int, ...], Change]
]  # states before -> (states after, change)
Place: TypeAlias = int  # number of a namespace on a rank: one per run of consecutive stages and micro-batch


@dataclass
class Storage:
    """A piece of memory, and the number of values and sends that hold it."""

    fixed_bytes: int
    bytes: int
    holders: int = 0
    name: str = ""  # of the value it was made for


@dataclass
class LiveMemory:
    """Live and peak bytes of a rank, without and with received rows."""

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
        if self.fixed_bytes > self.peak_fixed_bytes:
            self.peak_fixed_bytes = self.fixed_bytes
        if self.bytes > self.peak_bytes:
            self.peak_bytes = self.bytes

    def touch(self, fixed_bytes: int, bytes: int) -> None:
        """Count bytes that exist only for a moment."""
        if self.fixed_bytes + fixed_bytes > self.peak_fixed_bytes:
            self.peak_fixed_bytes = self.fixed_bytes + fixed_bytes
        if self.bytes + bytes > self.peak_bytes:
            self.peak_bytes = self.bytes + bytes

    def follow(self, change: Change) -> None:
        """Apply a change that was computed from empty memory."""
        fixed_bytes, num_bytes, peak_fixed_bytes, peak_bytes = change
        if self.fixed_bytes + peak_fixed_bytes > self.peak_fixed_bytes:
            self.peak_fixed_bytes = self.fixed_bytes + peak_fixed_bytes
        if self.bytes + peak_bytes > self.peak_bytes:
            self.peak_bytes = self.bytes + peak_bytes
        self.fixed_bytes += fixed_bytes
        self.bytes += num_bytes

    @property
    def change(self) -> Change:
        """The change since this memory was empty, for another memory to `follow`."""
        return self.fixed_bytes, self.bytes, self.peak_fixed_bytes, self.peak_bytes


@dataclass(frozen=True)
class NamespaceState:
    """A namespace between two bodies. Other fields refer to storages by their index in `storages`."""

    live: tuple[tuple[Name, Buffer, int], ...] = ()
    written: frozenset[tuple[int, str, bool]] = frozenset()  # (stage, name, whether a backward recomputed it)
    sent: tuple[tuple[str, int], ...] = ()  # by producing action; neither released nor received by the rank itself yet
    away: tuple[tuple[Name, int], ...] = ()  # on the host
    reported: tuple[tuple[Name, int], ...] = ()  # told to the executor, which keeps them to the end
    storages: tuple[tuple[int, int, int], ...] = ()  # fixed bytes, bytes, holders


@dataclass
class Namespace:
    """Values of one micro-batch in consecutive stages on a rank, which are mostly a single stage."""

    live: dict[Name, tuple[Buffer, Storage]] = field(default_factory=dict)
    written: set[tuple[int, str, bool]] = field(default_factory=set)
    sent: dict[str, Storage] = field(default_factory=dict)
    away: dict[Name, Storage] = field(default_factory=dict)  # on the host, with the storage for its return
    reported: dict[Name, Storage] = field(default_factory=dict)  # told to the executor

    @staticmethod
    def of(state: NamespaceState) -> Namespace:
        storages = [Storage(*sizes) for sizes in state.storages]
        live = {name: (buffer, storages[index]) for name, buffer, index in state.live}
        for name, (buffer, storage) in live.items():
            storage.name = storage.name if buffer.alias and storage.name else name[1]
        for name, index in state.away:
            storages[index].name = storages[index].name or name[1]
        for name, index in state.reported:
            storages[index].name = storages[index].name or name[1]
        sent = {action: storages[index] for action, index in state.sent}
        away, reported = (
            {name: storages[index] for name, index in entries} for entries in (state.away, state.reported)
        )
        return Namespace(live, set(state.written), sent, away, reported)

    @property
    def storages_on_device(self) -> tuple[Storage, ...]:
        """The storages in device memory; one storage may be listed several times."""
        return (*(storage for _, storage in self.live.values()), *self.sent.values(), *self.reported.values())

    def state(self) -> NamespaceState:
        storages = {id(storage): storage for storage in (*self.storages_on_device, *self.away.values())}
        place = {key: index for index, key in enumerate(storages)}
        return NamespaceState(
            tuple((name, buffer, place[id(storage)]) for name, (buffer, storage) in self.live.items()),
            frozenset(self.written),
            tuple((action, place[id(storage)]) for action, storage in self.sent.items()),
            tuple((name, place[id(storage)]) for name, storage in self.away.items()),
            tuple((name, place[id(storage)]) for name, storage in self.reported.items()),
            tuple((storage.fixed_bytes, storage.bytes, storage.holders) for storage in storages.values()),
        )


@dataclass
class Effects:
    """The effects of bodies and releases on states, each found once.

    One instance serves all programs of a plan, which share many bodies, for one number of received rows.
    """

    bodies: Bodies = field(default_factory=Bodies)
    states: list[NamespaceState] = field(default_factory=lambda: [NamespaceState()])
    numbers: dict[NamespaceState, int] = field(default_factory=lambda: {NamespaceState(): 0})
    transitions: dict[Hashable, Transitions] = field(
        default_factory=dict
    )  # by everything that decides the effect on the states
    messages: dict[Buffer | None, int] = field(default_factory=dict)  # numbers of the programs' messages
    inside: Inside | None = None  # bytes that segments need inside, besides what they return; None: not counted
    staging: Staging | None = None  # bytes that exchanges stage; None: not counted

    def find(
        self, before: tuple[int, ...], act: Callable[[list[Namespace], LiveMemory], None]
    ) -> tuple[tuple[int, ...], Change]:
        """The numbers of the states after `act`, and the change of memory."""
        names, memory = [Namespace.of(self.states[number]) for number in before], LiveMemory()
        act(names, memory)
        return tuple(self._number(namespace.state()) for namespace in names), memory.change

    def _number(self, state: NamespaceState) -> int:
        number = self.numbers.setdefault(state, len(self.states))  # a single lookup: it hashes all values of the state
        if number == len(self.states):
            self.states.append(state)
        return number
