"""Evaluate expressions to quantities: numbers with units, arithmetic, references."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

from dsl.facts import units
from dsl.facts.units import PLAIN, Dimension, Quantity, spoken
from dsl.messages.diagnostics import Note, Span, listed
from dsl.resolve.context import Context, RejectedError, Scope, inside_out, suggest
from dsl.resolve.merge import key_of
from dsl.schema import StoredUnit
from dsl.text.parser import MAX_DEPTH, MAX_NUMBER
from dsl.text.syntax import (
    ALTERNATIVES,
    Attribute,
    Binary,
    Block,
    Let,
    Negate,
    Number,
    Phrase,
    Range,
    Statement,
    String,
    Value,
    Word,
)

LARGEST = 10**60
TOKEN, STEP = (("token", 1),), (("step", 1),)
MAX_HINTED = 100  # mistakes with a computed hint; later ones are not shown
MAX_PATHS = 1000  # dotted names that a misspelt name is compared with
EXAMPLES = {
    "byte": "80GB",
    "byte/s": "200GB/s",
    "flop/s": "989TFLOPS",
    "USD/h": "2USD/h",
    "s": "10min",
    "token": "10B tokens",
    "step": "1000 steps",
}


def phrase(context: Context, scope: Scope, written: Phrase) -> Quantity:
    """Evaluate a whole phrase to a quantity; a unit word may follow: `469B tokens`."""
    key = (written.span, scope.path)
    if context.depth >= MAX_DEPTH and key not in context.phrases:
        context.phrases[key] = None
        raise _too_deep(context, written.span)
    if written.span in context.active:
        if not context.circular.intersection(context.active):
            context.circular.update(context.active)
            cycle = context.active[context.active.index(written.span) + 1 :]
            notes = [Note("through this", span) for span in cycle[:8]]
            context.complain("E0402", "this value depends on itself", written.span, "write a number", notes)
        raise RejectedError
    if key not in context.phrases:
        context.active.append(written.span)
        context.phrases[key] = None  # until evaluation succeeds, so that a mistake is reported once
        try:
            result, trailing = leading(context, scope, written.items)
            if trailing:
                raise _left_over(context, written.items, trailing)
            context.phrases[key] = result
        finally:
            context.active.pop()
    quantity = context.phrases[key]
    if quantity is None:
        raise RejectedError
    return quantity


def _left_over(context: Context, items: tuple[Value, ...], rest: tuple[Value, ...]) -> RejectedError:
    """Reject items after a number. If they contain further numbers, the hint cannot know which one is meant."""
    span = rest[0].span.to(rest[-1].span)
    text = items[0].span.to(span).text
    words = [word for word in re.findall(r"[A-Za-z_]+", text, re.ASCII) if word in units.WORDS]
    hint = "write one number" if re.search(r"[0-9]", span.text) else "remove it"
    if words and isinstance(items[1], Binary):  # `5 steps + 3 steps`
        bare = " ".join(re.sub(rf"\b({'|'.join(units.WORDS)})\b", " ", text).split())
        has_one_unit = len({units.WORDS[word] for word in words}) == 1
        hint = (
            f"write the unit once, at the end: write `{bare} {words[-1]}`"
            if has_one_unit
            else "write all parts in one unit"
        )
    return context.reject("E0302", f"`{span.text}` is not part of a number", span, hint)


class Leading(NamedTuple):
    """The quantity at the head of some items, with its unit word if it has one, and the other items."""

    quantity: Quantity
    rest: tuple[Value, ...]


def leading(context: Context, scope: Scope, items: tuple[Value, ...]) -> Leading:
    """Read the quantity at the head of some items. Raises RejectedError if there is none."""
    quantity, trailing = number(context, scope, items[0]), items[1:]
    if trailing and isinstance(trailing[0], Word) and trailing[0].text in units.WORDS:
        if quantity.dimension != PLAIN:
            message = f"`{items[0].span.text}` already has a unit: {spoken(quantity.dimension)}"
            raise context.reject("E0301", message, trailing[0].span, f"remove `{trailing[0].text}`")
        return Leading(Quantity(quantity.value, ((units.WORDS[trailing[0].text], 1),)), trailing[1:])
    if trailing and isinstance(items[0], Number) and not units.split(items[0].text)[1]:
        _touching(context, items[0], trailing)
    return Leading(quantity, trailing)


def _touching(context: Context, count: Number, rest: tuple[Value, ...]) -> None:
    """Reject `80 GB`: only unit words such as `tokens` may follow a space."""
    suffix = "".join(rest[0].span.text.split())
    if isinstance(rest[0], (Word, Binary)) and suffix and units.unit(suffix) is not None:
        span = count.span.to(rest[0].span)
        message = f"there is a space before the unit `{suffix}`"
        raise context.reject("E0301", message, span, f"write `{count.text}{suffix}`")


def number(context: Context, scope: Scope, value: Value) -> Quantity:
    """Evaluate one expression."""
    if context.depth >= MAX_DEPTH + MAX_DEPTH // 2:
        raise _too_deep(context, value.span)
    context.depth += 1
    try:
        return _number(context, scope, value)
    finally:
        context.depth -= 1


def _too_deep(context: Context, span: Span) -> RejectedError:
    message = f"this value has more than {MAX_DEPTH} nested references and brackets"
    return context.reject("E0103", message, span, "write a number")


def _number(context: Context, scope: Scope, value: Value) -> Quantity:
    if isinstance(value, Number):
        quantity = units.quantity(value.text)
        if quantity is None:
            raise context.reject("E0301", *no_unit(value))
        if quantity.value > LARGEST:
            raise context.reject("E0303", "this number is too large", value.span, "use a smaller number")
        return quantity
    if isinstance(value, Word):
        return _reference(context, scope, value)
    if isinstance(value, Negate):
        inner = number(context, scope, value.operand)
        return Quantity(-inner.value, inner.dimension)
    if isinstance(value, Binary):
        return _binary(context, scope, value)
    hint = _unquoted(value.value) if isinstance(value, String) else "write a number"
    raise context.reject("E0302", f"`{value.span.text}` is not a number", value.span, hint)


def _unquoted(text: str) -> str:
    """Hint for a number in quotes."""
    plain = text.strip()
    is_number = len(plain) <= MAX_NUMBER and units.NUMBER.fullmatch(plain) and units.quantity(plain) is not None
    return f"write `{plain}`" if is_number or plain == "auto" else "write a number"


def no_unit(number: Number) -> tuple[str, Span, str]:
    """(message, position, hint) for a number with an unknown unit."""
    suffix = units.split(number.text)[1]
    return f"there is no unit `{suffix}`", number.span, _unit_hint(number.text, suffix)


def convert(context: Context, found: Quantity, unit: StoredUnit | None, key: str, span: Span) -> Fraction:
    """Return the value of a quantity in the unit of a field. Raises RejectedError after reporting a wrong unit."""
    if unit is None:
        if found.dimension != PLAIN:
            message = f"`{key}` is a plain number, but `{span.text}` is in {spoken(found.dimension)}"
            raise context.reject("E0301", message, span, _without_unit(span.text))
        return found.value
    wanted = units.unit(unit.name)
    assert wanted is not None
    if found.dimension == wanted.dimension:
        return found.value / wanted.value
    if found.dimension == PLAIN and unit.bare:
        return found.value
    name = unit.name if "USD" in unit.name else spoken(wanted.dimension)
    message = f"`{key}` is in {name}, but `{span.text}` is {_in(found.dimension)}"
    raise context.reject("E0301", message, span, _conversion(found, unit, wanted.dimension, key, span.text))


def _in(dimension: Dimension) -> str:
    return "a plain number" if dimension == PLAIN else f"in {spoken(dimension)}"


def _conversion(found: Quantity, unit: StoredUnit, wanted: Dimension, key: str, text: str) -> str:
    if unit.bare and found.dimension in (STEP, TOKEN):  # the number itself is not converted: 5 tokens are not 5 steps
        alternative = ALTERNATIVES.get(key)
        return f"write `{alternative} = {text}`" if alternative else f"write it in {spoken(wanted)}"
    if found.dimension == (("bit", 1),) and wanted == (("byte", 1),) and (found.value / 8).denominator == 1:
        return f"write `{units.write(int(found.value / 8), 'byte')}`; B is a byte, b a bit"
    return f"write the unit, as in `{EXAMPLES[unit.name]}`"


def _without_unit(text: str) -> str:
    mantissa = units.NUMBER.match(text)
    return f"write `{mantissa['mantissa']}`" if mantissa else "remove the unit"


def _unit_hint(text: str, suffix: str) -> str:
    if "/" in suffix and not units.unit(suffix):
        numerator = suffix.partition("/")[0]
        if units.unit(numerator) is not None:
            return f"put spaces around `/` to divide, or end the rate in one of {', '.join(units.TIMES)}"
    suffixes = ["KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "GB/s", "TB/s", "Gb/s", "TFLOPS", "USD/h", "tokens"]
    suffixes += ["steps", "bytes", "K", "M", "B", "T", "%"]
    matches = [name for name in suffixes if name.lower() == suffix.lower()]
    from dsl.messages.spelling import nearest  # imported only to explain a mistake

    number = text.removesuffix(suffix)
    close = matches[:1] or [name for name in nearest(suffix, suffixes) if name not in units.WORDS]
    if close:
        return f"did you mean {listed([f'{number}{name}' for name in close], 'or')}?"
    return f"one of {listed(suffixes)}"


def _binary(context: Context, scope: Scope, value: Binary) -> Quantity:
    """Evaluate arithmetic from left to right. All operands are evaluated first, to report the mistakes in each."""
    chain = [value]
    while isinstance(chain[-1].left, Binary):
        chain.append(chain[-1].left)
    operands = [chain[-1].left, *(operation.right for operation in reversed(chain))]
    quantities: list[Quantity | None] = []
    for operand in operands:
        try:
            quantities.append(number(context, scope, operand))
        except RejectedError:
            quantities.append(None)
    result = quantities[0]
    for operation, right in zip(reversed(chain), quantities[1:], strict=True):
        if result is None or right is None:
            raise RejectedError
        result = _apply(context, operation, result, right)
    assert result is not None
    return result


def _apply(context: Context, value: Binary, left: Quantity, right: Quantity) -> Quantity:
    dimension = left.dimension
    if value.operator in "+-":
        if left.dimension != right.dimension:
            message = f"{spoken(left.dimension)} `{value.operator}` {spoken(right.dimension)} is not possible"
            raise context.reject("E0305", message, value.span, "give both sides the same unit")
        result = left.value + right.value if value.operator == "+" else left.value - right.value
    elif value.operator == "*":
        result, dimension = left.value * right.value, units.combine(left.dimension, right.dimension)
    elif right.value == 0:
        raise context.reject("E0305", "division by zero", value.right.span, "divide by another number")
    else:
        result, dimension = left.value / right.value, units.combine(left.dimension, right.dimension, -1)
    if abs(result.numerator) > LARGEST**2 or result.denominator > LARGEST**2 or abs(result) > LARGEST:
        raise context.reject("E0305", "this number is too large", value.span, "use smaller numbers")
    return Quantity(result, dimension)


# ---------------------------------------------------------------- references


def _reference(context: Context, scope: Scope, word: Word) -> Quantity:
    """Return the value of a key around the expression, of a `let`, or of a key in a named block: `hidden`,
    `model.hidden`."""
    definition = _find(context, scope, word)
    if definition is None:
        if word.text == "auto":
            raise context.reject("E0302", "this value cannot be auto", word.span, "write a number")
        if context.definitions.damaged:
            raise RejectedError
        raise context.reject("E0401", f"there is no value `{word.text}`", word.span, _meant(context, scope, word.text))
    statement, place = definition
    context.uses[word.span] = statement
    return phrase(context, place, statement.phrase)


def whole_number(context: Context, value: Fraction, span: Span, noun: str) -> int:
    """Return a whole number of `noun`. Raises RejectedError after reporting a fraction."""
    if value.denominator != 1:
        unit = f" {noun}" if noun in ("tokens", "steps") else ""
        hint = f"write `{max(1, round(value))}{unit}`"
        raise context.reject("E0302", f"`{span.text}` is not a whole number of {noun}", span, hint)
    return int(value)


def count(context: Context, scope: Scope, value: Value, key: str) -> int:
    """Evaluate a whole number without a unit."""
    return whole_number(
        context, convert(context, leading(context, scope, (value,)).quantity, None, key, value.span), value.span, key
    )


def ranges_of(context: Context, scope: Scope, block: Block) -> list[Block]:
    """The layer ranges of a model in the order of their first layers; those that cannot be read come first."""
    ranges = [statement for statement in block.body if isinstance(statement, Block) and key_of(statement) == "layers"]
    if block.head in context.active:  # a bound of a range refers to a range
        return ranges
    silent = replace(context.silent(), active=[*context.active, block.head])
    with_bounds: list[tuple[tuple[int, ...], Block]] = []
    for layer_range in ranges:
        label = layer_range.labels[0] if layer_range.labels else None
        ends = (label.first, label.last) if isinstance(label, Range) else ()
        try:
            bounds = tuple(count(silent, scope, end, "layers") for end in ends)
        except RejectedError:
            bounds = ()
        with_bounds.append((bounds, layer_range))
    return [layer_range for _, layer_range in sorted(with_bounds, key=lambda item: item[0])]


def is_value(context: Context, scope: Scope, word: Word) -> bool:
    """Whether a word names a value, or may name one that could not be read."""
    return context.definitions.damaged or _find(context, scope, word) is not None


def _find(context: Context, scope: Scope, word: Word) -> tuple[Attribute | Let, Scope] | None:
    first, *rest = word.text.split(".")
    for block, place in inside_out(scope):
        for statement in block.named.get(first, ()):
            if isinstance(statement, Let):
                if not rest:
                    return statement, place
                continue
            definition = _descend(context, statement, place, rest)
            if definition is not None:
                return definition
    outer = scope.blocks[0] if scope.blocks else None
    if outer is not None and outer.key.text == first and rest:
        name = "" if first == "run" else first
        return _inside(context, outer, Scope((outer,), name), rest)
    let = context.definitions.lets.get(first)
    return (let, Scope(())) if let is not None and not rest else None


def _inside(context: Context, block: Block, place: Scope, rest: list[str]) -> tuple[Attribute | Let, Scope] | None:
    if len(rest) > 1 and rest[0] == "layers" and rest[1].isdigit():
        layer_range = dict(enumerate(ranges_of(context, place, block))).get(int(rest[1][:9]))
        return (
            _inside(context, layer_range, place.inside(layer_range, f"layers.{rest[1]}"), rest[2:])
            if layer_range
            else None
        )
    for statement in block.named.get(rest[0], ()) if rest else ():
        if not isinstance(statement, Let):
            return _descend(context, statement, place, rest[1:])
    return None


def _descend(
    context: Context, statement: Attribute | Block, place: Scope, rest: list[str]
) -> tuple[Attribute | Let, Scope] | None:
    if isinstance(statement, Block):
        return _inside(context, statement, place.inside(statement, statement.key.text), rest)
    if not rest:
        return statement, place
    target = statement.phrase.items[0]
    kind = statement.key.text
    if isinstance(target, Word) and (kind, target.text) in context.definitions.blocks:
        block = context.block(kind, target.text, target.span)
        return _inside(context, block, Scope((block,), kind), rest)
    return None


def _meant(context: Context, scope: Scope, name: str) -> str:
    close = suggest(name, _names(context, scope, name) if len(context.mistakes) < MAX_HINTED else ())
    if close.startswith("did"):
        return close
    return "write a number, or the name of one" if "." in name else f"write a number, or define it: `let {name} = …`"


def _names(context: Context, scope: Scope, name: str) -> set[str]:
    """Candidates for a misspelt name; of dotted names, those that are similar in every part."""
    outer = scope.blocks[0] if scope.blocks else None
    if "." in name:
        below = islice(_below(context, outer), MAX_PATHS) if outer is not None else ()
        return {path for path in below if _is_near(name.split("."), path.split("."))}
    names = set(context.definitions.lets)
    for block, _ in inside_out(scope):
        names |= {statement.name.text for statement in block.body if isinstance(statement, Let)}
        names |= {key_of(statement) for statement in block.body if isinstance(statement, Attribute)}
    return names


def _is_near(parts: Sequence[str], others: Sequence[str]) -> bool:
    from dsl.messages.spelling import nearest  # imported only to explain a mistake

    different = [pair for pair in zip(parts, others, strict=False) if pair[0] != pair[1]]
    return len(parts) == len(others) and all(nearest(part, (other_part,)) for part, other_part in different)


def _below(context: Context, outer: Block) -> Iterator[str]:
    """Yield the dotted names of the values in a block, and in the blocks that it names."""
    for path in _paths(outer.body):
        yield path
        yield f"{outer.key.text}.{path}"
    for kind, body in _named(context, outer):
        yield from (f"{kind}.{path}" for path in _paths(body))


def _paths(body: Sequence[Statement]) -> Iterator[str]:
    """Yield the keys of a body and, dotted, those of the blocks in it, except `layers`, whose number cannot be
    guessed."""
    for statement in body:
        if isinstance(statement, Attribute):
            yield statement.key.text
        elif isinstance(statement, Block) and statement.key.text != "layers":
            yield from (f"{statement.key.text}.{path}" for path in _paths(statement.body))


def _named(context: Context, run: Block) -> Iterator[tuple[str, Sequence[Statement]]]:
    """Yield (kind, body) of the model, cluster and precision that a run names."""
    for statement in run.body:
        target = statement.phrase.items[0] if isinstance(statement, Attribute) else None
        kind = statement.key.text if isinstance(statement, Attribute) else ""
        if isinstance(target, Word) and (kind, target.text) in context.definitions.blocks:
            try:
                yield kind, context.silent().block(kind, target.text, target.span).body
            except RejectedError:
                continue
