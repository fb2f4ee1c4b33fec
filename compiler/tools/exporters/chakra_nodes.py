"""The trace nodes of a planned step on each pipeline rank, with times, dependencies and sizes.

All columns of a pipeline rank run the same nodes, so they share one list; only the peers of messages differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from compiler.ir import Body, Instruction
from compiler.ir.dtypes import tensor_bytes
from compiler.ir.holders import Columns
from compiler.machine.topology.traffic import messages_of
from compiler.plan.actions.chains import EXCHANGES, INTEGERS
from compiler.predict.tail import Group, groups_of, reduce_seconds, reduction_of
from compiler.predict.timed_plan import TimedPlan
from compiler.predict.times import reduction_spans
from compiler.program.lower.estimate import Times, timed_spans
from compiler.program.lower.estimate import rank_times as node_times
from dsl.closed_forms.memory import ITEMSIZE
from runtime.contract.actions import Action, is_copy
from runtime.contract.mesh import Mesh

NS, TAIL = 10**9, -1
TYPES = {"all_reduce": "ALL_REDUCE", "reduce_scatter": "REDUCE_SCATTER", "all_gather": "ALL_GATHER"}
OF_ROWS = {"rows": "tp", "sequences": "cp", "choices": "sq"}  # suffix of an instruction that moves rows → mesh axis


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One node of a rank's trace. Nodes are numbered by their index in the rank's list."""

    name: str
    kind: str  # a node type or collective type of Chakra
    start_ns: int
    end_ns: int
    step: int  # index in the rank's schedule; TAIL after the last
    needs: tuple[int, ...] = ()  # nodes whose results it reads
    behind: tuple[int, ...] = ()  # nodes before it on its lane, or that its lane waited for
    flops: int = 0
    size: int = 0  # bytes read and written (compute), sent (message), or of the whole buffer (collective)
    group: str = ""  # process group of a collective
    peer: int = -1  # the other pipeline rank of a message
    tag: int = 0


class ProgramTrace:
    """A timed plan with its program."""

    def __init__(self, timed: TimedPlan) -> None:
        self.timed, self.plan = timed, timed.plan
        self.schedule, self.lowering = timed.schedule, timed.lowering
        self.program = self.lowering.program(self.schedule)
        self.times = node_times(self.lowering)
        self.makespan_ns = round(float(timed.timeline.makespan) * 1e6)

    def rank(self, rank: int) -> tuple[TraceNode, ...]:
        """The nodes of a pipeline rank."""
        return tuple(_TraceRank(self, rank).run())

    def groups(self, rank: int) -> tuple[Group, ...]:
        """The trained parameters of a pipeline rank, grouped by holders."""
        return groups_of(self.plan, rank)

    @cached_property
    def sums(self) -> Mapping[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, float]]:
        """(pipeline ranks, stages) → start and end in seconds of their gradient reduction during the backward."""
        spec, timed = self.timed.spec, self.timed
        if not (self.plan.overlap_reduce and spec.has_hosts):
            return {}
        groups = [self.groups(rank) for rank in range(self.plan.mesh.pp)]
        seconds = reduce_seconds(spec, groups, timed.rates[0].fabric.reduce_s)
        return reduction_spans(self.plan, self.schedule, timed.times, timed.timeline, seconds)


def groups_on(traced: ProgramTrace, rank: int) -> dict[str, Callable[[int], Iterator[int]]]:
    """The process groups of a pipeline rank by name, each as a function from a column to the group's world ranks."""
    plan, mesh = traced.plan, traced.plan.mesh
    groups: dict[str, Callable[[int], Iterator[int]]] = {}

    def add(name: str, ranks: Sequence[int], columns: Columns) -> None:
        groups[name] = lambda column: (mesh.rank(p, c) for p in ranks for c in group_of_column(columns, column))

    pipeline_ranks = (rank,)
    for axis, columns in axes_of(mesh).items():
        add(axis, pipeline_ranks, columns)
    for group in traced.groups(rank):
        for part in (group, group.shard(traced.timed.spec, 2), group.shard(traced.timed.spec, 3)):
            add(name_of(part), part.holders.pipeline_ranks, part.holders.columns)
    for site in plan.sharded.values():
        for holders, _ in site.buckets:
            add(f"columns {_text(holders.columns)}", pipeline_ranks, holders.columns)
    add("world", range(mesh.pp), range(mesh.columns))
    return groups


