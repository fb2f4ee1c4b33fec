"""Quick fixes for diagnostics."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from compiler.tools.editor.outline import OpenDocument
from dsl.load import analyse
from dsl.messages.diagnostics import Diagnostic, Edit, Source, Span, text_before_value
from dsl.text.edits import apply, corrects_spelling, edit_of, is_mended


@dataclass(frozen=True)
class CodeAction:
    """Edits to make together, and the diagnostic that they fix."""

    title: str
    edits: tuple[Edit, ...]
    mends: Diagnostic
    is_preferred: bool  # whether an editor may apply it without asking


def actions(documents: Iterable[OpenDocument], span: Span) -> tuple[CodeAction, ...]:
    """The fixes for diagnostics of some documents that a span touches."""
    touched: dict[Diagnostic, OpenDocument] = {}
    for document in documents:
        for item in document.diagnostics:
            if item.span is not None and _touches(item.span, span):
                touched.setdefault(item, document)
    return tuple(action for item, document in touched.items() for action in _code_actions(document, item, span.source))


def _code_actions(document: OpenDocument, item: Diagnostic, source: Source) -> Iterator[CodeAction]:
    """The edit in the diagnostic's hint, then the resolutions of its conflict, the smallest change first."""
    seen: set[tuple[Edit, ...]] = set()
    edit = edit_of(item)
    fixes: list[tuple[Edit, ...]] = [(edit,)] if edit is not None else []
    fixes += item.conflict.resolutions if item.conflict is not None else ()
    for edits in fixes:
        if edits not in seen:
            seen.add(edits)
            preferred = len(seen) == 1 and edit is not None and _is_sure(document, item, edit)
            yield CodeAction(_title(edits, source), edits, item, preferred)


def _is_sure(document: OpenDocument, item: Diagnostic, edit: Edit) -> bool:
    """Whether an edit can be made without asking. A spelling correction must fix something and break nothing."""
    if not corrects_spelling(item):
        return True
    changed = edit.span.source

    def reader(path: str) -> tuple[Source, tuple[Diagnostic, ...]]:
        loaded = document.reader(path)
        return (Source(changed.name, apply(changed.text, [edit])), ()) if loaded[0] == changed else loaded

    return is_mended(document.analysis.diagnostics, analyse(document.path, reader=reader).diagnostics)


def _title(edits: tuple[Edit, ...], source: Source) -> str:
    """A description of edits, with the file of each if it is not `source`."""
    return " and ".join(f"{_description(edit)}{_in_other_file(edit.span.source, source)}" for edit in edits)


def _in_other_file(edited: Source, source: Source) -> str:
    if edited.name == source.name:
        return ""
    return f" in {os.path.relpath(edited.name, os.path.dirname(source.name) or '.')}"  # noqa: PTH120


def _description(edit: Edit) -> str:
    """An edit in a few words, with the whole statement, as a number alone says little."""
    if not edit.text:
        return f"remove `{_shorten(edit.span.text.strip())}`"
    before = text_before_value(edit.span)
    statement = f"{before}{edit.text}" if before.rstrip().endswith("=") else edit.text
    return f"{'write' if edit.span.text else 'add'} `{_shorten(statement.strip().rstrip(','))}`"


def _shorten(text: str) -> str:
    line = "; ".join(part.strip() for part in text.splitlines())
    return line if len(line) <= 80 else f"{line[:79]}…"


def _touches(span: Span, other: Span) -> bool:
    return span.source.name == other.source.name and span.start <= other.end and other.start <= span.end
