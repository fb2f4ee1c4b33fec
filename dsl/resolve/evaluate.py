"""Evaluate expressions to quantities: numbers with units, arithmetic, references."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

from dsl.facts import units
from dsl.facts.units import PLAIN, Dimension, Quantity, dimension_words
from dsl.messages.diagnostics import Note, Span, join_as_code
from dsl.resolve.context import Context, RejectedError, Scope, enclosing_blocks, suggest
from dsl.resolve.merge import key_of
from dsl.schema import StoredUnit
from dsl.text.parser import MAX_DEPTH, MAX_NUMBER
from dsl.text.syntax import (
    ALTERNATIVES,
    Attribute,
    BinaryOperation,
    Block,
    Let,
    Negation,
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
        raise _reject_depth(context, written.span)
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
            result, trailing = read_leading_quantity(context, scope, written.items)
            if trailing:
                raise _reject_trailing(context, written.items, trailing)
            context.phrases[key] = result
        finally:
            context.active.pop()
    quantity = context.phrases[key]
    if quantity is None:
        raise RejectedError
    return quantity


def _reject_trailing(context: Context, items: tuple[Value, ...], trailing: tuple[Value, ...]) -> RejectedError:
    """Reject items after a number. If they contain further numbers, the hint cannot know which one is meant."""
    span = trailing[0].span.extend_to(trailing[-1].span)
    text = items[0].span.extend_to(span).text
    words = [word for word in re.findall(r"[A-Za-z_]+", text, re.ASCII) if word in units.WORDS]
    hint = "write one number" if re.search(r"[0-9]", span.text) else "remove it"
    if words and isinstance(items[1], BinaryOperation):  # `5 steps + 3 steps`
        bare = " ".join(re.sub(rf"\b({'|'.join(units.WORDS)})\b", " ", text).split())
        has_one_unit = len({units.WORDS[word] for word in words}) == 1
        hint = (
            f"write the unit once, at the end: write `{bare} {words[-1]}`"
            if has_one_unit
            else "write all parts in one unit"
        )
    return context.reject("E0302", f"`{span.text}` is not part of a number", span, hint)


class LeadingQuantity(NamedTuple):
    """The quantity at the head of some items, with its unit word if it has one, and the other items."""

    quantity: Quantity
    trailing: tuple[Value, ...]


def read_leading_quantity(context: Context, scope: Scope, items: tuple[Value, ...]) -> LeadingQuantity:
    """Read the quantity at the head of some items. Raises RejectedError if there is none."""
    quantity, trailing = number(context, scope, items[0]), items[1:]
    if trailing and isinstance(trailing[0], Word) and trailing[0].text in units.WORDS:
        if quantity.dimension != PLAIN:
            message = f"`{items[0].span.text}` already has a unit: {dimension_words(quantity.dimension)}"
            raise context.reject("E0301", message, trailing[0].span, f"remove `{trailing[0].text}`")
        return LeadingQuantity(Quantity(quantity.value, ((units.WORDS[trailing[0].text], 1),)), trailing[1:])
    if trailing and isinstance(items[0], Number) and not units.split(items[0].text)[1]:
        _check_unit_space(context, items[0], trailing)
    return LeadingQuantity(quantity, trailing)


def _check_unit_space(context: Context, count: Number, trailing: tuple[Value, ...]) -> None:
    """Reject `80 GB`: only unit words such as `tokens` may follow a space."""
    suffix = "".join(trailing[0].span.text.split())
    if isinstance(trailing[0], (Word, BinaryOperation)) and suffix and units.unit(suffix) is not None:
        span = count.span.extend_to(trailing[0].span)
        message = f"there is a space before the unit `{suffix}`"
        raise context.reject("E0301", message, span, f"write `{count.text}{suffix}`")


def number(context: Context, scope: Scope, value: Value) -> Quantity:
    """Evaluate one expression."""
    if context.depth >= MAX_DEPTH + MAX_DEPTH // 2:
        raise _reject_depth(context, value.span)
    context.depth += 1
    try:
        return _number(context, scope, value)
    finally:
        context.depth -= 1


def _reject_depth(context: Context, span: Span) -> RejectedError:
    message = f"this value has more than {MAX_DEPTH} nested references and brackets"
    return context.reject("E0103", message, span, "write a number")


def _number(context: Context, scope: Scope, value: Value) -> Quantity:
    if isinstance(value, Number):
        quantity = units.quantity(value.text)
        if quantity is None:
            raise context.reject("E0301", *unknown_unit_message(value))
        if quantity.value > LARGEST:
            raise context.reject("E0303", "this number is too large", value.span, "use a smaller number")
        return quantity
    if isinstance(value, Word):
        return _reference(context, scope, value)
    if isinstance(value, Negation):
        inner = number(context, scope, value.operand)
        return Quantity(-inner.value, inner.dimension)
    if isinstance(value, BinaryOperation):
        return _binary(context, scope, value)
    hint = _quoted_number_hint(value.value) if isinstance(value, String) else "write a number"
    raise context.reject("E0302", f"`{value.span.text}` is not a number", value.span, hint)


def _quoted_number_hint(text: str) -> str:
    """Hint for a number in quotes."""
    plain = text.strip()
    is_number = len(plain) <= MAX_NUMBER and units.NUMBER.fullmatch(plain) and units.quantity(plain) is not None
    return f"write `{plain}`" if is_number or plain == "auto" else "write a number"


def unknown_unit_message(number: Number) -> tuple[str, Span, str]:
    """(message, position, hint) for a number with an unknown unit."""
    suffix = units.split(number.text)[1]
    return f"there is no unit `{suffix}`", number.span, _unit_hint(number.text, suffix)


def convert(context: Context, quantity: Quantity, unit: StoredUnit | None, key: str, span: Span) -> Fraction:
    """Return the value of a quantity in the unit of a field. Raises RejectedError after reporting a wrong unit."""
    if unit is None:
        if quantity.dimension != PLAIN:
            message = f"`{key}` is a plain number, but `{span.text}` is in {dimension_words(quantity.dimension)}"
            raise context.reject("E0301", message, span, _without_unit_hint(span.text))
        return quantity.value
    wanted = units.unit(unit.name)
    assert wanted is not None
    if quantity.dimension == wanted.dimension:
        return quantity.value / wanted.value
    if quantity.dimension == PLAIN and unit.bare:
        return quantity.value
    name = unit.name if "USD" in unit.name else dimension_words(wanted.dimension)
    message = f"`{key}` is in {name}, but `{span.text}` is {_dimension_text(quantity.dimension)}"
    raise context.reject(
        "E0301", message, span, _unit_conversion_hint(quantity, unit, wanted.dimension, key, span.text)
    )


def _dimension_text(dimension: Dimension) -> str:
    return "a plain number" if dimension == PLAIN else f"in {dimension_words(dimension)}"


def _unit_conversion_hint(quantity: Quantity, unit: StoredUnit, wanted: Dimension, key: str, text: str) -> str:
    # the number itself is not converted: 5 tokens are not 5 steps
    if unit.bare and quantity.dimension in (STEP, TOKEN):
        alternative = ALTERNATIVES.get(key)
        return f"write `{alternative} = {text}`" if alternative else f"write it in {dimension_words(wanted)}"
    if quantity.dimension == (("bit", 1),) and wanted == (("byte", 1),) and (quantity.value / 8).denominator == 1:
        return f"write `{units.unit_text(int(quantity.value / 8), 'byte')}`; B is a byte, b a bit"
    return f"write the unit, as in `{EXAMPLES[unit.name]}`"


def _without_unit_hint(text: str) -> str:
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
    from dsl.messages.spelling import nearest_words  # imported only to explain a mistake

    number = text.removesuffix(suffix)
    close_suffixes = matches[:1] or [name for name in nearest_words(suffix, suffixes) if name not in units.WORDS]
    if close_suffixes:
        return f"did you mean {join_as_code([f'{number}{name}' for name in close_suffixes], 'or')}?"
    return f"one of {join_as_code(suffixes)}"


def _binary(context: Context, scope: Scope, value: BinaryOperation) -> Quantity:
    """Evaluate arithmetic from left to right. All operands are evaluated first, to report the mistakes in each."""
    chain = [value]
    while isinstance(chain[-1].left, BinaryOperation):
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
        result = _result_of(context, operation, result, right)
    assert result is not None
    return result


def _result_of(context: Context, value: BinaryOperation, left: Quantity, right: Quantity) -> Quantity:
    dimension = left.dimension
    if value.operator in "+-":
        if left.dimension != right.dimension:
            left_words, right_words = dimension_words(left.dimension), dimension_words(right.dimension)
            message = f"{left_words} `{value.operator}` {right_words} is not possible"
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
    definition = _definition_of(context, scope, word)
    if definition is None:
        if word.text == "auto":
            raise context.reject("E0302", "this value cannot be auto", word.span, "write a number")
        if context.definitions.damaged:
            raise RejectedError
        raise context.reject(
            "E0401", f"there is no value `{word.text}`", word.span, _name_hint(context, scope, word.text)
        )
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
        context,
        convert(context, read_leading_quantity(context, scope, (value,)).quantity, None, key, value.span),
        value.span,
        key,
    )


def ranges_of(context: Context, scope: Scope, block: Block) -> list[Block]:
    """The layer ranges of a model in the order of their first layers; those that cannot be read come first."""
    ranges = [statement for statement in block.body if isinstance(statement, Block) and key_of(statement) == "layers"]
    if block.head in context.active:  # a bound of a range refers to a range
        return ranges
    silent = replace(context.silent_copy(), active=[*context.active, block.head])
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
    return context.definitions.damaged or _definition_of(context, scope, word) is not None


def _definition_of(context: Context, scope: Scope, word: Word) -> tuple[Attribute | Let, Scope] | None:
    first, *parts = word.text.split(".")
    for block, place in enclosing_blocks(scope):
        for statement in block.statements_by_name.get(first, ()):
            if isinstance(statement, Let):
                if not parts:
                    return statement, place
                continue
            definition = _find_in_statement(context, statement, place, parts)
            if definition is not None:
                return definition
    outer = scope.blocks[0] if scope.blocks else None
    if outer is not None and outer.key.text == first and parts:
        name = "" if first == "run" else first
        return _find_in_block(context, outer, Scope((outer,), name), parts)
    let = context.definitions.lets.get(first)
    return (let, Scope(())) if let is not None and not parts else None


def _find_in_block(
    context: Context, block: Block, place: Scope, parts: list[str]
) -> tuple[Attribute | Let, Scope] | None:
    if len(parts) > 1 and parts[0] == "layers" and parts[1].isdigit():
        layer_range = dict(enumerate(ranges_of(context, place, block))).get(int(parts[1][:9]))
        return (
            _find_in_block(context, layer_range, place.inner_scope(layer_range, f"layers.{parts[1]}"), parts[2:])
            if layer_range
            else None
        )
    for statement in block.statements_by_name.get(parts[0], ()) if parts else ():
        if not isinstance(statement, Let):
            return _find_in_statement(context, statement, place, parts[1:])
    return None


def _find_in_statement(
    context: Context, statement: Attribute | Block, place: Scope, parts: list[str]
) -> tuple[Attribute | Let, Scope] | None:
    if isinstance(statement, Block):
        return _find_in_block(context, statement, place.inner_scope(statement, statement.key.text), parts)
    if not parts:
        return statement, place
    target = statement.phrase.items[0]
    kind = statement.key.text
    if isinstance(target, Word) and (kind, target.text) in context.definitions.blocks:
        block = context.block(kind, target.text, target.span)
        return _find_in_block(context, block, Scope((block,), kind), parts)
    return None


def _name_hint(context: Context, scope: Scope, name: str) -> str:
    suggestion = suggest(name, _names(context, scope, name) if len(context.mistakes) < MAX_HINTED else ())
    if suggestion.startswith("did"):
        return suggestion
    return "write a number, or the name of one" if "." in name else f"write a number, or define it: `let {name} = …`"


def _names(context: Context, scope: Scope, name: str) -> set[str]:
    """Candidates for a misspelt name; of dotted names, those that are similar in every part."""
    outer = scope.blocks[0] if scope.blocks else None
    if "." in name:
        dotted_names = islice(_dotted_names(context, outer), MAX_PATHS) if outer is not None else ()
        return {path for path in dotted_names if _is_near(name.split("."), path.split("."))}
    names = set(context.definitions.lets)
    for block, _ in enclosing_blocks(scope):
        names |= {statement.name.text for statement in block.body if isinstance(statement, Let)}
        names |= {key_of(statement) for statement in block.body if isinstance(statement, Attribute)}
    return names


def _is_near(parts: Sequence[str], other_parts: Sequence[str]) -> bool:
    from dsl.messages.spelling import nearest_words  # imported only to explain a mistake

    different = [pair for pair in zip(parts, other_parts, strict=False) if pair[0] != pair[1]]
    return len(parts) == len(other_parts) and all(nearest_words(part, (other_part,)) for part, other_part in different)


def _dotted_names(context: Context, outer: Block) -> Iterator[str]:
    """Yield the dotted names of the values in a block, and in the blocks that it names."""
    for path in _paths(outer.body):
        yield path
        yield f"{outer.key.text}.{path}"
    for kind, body in _named_blocks(context, outer):
        yield from (f"{kind}.{path}" for path in _paths(body))


def _paths(body: Sequence[Statement]) -> Iterator[str]:
    """Yield the keys of a body and, dotted, those of the blocks in it, except `layers`, whose number cannot be
    guessed."""
    for statement in body:
        if isinstance(statement, Attribute):
            yield statement.key.text
        elif isinstance(statement, Block) and statement.key.text != "layers":
            yield from (f"{statement.key.text}.{path}" for path in _paths(statement.body))


def _named_blocks(context: Context, run: Block) -> Iterator[tuple[str, Sequence[Statement]]]:
    """Yield (kind, body) of the model, cluster and precision that a run names."""
    for statement in run.body:
        target = statement.phrase.items[0] if isinstance(statement, Attribute) else None
        kind = statement.key.text if isinstance(statement, Attribute) else ""
        if isinstance(target, Word) and (kind, target.text) in context.definitions.blocks:
            try:
                yield kind, context.silent_copy().block(kind, target.text, target.span).body
            except RejectedError:
                continue
