"""An independent executor: a line per pipeline rank, in-order channels without buffers, symbols for numbers.

It does not use the proof's argument. It runs a program as ranks would, once with each rank as the slowest and a few
times in random order, and reports the final state: the gradients of every rank after the reductions, and the
records. Equal results are equal sums of equal terms, in any order of summation. Wrong promises of the program
change the results:
- a channel carries no names, so a post takes the next message on it;
- a message is read from its sender's storage at the last moment, when it is awaited;
- released or freed storage holds garbage; an exchange reads its operands when it is awaited, and a scatter has
  only what was added before it started;
- of sharded tensors, a rank has no own accumulators and weights.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from random import Random

from compiler.ir import Bucket, Instruction, Plan, Program
from compiler.plan.actions.chains import EXCHANGES
from tests.compiler.program.proof.turns import Line, always, slowest, take_turns

Symbol = int
Sum = frozenset[tuple[tuple[Symbol, int], int]]  # ((term, data coordinate), how often)
GARBAGE: Symbol = -1
RANDOM = 2  # runs in random order


class Symbols:
    """Interned expressions: equal numbers for equal terms, across runs."""

    def __init__(self) -> None:
        self.table: dict[Hashable, Symbol] = {}

    def of(self, operands: tuple[Symbol, ...], *term: Hashable) -> Symbol:
        """A term that depends on garbage is garbage."""
        return GARBAGE if GARBAGE in operands else self.table.setdefault((operands, *term), len(self.table))


@dataclass(eq=False)
class Storage:
    """A piece of memory, with the number of names and sends that hold it. Without holders its content is garbage."""

    holders: int = 0


@dataclass(eq=False)
class Value:
    """A number in a storage. Values that alias share the storage, not the number (a view of some columns)."""

    symbol: Symbol
    storage: Storage
    tensors: frozenset[str] = frozenset()  # that it has, of those that data ranks divide
    added: Counter[tuple[str, Symbol]] = field(default_factory=Counter)  # terms of gradients, by tensor

    def __post_init__(self) -> None:
        self.storage.holders += 1

    @property
    def number(self) -> Symbol:
        return self.symbol if self.storage.holders else GARBAGE

    def drop(self) -> None:
        self.storage.holders -= 1


@dataclass
class Channel:
    """Messages from one rank to another. The k-th value sent fills the k-th receive posted."""

    sent: deque[Value] = field(default_factory=deque)
    posted: deque[Value] = field(default_factory=deque)

    def can_fill(self, wanted: Value) -> bool:
        """Whether the message for a posted value has been sent, or was taken before."""
        place = next((k for k, value in enumerate(self.posted) if value is wanted), -1)
        return place < len(self.sent)

    def fill(self, wanted: Value) -> None:
        """Read messages from their senders' storages, in order, up to the message of a posted value."""
        while wanted in self.posted:
            self.posted.popleft().symbol = self.sent.popleft().number


def buckets_reduced(program: Program) -> list[Bucket]:
    """The buckets whose gradients a program sums over their holders."""
    return [collective.bucket for collective in program.epilogue if collective.kind == "reduce" and collective.bucket]


@dataclass(frozen=True)
class Outcome:
    """The final state of a run; two programs are equivalent if all their outcomes are equal."""

    fault: str
    results: Hashable = None