def axes_of(mesh: Mesh) -> dict[str, range]:
    """The columns in one group with column 0, by mesh axis: expert, tensor and context parallel ranks, and the ranks
    that share sequences (`sq`)."""
    return {
        "ep": range(mesh.expert_group),
        "tp": range(mesh.tp),
        "cp": range(0, mesh.cp * mesh.tp, mesh.tp),
        "sq": range(mesh.cp * mesh.tp),
    }


def name_of(group: Group) -> str:
    """The name of a group that holds the same parameters: its pipeline ranks, and its columns for column 0."""
    ranks = "+".join(map(str, group.holders.pipeline_ranks))
    return f"ranks {ranks} columns {_text(group.holders.columns)}"


def _text(columns: Columns) -> str:
    return f"{columns[0]}..{columns[-1]} of {len(columns)}"


def group_of_column(columns: Columns, column: int) -> Iterator[int]:
    """The group of `column`, by analogy to `columns`, the group of column 0."""
    if isinstance(columns, range) and len(columns) == 1:
        return iter((column,))
    firsts, length = (columns, 1) if isinstance(columns, range) else (columns.firsts, columns.length)
    block = firsts.step * len(firsts)
    first = column // block * block + column % firsts.step // length * length
    return (start + offset for start in range(first, first + block, firsts.step) for offset in range(length))


