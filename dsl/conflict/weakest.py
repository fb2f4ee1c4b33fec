"""Values of free variables that restrict the others least: enough to decide whether some lines are consistent.

`weakest_values(path, view)` returns values for a free variable after those before it in ORDER are chosen. If the fixed
lines are consistent, one of these values satisfies all rules, because

- a free schedule is the plain one, which has no requirements; free chunks are 2, expert_tensor is 1, and there are
  1,000 layers; tensor and context are 1 if another degree of the world is free;
- smaller degrees divide more: a free degree is the smallest that fits the fixed values. If memory is at stake, larger
  degrees help: then every value that fits is tried, or the largest and the smallest;
- a free batch is the smallest one that fits, and does not grow;
- free experts are as many as possible, and groups as few as `top_groups`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dsl.conflict.sheet import (
    DATA,
    PIPELINE,
    SPLIT,
    Value,
    Variable,
    check_variables,
    divisors,
    greatest_common_divisor,
    lcm,
    split,
)
from dsl.facts.schedules import FACTS, PLAIN, facts_of
from dsl.schema.model import MAX_LAYER
from dsl.schema.parallel import MAX_DEGREE

ORDER = check_variables((
    "schedule.name", "schedule.chunks", "parallel.tensor", "parallel.context", "parallel.zero", "model", "precision",
    "parallel.expert_tensor", "parallel.expert", "parallel.pipeline", "parallel.data",
    "cluster.nodes", "cluster.node.devices", "train.micro_batch", "train.batch.end", "train.batch.start",
    "train.sequence", "cluster.node.device.memory", "cluster.node.device.sms", "sm.communication",
    "model.vocab", "data.tokenizer.vocab", "last", "top_k", "top_groups", "groups", "experts", "heads", "kv_heads",
))  # fmt: skip
MAX_EXPERTS, MAX_BATCH, MAX_NODES, MAX_DEVICES, MAX_MEMORY = 65536, 100_000_000, 1_000_000, 65536, 2**60
MOST_NEEDED = max(facts.fewest_micro_batches for facts in FACTS.values())  # micro-batches per rank, for any schedule
SIZES = ("train.batch.start", "train.batch.end")


def order_index(path: str) -> int:
    """The index of a variable in ORDER; variables of layers and heads are listed by their last part."""
    return ORDER.index(path if path in ORDER else path.rpartition(".")[2])


@dataclass
class ChoiceView:
    """The values known so far while values are chosen."""

    variables: Mapping[str, Variable]
    fixed: Mapping[str, Value]  # values of the fixed lines
    chosen: dict[str, Value]
    memory_at_stake: bool

    def get(self, path: str) -> int:
        """A number that is chosen or fixed; 0 if it is neither."""
        value = self.chosen.get(path, self.fixed.get(path, 0))
        assert isinstance(value, int)
        return value

    def number_or_one(self, path: str) -> int:
        """The number at `path` as a divisor; 1 if it is neither chosen nor fixed, or not in the spec."""
        return self.get(path) or 1

    def numbers_ending_in(self, suffix: str) -> list[int]:
        """The fixed numbers of all layers, by the end of their paths."""
        return [value for path, value in self.fixed.items() if path.endswith(suffix) and isinstance(value, int)]

    @property
    def multiple(self) -> int:
        """The number that ranks and micro-batches must be a multiple of for the schedule."""
        return facts_of(self.chosen.get("schedule.name")).multiple

    @property
    def fewest_micro_batches(self) -> int:
        """Micro-batches that the schedule needs per pipeline rank."""
        return facts_of(self.chosen.get("schedule.name")).fewest_micro_batches


def weakest_values(path: str, view: ChoiceView) -> Iterable[Value]:
    """Values to try for a free variable."""
    name = path.rpartition(".")[2]
    if path in SINGLE:
        return (SINGLE[path],)
    if path in SPLIT:
        return _split(path, view)
    if path in ("parallel.expert", "parallel.pipeline", "parallel.data"):
        return {"expert": _expert, "pipeline": _pipeline, "data": _data}[name](view)
    if path in ("cluster.nodes", "cluster.node.devices"):
        return _rest_of_world(path, view)
    if path == "train.micro_batch":
        sizes = [view.fixed[size_path] for size_path in SIZES if size_path in view.fixed]
        return _cofactors(sizes, view.number_or_one("parallel.data")) if sizes else (1,)
    if path in SIZES:
        return (_batch(path, view),)
    return _layer_values(path, name, view)


SINGLE: dict[str, Value] = check_variables(
    {
        "schedule.name": PLAIN,
        "schedule.chunks": 2,
        "parallel.expert_tensor": 1,
        "parallel.zero": 1,
        "train.sequence": 1,
        "cluster.node.device.memory": MAX_MEMORY,
        "cluster.node.device.sms": 4096,
        "sm.communication": 0,
        "model.vocab": 16_777_216,
        "data.tokenizer.vocab": 257,
        "model": "any",
        "precision": "any",
    }
)


def _cofactors(values: Iterable[Value], unit: int) -> tuple[int, ...]:
    """Numbers whose product with `unit` divides all values."""
    divisor = greatest_common_divisor(*(value for value in values if isinstance(value, int)))
    return divisors(divisor // unit) if divisor % unit == 0 else ()


def _expert(view: ChoiceView) -> Iterable[int]:
    experts, data = view.numbers_ending_in(".experts"), view.fixed.get("parallel.data", 0)
    assert isinstance(data, int)
    if not view.memory_at_stake:
        return (1,)
    columns, slices = data * split(view), view.number_or_one("parallel.expert_tensor")
    groups = columns // greatest_common_divisor(columns, slices) if columns else 0
    return reversed(divisors(greatest_common_divisor(*experts, groups))) if experts else (1,)


def _split(path: str, view: ChoiceView) -> Iterable[int]:
    """Values for tensor or context: if the user wrote it, the quotient of a fixed world and fixed degrees; otherwise 1,
    as another free degree can take that value."""
    fixed = [view.fixed.get(name, 0) for name in (PIPELINE, DATA, "cluster.nodes", "cluster.node.devices")]
    pipeline, data, nodes, devices = (value for value in fixed if isinstance(value, int))
    (other_path,) = {*SPLIT} - {path}
    variable, ranks = view.variables.get(path), pipeline * data * view.number_or_one(other_path)
    if variable is None or variable.span is None or not ranks or nodes * devices % ranks:
        return (1,)
    return (nodes * devices // ranks or 1,)


def _pipeline(view: ChoiceView) -> Iterable[int]:
    multiple = view.multiple
    nodes, devices, data = (view.fixed.get(name, 0) for name in ("cluster.nodes", "cluster.node.devices", DATA))
    assert isinstance(nodes, int) and isinstance(devices, int) and isinstance(data, int)
    limit = MAX_LAYER + 3
    if nodes and devices:
        world, data = nodes * devices, data * split(view)
        if data:
            return (world // data,) if world % data == 0 else ()
        return [degree for degree in range(multiple, limit, multiple) if world % (degree * split(view)) == 0]
    if view.memory_at_stake:
        return range(multiple, limit, multiple)
    # If P works, so does gcd(P, nodes), as the rest of `nodes` then divides data: divisors of fixed values are enough.
    return sorted({lcm(multiple, divisor) for divisor in divisors(nodes or devices or 1)})


def _data(view: ChoiceView) -> Iterable[int]:
    nodes, devices, pipeline = view.get("cluster.nodes"), view.get("cluster.node.devices"), view.number_or_one(PIPELINE)
    ranks = pipeline * split(view)
    if nodes and devices:
        return (nodes * devices // ranks,) if nodes * devices % ranks == 0 else ()
    anchor = nodes or devices or 1
    group = view.number_or_one("parallel.expert") * view.number_or_one("parallel.expert_tensor")
    base = lcm(group // greatest_common_divisor(group, split(view)), anchor // greatest_common_divisor(anchor, ranks))
    sizes = [view.fixed[size_path] for size_path in SIZES if size_path in view.fixed]
    if sizes:
        unit = view.number_or_one("train.micro_batch") * view.multiple
        degrees = [degree for degree in _cofactors(sizes, unit) if degree % base == 0 and degree <= MAX_DEGREE]
        return reversed(degrees) if view.memory_at_stake else degrees
    if not view.memory_at_stake:
        return (base,)
    least = MOST_NEEDED * pipeline * view.number_or_one("train.micro_batch")
    largest = min(MAX_DEGREE, MAX_BATCH // least, MAX_NODES * anchor // ranks) // base * base
    return (largest, base) if largest > base else (base,)


def _rest_of_world(path: str, view: ChoiceView) -> Iterable[int]:
    world = view.number_or_one(PIPELINE) * view.number_or_one(DATA) * split(view)
    if path == "cluster.node.devices":
        nodes = view.number_or_one("cluster.nodes")
        return (world // nodes,) if world % nodes == 0 else ()
    devices = view.get("cluster.node.devices")
    if devices:
        return (world // devices,) if world % devices == 0 else ()
    choices = (
        view.number_or_one(DATA),
        *divisors(world),
    )  # one node per data rank, with a whole pipeline, mostly works
    return [number for number in choices if number <= MAX_NODES and world // number <= MAX_DEVICES][:1]


def _batch(path: str, view: ChoiceView) -> int:
    if path == "train.batch.start":  # `to` is chosen first; with the same value, the batch has one size
        return view.get("train.batch.end")
    global_micro_batch = view.number_or_one(DATA) * view.number_or_one("train.micro_batch")
    unit, least = (
        global_micro_batch * view.multiple,
        global_micro_batch * max(1, view.fewest_micro_batches * view.number_or_one(PIPELINE)),
    )
    start = view.fixed.get("train.batch.start", 1)
    assert isinstance(start, int)
    return -(-max(least, start) // unit) * unit


def _layer_values(path: str, name: str, view: ChoiceView) -> Iterable[Value]:
    parent = path.rpartition(".")[0]
    if name == "last":
        return (MAX_LAYER,)
    if name == "top_k":
        return (1,)
    if name in ("heads", "kv_heads"):
        return (view.get(f"{parent}.kv_heads") or 1,) if name == "heads" else (1,)
    top_groups, experts, expert = (
        view.number_or_one(f"{parent}.top_groups"),
        view.get(f"{parent}.experts"),
        view.number_or_one("parallel.expert"),
    )
    if name == "top_groups":
        groups = view.get(f"{parent}.groups")
        return (groups,) if groups else divisors(experts) if experts else (1,)
    if name == "groups":
        return divisors(experts) if experts else dict.fromkeys((top_groups, -(-top_groups // expert) * expert))
    assert name == "experts", path
    unit = lcm(expert, *(view.number_or_one(f"{layer}.groups") for layer in _layers_of_line(path, view)))
    return (MAX_EXPERTS // unit * unit,) if unit <= MAX_EXPERTS else ()


def _layers_of_line(path: str, view: ChoiceView) -> list[str]:
    """The layers whose experts are set by the same line."""
    span = view.variables[path].span
    on_line = [
        expert_path
        for expert_path, variable in view.variables.items()
        if expert_path.endswith(".experts") and variable.span == span
    ]
    return [expert_path.rpartition(".")[0] for expert_path in (on_line if span is not None else [path])]
