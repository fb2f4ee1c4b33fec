"""An independent executor: a thread per pipeline rank, in-order channels without buffers, symbols for numbers.

It knows nothing of the proof's argument. It runs a program as ranks would, once with each rank as the slowest, and
says what the program ends with: the gradients of every rank after the reductions, and the records. Equal results are
equal sums of equal terms, whatever the order of summation. What the program promises wrongly shows in the results:
- a channel carries no names, so a post takes whatever message is next on it;
- a message is taken out of its sender's storage at the last moment, when it is awaited;
- a released or freed storage holds garbage; an exchange reads its operands when it is waited for.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from compiler.ir import Instruction, Plan, Program
from tests.proof.turns import Turns

Symbol = int
GARBAGE: Symbol = -1


class Symbols:
    """Interned expressions: equal numbers for equal terms, across runs."""

    def __init__(self) -> None:
        self.table: dict[Hashable, Symbol] = {}

    def of(self, *term: Hashable) -> Symbol:
        """A term that depends on garbage is garbage."""
        if any(part == GARBAGE or (isinstance(part, tuple) and GARBAGE in part) for part in term):
            return GARBAGE
        return self.table.setdefault(term, len(self.table))


@dataclass(eq=False)
class Storage:
    """A piece of memory: how many names and sends hold it; with none it holds garbage."""

    holders: int = 0


@dataclass(eq=False)
class Value:
    """A number in a storage. Values that alias share the storage, not the number (a view of some columns)."""

    symbol: Symbol
    storage: Storage

    def __post_init__(self) -> None:
        self.storage.holders += 1

    @property
    def number(self) -> Symbol:
        return self.symbol if self.storage.holders else GARBAGE

    def drop(self) -> None:
        self.storage.holders -= 1


@dataclass
class Channel:
    """Messages from one rank to another. Both queues are in order; they meet element by element."""

    sent: deque[Value] = field(default_factory=deque)
    posted: deque[Value] = field(default_factory=deque)

    def can_fill(self, wanted: Value) -> bool:
        """Whether the message for a posted value has been sent, or was taken before."""
        place = next((k for k, value in enumerate(self.posted) if value is wanted), -1)
        return place < len(self.sent)

    def fill(self, wanted: Value) -> None:
        """Take messages out of their senders' storages, in order, up to that of a posted value."""
        while wanted in self.posted:
            self.posted.popleft().symbol = self.sent.popleft().number


@dataclass(frozen=True)
class Outcome:
    """What a run ends with; two programs are equivalent if all their outcomes are equal."""

    fault: str
    results: Hashable = None


class Run:
    """One run of a program under one preference of ranks."""

    def __init__(self, program: Program, plan: Plan, symbols: Symbols, preference: tuple[int, ...]) -> None:
        self.program, self.plan, self.symbols = program, plan, symbols
        self.turns = Turns(preference)
        self.channels: dict[tuple[int, int], Channel] = defaultdict(Channel)
        self.gradients: list[dict[str, Counter[Symbol]]] = [defaultdict(Counter) for _ in program.bodies]
        self.records: list[Counter[tuple[str, Symbol]]] = [Counter() for _ in program.bodies]

    def outcome(self) -> Outcome:
        fault = self.turns.run(self._rank)
        if fault is not None:
            return Outcome(type(fault).__name__)
        records = tuple(frozenset(counter.items()) for counter in self.records)
        return Outcome("", (records, self._reduced()))

    def _rank(self, rank: int) -> None:
        _Rank(self, rank).execute()

    def _reduced(self) -> frozenset[Hashable]:
        """(replica, holder) → its gradient, a sum of terms by data coordinate, after the reductions."""
        sums: dict[tuple[str, int], Counter[tuple[Symbol, int]]] = {}
        for replica in self.plan.replicas:
            for holder in replica.holders:
                pipeline_rank, data_rank = self.plan.mesh.coordinates(holder)
                terms = self.gradients[pipeline_rank][replica.tensor]
                sums[replica.name, holder] = Counter({(term, data_rank): k for term, k in terms.items()})
        for bucket in self.program.reduces:
            for name in bucket.replicas:
                total: Counter[tuple[Symbol, int]] = Counter()
                for holder in bucket.holders:
                    total.update(sums[name, holder])
                for holder in bucket.holders:
                    sums[name, holder] = total
        return frozenset((key, frozenset(counter.items())) for key, counter in sums.items())


