"""Candidate values that may fix a spec: for a line that may change, values that fit the known ones, nearest first.

`nearest_values(path, view)` is called in ORDER, so that each variable can follow from those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import log

from dsl.closed_forms import memory, ramp
from dsl.conflict.sheet import (
    CHUNKS,
    DATA,
    SCHEDULE,
    SPLIT,
    SpecSheet,
    Value,
    adjacent_multiples,
    check_variables,
    divisors,
    expert_widths,
    greatest_common_divisor,
    lcm,
    split,
)
from dsl.facts.schedules import DEFAULT, PLAIN, facts_of
from dsl.rules.parallel import MAX_PLANNED
from dsl.schema import Batch
from dsl.schema.model import MAX_LAYER
from dsl.schema.parallel import MAX_DEGREE
from dsl.schema.run import MAX_CHUNKS

ORDER = check_variables((
    "parallel.tensor", "parallel.context", "parallel.zero", "parallel.pipeline", "cluster.nodes",
    "cluster.node.devices", "parallel.data", "schedule.name", "schedule.chunks", "last", "parallel.expert",
    "parallel.expert_tensor", "experts",
    "groups", "top_groups", "top_k", "train.micro_batch", "train.batch.end", "train.batch.start", "kv_heads", "heads",
    "cluster.node.device.sms", "sm.communication", "model.vocab", "data.tokenizer.vocab", "train.sequence",
    "cluster.node.device.memory", "model", "precision",
))  # fmt: skip
WINDOW = 16  # multiples to try if the numbers that determine them are unknown
BOUNDS = check_variables({  # as in the schema
    "parallel.pipeline": (1, MAX_LAYER + 3), "parallel.data": (1, MAX_DEGREE), "parallel.expert": (1, MAX_DEGREE),
    "parallel.expert_tensor": (1, MAX_DEGREE),
    "cluster.nodes": (1, 1_000_000), "cluster.node.devices": (1, 65536), "train.micro_batch": (1, 1_000_000),
    "train.batch.end": (1, 100_000_000), "train.batch.start": (1, 100_000_000), "experts": (1, 65536),
    "groups": (1, 65536), "top_groups": (1, 65536), "top_k": (1, 1024), "heads": (1, 65536), "kv_heads": (1, 65536),
    "last": (0, MAX_LAYER), "cluster.node.device.sms": (1, 4096), "sm.communication": (0, 4096),
    "model.vocab": (2, 16_777_216), "data.tokenizer.vocab": (257, 16_777_216),
    "cluster.node.device.memory": (1, 2**60), "schedule.chunks": (2, MAX_CHUNKS),
})  # fmt: skip


def order_index(path: str) -> int:
    """The index of a variable in ORDER; variables of layers and heads are listed by their last part."""
    return ORDER.index(_key(path))


def _key(path: str) -> str:
    return path if path in ORDER else path.rpartition(".")[2]


def distance(path: str, old: Value | None, new: Value) -> float:
    """The size of a change: the logarithm of the ratio. A changed word, and a step of `zero`, count as a doubling.

    Changes of model and cluster count as one doubling more: the run is a different one, or devices must be bought.
    """
    if old == new:
        return 0.0
    if not isinstance(old, int) or not isinstance(new, int):
        return log(2)
    if path == "parallel.zero":
        return log(2) * abs(new - old)
    offset = 1 if path.endswith(".last") or 0 in (old, new) else 0  # layers count from 0
    return abs(log((new + offset) / (old + offset))) + (log(2) if path.startswith(("model.", "cluster.")) else 0.0)


def nearest_values(path: str, old: Value | None, view: Mapping[str, Value], sheet: SpecSheet) -> list[Value]:
    """Return values to try, the nearest to the old one first, without the old one."""
    low, high = BOUNDS.get(_key(path), (0, 2**60))
    if path == SCHEDULE:
        return [name for name in dict.fromkeys((facts_of(old).roomier, PLAIN, DEFAULT)) if name != old]
    values = dict.fromkeys(_candidates(path, old if isinstance(old, int) else 1, _FixedView(view), sheet))
    fitting = [value for value in values if value != old and (isinstance(value, str) or low <= value <= high)]
    return sorted(fitting, key=lambda value: distance(path, old, value))


class _FixedView:
    """The values that are fixed or chosen; other numbers are 0."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values

    def __getitem__(self, path: str) -> int:
        value = self.values.get(path, 0)
        assert isinstance(value, int)
        return value

    def number_or_one(self, path: str) -> int:
        """The number at `path` as a divisor; 1 if it is neither fixed nor chosen."""
        return self[path] or 1

    def numbers_ending_in(self, suffix: str) -> list[int]:
        return [value for path, value in self.values.items() if path.endswith(suffix) and isinstance(value, int)]

    @property
    def multiple(self) -> int:
        """The number that ranks and micro-batches must be a multiple of for the schedule."""
        return facts_of(self.values.get(SCHEDULE)).multiple

    @property
    def fewest_micro_batches(self) -> int:
        """Micro-batches that the schedule needs per pipeline rank."""
        return facts_of(self.values.get(SCHEDULE)).fewest_micro_batches

    @property
    def stages(self) -> int:
        return self["parallel.pipeline"] * facts_of(self.values.get(SCHEDULE)).stages_per_rank(self[CHUNKS])

    def groups_over(self, path: str) -> int:
        """The number that the other degree of expert groups must divide; 0 if unknown."""
        columns, degree = self[DATA] * split(self), self.number_or_one(path)
        return columns // degree if columns % degree == 0 else 1

    def batch_over(self, unit: int) -> int:
        """The number that data must divide; 0 if the batch or micro-batch is unknown."""
        sizes = [self["train.batch.start"], self["train.batch.end"]]
        return (
            greatest_common_divisor(*sizes) // unit
            if unit and all(sizes) and greatest_common_divisor(*sizes) % unit == 0
            else 0
        )


