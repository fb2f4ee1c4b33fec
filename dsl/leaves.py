"""The single values of a spec, each with its path, its text, a JSON-able form and its origin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from dsl.canonical import batch_text, range_text, rate_text, value_text
from dsl.facts.devices import FIELDS as PEAK_FIELDS
from dsl.facts.devices import peaks_of
from dsl.messages.diagnostics import OVERRIDE, Span
from dsl.schema import BUILT_IN, Batch, Device, Node, Phase, RatePhase, Spec, Tile, TrainTokenizer
from dsl.schema.base import FieldType, fields_of, is_left_out
from dsl.schema.choices import OPEN
from dsl.text.syntax import NAMED

BUILT_IN_NODES = (Tile, TrainTokenizer)  # classes written as one value


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value. `text`: as in the canonical form; `value`: JSON-able, in the unit that the schema stores."""

    path: str
    text: str
    value: Any
    unit: str | None = None
    is_name: bool = False  # a user-defined name, not the kind of an attention or optimizer


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a value: a position in a file, `-s`, the values it is derived from, or the schema."""

    kind: Literal["written", "override", "derived", "default", "built-in"]
    span: Span | None = None
    reason: str = ""  # for a derived value: the values it follows from

    def __str__(self) -> str:
        if self.kind == "derived":
            place = f", {_position_text(self.span)}" if self.span else ""
            return f"derived: {self.reason}{place}"
        return _position_text(self.span) if self.span else self.kind


def _position_text(span: Span) -> str:
    """`file:line:column`, or `-s key=value` for the command line."""
    return f"-s {span.source.text}" if span.source.name == OVERRIDE else str(span)


# ---------------------------------------------------------------- values


def leaves(spec: Spec) -> tuple[Leaf, ...]:
    """All values of a spec, in the order of the canonical form, without absent blocks (`mtp`, `checkpoint`) and without
    defaults of `QuietField` keys."""
    return tuple(_node_leaves(spec, ""))


def _node_leaves(node: Node, path: str) -> Iterator[Leaf]:
    for name, kind in fields_of(type(node)).items():
        if not is_left_out(type(node).model_fields[name], getattr(node, name)):
            yield from _field_leaves(name, kind, getattr(node, name), f"{path}.{name}" if path else name)


def _field_leaves(name: str, kind: FieldType, value: Any, path: str) -> Iterator[Leaf]:
    if kind.form == "label":
        if path.rpartition(".")[0] not in NAMED:  # their names are values of the run
            yield Leaf(path, value, value, is_name=name == "name")
    elif path in NAMED:
        yield Leaf(path, value.name, value.name, is_name=True)
        yield from _node_leaves(value, path)
    elif kind.form == "layers":
        for index, span in enumerate(value):
            stride = {"by": span.by} if span.by > 1 else {}
            yield Leaf(f"{path}.{index}", range_text(span), {"first": span.first, "last": span.last, **stride})
            yield from _node_leaves(span.ffn, f"{path}.{index}.ffn")
            if span.attention is not None:
                yield from _node_leaves(span.attention, f"{path}.{index}.attention")
    elif kind.form == "entries":
        for entry in value:
            yield from (leaf for leaf in _node_leaves(entry, f"{path}.{entry.name}") if not leaf.is_name)
    elif kind.form == "rate":
        for index, phase in enumerate(value):
            yield Leaf(f"{path}.{index}", rate_text(phase), _json_value(phase))
    elif isinstance(value, Node) and not isinstance(value, (*BUILT_IN_NODES, Batch)):
        yield from _node_leaves(value, path)
    elif isinstance(value, Batch):
        yield Leaf(path, batch_text(value), value.end if value.start == value.end else _json_value(value))
    elif value is not None or (kind.optional and kind.required):
        yield Leaf(path, value_text(kind, value), _json_value(value), kind.unit.name if kind.unit else None)


def _json_value(value: Any) -> Any:
    """The JSON-able form of a value of the schema."""
    if isinstance(value, (RatePhase, Batch)):
        return dict(value)
    if isinstance(value, Tile):
        return [value.rows, value.columns]
    if isinstance(value, TrainTokenizer):
        return {"train": value.vocab}
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    if isinstance(value, tuple):
        phases = [dict(item) if isinstance(item, Phase) else _json_value(item) for item in value]
        return value[0].value if len(value) == 1 and isinstance(value[0], Phase) else phases
    return value


# ---------------------------------------------------------------- origins


def origin_of(path: str, spec: Spec, origins: Mapping[str, Span]) -> Origin:
    """Return the origin of the value at a path of `leaves(spec)`. `origins`: positions of values, from the resolver.

    A block has an origin too: its first line, or the first line of the block that it is inherited from.
    """
    span = origins.get(_recorded_path(path))
    reason = _derivation_text(path, spec, span)
    if reason:
        return Origin("derived", span, reason)
    if span is not None:
        return Origin("override" if span.source.name == OVERRIDE else "written", span)
    if path.startswith("precision.") and BUILT_IN.get(spec.precision.name) == spec.precision:
        return Origin("built-in")
    return Origin("default")


def _recorded_path(path: str) -> str:
    """The path under which the resolver records a value: a label is in the head of its block, a name is given in the
    run.
    """
    if path == "name":
        return ""
    head, _, last = path.rpartition(".")
    if last in ("kind", "name") and path != "schedule.name":
        path = head
    return path.removesuffix(".ffn")  # recorded with its layer range


def _derivation_text(path: str, spec: Spec, span: Span | None) -> str:
    """The values that a derived value follows from, in words; "" if it is not derived."""
    if path == "parallel.data" and (span is None or span.text == "auto"):
        split = {axis: degree for axis in ("context", "tensor") if (degree := getattr(spec.parallel, axis)) > 1}
        of_split = "".join(f" of {degree:,} {axis} ranks" for axis, degree in split.items())
        return f"{spec.cluster.world:,} devices / {spec.parallel.pipeline:,} pipeline ranks{of_split}"
    if path in OPEN and span is not None and span.text == "auto":
        return "chosen among values that pass the rules"
    if path.rpartition(".")[2] in PEAK_FIELDS and (span is None or span.text == "none"):
        peaks = peaks_of(_device_of(path, spec).name)
        return peaks.source if peaks is not None else ""
    if path == "schedule.name" and span is None:
        return f"pipeline = {spec.parallel.pipeline}"
    if path == "train.tokens" and span is not None:
        text_before = span.source.text[max(0, span.start - 40) : span.start]
        if re.search(r"\bsteps?\s*\Z", span.text) or re.search(r"\bsteps\s*=\s*\Z", text_before):
            return f"{span.text.removesuffix('steps').removesuffix('step').strip()} steps"
    return ""


def _device_of(path: str, spec: Spec) -> Device:
    """The device of a path such as `cluster.more.node.device.sms`."""
    return spec.cluster.devices[path.split(".").count("more")]