class Run:
    """One run of a program under one preference of ranks."""

    def __init__(
        self, program: Program, plan: Plan, symbols: Symbols, prefer: Callable[[list[int]], int], rendezvous: bool
    ) -> None:
        self.program, self.plan, self.symbols, self.prefer = program, plan, symbols, prefer
        self.rendezvous = rendezvous  # a release waits until the receive of its message is posted
        self.channels: dict[tuple[int, int], Channel] = defaultdict(Channel)
        self.gradients: list[dict[str, Counter[Symbol]]] = [defaultdict(Counter) for _ in program.bodies]
        self.records: list[Counter[tuple[str, Symbol]]] = [Counter() for _ in program.bodies]
        self.started: list[dict[tuple[int, ...], dict[str, Counter[Symbol]]]] = [{} for _ in program.bodies]

    def outcome(self) -> Outcome:
        ranks = [_Rank(self, rank) for rank in range(len(self.program.bodies))]
        fault = take_turns([rank.execute() for rank in ranks], self.prefer)
        if fault is not None:
            return Outcome(type(fault).__name__)
        try:
            reduced = self._reduced()
        except AssertionError as error:
            return Outcome(type(error).__name__)
        records = tuple(frozenset(counter.items()) for counter in self.records)
        return Outcome("", (records, reduced))

    def start(self, rank: int, stages: tuple[int, ...]) -> None:
        """A reduction reads the accumulator when it starts; what is added later is lost in the worst case."""
        assert stages not in self.started[rank], "its gradients were summed before"
        self.started[rank][stages] = {tensor: Counter(terms) for tensor, terms in self.gradients[rank].items()}

    def _reduced(self) -> frozenset[Hashable]:
        """(replica, holder) → its gradient, a sum of terms by data coordinate, after the reductions."""
        replicas = self.plan.replicas
        places = {(replica.tensor, holder) for replica in replicas for holder in replica.holders}
        computed = {place: self._computed(*place, ()) for place in places}
        sums = {
            (replica.key, holder): computed[replica.tensor, holder]
            for replica in replicas
            for holder in replica.holders
        }
        tensors = {replica.key: replica.tensor for replica in replicas}
        totals: dict[tuple[Sum, ...], Sum] = {}
        reduced = buckets_reduced(self.program)
        assert len({bucket.name for bucket in reduced}) == len(reduced), "a sum that is waited for twice"
        for bucket in reduced:
            self._check_channel(bucket)
        scattered = [bucket for bucket in self.plan.buckets if bucket.sites and bucket not in reduced]
        for bucket, stages, groups in (
            *((bucket, bucket.stages, [bucket.holders]) for bucket in reduced),
            *(
                (bucket, (), [bucket.holders.on_rank(rank) for rank in bucket.holders.pipeline_ranks])
                for bucket in scattered
            ),
        ):
            for name, holders in product(bucket.replicas, groups):
                parts = tuple(self._computed(tensors[name], holder, stages) for holder in holders)
                if parts not in totals:  # experts that are stacked in one tensor have the same terms
                    totals[parts] = _total(parts)
                sums |= dict.fromkeys(((name, holder) for holder in holders), totals[parts])
        return frozenset(sums.items())

    def _check_channel(self, bucket: Bucket) -> None:
        """Its ranks have started a bucket's reduction, and all others of its channel in one order."""
        ranks = {self.plan.mesh.coordinates(holder).pp_rank for holder in bucket.holders}
        columns = self.plan.mesh.columns
        channels = _channels(bucket, columns)
        channel_stages = {b.stages for b in self.plan.buckets if not _channels(b, columns).isdisjoint(channels)}
        orders = [[stages for stages in self.started[rank] if stages in channel_stages] for rank in ranks]
        assert bucket.stages in orders[0] and all(order == orders[0] for order in orders), "sums that do not meet"

    def _computed(self, tensor: str, holder: int, stages: tuple[int, ...]) -> Sum:
        """The sum of a rank for a tensor, in total or until it started a reduction."""
        pipeline_rank, data_rank = self.plan.mesh.coordinates(holder)
        gradients = self.started[pipeline_rank][stages] if stages else self.gradients[pipeline_rank]
        terms = gradients.get(tensor, Counter())
        return frozenset(((term, data_rank), k) for term, k in terms.items())


def _channels(bucket: Bucket, columns: int) -> set[frozenset[int]]:
    """The ranks of each channel that sums a bucket after the backward; for a sharded bucket, those of each column."""
    ranks_by_column: dict[int, set[int]] = defaultdict(set)
    for holder in bucket.holders:
        ranks_by_column[holder % columns if bucket.sites else 0].add(holder)
    return {*map(frozenset, ranks_by_column.values())}


