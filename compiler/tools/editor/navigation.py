"""Definitions and references of names, and the outline of a text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from compiler.tools.editor import outline
from compiler.tools.editor.outline import LET, OpenDocument, OutlineToken, span, target
from dsl.messages.diagnostics import Source, Span
from dsl.resolve.merge import PHASE
from dsl.text.syntax import KINDS, NAMED, Let

SymbolKind = Literal["run", "model", "cluster", "precision", "block", "key", "let", "import", "line"]


@dataclass(frozen=True)
class Symbol:
    """An entry of the outline: characters `start` to `end`; its head ends at `head_end`."""

    name: str
    detail: str
    kind: SymbolKind
    start: int
    end: int
    head_end: int
    children: tuple[Symbol, ...] = ()


def definition(document: OpenDocument, offset: int) -> Span | None:
    """The definition of the word at character `offset`: a block, a parent or a value; for an import, the start of its
    file. None if there is none."""
    place = outline.place(document.source.text, document.file, offset)
    token, statement = place.token, place.statement
    if place.comment or token is None or statement is None:
        return None
    if statement.key == "import":
        return _file(document, token)
    name = _name(statement, token)
    if name is not None:
        return document.names.get(name)
    if token.kind != "word" or token in statement.head[:1]:
        return None
    return _definition_of_reference(document, token) or _visible(document, place.block, token)


def references(documents: Iterator[OpenDocument] | list[OpenDocument], definition_span: Span) -> tuple[Span, ...]:
    """All references, in some documents and their imports, to the definition at a span; the definition comes first."""
    spans = {_key(definition_span): definition_span}
    for document in documents:
        for view in document.analysis.views:
            for used, item in view.context.uses.items():
                defined = item.name.span if isinstance(item, Let) else item.key.span
                if _key(defined) == _key(definition_span):
                    spans.setdefault(_key(used), used)
        for source in document.analysis.definitions.sources:
            for used, name in _names(source):
                origin = document.names.get(name)
                if origin is not None and _key(origin) == _key(definition_span):
                    spans.setdefault(_key(used), used)
    return tuple(spans.values())


def symbols(file: outline.OutlineNode) -> tuple[Symbol, ...]:
    """The outline: blocks and their keys."""
    return tuple(_symbol(node) for node in file.body if node.head)


# ---------------------------------------------------------------- names


def _file(document: OpenDocument, token: OutlineToken) -> Span | None:
    if token.kind != "string":
        return None
    source, mistakes = document.reader(target(document.source, token.text.strip('"')))
    unread = any(mistake.span is None for mistake in mistakes)
    return None if unread else Span(source, 0, 0)


def _name(statement: outline.OutlineNode, token: OutlineToken) -> tuple[str, str] | None:
    """The (kind, name) of a token that names a block or `let`, where it is defined, extended or used; else None."""
    kind, words = statement.key, statement.head
    is_file = statement.parent is not None and not statement.parent.head
    if is_file and (kind in KINDS or kind == LET) and token in words[1:2]:
        return kind, token.text
    if is_file and kind in KINDS and len(words) > 3 and words[2].text == "extends" and token is words[3]:
        return kind, token.text
    around = [] if statement.parent is None else [node.key for node in statement.parent.path()]
    in_run = around in (["run"], ["run", PHASE])
    return (kind, token.text) if in_run and kind in NAMED and token in statement.value[:1] else None


def _names(source: Source) -> Iterator[tuple[Span, tuple[str, str]]]:
    """All places of a text that name a block or `let`."""
    for statement in outline.read(source.text).walk():
        for token in (*statement.head[1:], *statement.value[:1]):
            name = _name(statement, token)
            if name is not None:
                yield span(source, token), name


def _definition_of_reference(document: OpenDocument, token: OutlineToken) -> Span | None:
    """The definition that a name in an expression was resolved to."""
    for view in document.analysis.views:
        for used, item in view.context.uses.items():
            if used.source.name == document.source.name and used.start == token.start:
                return item.name.span if isinstance(item, Let) else item.key.span
    return None


def _visible(document: OpenDocument, block: outline.OutlineNode, token: OutlineToken) -> Span | None:
    """The definition of a name by the text alone, if nothing was resolved: a key of an outer block, or a `let`."""
    for around in reversed(block.path()):
        for statement in around.body:
            is_let = statement.key == LET and len(statement.head) > 1
            named = statement.head[1] if is_let else statement.head[0] if statement.head else None
            if named is not None and named.text == token.text and (statement.equals is not None or is_let):
                return span(document.source, named)
    return document.names.get((LET, token.text))


def _key(place: Span) -> tuple[str, int]:
    return os.path.realpath(place.source.name), place.start


# ---------------------------------------------------------------- outline


def _symbol(node: outline.OutlineNode) -> Symbol:
    kind: SymbolKind = "key" if node.equals is not None else "line" if node.opened is None else "block"
    words = [token.text for token in node.head]
    name, detail = "".join(words) if node.key == "layers" else " ".join(words), " ".join(t.text for t in node.value)
    if node.key in ("import", LET):
        kind = "import" if node.key == "import" else "let"
        name = " ".join(words[1:]).strip('"') or node.key
    elif node.key == "layers":
        name = f"layers {''.join(words[1:])}"
    elif node.opened is not None and node.parent is not None and not node.parent.head and node.key in KINDS:
        kind = {"run": "run", "model": "model", "cluster": "cluster"}.get(node.key, "precision")  # type: ignore[assignment]
    inner = tuple(_symbol(child) for child in node.body if child.head)
    end = max([node.end, *(child.end for child in inner)])
    return Symbol(name, detail, kind, node.start, end, node.head[-1].end, inner)
