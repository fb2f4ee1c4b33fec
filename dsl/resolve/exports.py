"""What a file hands to those that import it: its blocks and lets over those of its imports.

Where two imports define one name, one of the two must be built on the other; else nobody knows which is meant.
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
class Defined:
    """A block or let as it is when a file has been read."""

    statement: Block | Let
    places: frozenset[Span]  # every definition in a file that has gone into it


Exports = Mapping[Key, Defined]


def joined(
    imports: Iterable[tuple[Import, Exports]], defined_here: Collection[Key], mistakes: list[Diagnostic]
) -> dict[Key, Defined]:
    """What the imports of one file define together. A let of `defined_here`, the file itself, may be in several."""
    offers: dict[Key, list[tuple[Import, Defined]]] = {}
    for statement, exports in imports:
        for key, defined in exports.items():
            offers.setdefault(key, []).append((statement, defined))
    found: dict[Key, Defined] = {}
    for key, several in offers.items():
        _, best = max(several, key=lambda offer: len(offer[1].places))
        found[key] = Defined(best.statement, best.places.union(*(each.places for _, each in several)))
        rival = next((offer for offer in several if not offer[1].places <= best.places), None)
        if rival is not None and not (key[0] == LET and key in defined_here):
            mistakes.append(_ambiguous(key, best, *rival))
    return found


def put_over(found: dict[Key, Defined], key: Key, new: Block | Let, mistakes: list[Diagnostic]) -> None:
    """A definition of the file itself: a let takes the place of an imported one, a block changes it key by key."""
    old = found.get(key)
    if old is None:
        found[key] = Defined(new, frozenset((new.span,)))
        return
    changed = (
        merge(old.statement, new, mistakes) if isinstance(old.statement, Block) and isinstance(new, Block) else new
    )
    found[key] = Defined(changed, old.places | {new.span})


def _ambiguous(key: Key, winner: Defined, statement: Import, rival: Defined) -> Diagnostic:
    kind, name = key
    notes = tuple(Note("one is here", _last(each)) for each in (winner, rival))
    message = f"{kind} `{name}` is defined by two of the imports, and neither is built on the other"
    hint = (
        f"say here which is meant: `let {name} = …`" if kind == LET else "rename one of them, or import one file only"
    )
    return Diagnostic("E0202", message, statement.path.span, hint, notes)


def _last(defined: Defined) -> Span:
    """Where a definition was last given or changed."""
    return defined.statement.span
