"""The syntax tree of a file, with the position of every part. Nothing is interpreted yet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dsl.messages.diagnostics import Source, Span

NAMED = ("model", "cluster", "precision")  # top-level blocks that a run refers to by name
KINDS = ("run", *NAMED)  # kinds of top-level blocks
# Pairs of keys of which a block may give only one.
ALTERNATIVES = {"tokens": "steps", "steps": "tokens", "source": "sources", "sources": "source"}


@dataclass(frozen=True)
class Word:
    """A name, a keyword or a reference: `dualpipe`, `until`, `model.hidden`."""

    text: str
    span: Span


@dataclass(frozen=True)
class Number:
    """A number with its suffix: `129_280`, `79.1GiB`, `1x128`, also `1f1b`."""

    text: str
    span: Span


@dataclass(frozen=True)
class String:
    """A string; `value` has no quotes."""

    value: str
    span: Span


@dataclass(frozen=True)
class ListOf:
    """`[rmsnorm, mla_up]`."""

    items: tuple[Value, ...]
    span: Span


@dataclass(frozen=True)
class Range:
    """`first..last`, both included."""

    first: Value
    last: Value
    span: Span


@dataclass(frozen=True)
class BinaryOperation:
    """`hidden * 4`."""

    operator: str  # + - * /
    left: Value
    right: Value
    span: Span


@dataclass(frozen=True)
class Negation:
    operand: Value
    span: Span


@dataclass(frozen=True)
class FunctionCall:
    """`train(4096)`."""

    name: str
    arguments: tuple[Value, ...]
    span: Span


Value = Word | Number | String | ListOf | Range | BinaryOperation | Negation | FunctionCall


@dataclass(frozen=True)
class Phrase:
    """Values side by side: `0.3 until 10T tokens then 0.1`."""

    items: tuple[Value, ...]
    span: Span


@dataclass(frozen=True)
class Attribute:
    """`key = phrase`."""

    key: Word
    phrase: Phrase
    span: Span


@dataclass(frozen=True)
class Let:
    """`let name = phrase`."""

    name: Word
    phrase: Phrase
    span: Span


@dataclass(frozen=True)
class Import:
    """`import "file"`."""

    path: String
    span: Span


@dataclass(frozen=True)
class Line:
    """A statement of words and values only: a phase of the learning rate."""

    head: Word
    items: tuple[Value, ...]
    span: Span


@dataclass(frozen=True)
class Block:
    """`key labels { body }`. `head` spans key and labels; `parent` is the block it extends; `end` is the offset of its
    `}`.
    """

    key: Word
    labels: tuple[Value, ...]
    parent: Word | None
    body: tuple[Statement, ...]
    head: Span
    end: int = field(default=0, compare=False)

    @property
    def span(self) -> Span:
        return self.head

    def encloses(self, span: Span) -> bool:
        """Whether a span is between the braces; spans of inherited keys and overrides are not."""
        return span.source == self.head.source and self.head.end <= span.start < self.end

    @cached_property
    def statements_by_name(self) -> Mapping[str, Sequence[Attribute | Block | Let]]:
        """The statements of the body by key, a `let` by its name, in the order in which they are written."""
        statements: dict[str, list[Attribute | Block | Let]] = {}
        for statement in self.body:
            if isinstance(statement, (Attribute, Block, Let)):
                name = statement.name.text if isinstance(statement, Let) else statement.key.text
                statements.setdefault(name, []).append(statement)
        return statements

    def has_key(self, key: str) -> bool:
        """Whether the body sets a key."""
        return any(not isinstance(statement, Let) for statement in self.statements_by_name.get(key, ()))


@dataclass(frozen=True)
class LostStatement:
    """A statement that could not be parsed; its mistake has been reported. The span may cover further statements."""

    span: Span

    @property
    def words(self) -> frozenset[str]:
        """The names in it; some are keys that it, or a further statement in its span, sets."""
        return frozenset(re.findall(r"[A-Za-z_]\w*", self.span.text, re.ASCII))


Statement = Attribute | Let | Import | Line | Block | LostStatement


@dataclass(frozen=True)
class Document:
    """One file."""

    source: Source
    body: tuple[Statement, ...]
