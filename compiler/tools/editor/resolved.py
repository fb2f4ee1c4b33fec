"""Resolved values of statements: `data = auto` is 128, `steps = 130` is 266,240 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from compiler.tools.editor.outline import OutlineNode as Statement
from compiler.tools.editor.outline import OutlineToken
from dsl.canonical import number_text
from dsl.closed_forms.ramp import Ramp
from dsl.facts import units
from dsl.facts.units import Quantity, decimal_text, dimension_words
from dsl.load import Analysis, ResolvedView
from dsl.messages.diagnostics import Source, Span
from dsl.resolve import derive
from dsl.resolve.merge import label_of
from dsl.resolve.phases import SEPARATOR
from dsl.schema import BUILT_IN, Batch, LayerRange, Node, Phase, RatePhase, Tile, TrainTokenizer
from dsl.schema.base import FieldType, fields_of
from dsl.text.syntax import Attribute, Let

UNITS = {"byte": "bytes", "byte/s": "bytes/s", "flop/s": "FLOPS", "token": "tokens", "step": "steps", "USD/h": "USD/h"}


def values(analysis: Analysis, source: Source, statement: Statement) -> tuple[str, ...]:
    """The values of a statement as text: one, or if the runs of the file differ, one for each value with its runs."""
    start = statement.value[0].start if statement.value else statement.start
    runs_of: dict[str, dict[str, None]] = {}
    for view in analysis.views:
        for path, span in view.context.origins.items():
            if path and span.source.name == source.name and _begins(path, span, statement, start):
                text = _value(view, path, statement)
                if text:
                    run = view.context.run
                    runs_of.setdefault(text, {})[label_of(run) or run.head.text] = None
    if len(runs_of) < 2:
        return tuple(runs_of)
    return tuple(f"{text} in {', '.join(runs)}" for text, runs in runs_of.items())


def reference(analysis: Analysis, source: Source, token: OutlineToken) -> tuple[Attribute | Let, str] | None:
    """The definition of a name in an expression, and its value if that is a number, else ""."""
    for view in analysis.views:
        for span, target in view.context.uses.items():
            if span.source.name == source.name and span.start == token.start:
                return target, next(_quantities(view, target.phrase.span), "")
    return None


def phase(analysis: Analysis, statement: Statement) -> str:
    """The number of a `phase` block and where it begins; "" if unknown."""
    head = statement.parent.head if statement.parent is not None else []
    name = SEPARATOR.join(tokens[1].text for tokens in (head, statement.head) if len(tokens) > 1)
    for view in analysis.views:
        within = getattr(getattr(view.spec, "train", None), "within", None)
        if within is not None and label_of(view.context.run) == name:
            begin = f"{_steps(within.first_step)}, {within.first_token:,} tokens"
            return f"`{name}`, phase {within.number} of {within.phases}, begins after {begin}"
    return ""


def let(analysis: Analysis, source: Source, statement: Statement) -> str:
    """The value of a `let`, where a run uses it."""
    if not statement.value:
        return ""
    spans = {
        span: view
        for view in analysis.views
        for span, _ in view.context.phrases
        if span.source.name == source.name and span.start == statement.value[0].start
    }
    return next((text for span, view in spans.items() for text in _quantities(view, span)), "")


def _begins(path: str, span: Span, statement: Statement, start: int) -> bool:
    """Whether the value at `path` comes from a statement; a layer range is recognized by its label."""
    if statement.key == "layers":
        return path.startswith("model.layers.") and statement.start < span.start < (statement.opened or 0)
    return span.start == start


def _quantities(view: ResolvedView, span: Span) -> Iterator[str]:
    for (place, _), quantity in view.context.phrases.items():
        if place == span and quantity is not None:
            yield _quantity(quantity)


def _quantity(quantity: Quantity) -> str:
    unit = "" if not quantity.dimension else f" {dimension_words(quantity.dimension)}"
    return f"{_fraction(quantity.value)}{unit}"


def _fraction(value: Fraction) -> str:
    if value.denominator == 1:
        return f"{int(value):,}"
    scaled = value * 10**12
    return decimal_text(value) if scaled.denominator == 1 else f"{float(value):.6g}"


def _value(view: ResolvedView, path: str, statement: Statement) -> str:
    """The value at a path as text; "" if it failed, or the source text already says it."""
    parent: Any = None
    value: Any = view.spec
    for part in path.split("."):
        parent = value
        if isinstance(value, tuple):
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = getattr(value, part, None)  # values that failed are absent
        if value is None:
            return ""
    ramp = derive.ramp_of(view.context.silent_copy())
    name = path.rpartition(".")[2]
    if isinstance(value, RatePhase):
        return _rate(value, ramp)
    if isinstance(value, LayerRange):
        return _layers(len(value.layers))
    kind = fields_of(type(parent)).get(name) if isinstance(parent, Node) else None
    if path == "train.tokens" and ramp is not None:
        return f"{value:,} tokens = {_steps(ramp.steps_for(value))}"
    return _text(kind, value, ramp) if kind is not None and not _is_plain_number(statement) else ""


def _is_plain_number(statement: Statement) -> bool:
    """Whether a value is a single number without a unit, which needs no explanation."""
    first = statement.value[0] if len(statement.value) == 1 else None
    return first is not None and first.kind == "number" and not units.split(first.text)[1]


def _text(kind: FieldType, value: Any, ramp: Ramp | None) -> str:
    if kind.form == "phases":
        return "; ".join(_phase(phase, ramp) for phase in value)
    if isinstance(value, Batch):
        return _batch(value)
    if isinstance(value, TrainTokenizer) or value in BUILT_IN.values():
        return ""
    if isinstance(value, Tile):
        return f"{value.rows} × {value.columns} elements"
    if isinstance(value, bool) or not isinstance(value, (int, float, Fraction)):
        return ""
    unit = kind.unit.name if kind.unit is not None else ""
    text = f"{value:,}" if isinstance(value, int) else number_text(value)
    if unit == "step" and ramp is not None and len(ramp.sizes) == 1:  # otherwise it depends on the step
        return f"{_steps(int(value))} = {ramp.tokens_at(int(value)):,} tokens"
    return f"{text} {UNITS[unit]}" if unit else text


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count:,} layers"


def _phase(phase: Phase, ramp: Ramp | None) -> str:
    if phase.until_tokens is None:
        return number_text(phase.value)
    return f"{number_text(phase.value)} until {_moment(phase.until_tokens, ramp)}"


def _moment(tokens: int, ramp: Ramp | None) -> str:
    step = f" (step {ramp.steps_for(tokens):,})" if ramp is not None else ""
    return f"token {tokens:,}{step}"


def _rate(phase: RatePhase, ramp: Ramp | None) -> str:
    end = _moment(phase.end_tokens, ramp)
    if phase.shape == "constant":
        return f"{number_text(phase.start)} until {end}"
    return f"{phase.shape} from {number_text(phase.start)} to {number_text(phase.end)} until {end}"


def _batch(batch: Batch) -> str:
    if batch.start == batch.end:
        return f"{batch.start:,}"
    return f"{batch.start:,} sequences, growing to {batch.end:,} over {batch.over_tokens:,} tokens"
