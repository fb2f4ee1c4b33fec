"""Profile of a rank's steps, to the last nanosecond: `dsc train --profile`, docs/profiling.md.

While a step is profiled, functions that it calls are replaced by timed ones: the globals of emitted segments and
bodies, the communication of the executor, and the phases of the trainer and the optimizer. All other code, and other
steps, run unchanged: no code checks whether a profile is taken.

Times are exclusive: the row of a call leaves out the timed calls inside it, so the rows of a rank sum to its steps.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from runtime.comm import collective, memory
from runtime.comm.collective import Communicator
from runtime.comm.transport import Shares, Sums, Work
from runtime.run.observers import Observer, StepRow
from runtime.state import optimizer
from runtime.step.trainer import Trainer
from runtime.system.regular_files import write

WARM_UP = 3  # steps before the profile
FOLDER = "profile"  # of a run

Number = TypeVar("Number", int, float)

# op: work on tensors · copy: communication without waiting · wait: for other ranks · bubble: waiting for a pipeline
# message · python: everything between these · profile: the known cost of the profile itself
Kind = Literal["op", "copy", "wait", "bubble", "python", "profile"]


class CallKey(NamedTuple):
    """Key of a row. Fields that are "" when a call is timed are taken from the enclosing call."""

    place: str  # body of an action, "F0", or phase of the step, "reduce"
    segment: str  # emitted module, or ""
    function: str  # of the segment: F, I, W
    kind: Kind
    name: str  # op, or what is communicated


@dataclass
class CallTime:
    """Exclusive time of all calls with one key, in ns. `inside`: number of timed calls made directly from them."""

    calls: int = 0
    clock: int = 0
    processor: int = 0
    inside: int = 0


@dataclass
class _CallFrame:
    key: CallKey
    row: CallTime
    clock: int
    processor: int
    inner_clock: int = 0
    inner_processor: int = 0
    inside: int = 0


@dataclass
class Stopwatch:
    """Exclusive times of nested calls in the thread that makes the stopwatch. Other threads, which read samples and
    write checkpoints, are not timed. `settle`: called before a clock is read, to wait for work on a device."""

    settle: Callable[[], object] | None = None
    rows: dict[CallKey, CallTime] = field(default_factory=dict)
    clock: int = 0  # ns of all outermost calls; equals the sum of the rows
    processor: int = 0
    _stack: list[_CallFrame] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)

    def with_timer(
        self,
        call: Callable[..., Any],
        kind: Kind,
        name: str = "",
        place: str = "",
        segment: str = "",
        function: str = "",
    ) -> Callable[..., Any]:
        """Return a function that calls `call` and records its time."""
        key = CallKey(place, segment, function, kind, name)

        @wraps(call)
        def run(*args: Any, **named: Any) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **named)
            self._enter(key)
            try:
                return call(*args, **named)
            finally:
                self._leave()

        return run

    def _enter(self, key: CallKey) -> None:
        if self._stack:
            around = self._stack[-1]
            around.inside += 1
            place, segment, function, kind, name = key
            outer = around.key
            if kind == "wait" and (outer.kind == "python" or outer.name == "message"):
                kind, name = "bubble", "message"
            # a wait has the name of the communication
            name = name or (outer.name if kind == "wait" else "")
            key = CallKey(place or outer.place, segment or outer.segment, function or outer.function, kind, name)
        row = self.rows.setdefault(key, CallTime())
        if self.settle:
            self.settle()
        self._stack.append(_CallFrame(key, row, time.perf_counter_ns(), time.thread_time_ns()))

    def _leave(self) -> None:
        if self.settle:
            self.settle()
        processor, clock = time.thread_time_ns(), time.perf_counter_ns()
        frame = self._stack.pop()
        clock, processor = clock - frame.clock, processor - frame.processor
        row = frame.row
        row.calls += 1
        row.clock += clock - frame.inner_clock
        row.processor += processor - frame.inner_processor
        row.inside += frame.inside
        if self._stack:
            self._stack[-1].inner_clock += clock
            self._stack[-1].inner_processor += processor
        else:
            self.clock += clock
            self.processor += processor


# ---------------------------------------------------------------- the cost of the profile itself


@dataclass(frozen=True)
class Overhead:
    """The cost of timing one call, in ns (clock, processor): in its own row, and in the row of the enclosing call."""

    within: tuple[float, float]
    around: tuple[float, float]


def measure_overhead(rounds: int = 5, calls: int = 2000) -> Overhead:
    """Measure the cost of timing a call: the minimum of some rounds."""

    def noop() -> None: ...

    within, around = [], []
    for _ in range(rounds):
        watch = Stopwatch()
        inner = watch.with_timer(noop, "op", "nothing")

        def loop(call: Callable[[], object] = inner) -> None:
            for _ in range(calls):
                call()

        watch.with_timer(loop, "python", place="loop")()
        outer, inside = (
            watch.rows[CallKey("loop", "", "", "python", "")],
            watch.rows[CallKey("loop", "", "", "op", "nothing")],
        )
        within.append((inside.clock / calls, inside.processor / calls))
        around.append((outer.clock / calls, outer.processor / calls))
    return Overhead(_minimum(within), _minimum(around))


def _minimum(pairs: Sequence[tuple[Number, Number]]) -> tuple[Number, Number]:
    return min(clock for clock, _ in pairs), min(processor for _, processor in pairs)


def without_overhead(rows: Mapping[CallKey, CallTime], overhead: Overhead) -> dict[CallKey, CallTime]:
    """Move the cost of the profile into separate rows, one per place. Sums do not change."""
    result: dict[CallKey, CallTime] = {}
    for key, row in rows.items():
        took = [
            min(max(measured, 0), round(row.calls * within + row.inside * around))
            for measured, within, around in zip(
                (row.clock, row.processor), overhead.within, overhead.around, strict=True
            )
        ]
        result[key] = CallTime(row.calls, row.clock - took[0], row.processor - took[1], row.inside)
        cost = result.setdefault(CallKey(key.place, "", "", "profile", "profile"), CallTime())
        cost.calls, cost.clock, cost.processor = cost.calls + row.calls, cost.clock + took[0], cost.processor + took[1]
    return result


# ---------------------------------------------------------------- the timed functions


class _TimedNamespace:
    """A namespace whose functions are timed if `choose` accepts their name."""

    def __init__(self, space: object, wrap: Callable[[Any], Any], choose: Callable[[str], bool]) -> None:
        self._space, self._wrap, self._choose = space, wrap, choose

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._space, name)
        if callable(value) and not isinstance(value, type) and self._choose(name):
            value = self._wrap(value)
        setattr(self, name, value)  # found without this method from now on
        return value


@dataclass(frozen=True)
class _TimedWork:
    work: Work
    wait: Callable[[], object]


# (method of the trainer, place in the step, kind and name of its exclusive time)
_PHASES: tuple[tuple[str, str, Kind, str], ...] = (
    ("accumulate", "zero", "op", "zero"),  # it has no other work of its own
    ("_run", "between actions", "python", ""),
    ("_data", "load data", "python", ""),
    ("_count_targets", "count targets", "python", ""),
    ("_tangents", "count targets", "python", ""),
    ("records", "records", "python", ""),
    ("_collect", "sums", "python", ""),
    ("apply", "metrics", "python", ""),
    ("_balance", "balance", "python", ""),
)
_OPTIMIZER: tuple[tuple[str, str, Kind, str], ...] = (
    ("start_reduce", "reduce", "python", ""),
    ("gradient_square", "norm", "op", "norm"),
    ("update", "update", "python", ""),
    ("gather_weights", "update", "python", ""),
)
_COMMUNICATION = {
    "counts": "counts",
    "dispatch": "dispatch",
    "wait_dispatch": "dispatch",
    "combine": "combine",
    "wait_combine": "combine",
    "gather_rows": "gather",
    "wait_gather_rows": "gather",
    "scatter_rows": "scatter",
    "gather_choices": "gather",
    "wait_gather_choices": "gather",
    "gather_sequences": "gather",
    "wait_gather_sequences": "gather",
    "scatter_sequences": "scatter",
    "wait_scatter_sequences": "scatter",
    "wait_scatter_rows": "scatter",
    "gather": "gather",
    "wait_gather": "gather",
    "zeros": "scatter",
    "scatter": "scatter",
    "wait_scatter": "scatter",
    "send": "message",
    "receive": "message",
}

Patch = tuple[Any, str, Any]  # object, attribute, value while it is profiled


class Profile(Observer):
    """Profiles `steps` steps of a trainer after WARM_UP others, and writes the result into the folder `run`. Every rank
    takes its own profile."""

    def __init__(self, trainer: Trainer, steps: int, run: Path) -> None:
        self.trainer, self.steps, self.run, self.done = trainer, steps, run, 0
        trainer.executor.graphs.is_on = False  # a graph would hide the ops that it replays
        self.overhead = measure_overhead()
        self.watch = Stopwatch(torch.cuda.synchronize if trainer.device.type == "cuda" else None)
        self.received: dict[str, list[int]] = {}  # site → calls, rows received for this rank's experts
        self.plain_ns: list[tuple[int, int]] = []  # (clock, processor) of the warm-up steps

    def train(self, step: Callable[[], StepRow]) -> StepRow:
        """Train a step, with a profile after the warm-up."""
        self.done += 1
        if self.done <= WARM_UP:
            plain = Stopwatch(self.watch.settle)
            row: StepRow = plain.with_timer(step, "python")()
            self.plain_ns.append((plain.clock, plain.processor))
            return row
        with ExitStack() as stack:
            for patch in self._patches():
                stack.callback(_apply(*patch))
            row = self.watch.with_timer(step, "python", place="metrics")()
            return row

    def document(self) -> dict[str, Any]:
        """Return the profile for JSON. Times are in ns, over all profiled steps."""
        rows = without_overhead(self.watch.rows, self.overhead)
        plain_clock, plain_processor = _minimum(self.plain_ns[1:])
        return {
            "rank": self.trainer.rank,
            "device": self.trainer.device.type,
            "steps": self.steps,
            "clock_ns": self.watch.clock,
            "processor_ns": self.watch.processor,
            "plain": {"clock_ns": plain_clock, "processor_ns": plain_processor},
            "actions": sorted(self.trainer.bodies),
            "received": self.received,
            "rows": [
                {**key._asdict(), "calls": row.calls, "clock_ns": row.clock, "processor_ns": row.processor}
                for key, row in sorted(rows.items(), key=lambda item: _sort_key(self.watch.rows, item[0]))
            ],
        }

    def close(self) -> None:
        """Write profile/rank_<r>.json into the run folder, if all steps were trained."""
        if self.done < WARM_UP + self.steps:
            return
        folder = self.run / FOLDER
        folder.mkdir(exist_ok=True)
        write(folder / f"rank_{self.trainer.rank}.json", json.dumps(self.document(), indent=1) + "\n")

    # ---- patches

    def _patches(self) -> Iterator[Patch]:
        trainer, with_timer = self.trainer, self.watch.with_timer
        for owner, phases in ((trainer, _PHASES), (optimizer, _OPTIMIZER)):
            for name, place, kind, row_name in phases:
                yield owner, name, with_timer(getattr(owner, name), kind, row_name, place)
        yield optimizer, "update_part", with_timer(optimizer.update_part, "op", trainer.recipe.kind)
        bodies = trainer.bodies
        yield trainer, "bodies", {name: with_timer(body, "python", place=name) for name, body in bodies.items()}
        stage = next(iter(bodies.values())).__globals__
        for segment in {id(value): value for value in stage.values() if isinstance(value, ModuleType)}.values():
            yield from self._of_segment(segment)
        yield from self._of_communication()

    def _of_segment(self, module: ModuleType) -> Iterator[Patch]:
        segment, with_timer = module.__name__.rpartition(".")[2], self.watch.with_timer
        for name, value in list(vars(module).items()):
            if name in ("F", "I", "W"):
                yield module, name, with_timer(value, "python", segment=segment, function=name)
            elif value is torch:
                yield (
                    module,
                    name,
                    _TimedNamespace(torch, lambda call: with_timer(call, "op", call.__name__), lambda _: True),
                )
            elif isinstance(value, FunctionType) and name != "on_cuda":
                yield module, name, with_timer(value, "op", value.__name__)

    def _of_communication(self) -> Iterator[Patch]:
        executor, with_timer = self.trainer.executor, self.watch.with_timer
        for name in ("load", "record", "tell"):
            yield executor, name, with_timer(getattr(executor, name), "op", name)
        for name, communicated in _COMMUNICATION.items():
            yield executor, name, with_timer(getattr(executor, name), "copy", communicated)
        yield executor, "wait_counts", with_timer(partial(self._wait_counts, executor.wait_counts), "copy", "counts")
        yield self.trainer.links, "sums", _TimedSums(self.trainer.links.sums, with_timer)
        # Waits for memory that ranks share happen here; torch.distributed waits in its works and collectives.
        yield memory, "wait_until", with_timer(memory.wait_until, "wait")
        yield collective, "_work", partial(self._work, collective._work)
        yield Communicator, "all_gather", with_timer(Communicator.all_gather, "wait")

    def _wait_counts(self, call: Callable[..., Any], action: str, micro_batch: int, site: str) -> Any:
        route, *tables = call(action, micro_batch, site)
        totals = self.received.setdefault(site, [0, 0])
        totals[0] += 1
        totals[1] += route.num_rows
        return route, *tables

    def _work(self, function: Callable[[Any], Work], operand: Any) -> Work:
        work = function(operand)
        return _TimedWork(work, self.watch.with_timer(work.wait, "wait"))


class _TimedSums:
    """The sums of a rank, timed."""

    def __init__(self, sums: Sums, with_timer: Callable[..., Callable[..., Any]]) -> None:
        self.all_reduce: Callable[..., None] = with_timer(sums.all_reduce, "copy", "sum")
        self._start, self._timed = with_timer(sums.start_reduce, "copy", "reduce"), with_timer
        self.gather: Callable[[str, tuple[int, ...], Tensor, Shares], None] = with_timer(sums.gather, "copy", "gather")

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        work: Work = self._start(bucket, holders, flat, shares)
        return _TimedWork(work, self._timed(work.wait, "copy", "reduce"))


def _apply(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute. Return a function that restores it."""
    if name in vars(owner):
        undo: Callable[[], None] = partial(setattr, owner, name, vars(owner)[name])
    else:  # a method of its class
        undo = partial(delattr, owner, name)
    setattr(owner, name, value)
    return undo


def _sort_key(rows: Mapping[CallKey, CallTime], key: CallKey) -> tuple[int, int]:
    """Return the sort key of a row: places, and rows within a place, in the order of their first call. Profile rows are
    last."""
    keys = list(rows)
    places = [row_key.place for row_key in keys]
    return places.index(key.place), keys.index(key) if key in rows else len(keys)
