"""Write a spec as canonical text: one key per line, everything resolved. It reads back as an equal spec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dsl.facts import units
from dsl.schema import BUILT_IN, Batch, LayerRange, Node, Phase, RatePhase, Spec, Tile, TrainTokenizer
from dsl.schema.base import FieldType, fields_of, is_left_out
from dsl.schema.train import LOCAL
from dsl.text.syntax import NAMED

INDENT = "  "


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line of the canonical form, and the path of its value; "" for a line that only ends a block."""

    text: str
    path: str


def canonical(spec: Spec) -> str:
    """Return the text of `spec.resolved`: the run, then the model, cluster and precision it names, without imports."""
    return "".join(f"{line.text}\n" for line in text_lines(spec))


def text_lines(spec: Spec) -> tuple[TextLine, ...]:
    """The lines of the canonical form."""
    lines = _node_lines(f"run {spec.name}", spec, "")
    for kind in NAMED:
        node = getattr(spec, kind)
        if kind != "precision" or BUILT_IN.get(node.name) != node:
            lines += [TextLine("", ""), *_node_lines(f"{kind} {node.name}", node, kind)]
    return tuple(lines)


def block_lines(head: str, node: Node) -> tuple[TextLine, ...]:
    """The lines of a single block."""
    return tuple(_node_lines(head, node, ""))


def _node_lines(head: str, node: Node, path: str) -> list[TextLine]:
    body = (
        line
        for name, kind in fields_of(type(node)).items()
        if not is_left_out(type(node).model_fields[name], getattr(node, name))
        for line in _field_lines(name, kind, getattr(node, name), f"{path}.{name}" if path else name)
    )
    return _lines_in_braces(head, path, body)


def _lines_in_braces(head: str, path: str, body: Iterable[TextLine]) -> list[TextLine]:
    inner = (TextLine(INDENT + line.text, line.path) for line in body)
    return [TextLine(f"{head} {{", path), *inner, TextLine("}", "")]


def _field_lines(name: str, kind: FieldType, value: Any, path: str) -> Iterator[TextLine]:
    if kind.form == "label":
        return
    if kind.form == "layers":
        for index, span in enumerate(value):
            body = _node_lines(_head_text("ffn", span.ffn), span.ffn, f"{path}.{index}.ffn")
            if span.attention is not None:
                body += _overriding_block(
                    _head_text("attention", span.attention), span.attention, f"{path}.{index}.attention"
                )
            yield from _lines_in_braces(f"layers {range_text(span)}", f"{path}.{index}", body)
    elif kind.form == "entries":
        blocks = (line for entry in value for line in _node_lines(entry.name, entry, f"{path}.{entry.name}"))
        yield from _lines_in_braces(name, path, blocks)
    elif kind.form == "rate":
        phases = (TextLine(rate_text(phase), f"{path}.{index}") for index, phase in enumerate(value))
        yield from _lines_in_braces(name, path, phases)
    elif kind.form == "batch":
        text = batch_text(value)
        yield TextLine(f"{name} {text}" if text.startswith("{") else f"{name} = {text}", path)
    elif isinstance(value, Node) and not isinstance(value, (Tile, TrainTokenizer)):
        if name in NAMED and "." not in path:
            yield TextLine(f"{name} = {value.name}", path)  # type: ignore[attr-defined]
        else:
            # the attention of `mtp` is merged over that of the last layer
            lines = _overriding_block if path.endswith("mtp.attention") else _node_lines
            yield from lines(_head_text(name, value), value, path)
    elif value is not None or (kind.optional and kind.required):
        yield TextLine(f"{name} = {value_text(kind, value)}", path)


def _overriding_block(head: str, node: Node, path: str) -> list[TextLine]:
    """The lines of a block that is merged over another one: all fields, with `none` for those without a value."""
    body: list[TextLine] = []
    for name, kind in fields_of(type(node)).items():
        value, field_path = getattr(node, name), f"{path}.{name}"
        if isinstance(value, Node) and not isinstance(value, Tile):
            body += _overriding_block(_head_text(name, value), value, field_path)
        elif value is None:
            body.append(TextLine(f"{name} = none", field_path))
        else:
            body += _field_lines(name, kind, value, field_path)
    return _lines_in_braces(head, path, body)


def range_text(span: LayerRange) -> str:
    """`0..47`, `0..44 by 4`."""
    return f"{span.first}..{span.last}" + (f" by {span.by}" if span.by > 1 else "")


def _head_text(name: str, node: Node) -> str:
    """`attention mla`, `device h800`, `parallel`."""
    label = next((key for key, kind in fields_of(type(node)).items() if kind.form == "label"), None)
    return f"{name} {getattr(node, label)}" if label else name


def value_text(kind: FieldType, value: Any) -> str:
    """A value of a field, as written in a spec."""
    if value is None:
        return "none"
    if kind.form == "phases":
        return " then ".join(_phase_text(phase) for phase in value)
    if kind.unit is not None:
        return units.unit_text(value, kind.unit.name)
    return _scalar_text(kind, value)


def _scalar_text(kind: FieldType, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float, Fraction)):
        return number_text(value)
    if isinstance(value, Tile):
        return str(value)
    if isinstance(value, TrainTokenizer):
        return f"train({value.vocab})"
    if isinstance(value, tuple):
        if kind.form == "ranks":
            return f"[{', '.join(map(number_text, value))}]"
        words = (quote(word) if kind.form == "places" and word != LOCAL else word for word in value)
        return f"[{', '.join(words)}]"
    assert isinstance(value, str), value
    return quote(value) if str in kind.types else value


def number_text(value: int | float | Fraction) -> str:
    """The shortest text that reads back as the same number."""
    if isinstance(value, Fraction):
        return units.exact_text(value)
    text = repr(value or 0)  # -0 reads back as 0
    return text.removesuffix(".0")


def quote(text: str) -> str:
    """A string in quotes, escaped."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _phase_text(phase: Phase) -> str:
    end = "" if phase.until_tokens is None else f" until {units.unit_text(phase.until_tokens, 'token')}"
    return number_text(phase.value) + end


def batch_text(batch: Batch) -> str:
    """`64`, or a block for a batch that grows."""
    if batch.start == batch.end and not batch.over_tokens:
        return f"{batch.start}"
    return f"{{ from = {batch.start}, to = {batch.end}, over = {units.unit_text(batch.over_tokens, 'token')} }}"


def rate_text(phase: RatePhase) -> str:
    """A phase of the learning rate, with all its clauses."""
    end = units.unit_text(phase.end_tokens, "token")
    if phase.shape == "constant":
        return f"constant at {number_text(phase.start)} until {end}"
    return f"{phase.shape} from {number_text(phase.start)} to {number_text(phase.end)} until {end}"