def _candidates(path: str, old: int, view: _FixedView, sheet: SpecSheet) -> Iterable[Value]:
    if path in SPLIT:
        return divisors(view["cluster.nodes"] * view["cluster.node.devices"] or 1)
    if path == "parallel.zero":
        return (0, 1, 2, 3)
    if path in ("parallel.pipeline", "parallel.data", "cluster.nodes", "cluster.node.devices"):
        return _degrees(path, old, view)
    if path == CHUNKS:
        return range(2, old + 1)
    if path == "parallel.expert":
        return divisors(
            greatest_common_divisor(view.groups_over("parallel.expert_tensor"), *view.numbers_ending_in(".experts"))
            or 1
        )
    if path == "parallel.expert_tensor":
        return divisors(greatest_common_divisor(view.groups_over("parallel.expert"), *expert_widths(sheet.spec)) or 1)
    if path.startswith("train."):
        return _batches(path, old, view)
    if path == "cluster.node.device.memory":
        return _round_up(sheet.spec.cluster.node.device.memory_for(memory.lower_bound(sheet.spec).total))
    if path in OPPOSITE:
        return (view[OPPOSITE[path][0]] + OPPOSITE[path][1],)
    if path.startswith("model."):
        return _model_values(path, old, view)
    return ()


OPPOSITE = check_variables(
    {
        "cluster.node.device.sms": ("sm.communication", 1),
        "sm.communication": ("cluster.node.device.sms", -1),
        "model.vocab": ("data.tokenizer.vocab", 0),
        "data.tokenizer.vocab": ("model.vocab", 0),
    }
)


