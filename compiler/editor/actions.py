"""Edits that mend a mistake, as an editor offers them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dsl.diagnostics import Diagnostic, Edit, giver
from dsl.edits import edit_of
from dsl.source import OVERRIDE, Span


@dataclass(frozen=True)
class Action:
    """Edits to make together, and what they mend."""

    title: str
    edits: tuple[Edit, ...]
    mends: Diagnostic
    preferred: bool  # what to take if one had to be taken without asking


def actions(diagnostics: Iterable[Diagnostic], at: Span) -> tuple[Action, ...]:
    """What mends the mistakes that a span of a text touches."""
    touched = [item for item in diagnostics if item.span is not None and _touches(item.span, at)]
    return tuple(action for item in touched for action in _mending(item))


def _mending(item: Diagnostic) -> Iterator[Action]:
    """The edit its hint says, then the ways out of a conflict, the smallest change first."""
    seen: set[tuple[Edit, ...]] = set()
    edit = edit_of(item)
    ways: list[tuple[Edit, ...]] = [(edit,)] if edit is not None else []
    ways += item.conflict.resolutions if item.conflict is not None else ()
    for way in ways:
        if way not in seen and not any(each.span.source.name == OVERRIDE for each in way):
            seen.add(way)
            yield Action(_title(way), way, item, preferred=len(seen) == 1 and edit is not None)


def _title(edits: tuple[Edit, ...]) -> str:
    return " and ".join(_said(edit) for edit in edits)


def _said(edit: Edit) -> str:
    """An edit in a few words: the whole statement, as a number alone says little."""
    if not edit.text:
        return f"remove `{_short(edit.span.text.strip())}`"
    before = giver(edit.span)
    given = f"{before}{edit.text}" if before.rstrip().endswith("=") else edit.text
    return f"{'write' if edit.span.text else 'add'} `{_short(given.strip().rstrip(','))}`"


def _short(text: str) -> str:
    line = "; ".join(part.strip() for part in text.splitlines())
    return line if len(line) <= 80 else f"{line[:79]}…"


def _touches(span: Span, at: Span) -> bool:
    return span.source.name == at.source.name and span.start <= at.end and at.start <= span.end
