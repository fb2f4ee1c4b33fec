"""Check expressions that no value uses: unused lets, and numbers that a child overrides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin

from dsl.facts import units
from dsl.messages.diagnostics import Diagnostic, Span
from dsl.resolve.context import Context, RejectedError, Scope
from dsl.resolve.evaluate import phrase, unknown_unit_message
from dsl.resolve.files import Definitions
from dsl.resolve.values import TILE, let_of
from dsl.schema import Node, Spec
from dsl.schema.base import WORDS_AS_TEXT, fields_of
from dsl.text.syntax import (  # fmt: skip
    Attribute,
    BinaryOperation,
    Block,
    FunctionCall,
    Let,
    Line,
    ListOf,
    Negation,
    Number,
    Range,
    Statement,
    String,
    Value,
    Word,
)

MAX_REPORTED = 100  # reported numbers with an unknown unit, per file


def check_lets(context: Context) -> None:
    """Evaluate the lets of the first file and of the resolved blocks, and report their mistakes."""
    reported = {item.span for item in context.mistakes}
    names = [statement.name.text for statement in context.definitions.body if isinstance(statement, Let)]
    places = [(Scope(()), context.definitions.lets[name]) for name in names]
    for scope, let in (*places, *context.lets):
        if reported.isdisjoint(item.span for item in let.phrase.items) and not _is_no_number(context, scope, let):
            try:
                phrase(context, scope, let.phrase)
            except RejectedError:
                continue


def _is_no_number(context: Context, scope: Scope, let: Let) -> bool:
    """Whether a let is a string, a list, a tile or a word that some key takes, itself or through other lets."""
    seen: set[Span] = set()
    current: Let | None = let
    while current is not None and current.span not in seen and len(current.phrase.items) == 1:
        seen.add(current.span)
        value = current.phrase.items[0]
        if isinstance(value, (String, ListOf)):
            return True
        if isinstance(value, (Word, Number)) and _is_known(value.text):
            return True
        current = let_of(context, scope, value.text) if isinstance(value, Word) else None
    return False


def _is_known(text: str) -> bool:
    return TILE.fullmatch(text) is not None or text in _words()


@cache
def _words() -> frozenset[str]:
    """All words that some key takes."""
    return frozenset({"none", "auto", "true", "false", *WORDS_AS_TEXT, *_choices(Spec)})


def _choices(cls: type[Node], outer_classes: tuple[type[Node], ...] = ()) -> Iterator[str]:
    if cls in outer_classes:  # a block may contain one of its kind
        return
    for kind in fields_of(cls).values():
        for annotation in kind.types:
            yield from _words_of_type(annotation, (*outer_classes, cls))


def _words_of_type(kind: Any, outer_classes: tuple[type[Node], ...]) -> Iterator[str]:
    if isinstance(kind, type) and issubclass(kind, Node):
        yield from _choices(kind, outer_classes)
    else:
        yield from _literals(kind, outer_classes)


def _literals(kind: Any, outer_classes: tuple[type[Node], ...]) -> Iterator[str]:
    """Yield the words of a type: a `Literal["a", "b"]`, or a tuple of such."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for argument in get_args(kind):
            if get_origin(argument) is not None or (isinstance(argument, type) and issubclass(argument, Node)):
                yield from _words_of_type(argument, outer_classes)


# ---------------------------------------------------------------- numbers as written


def unknown_units(definitions: Definitions, reported: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Return messages for numbers of the first file with an unknown unit, whether or not a value uses them.

    A number that is inside a reported span is skipped.
    """
    if definitions.broken:
        return []
    unknown_numbers = [number for number in _numbers(definitions.body) if units.quantity(number.text) is None]
    unknown_numbers = [number for number in unknown_numbers if not _is_known(number.text)][:MAX_REPORTED]
    spans = [item.span for item in reported if item.span is not None] if unknown_numbers else []
    return [
        Diagnostic("E0301", *unknown_unit_message(number))
        for number in unknown_numbers
        if not any(
            span.source is number.span.source and span.start <= number.span.start and number.span.end <= span.end
            for span in spans
        )
    ]


def _numbers(body: Iterable[Statement]) -> Iterator[Number]:
    for statement in body:
        if isinstance(statement, (Attribute, Let)):
            yield from _numbers_in(statement.phrase.items)
        elif isinstance(statement, Line):
            yield from _numbers_in(statement.items)
        elif isinstance(statement, Block):  # labels other than ranges are names
            yield from _numbers_in(label for label in statement.labels if isinstance(label, Range))
            yield from _numbers(statement.body)


def _numbers_in(values: Iterable[Value]) -> Iterator[Number]:
    for value in values:
        if isinstance(value, Number):
            yield value
        elif isinstance(value, ListOf):
            yield from _numbers_in(value.items)
        elif isinstance(value, FunctionCall):
            yield from _numbers_in(value.arguments)
        elif isinstance(value, Range):
            yield from _numbers_in((value.first, value.last))
        elif isinstance(value, BinaryOperation):
            yield from _numbers_in((value.left, value.right))
        elif isinstance(value, Negation):
            yield from _numbers_in((value.operand,))
