"""Build the nodes of the syntax tree. The parser calls the method with the name of the grammar rule that it matched."""

from __future__ import annotations

import re
from typing import Any

from dsl.messages.diagnostics import Diagnostic, Source, Span, is_hidden
from dsl.text.syntax import (
    Attribute,
    BinaryOperation,
    Block,
    FunctionCall,
    Import,
    Let,
    Line,
    ListOf,
    LostStatement,
    Negation,
    Number,
    Phrase,
    Range,
    Statement,
    String,
    Value,
    Word,
)
from dsl.text.table import Token


class Builder:
    """Builds the tree of one source, and collects mistakes that the grammar does not exclude."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.mistakes: list[Diagnostic] = []
        self.reported: set[int] = set()  # start offsets of strings with an invisible character

    def start(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        return body

    def body(self, *parts: Any) -> tuple[Statement, ...]:
        return tuple(part for part in parts if not isinstance(part, Token))

    # ------------------------------------------------------------ statements

    def line(self, head: Token, *items: Value) -> Statement:
        key = self.word(head)
        span = key.span.extend_to(items[-1].span) if items else key.span
        if key.text == "import":
            if len(items) == 1 and items[0].span.start in self.reported:
                return LostStatement(span)
            if len(items) == 1 and isinstance(items[0], String):
                return Import(items[0], span)
            return self._report_lost(span, span, "an import names one file", 'write `import "models/deepseek-v3.dsc"`')
        return Line(key, items, span)

    def attribute(self, head: Token, *parts: Any) -> Statement:
        key, items, phrase = self.word(head), parts[:-2], parts[-1]
        span = key.span.extend_to(phrase.span)
        if key.text == "let" and len(items) == 1 and isinstance(items[0], Word):
            return Let(items[0], phrase, span)
        if items:
            extra = Span(self.source, items[0].span.start, items[-1].span.end)
            name = f"let {re.sub(r'[^A-Za-z0-9_]+', '_', extra.text)}" if key.text == "let" else key.text
            hint = f"write `{name} = {phrase.span.text}`"
            return self._report_lost(span, extra, f"`{extra.text}` between `{key.text}` and `=`", hint)
        return Attribute(key, phrase, span)

    def block(self, head: Token, *parts: Any) -> Statement:
        key, labels, body = self.word(head), parts[:-3], parts[-2]
        span = key.span.extend_to(labels[-1].span) if labels else key.span
        words = [label.text if isinstance(label, Word) else "" for label in labels]
        parent = None
        if "extends" in words:
            index = words.index("extends")
            parent = labels[index + 1] if len(labels) == index + 2 else None
            if not isinstance(parent, Word):
                hint = f"write `{key.text} child extends parent {{ … }}`"
                return self._report_lost(span, labels[index].span, "`extends` names one block", hint)
            labels = labels[:index]
        return Block(key, labels, parent, body, span, parts[-1].start)

    def lost(self, token: Token) -> Statement:
        return LostStatement(self._span(token))

    def lost_block(self, token: Token, *_: Any) -> Statement:
        return LostStatement(self._span(token))

    # ------------------------------------------------------------ values

    def phrase(self, *items: Value) -> Phrase:
        return Phrase(items, items[0].span.extend_to(items[-1].span))

    def item(self, value: Value) -> Value:
        return value

    def value(self, value: Value) -> Value:
        return value

    def range(self, first: Value, _: Token, last: Value) -> Range:
        return Range(first, last, first.span.extend_to(last.span))

    def binary(self, left: Value, operator: Token, right: Value) -> BinaryOperation:
        return BinaryOperation(operator.text, left, right, left.span.extend_to(right.span))

    def negate(self, sign: Token, operand: Value) -> Negation:
        return Negation(operand, self._span(sign).extend_to(operand.span))

    def group(self, _open: Token, value: Value, _close: Token) -> Value:
        return value

    def number(self, token: Token) -> Number:
        return Number(token.text, self._span(token))

    def word(self, token: Token) -> Word:
        return Word(token.text, self._span(token))

    def string(self, token: Token) -> String:
        if not token.text.isprintable():
            self._report_invisible(token)
        text = token.text[1:-1].replace("\\\\", "\0").replace('\\"', '"').replace("\0", "\\")
        return String(text, self._span(token))

    def list(self, *parts: Any) -> ListOf:
        items = tuple(part for part in parts if not isinstance(part, Token))
        return ListOf(items, self._span(parts[0]).extend_to(self._span(parts[-1])))

    def call(self, *parts: Any) -> FunctionCall:
        arguments = tuple(part for part in parts if not isinstance(part, Token))
        return FunctionCall(parts[0].text[:-1], arguments, self._span(parts[0]).extend_to(self._span(parts[-1])))

    # ------------------------------------------------------------ helpers

    def _span(self, token: Token) -> Span:
        return Span(self.source, token.start, token.end)

    def _report_invisible(self, token: Token) -> None:
        """Report the first invisible character of a string. The string stays in the tree, so later checks still run."""
        index = next((index for index, character in enumerate(token.text) if is_hidden(character)), None)
        if index is not None:
            place = Span(self.source, token.start + index, token.start + index + 1)
            message = f"the character U+{ord(token.text[index]):04X} in this string is invisible"
            self.mistakes.append(Diagnostic("E0105", message, place, "a string has only visible characters"))
            self.reported.add(token.start)

    def _report_lost(self, statement: Span, span: Span, message: str, hint: str) -> LostStatement:
        """Report a mistake at `span`, and return a placeholder for the whole statement."""
        self.mistakes.append(Diagnostic("E0108", message, span, hint))
        return LostStatement(statement)