class _Rank:
    """One rank's straight line, in its own thread."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank = run, rank
        self.values: dict[tuple[str, int], dict[str, Value]] = defaultdict(dict)  # by (stage, micro-batch)
        self.posted: dict[tuple[int, str], Value] = {}
        self.in_flight: dict[tuple[int, str], Value] = {}
        self.exchanges: dict[Hashable, list[Value]] = {}

    def execute(self) -> None:
        bodies = {body.name: body for body in self.run.program.bodies[self.rank]}
        for invocation in self.run.program.invocations[self.rank]:
            for source, message in invocation.posts:
                self._post(source, str(message))
            for i in bodies[invocation.body].instructions:
                micro_batch = invocation.micro_batches[i.slot]
                self._instruction(i, self.values[i.action[1:], micro_batch], micro_batch)
            for destination, message in invocation.releases:
                self._release(destination, str(message))
        for (peer, _), value in self.in_flight.items():
            self.run.turns.pass_on(self.rank, lambda v=value, p=peer: v not in self.run.channels[self.rank, p].sent)
        left = [name for values in self.values.values() for name in values]
        assert not left and not self.posted and not self.exchanges, "values or messages are left over"

    def _post(self, source: int, message: str) -> None:
        assert (source, message) not in self.posted
        value = Value(GARBAGE, Storage())
        self.posted[source, message] = value
        self.run.channels[source, self.rank].posted.append(value)
        self.run.turns.pass_on(self.rank)

    def _release(self, destination: int, message: str) -> None:
        """The sender writes into the buffer from here on, whether or not the message has been taken."""
        value = self.in_flight.pop((destination, message))
        value.symbol = GARBAGE
        value.drop()
        self.run.turns.pass_on(self.rank)

    def _instruction(self, i: Instruction, values: dict[str, Value], micro_batch: int) -> None:
        given = [values[name] for name in i.reads]
        exchange = (i.slot, i.action, micro_batch, i.phase, i.site, i.wait or i.kind)
        if i.kind == "free":
            for name in i.reads:
                values.pop(name).drop()
        elif i.kind in ("counts", "dispatch", "combine"):
            assert exchange not in self.exchanges
            self.exchanges[exchange] = given
        elif i.kind == "send":
            self._send(i, given[0], micro_batch)
        elif i.kind == "receive":
            values[i.writes[0].name] = self._receive(i, micro_batch)
        elif i.kind == "record":
            self.run.records[self.rank][i.site, given[0].number] += 1
        else:
            operands = self.exchanges.pop(exchange) if i.kind == "wait" else given
            self._compute(i, values, tuple(value.number for value in operands), micro_batch)

    def _compute(
        self, i: Instruction, values: dict[str, Value], operands: tuple[Symbol, ...], micro_batch: int
    ) -> None:
        data = micro_batch if i.kind == "load" else None
        term = (i.kind, i.phase, i.site, i.wait, data, operands)
        for buffer in i.writes:
            storage = values[buffer.alias].storage if buffer.alias in values else Storage()
            values[buffer.name] = Value(self.run.symbols.of(*term, buffer.name), storage)
        if i.phase == "W":
            for tensor in i.params:
                self.run.gradients[self.rank][tensor][self.run.symbols.of(*term, tensor)] += 1

    def _send(self, i: Instruction, value: Value, micro_batch: int) -> None:
        producer = f"{'F' if i.phase == 'F' else 'B'}{i.action[1:]}.{micro_batch}"
        message = Value(value.symbol, value.storage)
        self.in_flight[i.peer, producer] = message
        self.run.channels[self.rank, i.peer].sent.append(message)
        self.run.turns.pass_on(self.rank)

    def _receive(self, i: Instruction, micro_batch: int) -> Value:
        stage = int(i.action[1:])
        producer = f"F{stage - 1}.{micro_batch}" if i.phase == "F" else f"B{stage + 1}.{micro_batch}"
        value = self.posted.pop((i.peer, producer))
        channel = self.run.channels[i.peer, self.rank]
        self.run.turns.pass_on(self.rank, lambda: channel.can_fill(value))
        channel.fill(value)
        return value


def outcomes(program: Program, plan: Plan, symbols: Symbols, reference: list[Outcome] | None = None) -> list[Outcome]:
    """With each rank as the slowest in turn; stops at the first that differs from `reference`."""
    ranks = range(len(program.bodies))
    result: list[Outcome] = []
    for slowest in ranks:
        preference = (*(rank for rank in ranks if rank != slowest), slowest)
        result.append(Run(program, plan, symbols, preference).outcome())
        if reference is not None and result != reference[: len(result)]:
            break
    return result
