"""The numbers that the joint rules read, as variables with positions, and a spec in which they can be changed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import gcd, isqrt
from typing import Any, Protocol, TypeVar

from dsl.messages.diagnostics import Span
from dsl.schema import Gqa, LayerRange, Moe, Node, Spec, TrainTokenizer
from dsl.schema.paths import check_key, check_path, check_paths

Value = int | str
Names = TypeVar("Names", bound=Collection[str])
PLAIN = check_paths(
    "parallel.tensor", "parallel.context", "parallel.zero", "parallel.pipeline", "parallel.expert", "parallel.data",
    "parallel.expert_tensor",
    "cluster.nodes", "cluster.node.devices", "cluster.node.device.memory", "cluster.node.device.sms", "schedule.name",
    "schedule.chunks", "sm.communication", "train.micro_batch", "train.sequence",
    "train.batch.start", "train.batch.end", "model.vocab",
)  # fmt: skip
MODEL, PRECISION = check_paths("model", "precision")  # each set as a whole, by one line of the run
WORLD = check_paths("parallel.pipeline", "parallel.tensor", "parallel.context", "cluster.nodes", "cluster.node.devices")
SPLIT = check_paths("parallel.tensor", "parallel.context")  # degrees that split the data of a data rank
DATA, PIPELINE, SCHEDULE, CHUNKS = check_paths("parallel.data", "parallel.pipeline", "schedule.name", "schedule.chunks")
TRAINED_VOCAB = check_path("data.tokenizer.vocab")
ROUTED = tuple(check_key(Moe, name) for name in ("experts", "groups", "top_groups", "top_k"))
HEADS = tuple(check_key(Gqa, name) for name in ("heads", "kv_heads"))
LAST = check_key(LayerRange, "last")
# variables of layers by their last part
VARIABLES = frozenset({*PLAIN, MODEL, PRECISION, TRAINED_VOCAB, *ROUTED, *HEADS, LAST})
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*", re.ASCII)


@dataclass(frozen=True)
class Variable:
    """A number or word of a spec."""

    path: str
    value: Value | None  # None: unknown, as the values it follows from contradict each other
    span: Span | None = None  # where the user wrote it; None: a default, or auto
    constant: bool = True  # whether its expression does not depend on other lines
    is_fixed: bool = False  # whether it has this value in every search


class SheetValues(Protocol):
    def number_or_one(self, path: str) -> int:
        """A number; 1 if unknown."""
        ...


def split(view: SheetValues) -> int:
    """The ranks that split the data of a data rank: tensor · context."""
    return view.number_or_one(SPLIT[0]) * view.number_or_one(SPLIT[1])


class SpecSheet:
    """A private copy of a spec whose values are overwritten in place; rules read it like any spec.

    Nodes are frozen for all other code; building new ones for each value tried would take a hundred times as long.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec.model_copy(deep=True)
        self._places: dict[str, tuple[dict[str, Any], str]] = {}

    def set_value(self, path: str, value: Value) -> None:
        if path not in self._places:
            *parents, name = path.split(".")
            node: Any = self.spec
            for part in parents:
                node = node[int(part)] if part.isdigit() else getattr(node, part)
            assert isinstance(node, Node)
            check_key(type(node), name)
            self._places[path] = (vars(node), name)
        values, name = self._places[path]
        values[name] = value


def check_variables(names: Names) -> Names:
    """Return a table of variables. Raises LookupError if a name is no variable."""
    unknown = {*names} - VARIABLES
    if unknown:
        raise LookupError(f"no variables: {', '.join(sorted(unknown))}")
    return names


def with_one_node(spec: Spec) -> Spec:
    """The spec with all devices on one node. Joint rules that are not about a kind of device read only their number."""
    cluster = spec.cluster
    node = cluster.node.model_copy(update={"devices": cluster.world})
    return spec.model_copy(update={"cluster": cluster.model_copy(update={"nodes": 1, "node": node, "more": None})})