def _degrees(path: str, old: int, view: _FixedView) -> Iterable[int]:
    """Degrees for which pipeline · data · tensor · context = nodes · devices, as far as they are known."""
    pipeline, data, nodes, devices = (
        view[name] for name in ("parallel.pipeline", DATA, "cluster.nodes", "cluster.node.devices")
    )
    splits = split(view)
    if path in ("parallel.pipeline", DATA):
        cofactor = data if path == "parallel.pipeline" else pipeline
        if nodes and devices:
            worlds = _exact_quotients(nodes * devices, splits)
            return [
                degree
                for world in worlds
                for degree in (_exact_quotients(world, cofactor) if cofactor else divisors(world))
            ]
        if path == "parallel.pipeline":
            return range(1, MAX_LAYER + 4)
        group = view.number_or_one("parallel.expert") * view.number_or_one("parallel.expert_tensor")
        return _multiples(old, group // greatest_common_divisor(group, splits))
    cofactor = devices if path == "cluster.nodes" else nodes
    pipeline *= splits
    if pipeline and data:
        return _exact_quotients(pipeline * data, cofactor) if cofactor else divisors(pipeline * data)
    if not pipeline or not cofactor:
        return _multiples(old, 1)
    batch = view.batch_over(view["train.micro_batch"])
    if batch:
        return (divisor * pipeline // cofactor for divisor in divisors(batch) if divisor * pipeline % cofactor == 0)
    return _multiples(old, pipeline // greatest_common_divisor(pipeline, cofactor))


def _exact_quotients(number: int, divisor: int) -> tuple[int, ...]:
    return (number // divisor,) if number % divisor == 0 else ()


def _multiples(old: int, unit: int) -> Iterator[int]:
    """Multiples of a unit: small ones, and those near the old value."""
    middle = old // unit
    counts = dict.fromkeys((*range(1, WINDOW + 1), *range(max(1, middle - WINDOW), middle + WINDOW), 2 * middle))
    return (unit * count for count in counts)


def _batches(path: str, old: int, view: _FixedView) -> Iterable[int]:
    if path == "train.micro_batch":
        batch = view.batch_over(view.number_or_one(DATA))
        return divisors(batch) if batch else _multiples(old, 1)
    if path == "train.sequence" or not view["train.micro_batch"]:
        return ()
    global_micro_batch = view.number_or_one(DATA) * view["train.micro_batch"]
    unit, quantum, smallest_batch = (
        global_micro_batch * view.multiple,
        2 * global_micro_batch,
        global_micro_batch * max(1, view.fewest_micro_batches * view.number_or_one("parallel.pipeline")),
    )
    stages = view.stages or 1
    start, end = view["train.batch.start"], view["train.batch.end"]
    if path == "train.batch.start":
        grown = _last_good(end // unit, 1, lambda count: _is_planned(count * unit, end, stages, quantum))
        return (*adjacent_multiples(old, unit), grown * unit, end)
    largest = _last_good(
        -(-max(start, smallest_batch) // unit),
        old // unit,
        lambda count: _is_planned(start or count * unit, count * unit, stages, quantum),
    )
    return (
        *adjacent_multiples(old, unit),
        smallest_batch,
        largest * unit,
        *(adjacent_multiples(start, unit) if start else ()),
    )


def _is_planned(start: int, end: int, stages: int, quantum: int) -> bool:
    """Whether the sizes and micro-batches of a batch are within the limits."""
    sizes = ramp.num_sizes(Batch.model_construct(start=start, end=end), quantum)
    return sizes <= ramp.MAX_SIZES and stages * sizes * (start + end) // quantum <= MAX_PLANNED


def _last_good(good: int, bad: int, holds: Callable[[int], bool]) -> int:
    """The last good number on the way from `good` to `bad`, by bisection."""
    if holds(bad):
        return bad
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good


def _model_values(path: str, old: int, view: _FixedView) -> Iterable[int]:
    parent, _, name = path.rpartition(".")
    if name == "last":
        return (max(1, view.stages - 2) - 1, view.stages - 1)
    if name == "kv_heads":
        heads = view[f"{parent}.heads"]
        return divisors(heads) if heads else _multiples(old, 1)
    if name == "heads":
        return adjacent_multiples(old, view.number_or_one(f"{parent}.kv_heads"))
    experts, groups, top_groups, top_k = (
        view[f"{parent}.{key}"] for key in ("experts", "groups", "top_groups", "top_k")
    )
    if name == "experts":
        unit = lcm(view["parallel.expert"] or 1, groups or 1)
        return (
            *adjacent_multiples(old, unit),
            *(adjacent_multiples(-(-top_k * groups // top_groups), unit) if groups and top_groups and top_k else ()),
        )
    if name == "groups":
        return divisors(experts or 1)
    if name == "top_groups":
        return (groups, -(-top_k * groups // (experts or 1)))
    return (top_groups * experts // (groups or 1),)


def _round_up(num_bytes: int) -> Iterator[int]:
    """The bytes, rounded up to a whole number of the largest unit."""
    for scale in (10**9, 10**6, 10**3, 1):
        if num_bytes >= scale:
            yield -(-num_bytes // scale) * scale
            return
