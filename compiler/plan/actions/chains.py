"""A stage → the chains of instructions of its actions: F, I, W, and B (I and W together).

A chain is in base order, without waits and frees. `order.py` interleaves chains over two lanes and inserts both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from compiler.ir import Buffer, Communication, Cut, Instruction, ShardedTensors, Stage, StageStep, Use
from compiler.ir.dtypes import ITEMSIZE, SCALES
from compiler.ir.expert_placement import ReceivedRows, even_rows
from compiler.ir.names import accumulator_of, gradient_of
from compiler.ir.program import GATHERS
from compiler.machine.rates import Rates
from compiler.machine.topology.fabric import ReductionKind
from runtime.contract.names import ActionName

# --- An instruction of a chain before it is ordered: the time on its lane, and what must come before it

Axis = Literal["experts", "tensor", "context", "data", "pipeline"]
AXES: Mapping[str, Axis] = {  # the ranks among which an exchange moves data, by its kind
    **dict.fromkeys(("counts", "dispatch", "combine"), "experts"),
    **dict.fromkeys(("gather_rows", "scatter_rows"), "tensor"),
    **dict.fromkeys(("gather_sequences", "scatter_sequences", "gather_choices"), "context"),
    **dict.fromkeys(("gather", "scatter"), "data"),
}
EXCHANGES = tuple(AXES)
Key = tuple[str, str, str]  # kind, phase and site of an instruction
UNPLACED = ActionName()  # the action of an instruction that is in no body yet


@dataclass(frozen=True)
class ChainNode:
    """An instruction to be ordered, its time on its lane, and the buffers that it or its wait writes.

    Beside an exchange, a segment runs on the SMs that the exchange leaves. In an action without exchanges it has all
    SMs. In an action with exchanges it also has all SMs while none of them runs, unless the spec reserves SMs for
    communication, as kernels are then built for the other SMs.
    """

    instruction: Instruction
    time_ns: int  # beside an exchange
    writes: tuple[Buffer, ...]
    after: tuple[Key, ...] = ()  # nodes of its chain that come before it although it reads nothing of theirs
    faster_ns: int = 0  # by how much it is faster with all SMs
    keeps_share: bool = False  # whether it always keeps to its share of the SMs

    @property
    def key(self) -> Key:
        """Its kind, phase and site, which are unique in its chain."""
        return self.instruction.kind, self.instruction.phase, self.instruction.site

    @property
    def alone_ns(self) -> int:
        """Its time in an action without exchanges."""
        return self.time_ns - self.faster_ns

    @property
    def between_ns(self) -> int:
        """Its time in an action with exchanges, while none of them runs."""
        return self.time_ns if self.keeps_share else self.alone_ns

    @property
    def is_exchange(self) -> bool:
        """Whether it starts an exchange, on the communication lane."""
        return self.instruction.kind in EXCHANGES

    @property
    def uses_lane(self) -> bool:
        """Whether it occupies a lane. Other instructions are placed next to the ones they belong to."""
        return self.is_exchange or self.instruction.kind == "run"


def nanoseconds(time_s: float) -> int:
    """Whole nanoseconds, whose sums are exact, so that orders do not depend on rounding."""
    return round(time_s * 1e9)


# --- The gathers, zeros and scatters in a chain if data ranks shard gradients, or weights too
#
# Weights are gathered one segment ahead: while a segment runs, the weights of the next one arrive. They are freed after
# their segment. Gradients of a micro-batch are zeroed before a W and scattered after it. The W after the next one waits
# for the scatter, so the gradients of two segments exist at a time. An I waits for the W of the segment before the last
# one. The inputs of a W are kept until it runs, and those of all layers take more memory than sharding saves.


def add_collectives(chain: Sequence[ChainNode], sharded: Mapping[str, ShardedTensors], rates: Rates) -> list[ChainNode]:
    """The chain with the gathers, zeros and scatters of its segments. `sharded`: by site."""
    taking = [node for node in chain if _reads_gathered(node.instruction, sharded)]
    gathers = [
        _gather(node, taking[max(0, index - 2) : max(0, index - 1)], sharded, rates)
        for index, node in enumerate(taking)
    ]
    result, gave, scattered = gathers[:1], list[ChainNode](), list[ChainNode]()
    del gathers[:1]
    for node in chain:
        i, shards = node.instruction, sharded.get(node.instruction.site)
        if gathers and _reads_gathered(i, sharded):
            result.append(gathers.pop(0))
        if shards is None or i.kind != "run":
            result.append(node)
            continue
        gives = i.phase == "W" and not shards.tensors.isdisjoint(i.params)
        weights = weights_name(shards.weights, i.phase) if shards.weights else ""
        inside = replace(
            i,
            params_in=_places(i.params, shards, shards.gradients.name if i.phase == "W" else weights),
            weights_in=_places(i.weights, shards, weights),
        )
        spaces = tuple(dict.fromkeys(name for name in (*inside.weights_in, *inside.params_in) if name))
        run = replace(node, instruction=replace(inside, reads=(*i.reads, *spaces)))
        if i.phase == "I":
            run = replace(run, after=(*run.after, *(given.key for given in gave[-2:-1])))
        if not gives:
            result.append(run)
            continue
        before = tuple(scatter.key for scatter in scattered[-2:-1])
        zeros = replace(i, kind="zeros", reads=(), writes=(shards.gradients,), params=(), weights=())
        cleared_s = rates.optimizer_time_s(shards.gradients.fixed_bytes)
        gave.append(run)
        scattered.append(_scatter(run, shards, rates))
        result += [
            ChainNode(zeros, 0, (shards.gradients,), before),
            replace(run, time_ns=run.time_ns + nanoseconds(cleared_s), after=before),
            scattered[-1],
        ]
    return result


def weights_name(weights: Buffer, phase: str) -> str:
    """The name of gathered weights in a phase. F and I of a micro-batch each gather them."""
    return f"{weights.name}_{phase}"


def transfer_s(sharded: ShardedTensors, kind: ReductionKind, dtype: str, rates: Rates) -> float:
    """Seconds to gather or scatter the tensors of a segment."""
    size = ITEMSIZE[dtype]
    return sum(rates.fabric.reduce_s(elements * size, holders, kind) for holders, elements in sharded.buckets)


def _reads_gathered(i: Instruction, sharded: Mapping[str, ShardedTensors]) -> bool:
    """Whether a segment reads sharded weights."""
    shards = sharded.get(i.site)
    if i.kind != "run" or shards is None or shards.weights is None:
        return False
    return not shards.tensors.isdisjoint(i.weights if i.phase == "W" else i.params)


def _places(tensors: tuple[str, ...], shards: ShardedTensors, value: str) -> tuple[str, ...]:
    values = tuple(value if tensor in shards.tensors else "" for tensor in tensors)
    return values if any(values) else ()


def _gather(
    run: ChainNode, behind: Sequence[ChainNode], sharded: Mapping[str, ShardedTensors], rates: Rates
) -> ChainNode:
    i, shards = run.instruction, sharded[run.instruction.site]
    assert shards.weights is not None
    weights = replace(shards.weights, name=weights_name(shards.weights, i.phase))
    start = Instruction("gather", 0, UNPLACED, i.phase, i.site)
    time_s = transfer_s(shards, "all_gather", weights.dtype, rates)
    return ChainNode(start, nanoseconds(time_s), (weights,), tuple(node.key for node in behind))


def _scatter(run: ChainNode, shards: ShardedTensors, rates: Rates) -> ChainNode:
    start = Instruction("scatter", 0, UNPLACED, "W", run.instruction.site, reads=(shards.gradients.name,))
    time_s = transfer_s(shards, "reduce_scatter", shards.gradients.dtype, rates)
    return ChainNode(start, nanoseconds(time_s), (), (run.key,))


# --- chains

TO_EXPERTS = (("dispatch", "F"), ("combine", "I"))  # the other exchanges return rows to their tokens
INTEGERS = ("int32", "int64")  # counts and offsets, a few bytes


@dataclass(frozen=True)
class ValueNames:
    """Local names of a segment at a site → values of the stage."""

    values: Mapping[str, str]
    buffers: Mapping[str, Buffer]

    @staticmethod
    def of(use: Use, cut: Cut) -> ValueNames:
        prefix = use.site.replace(".", "_")
        inputs = {i.name: value for i, value in zip(use.segment.inputs, use.inputs, strict=True)}
        outputs = {o.name: value for o, value in zip(use.segment.outputs, use.outputs, strict=True)}
        assert not inputs.keys() & outputs.keys(), (use.site, "an input and an output share a name")
        values = inputs | outputs
        values |= {gradient_of(local): gradient_of(value) for local, value in values.items()}
        values |= {f"{local}{SCALES}": f"{value}{SCALES}" for local, value in values.items()}
        written = (*cut.outputs, *cut.saved, *cut.gradients, *cut.deferred)
        values |= {b.name: f"{prefix}_{b.name}" for b in (*cut.saved, *cut.deferred)}
        buffers = {b.name: b.with_name(values[b.name], values[b.alias] if b.alias else "") for b in written}
        return ValueNames(values, buffers)


@dataclass(frozen=True)
class Chains:
    """The chains of one stage on one kind of device. Sends and receives have no peer yet, as it depends on the rank."""

    stage: Stage
    cuts: Mapping[str, Cut]  # by site
    rates: Rates
    sharded: Mapping[str, ShardedTensors] = field(default_factory=dict, repr=False)  # by site
    _chains: dict[str, list[ChainNode]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _runs: dict[tuple[str, str], ChainNode] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def sent(self) -> int:
        """Rows that a rank sends in a layer, and receives if the experts' load is even."""
        return int(self._dispatch.sizes[0].shape[0]) if self._dispatch else 0

    @cached_property
    def rows(self) -> int:
        """Rows that the experts of the fullest rank then process, with padding. Used for times."""
        if self._dispatch is None:
            return 0
        rows = round(self.rates.load * self.sent)
        return even_rows(rows, int(self._dispatch.outputs[-1].shape[0]), self._dispatch.alignment)

    @cached_property
    def _dispatch(self) -> Communication | None:
        return next((s for s in self.stage.steps if isinstance(s, Communication) and s.kind == "dispatch"), None)

    def chain(self, kind: str) -> list[ChainNode]:
        """The chain of an action of a kind: F, B, I or W. Made once."""
        if kind not in self._chains:
            chain = self.forward() if kind == "F" else self.backward("IW" if kind == "B" else kind)
            self._chains[kind] = add_collectives(chain, self.sharded, self.rates) if self.sharded else chain
        return self._chains[kind]

    def read_later(self, kind: str) -> frozenset[str]:
        """The values of an action that later actions of the same stage and micro-batch read.

        Values that a backward recomputes before it reads them are not among them.
        """
        later = self.chain({"F": "B", "I": "W"}[kind]) if kind in "FI" else []
        written = {buffer.name for node in later for buffer in node.writes}
        return frozenset(value for node in later for value in node.instruction.reads if value not in written)

    def offloaded_values(self) -> tuple[Buffer, ...]:
        """The values that an O copies to the host: those that F writes and a backward reads.

        Loaded data stays on the device, where it is kept anyway, and so do counts and offsets, which are a few bytes.
        """
        later = self.read_later("F")
        written = [buffer for node in self.chain("F") if node.instruction.kind != "load" for buffer in node.writes]
        return tuple(sorted((b for b in written if b.name in later and b.dtype not in INTEGERS), key=lambda b: b.name))

    def offloaded_bytes(self, rows: ReceivedRows) -> int:
        """Bytes of the storages of `offloaded_values`, each counted once, for a rank that receives `rows`."""
        written = {buffer.name: buffer for node in self.chain("F") for buffer in node.writes}

        def storage(name: str) -> str:
            return storage(written[name].alias) if written[name].alias in written else name

        return sum(
            written[name].bytes_at(*rows) for name in {storage(buffer.name) for buffer in self.offloaded_values()}
        )

    def forward(self) -> list[ChainNode]:
        stage = self.stage
        nodes = [self._node("load", "F", writes=(b,), site=b.name) for b in stage.loads]
        if stage.input:
            nodes.append(self._node("receive", "F", writes=(stage.input,)))
        for step in stage.steps:
            nodes += self._exchange_forward(step) if isinstance(step, Communication) else [self._run(step, "F")]
        nodes += [self._node("record", "F", reads=(value,), site=metric) for metric, value in stage.records]
        nodes += [self._node("tell", "F", reads=(value,), site=name) for name, value in stage.tells]
        if stage.output:
            nodes.append(self._node("send", "F", reads=(stage.output.name,)))
        return nodes

    def backward(self, kinds: str) -> list[ChainNode]:
        """The chain of a backward. `kinds`: "I", "W", or "IW" for a full one, with the W of each segment after its I.

        The forwards of a recomputed layer come before its backward.
        """
        stage, nodes = self.stage, []
        if "I" in kinds and stage.output:
            nodes.append(self._node("receive", "I", writes=(self._gradient(stage.output),)))
        if "I" in kinds:
            nodes += [
                self._node("constant", "I", writes=(Buffer(gradient_of(value), (), self._dtype(value)),), site=constant)
                for value, constant in stage.tangents
            ]
        for step in reversed(stage.steps):
            if "I" in kinds and isinstance(step, Use):
                nodes += self._recomputed_forward(step.site, nodes)
            if isinstance(step, Communication):
                nodes += self._exchange_backward(step) if "I" in kinds else []
                continue
            nodes += [self._run(step, k) for k in kinds if self._signature(step, k) != ((), ())]
        if "I" in kinds and stage.input:
            nodes.append(self._node("send", "I", reads=(gradient_of(stage.input.name),)))
        return nodes

    def _recomputed_forward(self, site: str, before: Sequence[ChainNode]) -> list[ChainNode]:
        """The forwards that are recomputed before the backward of a segment, which is the first to read their values.

        They come after the backward of the next layer, so that only the values of one layer exist at a time.
        """
        behind = tuple(node.key for node in before if node.uses_lane and node.instruction.phase == "I")[-1:]
        nodes = []
        for step in self._repeated_steps.get(site, ()):
            forward = self._exchange_forward(step) if isinstance(step, Communication) else [self._run(step, "F")]
            nodes += [replace(node, after=behind) for node in forward if node.instruction.kind != "counts"]
        return nodes

    @cached_property
    def _repeated_steps(self) -> dict[str, list[StageStep]]:
        """The steps that are recomputed, by the last segment whose backward reads their values."""
        of_layer: dict[str, list[StageStep]] = {}
        for step in self.stage.steps:
            if step.is_repeated:
                of_layer.setdefault(step.site.block, []).append(step)
        return {self._last_reader(steps): steps for steps in of_layer.values()}

    def _last_reader(self, repeated: Sequence[StageStep]) -> str:
        written = {
            buffer.name
            for step in repeated
            for node in ([self._run(step, "F")] if isinstance(step, Use) else self._exchange_forward(step))
            for buffer in node.writes
        }
        return next(
            step.site
            for step in reversed(self.stage.steps)
            if isinstance(step, Use)
            and any(not written.isdisjoint(self._run(step, kind).instruction.reads) for kind in "IW")
        )

    def _node(self, kind: str, phase: str, **fields: object) -> ChainNode:
        writes = fields.pop("writes", ())
        instruction = Instruction(kind, 0, UNPLACED, phase, writes=writes, **fields)  # type: ignore[arg-type]
        return ChainNode(instruction, 0, writes)  # type: ignore[arg-type]

    def _signature(self, use: Use, phase: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        signature = getattr(self.cuts[use.site], phase)
        return signature.args, signature.returns

    @cached_property
    def _names(self) -> dict[str, ValueNames]:
        """The names of every segment, by site."""
        return {
            step.site: ValueNames.of(step, self.cuts[step.site]) for step in self.stage.steps if isinstance(step, Use)
        }

    def _run(self, use: Use, phase: str) -> ChainNode:
        if (use.site, phase) not in self._runs:
            self._runs[use.site, phase] = self._new_run(use, phase)
        return self._runs[use.site, phase]

    def _new_run(self, use: Use, phase: str) -> ChainNode:
        cut, names = self.cuts[use.site], self._names[use.site]
        tensors = use.tensors(cut)
        args, returns = self._signature(use, phase)
        accumulators = {accumulator_of(p.name): tensors[p.name] for p in use.segment.params}
        added, read = (tuple(table[a] for a in args if a in table) for table in (accumulators, tensors))
        params, weights = (added, read) if phase == "W" else (read, ())
        reads = tuple(names.values[a] for a in args if a not in tensors and a not in accumulators)
        writes = tuple(names.buffers[r] for r in returns)
        cost = dict(cut.costs)[phase]
        instruction = Instruction(
            "run", 0, UNPLACED, phase, use.site, reads=reads, writes=writes, params=params, weights=weights
        )
        beside, alone = (
            nanoseconds(rates.compute_s(use.segment.kind, cost, self.rows))
            for rates in (self.rates.beside_exchange, self.rates.without_exchange)
        )
        return ChainNode(instruction, beside, writes, faster_ns=beside - alone, keeps_share=self.rates.keeps_share)

    def _exchange(
        self,
        kind: str,
        phase: str,
        site: str,
        reads: tuple[str, ...],
        writes: tuple[Buffer, ...],
        forwarded: tuple[Buffer, ...] = (),
    ) -> ChainNode:
        moved = tuple(b for b in writes if b.dtype not in INTEGERS)
        time_s = self.rates.fabric.exchange_s(
            self.rates.experts, (kind, phase) in TO_EXPERTS, moved, round(self.rates.load * self.sent)
        )
        time_s += self.rates.host_read_s if kind == "counts" else 0.0
        instruction = Instruction(kind, 0, UNPLACED, phase, site, reads=reads)  # type: ignore[arg-type]
        return ChainNode(instruction, nanoseconds(time_s), (*writes, *forwarded))

    def _rows(self, step: Communication, phase: str) -> ChainNode:
        """The gather or scatter of rows, or of their gradients, over tensor, context or sequence ranks."""
        reads, writes = (step.sizes, step.outputs) if phase == "F" else (step.arriving, step.returned)
        kind = step.rows_kind(phase)
        num_bytes = max(buffer.fixed_bytes for buffer in (*reads, *writes))
        collective: ReductionKind = "all_gather" if kind in GATHERS else "reduce_scatter"
        among = self.rates.sharing[step.axis]
        time_s = self.rates.fabric.reduce_s(num_bytes, among, collective)
        time_s *= self.rates.tensor_share if step.axis == "tp" else 1.0
        start = Instruction(kind, 0, UNPLACED, phase, step.site, reads=tuple(buffer.name for buffer in reads))
        return ChainNode(start, nanoseconds(time_s), writes)

    def _exchange_forward(self, step: Communication) -> list[ChainNode]:
        if step.moves_rows:
            return [self._rows(step, "F")]
        route, maps = f"{step.site}_route", self._maps(step)
        routing = (*(b.name for b in maps), route)
        if step.kind == "combine":
            return [self._exchange("combine", "F", step.site, (*step.inputs, *routing), step.outputs, step.forwarded)]
        *rows, counts = step.inputs
        *received, offsets = step.outputs
        routed = (Buffer(route, (2, step.sizes[-1].shape[0]), "int64"), offsets, *maps)
        announced = (counts, step.order) if step.order else (counts,)
        return [
            self._exchange("counts", "F", step.site, announced, routed),
            self._exchange("dispatch", "F", step.site, (*rows, *routing), tuple(received), step.forwarded),
        ]

    def _maps(self, step: Communication) -> tuple[Buffer, ...]:
        """The tables for forwarding inside a node: the row of each copy, and the copy and gate weight of each row."""
        if not step.order:
            return ()
        of_rows = step.sizes if step.kind == "dispatch" else step.outputs
        copies = Buffer(f"{step.site}_copies", of_rows[0].shape[:1], "int64")
        return copies, Buffer(f"{step.site}_forwards", (2, "X"), "int64")

    def _exchange_backward(self, step: Communication) -> list[ChainNode]:
        """The backward of an exchange moves gradients the other way, from its outputs to its inputs."""
        if step.moves_rows:
            return [self._rows(step, "I")] if step.returned else []
        reads = (*(b.name for b in (*step.arriving, *self._maps(step))), f"{step.site}_route")
        return [self._exchange(step.kind, "I", step.site, reads, step.returned, step.forwarded_back)]

    def _gradient(self, buffer: Buffer) -> Buffer:
        return buffer.with_name(gradient_of(buffer.name))

    def _dtype(self, value: str) -> str:
        for step in self.stage.steps:
            if isinstance(step, Use) and value in step.outputs:
                local = step.segment.outputs[step.outputs.index(value)].name
                return self._names[step.site].buffers[local].dtype
        raise AssertionError(f"no segment of stage {self.stage.index} makes {value}")
