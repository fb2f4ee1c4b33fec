"""The definitions that a file exports to its importers: its own blocks and lets, merged over those of its imports.

If two imports define the same name, one definition must be built on the other; otherwise the name is ambiguous.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dsl.messages.diagnostics import Diagnostic, Note, Span
from dsl.resolve.merge import merge
from dsl.text.syntax import Block, Import, Let

LET = "let"
Key = tuple[str, str]  # (kind, name) of a block, (LET, name) of a let


@dataclass(frozen=True)
class ExportedDefinition:
    """A block or let after its file has been read."""

    statement: Block | Let
    places: frozenset[Span]  # every definition in a file that is part of it


Exports = Mapping[Key, ExportedDefinition]


def join_exports(
    imports: Iterable[tuple[Import, Exports]], defined_here: Collection[Key], mistakes: list[Diagnostic]
) -> dict[Key, ExportedDefinition]:
    """Join the definitions of a file's imports. Reports names that are ambiguous, except lets in `defined_here`, which
    the file defines itself."""
    offers: dict[Key, list[tuple[Import, ExportedDefinition]]] = {}
    for statement, exports in imports:
        for key, defined in exports.items():
            offers.setdefault(key, []).append((statement, defined))
    definitions: dict[Key, ExportedDefinition] = {}
    for key, candidates in offers.items():
        _, best = max(candidates, key=lambda offer: len(offer[1].places))
        definitions[key] = ExportedDefinition(
            best.statement, best.places.union(*(definition.places for _, definition in candidates))
        )
        rival = next((offer for offer in candidates if not offer[1].places <= best.places), None)
        if rival is not None and not (key[0] == LET and key in defined_here):
            mistakes.append(_ambiguity(key, best, *rival))
    return definitions


def add_definition(
    definitions: dict[Key, ExportedDefinition], key: Key, statement: Block | Let, mistakes: list[Diagnostic]
) -> None:
    """Add a definition of the file itself: a let replaces an imported one, a block is merged over it key by key."""
    old = definitions.get(key)
    if old is None:
        definitions[key] = ExportedDefinition(statement, frozenset((statement.span,)))
        return
    new_statement = (
        merge(old.statement, statement, mistakes)
        if isinstance(old.statement, Block) and isinstance(statement, Block)
        else statement
    )
    definitions[key] = ExportedDefinition(new_statement, old.places | {statement.span})


def _ambiguity(key: Key, winner: ExportedDefinition, statement: Import, rival: ExportedDefinition) -> Diagnostic:
    kind, name = key
    notes = tuple(Note("one definition is here", _last_position(definition)) for definition in (winner, rival))
    message = f"two imports define {kind} `{name}`, and neither definition is built on the other"
    hint = f"define it here: `let {name} = …`" if kind == LET else "rename one of them, or import only one of the files"
    return Diagnostic("E0202", message, statement.path.span, hint, notes)


def _last_position(defined: ExportedDefinition) -> Span:
    """The position where a definition was last given or changed."""
    return defined.statement.span
