"""Spans, edits and diagnostics as JSON-able values, for `dsc check --format json` and for editors.

docs/json.md describes them. Lines and columns count from 1; the end is the position after the last character.
"""

from __future__ import annotations

from typing import Any

from dsl.messages.diagnostics import Conflict, Diagnostic, Edit, Note, Span, statement_of
from dsl.text.edits import edit_of

NO_PLACE: dict[str, Any] = dict.fromkeys(("file", "line", "column", "end_line", "end_column"))


def span_value(span: Span | None) -> dict[str, Any]:
    """file, line, column, end_line, end_column; all null without a span. The file of the command line is `-s`."""
    if span is None:
        return dict(NO_PLACE)
    end_line, end_column = span.source.position(span.end)
    return {
        "file": span.source.name,
        "line": span.line,
        "column": span.column,
        "end_line": end_line,
        "end_column": end_column,
    }


def edit_value(edit: Edit) -> dict[str, Any]:
    """A span and its replacement."""
    return {**span_value(edit.span), "text": edit.text}


def diagnostic_value(item: Diagnostic) -> dict[str, Any]:
    """A message, with the edit of its hint if a machine can apply it."""
    edit = edit_of(item)
    return {
        "code": item.code,
        "severity": item.severity,
        "message": item.message,
        **span_value(item.span),
        "hint": item.hint,
        "edit": edit_value(edit) if edit else None,
        "notes": [value for note in item.notes for value in _notes(note)],
        "conflict": _conflict(item.conflict) if item.conflict else None,
    }


def _notes(note: Note) -> list[dict[str, Any]]:
    """A note, followed by one for each value that it follows from."""
    places = [{"message": statement_of(place), **span_value(place)} for place in note.places]
    return [{"message": note.message, **span_value(note.span)}, *places]


def _conflict(conflict: Conflict) -> dict[str, Any]:
    return {
        "lines": [span_value(line) for line in conflict.lines],
        "resolutions": [[edit_value(edit) for edit in edits] for edits in conflict.resolutions],
        "leaves_others": conflict.leaves_others,
    }