class _TraceRank:
    """Builds the nodes of one pipeline rank in the order of its steps."""

    def __init__(self, traced: ProgramTrace, rank: int) -> None:
        self._t, self._number = traced, rank
        self._nodes: list[TraceNode] = []
        self._makers: dict[tuple[int, int, str], int] = {}  # (stage, micro-batch, value) → the node that produces it
        self._local: dict[int, int] = {}  # tag of a message within this rank → the node that produces its value
        self._compute: tuple[int, ...] = ()  # the last node of the compute lane
        self._link: tuple[int, ...] = ()  # the last node of the communication lane
        self._copied: dict[str, tuple[int, ...]] = {}  # kind of copy, O or R → its last node
        self._waited: set[int] = set()  # exchanges for which the compute lane has waited since its last node
        placement = traced.schedule.stage_placement
        self._messages = messages_of(traced.lowering.rates[0].fabric, traced.plan, placement)
        self._spans: dict[str, tuple[list[tuple[Instruction, int, int]], int]] = {}

    def run(self) -> list[TraceNode]:
        """All nodes of the rank."""
        traced, rank = self._t, self._number
        bodies = {body.name: body for body in traced.program.bodies[rank]}
        unit = traced.timed.timeline.unit * 10**6
        copies = (
            {index: span for index, *span in traced.timed.timeline.copies[rank]} if traced.timed.timeline.copies else {}
        )
        ends_with: list[tuple[int, ...]] = []
        rows = zip(
            traced.schedule.actions[rank],
            traced.program.invocations[rank],
            traced.timed.timeline.ticks[rank],
            strict=True,
        )
        for index, (step, invocation, ticks) in enumerate(rows):
            start, end = (int(tick * unit) for tick in copies.get(index, ticks))
            if is_copy(step):
                assert isinstance(step, Action)
                self._copy(index, step, bodies[invocation.body], start, end)
            else:
                self._step(index, bodies[invocation.body], invocation.micro_batches, start, end)
            ends_with.append((*self._compute, *self._waited))
        self._tail(ends_with)
        return self._nodes

    # ------------------------------------------------------------ a step of the schedule

    def _step(self, step: int, body: Body, micro_batches: Sequence[int], start: int, end: int) -> None:
        spans, length = self._spans_of(body)
        on_lanes = iter(spans)
        stages = [action.stage for action in body.actions]
        started: dict[tuple[int, str, str, str], int] = {}

        def scale_time(time: int) -> int:
            return start + (time * (end - start) // length if length else 0)

        for i in body.instructions:
            stage, micro_batch = stages[i.slot], micro_batches[i.slot]
            if i.kind == "run" or i.kind in EXCHANGES:
                _, begins, ends = next(on_lanes)
                nodes = self._run(i, stage, micro_batch) if i.kind == "run" else self._exchange(i, stage, micro_batch)
                for index, (node, share) in enumerate(nodes):
                    first, last = (scale_time(begins + (ends - begins) * share[k] // 10**6) for k in (0, 1))
                    added = self._add(node, first, last, step, i.kind in EXCHANGES)
                    if index == len(nodes) - 1:
                        started[i.slot, i.kind, i.phase, i.site] = added
                for buffer in i.writes:
                    self._makers[stage, micro_batch, buffer.name] = added
            elif i.kind == "wait":
                exchange = started[i.slot, i.wait, i.phase, i.site]
                self._waited.add(exchange)
                for buffer in i.writes:
                    self._makers[stage, micro_batch, buffer.name] = exchange
            elif i.kind == "send":
                self._send(i, stage, micro_batch, step, on_lanes, scale_time)
            elif i.kind == "receive":
                self._receive(i, stage, micro_batch, step, start)

    def _spans_of(self, body: Body) -> tuple[list[tuple[Instruction, int, int]], int]:
        """The (instruction, start, end) of a body, and its length."""
        if body.name not in self._spans:
            sends = [0] * len(body.actions)
            for i in body.instructions:
                if i.kind == "send" and i.peer != self._number:
                    sends[i.slot] = round(self._messages.seconds[self._number, i.peer] * NS)
            spans = list(timed_spans(body.instructions, self._times, sends))
            self._spans[body.name] = spans, max((end for *_, end in spans), default=0)
        return self._spans[body.name]

    @property
    def _times(self) -> Times:
        return self._t.times[self._number]

    def _add(self, node: TraceNode, start: int, end: int, step: int, exchanges: bool) -> int:
        """Append a node to its lane. Returns its number."""
        behind = {*self._compute, *self._waited, *(self._link if exchanges else ())}
        needs = tuple(sorted(node.needs))
        order = tuple(sorted(behind.difference(needs)))
        self._nodes.append(replace(node, start_ns=start, end_ns=end, step=step, needs=needs, behind=order))
        number = len(self._nodes) - 1
        if exchanges:
            self._link = (number,)
        else:
            self._compute, self._waited = (number,), set()
        return number

    def _reads(self, i: Instruction, stage: int, micro_batch: int) -> tuple[int, ...]:
        keys = ((stage, micro_batch, name) for name in i.reads)
        return tuple(dict.fromkeys(self._makers[key] for key in keys if key in self._makers))

    def _run(self, i: Instruction, stage: int, micro_batch: int) -> list[tuple[TraceNode, tuple[int, int]]]:
        plan = self._t.plan
        cost, rows = dict(plan.cuts[i.site].costs)[i.phase], self._t.lowering.chains(stage, self._number).rows
        name = f"{i.phase}{stage}.{micro_batch} {i.site}"
        flops, size = cost.flops + cost.flops_row * rows, cost.bytes + cost.bytes_row * rows
        return [(_blank(name, "COMP", self._reads(i, stage, micro_batch), flops=flops, size=size), (0, 10**6))]

    def _exchange(self, i: Instruction, stage: int, micro_batch: int) -> list[tuple[TraceNode, tuple[int, int]]]:
        name, reads = f"{i.kind} {i.phase}{stage}.{micro_batch} {i.site}", self._reads(i, stage, micro_batch)
        if i.kind in ("gather", "scatter"):
            return self._sharded_collectives(i, name, reads)
        writes = self._times[i.kind, i.phase, i.site].writes
        if i.kind == "counts":
            size, group, kind = writes[0].fixed_bytes // 2, "ep", "ALL_TO_ALL"
        elif i.kind in ("dispatch", "combine"):
            moved = [b for b in writes if b.dtype not in INTEGERS and b.shape[0] not in ("P", "X")]
            sent = self._t.lowering.chains(stage, self._number).sent
            size = sent * sum(tensor_bytes(("R", *b.shape[1:]), b.dtype) for b in moved)
            group, kind = "ep", "ALL_TO_ALL"
        else:
            direction, _, moved_kind = i.kind.partition("_")
            group, kind = OF_ROWS[moved_kind], "ALL_GATHER" if direction == "gather" else "REDUCE_SCATTER"
            degree = len(axes_of(self._t.plan.mesh)[group]) if direction == "scatter" else 1
            size = degree * sum(buffer.fixed_bytes for buffer in writes)
        return [(_blank(name, kind, reads, size=size, group=group), (0, 10**6))]

    def _sharded_collectives(
        self, i: Instruction, name: str, reads: tuple[int, ...]
    ) -> list[tuple[TraceNode, tuple[int, int]]]:
        """The collectives of sharded weights or gradients, one after the other, one per group of holders."""
        site = self._t.plan.sharded[i.site]
        buffer = site.weights if i.kind == "gather" else site.gradients
        assert buffer is not None
        total, done, nodes = sum(elements for _, elements in site.buckets), 0, []
        kind = "ALL_GATHER" if i.kind == "gather" else "REDUCE_SCATTER"
        for holders, elements in site.buckets:
            size = buffer.fixed_bytes * elements // total
            node = _blank(name, kind, reads, size=size, group=f"columns {_text(holders.columns)}")
            nodes.append((node, (10**6 * done // total, 10**6 * (done + elements) // total)))
            done += elements
        return nodes

    # ------------------------------------------------------------ messages and copies

    def _send(
        self,
        i: Instruction,
        stage: int,
        micro_batch: int,
        step: int,
        on_lanes: Iterator[tuple[Instruction, int, int]],
        scale_time: Callable[[int], int],
    ) -> None:
        tag = self._tag(i.phase, stage, micro_batch)
        reads = self._reads(i, stage, micro_batch)
        if i.peer == self._number:
            self._local[tag] = reads[0]
            return
        _, begins, ends = next(on_lanes)
        message = self._t.program.message
        assert message is not None
        name = f"send {i.phase}{stage}.{micro_batch}"
        node = _blank(name, "COMM_SEND", reads, size=message.fixed_bytes, peer=i.peer, tag=tag)
        self._add(node, scale_time(begins), scale_time(ends), step, exchanges=True)

    def _receive(self, i: Instruction, stage: int, micro_batch: int, step: int, start: int) -> None:
        """A receive takes no time: the step starts only once its message has arrived."""
        tag = self._tag(i.phase, stage - 1 if i.phase == "F" else stage + 1, micro_batch)
        key = stage, micro_batch, i.writes[0].name
        if i.peer == self._number:
            self._makers[key] = self._local.pop(tag)
            return
        message = self._t.program.message
        assert message is not None
        name = f"receive {i.phase}{stage}.{micro_batch}"
        self._nodes.append(
            TraceNode(name, "COMM_RECV", start, start, step, size=message.fixed_bytes, peer=i.peer, tag=tag)
        )
        self._makers[key] = len(self._nodes) - 1

    def _tag(self, phase: str, stage: int, micro_batch: int) -> int:
        """The tag of a message: the output of a stage, or the gradient of its input."""
        return 2 * (stage * self._t.schedule.num_micro_batches + micro_batch) + (phase != "F")

    def _copy(self, step: int, action: Action, body: Body, start: int, end: int) -> None:
        """Copy what a forward saved to the host or back, concurrently with both lanes."""
        i = body.instructions[0]
        saved = self._t.lowering.chains(action.stage, self._number)
        names = i.reads or tuple(buffer.name for buffer in i.writes)
        keys = [(action.stage, action.micro_batch, name) for name in names]
        needs = {self._makers[key] for key in keys if key in self._makers}
        behind = set(self._copied.get(action.kind, ())) | (
            set() if action.kind == "O" else {*self._compute, *self._waited}
        )
        kind = "MEM_STORE" if action.kind == "O" else "MEM_LOAD"
        size = sum(buffer.bytes_at(saved.rows) for buffer in saved.offloaded_values())
        order = tuple(sorted(needs)), tuple(sorted(behind - needs))
        self._nodes.append(TraceNode(str(action), kind, start, end, step, *order, size=size))
        self._copied[action.kind] = (len(self._nodes) - 1,)
        self._makers |= dict.fromkeys(keys, len(self._nodes) - 1)
        if action.kind == "O":
            self._waited.add(len(self._nodes) - 1)

    # ------------------------------------------------------------ after the last action

    def _tail(self, ends_with: Sequence[tuple[int, ...]]) -> None:
        """The gradient reductions, the norm, the update, and the all-gather of weights."""
        traced, spec, tail = self._t, self._t.timed.spec, self._t.timed.tails[self._number]
        size, weight = ITEMSIZE[spec.precision.gradients], ITEMSIZE[spec.precision.parameter]
        reduce_s, groups = traced.timed.rates[0].fabric.reduce_s, traced.groups(self._number)
        reduction = reduction_of(spec)
        time_ns, last = float(traced.makespan_ns), ends_with[-1]

        def add(name: str, kind: str, seconds: float, needs: Sequence[int], **fields: object) -> int:
            nonlocal time_ns
            begin, time_ns = time_ns, time_ns + seconds * NS
            node = TraceNode(
                name,
                kind,
                round(begin),
                round(time_ns),
                TAIL,
                tuple(sorted({*needs})),
                **fields,  # type: ignore[arg-type]
            )
            self._nodes.append(node)
            return len(self._nodes) - 1

        after = {entry.stages: entry.after for entry in traced.program.reductions[self._number]}
        sums: list[int] = []
        summed = [group for group in (group.shard(spec, 2) for group in groups) if len(group.holders) > 1]
        summed.sort(key=lambda group: traced.sums.get((group.holders.pipeline_ranks, group.stages), (0.0, 0.0)))
        total, done = Counter[object](), Counter[object]()  # elements reduced in one span, in all and so far
        for group in summed:
            total[group.holders.pipeline_ranks, group.stages] += group.elements
        for group in summed:
            num_bytes = group.elements * size
            fields = {"size": num_bytes, "group": name_of(group)}
            key = group.holders.pipeline_ranks, group.stages
            name = f"sum of gradients of stages {', '.join(map(str, group.stages))}"
            if key in traced.sums:
                begin, end = traced.sums[key]
                first = begin + (end - begin) * done[key] / total[key]
                done[key] += group.elements
                begin, end = first, begin + (end - begin) * done[key] / total[key]
                needs = (*ends_with[after.get(group.stages, -1)], *sums[-1:])
                ns = round(begin * NS), round(end * NS)
                self._nodes.append(TraceNode(name, TYPES[reduction], *ns, TAIL, needs, **fields))  # type: ignore[arg-type]
                sums.append(len(self._nodes) - 1)
            else:
                seconds = reduce_s(num_bytes, group.holders, reduction) * traced.timed.slowdown
                last = (add(name, TYPES[reduction], seconds, last, **fields),)
        if sums:
            time_ns += tail.reduction_s * NS
        last = (*last, *sums)
        if tail.norm_s:
            last = (add("norm of gradients", "ALL_REDUCE", tail.norm_s, last, size=8, group="world"),)
        last = (add("update", "COMP", tail.update_s + tail.host_s, last),)
        for group in (group.shard(spec, 3) for group in groups):
            num_bytes = group.elements * weight
            seconds = reduce_s(num_bytes, group.holders, "all_gather") * traced.timed.slowdown
            if spec.parallel.zero and len(group.holders) > 1:
                fields = {"size": num_bytes, "group": name_of(group)}
                last = (add("gathering of weights", "ALL_GATHER", seconds, last, **fields),)


def _blank(name: str, kind: str, needs: tuple[int, ...], **fields: object) -> TraceNode:
    """A node without times."""
    return TraceNode(name, kind, 0, 0, TAIL, needs, **fields)  # type: ignore[arg-type]
