"""What may be written as a value: words, names, units after a number, references, phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import get_origin

from compiler.tools.editor import block_keys, texts
from compiler.tools.editor.block_keys import Inside
from compiler.tools.editor.items import Item
from compiler.tools.editor.open_text import LET, Document
from compiler.tools.editor.outline import Place, Token
from dsl.facts import units
from dsl.resolve import derive
from dsl.resolve.forms import CLAUSES, SHAPES
from dsl.schema import BUILT_IN, Node, Spec, Unit
from dsl.schema.fields import WORDS_AS_TEXT, FieldType, fields_of
from dsl.text.syntax import NAMED

TOKENS, STEPS = Unit("token", bare=True), Unit("step", bare=True)
OPERATORS = ("+", "-", "*", "/", "(")


def value_items(document: Document, where: Inside, place: Place) -> Iterable[Item]:
    """Proposals behind the `=` of a statement."""
    statement = place.statement
    assert statement is not None and statement.equals is not None
    before = [token for token in place.before if token.start > statement.equals.start]
    if statement.key == LET:
        return _numbers(document, place, before, None)
    if where.form == "batch":
        return _numbers(document, place, before, TOKENS if statement.key == "over" else None)
    if where.form != "class":
        return ()
    if statement.key == "steps":
        return _numbers(document, place, before, STEPS)
    kind = fields_of(where.cls).get(statement.key)
    return _of_field(document, where, statement.key, kind, place, before) if kind is not None else ()


def _of_field(
    document: Document, where: Inside, key: str, kind: FieldType, place: Place, before: list[Token]
) -> Iterator[Item]:
    first = not before
    if key in NAMED and where.cls is Spec:
        yield from _names(document, key) if first else ()
    elif kind.form == "phases":
        yield from _phases(before, place)
    elif block_keys.values(kind):
        yield from _words(where.at(key), kind, place, first)
    elif kind.form == "tokenizer" and first:
        yield Item("train(4096)", "value", "trained on the data, with so many entries", snippet="train(${1:4096})")
        yield Item('"tokenizer.json"', "value", "a file", snippet='"${1:tokenizer.json}"')
    elif str in kind.types and first:
        yield from (Item(word, "value") for word in sorted(WORDS_AS_TEXT) if key == "source")
    elif {int, float, Fraction} & {*kind.types} or kind.form == "batch":
        word = first and (place.token is None or place.token.kind == "word")
        if word and kind.optional:
            yield Item("none", "value", "without")
        if word and key in derive.DEFAULTS.get(where.cls, {}):
            yield Item("auto", "value", "what the rest leaves")
        yield from _numbers(document, place, before, kind.unit, float in kind.types)


def _names(document: Document, kind: str) -> Iterator[Item]:
    names = document.names_of(kind)
    yield from (Item(name, "name", kind) for name in names)
    if kind == "precision":
        yield from (Item(name, "name", "built in") for name in BUILT_IN if name not in names)


def _words(path: str, kind: FieldType, place: Place, first: bool) -> Iterator[Item]:
    """The words of an enum, once each in a list."""
    statement = place.statement
    assert statement is not None
    if get_origin(kind.types[0]) is not tuple:
        yield from (Item(word, "value", texts.choice(path, word)) for word in block_keys.values(kind) if first)
    elif first:
        yield Item("[ ]", "value", "a list", snippet="[$0]")
    else:
        given = {token.text for token in statement.value if token is not place.token}
        yield from (
            Item(word, "value", texts.choice(path, word)) for word in block_keys.values(kind) if word not in given
        )


def _numbers(
    document: Document, place: Place, before: list[Token], unit: Unit | None, share: bool = False
) -> Iterator[Item]:
    """Units behind a number; names of numbers elsewhere."""
    token = place.token
    if token is not None and token.kind == "number":
        yield from _units(token, unit, share)
    elif before and before[-1].kind == "number":
        yield from _unit_word(before[-1], unit)
    elif not before or before[-1].text in OPERATORS:
        yield from _references(document, place)


# ---------------------------------------------------------------- units


def _units(token: Token, unit: Unit | None, share: bool = False) -> Iterator[Item]:
    """A number with each unit that its field takes."""
    match = units.NUMBER.match(token.text)
    assert match is not None
    if unit is not None:
        yield from (Item(match["mantissa"] + suffix, "unit") for suffix, _ in units.SUFFIXES[unit.name])
    elif share:
        yield Item(match["mantissa"] + "%", "unit")


def _unit_word(number: Token, unit: Unit | None) -> Iterator[Item]:
    """`tokens` or `steps` after a number that has no unit yet; `10T` has none."""
    match = units.NUMBER.match(number.text)
    assert match is not None
    if unit in (TOKENS, STEPS) and match["suffix"] in units.COUNTS:
        yield Item(f"{unit.name}s", "unit")


# ---------------------------------------------------------------- references


def _references(document: Document, place: Place) -> Iterator[Item]:
    """`let`s, keys of the blocks around; with a dot, the keys of what the name before it means."""
    typed = place.token.text if place.token is not None else ""
    if "." in typed:
        yield from _dotted(place, typed.split(".")[:-1])
        return
    seen: dict[str, Item] = {}
    for block in [*reversed(place.block.path()), document.file]:
        for statement in block.body:
            is_let = statement.key == LET and len(statement.head) > 1
            name = statement.head[1].text if is_let else statement.key
            if statement is not place.statement and (is_let or (block is not document.file and statement.equals)):
                shown = " ".join(token.text for token in statement.value)
                seen.setdefault(name, Item(name, "reference", f"= {shown}"))
    for name in document.names_of(LET):  # of imported files too
        seen.setdefault(name, Item(name, "reference", LET))
    yield from seen.values()


def _dotted(place: Place, parts: list[str]) -> Iterator[Item]:
    """Keys of the block that a dotted name leads to, as the schema knows it."""
    path = place.block.path()
    around = [block_keys.inside(path[: index + 1]).cls for index in range(len(path))]
    found: tuple[type[Node], ...] = ()
    for cls in (*reversed(around), Spec):
        if parts[0] in fields_of(cls):
            found = fields_of(cls)[parts[0]].nodes
            break
    for part in parts[1:]:
        found = tuple(inner for cls in found if part in fields_of(cls) for inner in fields_of(cls)[part].nodes)
    seen: dict[str, Item] = {}
    for cls in found:  # kinds of a block share keys
        for name, kind in fields_of(cls).items():
            if kind.form not in ("label", "layers", "rate"):
                meaning = cls.model_fields[name].description or ""
                seen.setdefault(name, Item(".".join([*parts, name]), "reference", meaning))
    yield from seen.values()


# ---------------------------------------------------------------- text that reads like the paper


def _duration(place: Place, before: list[Token]) -> Iterator[Item]:
    """Units of a duration that is being written."""
    for unit in (TOKENS, STEPS):
        if place.token is not None and place.token.kind == "number":
            yield from _units(place.token, unit)
        elif before and before[-1].kind == "number":
            yield from _unit_word(before[-1], unit)


def _phases(before: list[Token], place: Place) -> Iterator[Item]:
    """`0.3 until 10T tokens then 0.1`."""
    words = [token.text for token in before]
    last = next((word for word in reversed(words) if word in ("until", "then")), "")
    behind = words[len(words) - words[::-1].index(last) :] if last else words
    if last == "until":
        yield from _duration(place, before)
        if behind:
            yield Item("then", "word", "the value that comes after")
    elif behind:
        yield Item("until", "word", "where this value ends, in tokens or steps")


def rate_items(place: Place) -> Iterator[Item]:
    """A line of the learning rate: its shape, then clauses, each at most once."""
    before, words = list(place.before), [token.text for token in place.before]
    if not words:
        alone = place.statement is None or len(place.statement.head) < 2
        yield from (Item(name, "word", snippet=block_keys.phase_snippet(name) if alone else "") for name in SHAPES)
        return
    clause = next((word for word in reversed(words) if word in CLAUSES), "over")
    if clause in ("over", "until"):
        yield from _duration(place, before)
    if words[-1] in CLAUSES or (place.token is not None and place.token.kind == "number"):
        return
    ended = {"until", "over"} & set(words) or (len(words) > 1 and words[1] not in CLAUSES)
    for name in ("at", "until", "over") if SHAPES.get(words[0]) == "constant" else ("to", "from", "until", "over"):
        if name not in words and not (ended and name in ("until", "over")):
            yield Item(name, "word")
