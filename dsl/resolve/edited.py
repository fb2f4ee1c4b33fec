"""A spec with some of its values written anew: what an edit of the text would give, without reading it again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dsl.messages.source import OVERRIDE, Span
from dsl.resolve.files import Definitions
from dsl.text.syntax import Attribute, Block, Call, Number, Phrase, Range, Statement, Value, Word

RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)", re.ASCII)
CALL = re.compile(r"([a-z]+)\(([0-9]+)\)", re.ASCII)


def edited(definitions: Definitions, edits: Mapping[Span, str]) -> Definitions:
    """Definitions in which the values at the spans are others. Spans stay as they are."""
    blocks = {key: _block(block, edits) for key, block in definitions.blocks.items()}
    return replace(definitions, blocks=blocks, sources=[*definitions.sources], mistakes=[])


def edited_overrides(overrides: Iterable[str], edits: Mapping[Span, str]) -> tuple[str, ...]:
    """The overrides of the command line with these edits made."""
    new = {span.source.text: (span, text) for span, text in edits.items() if span.source.name == OVERRIDE}
    return tuple(
        f"{text[: new[text][0].start]}{new[text][1]}{text[new[text][0].end :]}" if text in new else text
        for text in overrides
    )


def respelled(definitions: Definitions, names: Mapping[Span, str]) -> Definitions:
    """Definitions in which the keys of the blocks at the spans are others."""
    blocks = {key: _respelled(block, names) for key, block in definitions.blocks.items()}
    return replace(definitions, blocks=blocks, sources=[*definitions.sources], mistakes=[])


def _respelled(block: Block, names: Mapping[Span, str]) -> Block:
    key = Word(names[block.key.span], block.key.span) if block.key.span in names else block.key
    body = tuple(_respelled(each, names) if isinstance(each, Block) else each for each in block.body)
    same = key is block.key and all(new is old for new, old in zip(body, block.body, strict=True))
    return block if same else replace(block, key=key, body=body)


def _block(block: Block, edits: Mapping[Span, str]) -> Block:
    labels = tuple(_value(edits[label.span], label.span) if label.span in edits else label for label in block.labels)
    return replace(block, labels=labels, body=tuple(_statement(each, edits) for each in block.body))


def _statement(statement: Statement, edits: Mapping[Span, str]) -> Statement:
    if isinstance(statement, Block):
        return _block(statement, edits)
    if isinstance(statement, Attribute) and statement.phrase.span in edits:
        span = statement.phrase.span
        return replace(statement, phrase=Phrase((_value(edits[span], span),), span))
    return statement


def _value(text: str, span: Span) -> Value:
    """Numbers with units, words, layer ranges and `train(4096)`: all that an edit writes."""
    match = RANGE.fullmatch(text)
    if match is not None:
        return Range(Number(match[1], span), Number(match[2], span), span)
    match = CALL.fullmatch(text)
    if match is not None:
        return Call(match[1], (Number(match[2], span),), span)
    return Number(text, span) if text[0].isdigit() else Word(text, span)
