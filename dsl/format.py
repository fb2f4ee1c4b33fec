"""Spec to text: the canonical form, one key a line, everything resolved. It reads back as an equal spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsl import units
from dsl.resolve.fields import FieldType, fields_of
from dsl.schema import BUILT_IN, Batch, Node, Phase, RatePhase, Spec, Tile, TrainTokenizer

INDENT = "  "
NAMED = ("model", "cluster", "precision")


def canonical(spec: Spec) -> str:
    """The text of `spec.resolved`: the run, then the model, cluster and precision it names, without imports."""
    blocks = [_block(f"run {spec.name}", spec)]
    for kind in NAMED:
        node = getattr(spec, kind)
        if kind != "precision" or BUILT_IN.get(node.name) != node:
            blocks.append(_block(f"{kind} {node.name}", node))
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _block(head: str, node: Node) -> list[str]:
    body = [line for name, kind in fields_of(type(node)).items() for line in _field(name, kind, getattr(node, name))]
    return [f"{head} {{", *(INDENT + line for line in body), "}"]


def _field(name: str, kind: FieldType, value: Any) -> Iterator[str]:
    if kind.form == "label":
        return
    if kind.form == "layers":
        for span in value:
            ffn = _block(_head("ffn", span.ffn), span.ffn)
            yield from (f"layers {span.first}..{span.last} {{", *(INDENT + line for line in ffn), "}")
    elif kind.form == "rate":
        yield from (f"{name} {{", *(INDENT + _rate(phase) for phase in value), "}")
    elif kind.form == "batch":
        yield _batch(name, value)
    elif isinstance(value, Node) and not isinstance(value, (Tile, TrainTokenizer)):
        yield from [f"{name} = {value.name}"] if name in NAMED else _block(_head(name, value), value)  # type: ignore[attr-defined]
    elif value is not None or (kind.optional and kind.required):
        yield f"{name} = {_value(kind, value)}"


def _head(name: str, node: Node) -> str:
    """`attention mla`, `device h800`, `parallel`."""
    label = next((key for key, kind in fields_of(type(node)).items() if kind.form == "label"), None)
    return f"{name} {getattr(node, label)}" if label else name


def _value(kind: FieldType, value: Any) -> str:
    if value is None:
        return "none"
    if kind.form == "phases":
        return " then ".join(_phase(phase) for phase in value)
    if kind.unit is not None:
        return units.write(value, kind.unit.name)
    return _scalar(kind, value)


def _scalar(kind: FieldType, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, Tile):
        return f"{value.rows}x{value.columns}"
    if isinstance(value, TrainTokenizer):
        return f"train({value.vocab})"
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    assert isinstance(value, str), value
    return quoted(value) if str in kind.types else value


def number(value: int | float) -> str:
    """The shortest text that reads back as the same number."""
    text = repr(value)
    return text.removesuffix(".0")


def quoted(text: str) -> str:
    """A string as it is written."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _phase(phase: Phase) -> str:
    end = "" if phase.until_tokens is None else f" until {units.write(phase.until_tokens, 'token')}"
    return number(phase.value) + end


def _batch(name: str, batch: Batch) -> str:
    if batch.start == batch.end and not batch.over_tokens:
        return f"{name} = {batch.start}"
    over = units.write(batch.over_tokens, "token")
    return f"{name} {{ from = {batch.start}, to = {batch.end}, over = {over} }}"


def _rate(phase: RatePhase) -> str:
    end = units.write(phase.end_tokens, "token")
    if phase.shape == "constant":
        return f"constant at {number(phase.start)} until {end}"
    return f"{phase.shape} from {number(phase.start)} to {number(phase.end)} until {end}"