def _total(parts: Iterable[Sum]) -> Sum:
    total: Counter[tuple[Symbol, int]] = Counter()
    for part in parts:
        total.update(dict(part))
    return frozenset(total.items())


class _Rank:
    """One rank's straight line."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank = run, rank
        self.values: dict[tuple[str, int], dict[str, Value]] = defaultdict(dict)  # by (stage, micro-batch)
        self.posted: dict[tuple[int, str], Value] = {}
        self.in_flight: dict[tuple[int, str], Value] = {}
        self.own: dict[str, Value] = {}  # messages to itself
        self.exchanges: dict[Hashable, list[Value]] = {}
        self.scattered: dict[Hashable, list[Counter[tuple[str, Symbol]]]] = {}
        self.host: dict[Hashable, Symbol] = {}  # by stage, micro-batch and name

    def execute(self) -> Line:
        bodies = {body.name: body for body in self.run.program.bodies[self.rank]}
        reductions = self.run.program.reductions
        for number, invocation in enumerate(self.run.program.invocations[self.rank]):
            for source, message in invocation.posts:
                self._post(source, str(message))
                yield always
            for i in bodies[invocation.body].instructions:
                micro_batch = invocation.micro_batches[i.slot]
                values = self.values[i.action[1:], micro_batch]
                if i.kind == "receive":
                    yield from self._receive(i, values, micro_batch)
                else:
                    self._instruction(i, values, micro_batch)
                if i.kind == "send":
                    yield always
            for destination, message in invocation.releases:
                if self.run.rendezvous:
                    yield partial(self._is_posted, destination, str(message))
                self._release(destination, str(message))
                yield always
            for after, stages in reductions[self.rank] if reductions else ():
                if after == number:
                    self.run.start(self.rank, stages)
        for (peer, _), value in self.in_flight.items():
            channel = self.run.channels[self.rank, peer]
            yield lambda v=value, c=channel: v not in c.sent  # type: ignore[misc]
        leftover = [name for values in self.values.values() for name in values]
        assert not leftover and not self.posted and not self.exchanges and not self.own and not self.host, (
            "values or messages are left over"
        )

    def _post(self, source: int, message: str) -> None:
        assert (source, message) not in self.posted
        value = Value(GARBAGE, Storage())
        self.posted[source, message] = value
        self.run.channels[source, self.rank].posted.append(value)

    def _is_posted(self, destination: int, message: str) -> bool:
        value, channel = self.in_flight[destination, message], self.run.channels[self.rank, destination]
        return value not in channel.sent or channel.sent.index(value) < len(channel.posted)

    def _release(self, destination: int, message: str) -> None:
        """The sender writes into the buffer from here on, whether or not the message has been taken."""
        value = self.in_flight.pop((destination, message))
        value.symbol = GARBAGE
        value.drop()

    def _instruction(self, i: Instruction, values: dict[str, Value], micro_batch: int) -> None:
        inputs = [values[name] for name in i.reads]
        exchange = (i.slot, i.action, micro_batch, i.phase, i.site, i.wait or i.kind)
        if i.kind == "free":
            for name in i.reads:
                values.pop(name).drop()
        elif i.kind in EXCHANGES:
            assert exchange not in self.exchanges
            self.exchanges[exchange] = inputs
            if i.kind == "scatter":
                self.scattered[exchange] = [value.added.copy() for value in inputs]
        elif i.kind == "to_host":
            self.host |= {(i.action[1:], micro_batch, name): values[name].number for name in i.reads}
        elif i.kind == "from_host":
            for buffer in i.writes:
                values[buffer.name] = Value(self.host.pop((i.action[1:], micro_batch, buffer.name)), Storage())
        elif i.kind == "send":
            self._send(i, inputs[0], micro_batch)
        elif i.kind in ("record", "tell"):
            name = i.site if i.kind == "record" else f"{i.site} {micro_batch}"
            self.run.records[self.rank][name, inputs[0].number] += 1
        else:
            operands = self.exchanges.pop(exchange) if i.kind == "wait" else inputs
            for value, added in zip(operands, self.scattered.pop(exchange, ()), strict=False):
                for (tensor, term), times in added.items():
                    self.run.gradients[self.rank][tensor][GARBAGE if value.number == GARBAGE else term] += times
            self._compute(i, values, tuple(value.number for value in operands), micro_batch)

    def _compute(
        self, i: Instruction, values: dict[str, Value], operands: tuple[Symbol, ...], micro_batch: int
    ) -> None:
        data = micro_batch if i.kind == "load" else None
        symbol_of = self.run.symbols.of
        outputs = (symbol_of(operands, i.kind, i.phase, i.site, i.wait, data, i.params, i.weights),)
        for buffer in i.writes:
            storage = values[buffer.alias].storage if buffer.alias in values else Storage()
            sharded = self.run.plan.sharded.get(i.site) if (i.wait or i.kind) in ("gather", "zeros") else None
            values[buffer.name] = Value(
                symbol_of(outputs, buffer.name), storage, sharded.tensors if sharded else frozenset()
            )
        for names, places in ((i.params, i.params_in), (i.weights, i.weights_in)):
            for tensor, place in zip(names, places or [""] * len(names), strict=True):
                adds = i.phase == "W" and names is i.params
                is_whole = not self._is_divided(i.site, tensor, gradients=adds)
                if not is_whole if place == "" else tensor not in values[place].tensors:
                    raise LookupError(tensor)
                if adds and place:
                    values[place].added[tensor, symbol_of(outputs, tensor)] += 1
                elif adds:
                    self.run.gradients[self.rank][tensor][symbol_of(outputs, tensor)] += 1

    def _is_divided(self, site: str, tensor: str, gradients: bool) -> bool:
        """Whether a rank has only a part of the tensor, or of its gradients."""
        sharded = self.run.plan.sharded.get(site)
        return sharded is not None and tensor in sharded.tensors and (gradients or sharded.weights is not None)

    def _send(self, i: Instruction, value: Value, micro_batch: int) -> None:
        producer = f"{'F' if i.phase == 'F' else 'B'}{i.action[1:]}.{micro_batch}"
        message = Value(value.symbol, value.storage)
        if i.peer == self.rank:
            assert producer not in self.own
            self.own[producer] = message
            return
        self.in_flight[i.peer, producer] = message
        self.run.channels[self.rank, i.peer].sent.append(message)

    def _receive(self, i: Instruction, values: dict[str, Value], micro_batch: int) -> Line:
        stage = int(i.action[1:])
        producer = f"F{stage - 1}.{micro_batch}" if i.phase == "F" else f"B{stage + 1}.{micro_batch}"
        if i.peer == self.rank:
            value = self.own.pop(producer)
        else:
            value = self.posted.pop((i.peer, producer))
            channel = self.run.channels[i.peer, self.rank]
            yield lambda: channel.can_fill(value)
            channel.fill(value)
        values[i.writes[0].name] = value


def outcomes(
    program: Program,
    plan: Plan,
    symbols: Symbols,
    reference: list[Outcome] | None = None,
    rendezvous: bool = False,
) -> list[Outcome]:
    """Outcomes with each rank as the slowest in turn, then `RANDOM` random orders; stops at one not in `reference`."""
    orders = [slowest(rank) for rank in range(len(program.bodies))]
    orders += [Random(seed).choice for seed in range(RANDOM)]
    result: list[Outcome] = []
    for prefer in orders:
        result.append(Run(program, plan, symbols, prefer, rendezvous).outcome())
        if reference is not None and result != reference[: len(result)]:
            break
    return result