def variables(
    spec: Spec, origins: Mapping[str, Span], failed: Collection[str], constants: Collection[str]
) -> dict[str, Variable]:
    """The variables of a spec, by path. `constants`: names that do not depend on other lines (`let`)."""
    by_path = {}
    for path in (*PLAIN, *_model_paths(spec), *_data_paths(spec)):
        value = value_at(spec, path)
        span = _written_span(path, origins)
        if path == DATA and (value is None or span is None or span.text == "auto"):
            value, span = value, None
        elif not isinstance(value, (int, str)) or path in failed:
            continue
        constant = span is None or path == SCHEDULE or set(NAME.findall(_without_units(span.text))) <= {*constants}
        by_path[path] = Variable(path, value, span, constant)
    for path in (MODEL, PRECISION):
        if path in origins and not any(
            failed_path == path or failed_path.startswith(f"{path}.") for failed_path in failed
        ):
            by_path[path] = Variable(path, origins[path].text, origins[path])
    return by_path


def value_at(spec: Spec, path: str) -> Any:
    """The value at a path of a spec that may be incomplete; None if there is none."""
    node: Any = spec
    for part in path.split("."):
        values = vars(node) if isinstance(node, Node) else {}
        node = node[int(part)] if isinstance(node, tuple) else values.get(part)
    return node


def expert_widths(spec: Spec) -> list[int]:
    """The inner widths of the routed experts of a spec that may be incomplete."""
    experts = (vars(span).get("ffn") for span in value_at(spec, "model.layers") or ())
    widths = (vars(ffn).get("inner") for ffn in experts if isinstance(ffn, Moe))
    return [width for width in widths if isinstance(width, int)]


def _without_units(text: str) -> str:
    """An expression without function names and without units of numbers."""
    return re.sub(r"[0-9][0-9A-Za-z_.]*|[A-Za-z_]+\(", " ", text)


def _model_paths(spec: Spec) -> Iterator[str]:
    layers = value_at(spec, "model.layers") or ()
    for index, span in enumerate(layers):
        if isinstance(vars(span).get("ffn"), Moe):
            yield from (check_path(f"model.layers.{index}.ffn.{name}") for name in ROUTED)
    if layers and all(span.by == 1 for span in layers):  # otherwise several ranges share the last layer
        yield check_path(f"model.layers.{len(layers) - 1}.{LAST}")
    if isinstance(value_at(spec, "model.attention"), Gqa):
        yield from (check_path(f"model.attention.{name}") for name in HEADS)


def _data_paths(spec: Spec) -> Iterator[str]:
    if isinstance(value_at(spec, "data.tokenizer"), TrainTokenizer):
        yield TRAINED_VOCAB


def _written_span(path: str, origins: Mapping[str, Span]) -> Span | None:
    """The position of a value, if it is written."""
    parent, _, name = path.rpartition(".")
    if parent == "train.batch":
        return origins.get(f"{parent}.{'from' if name == 'start' else 'to'}", origins.get(parent))
    if path == "data.tokenizer.vocab":
        return origins.get(parent)
    if name == "last":
        span = origins.get(parent)
        return span if span is not None and ".." in span.text else None
    return origins.get(path)


def text_of(variable: Variable, value: Value, spec: Spec) -> str:
    """The text of a value that replaces the old one."""
    if variable.path == "data.tokenizer.vocab":
        return f"train({value})"
    if variable.path.endswith(".last"):
        first = value_at(spec, variable.path.replace(".last", ".first"))
        return f"{first}..{value}"
    if variable.path == "cluster.node.device.memory":
        from dsl.facts.units import unit_text

        assert isinstance(value, int)
        return unit_text(value, "byte")
    return str(value)


# --- Divisors and multiples


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Divisors, ascending. Numbers of a spec are at most 10⁸, so candidates up to 10⁴ find all; larger numbers may have
    more."""
    small = [divisor for divisor in range(1, min(isqrt(number), 10_000) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


def lcm(*numbers: int) -> int:
    """The least common multiple; 1 for no numbers."""
    result = 1
    for number in numbers:
        result = result * number // gcd(result, number)
    return result


def greatest_common_divisor(*numbers: int) -> int:
    """The greatest common divisor; 0 for no numbers."""
    return gcd(*numbers)


def adjacent_multiples(value: int, unit: int) -> tuple[int, ...]:
    """The positive multiples of `unit` next to `value`: the largest at or below it, and the smallest at or above it."""
    lower_multiple = value // unit * unit
    return tuple(multiple for multiple in dict.fromkeys((lower_multiple, -(-value // unit) * unit)) if multiple > 0)
