"""What was meant by a key that a block does not have, or by a kind that a block does not come in."""

from __future__ import annotations

from collections.abc import Iterable

from dsl import vocabulary
from dsl.diagnostics import Note
from dsl.resolve.context import listed, suggest
from dsl.resolve.fields import fields_of
from dsl.resolve.merge import ALTERNATIVES, key_of
from dsl.schema import Node
from dsl.spelling import edits, nearest
from dsl.syntax import Attribute, Block


def key_meant(
    path: str, cls: type[Node], block: Block, statement: Attribute | Block, keys: tuple[str, ...]
) -> tuple[set[str], str, tuple[Note, ...]]:
    """(keys that count as given, hint, notes) of a statement whose key is none of the block at a path.

    A key that stands beside it already is never proposed: two would be one too many. A key that must be given, and is
    not, comes before the others.
    """
    word, place = statement.key.text, ".".join(part for part in path.split(".") if not part.isdigit())
    inside = block.encloses(statement.key.span)
    beside = {
        key_of(each): each.key.span
        for each in block.body
        if isinstance(each, (Attribute, Block))
        and each.key.span.source == statement.key.span.source
        and block.encloses(each.key.span) == inside
    }
    taken = {*beside, *(ALTERNATIVES.get(key, "") for key in beside)} - {"layers"}
    free = [key for key in keys if key not in taken]
    value = statement.phrase.span.text if isinstance(statement, Attribute) else "…"
    said = vocabulary.said_in(word, place, value)
    if said:
        meant = {each.rpartition(".")[2] for each in vocabulary.places(word)}
        return meant & {*free}, said, ()
    alias = vocabulary.key_in(word, place)
    if alias in free:
        return {alias}, f"did you mean `{alias}`?", ()
    absent = [key for key in free if key in _required(cls) and not block.gives(key)]
    close = nearest(word, absent) or nearest(word, free)
    if close:
        return {*close}, f"did you mean {listed(close, 'or')}?", ()
    if len(keys) == 1 and free and edits(word, keys[0]) == 1:  # too short a word to be near: `fnn`
        return {*keys}, f"did you mean `{keys[0]}`?", ()
    same = next((key for key in (alias, *nearest(word, taken & {*keys})) if key), "")
    given = same if same in beside else ALTERNATIVES.get(same, "")
    if given in beside:
        return set(), f"remove it, or change `{given}`", (Note(f"`{given}` is given here", beside[given]),)
    elsewhere = vocabulary.places(word)
    if elsewhere:
        return set(), f"here it is {listed(elsewhere, 'or')}", ()
    return set(), suggest(word, free or keys), ()


def _required(cls: type[Node]) -> set[str]:
    """The keys that a block must give."""
    names = {name for name, kind in fields_of(cls).items() if kind.required}
    return names | {ALTERNATIVES[name] for name in names if name in ALTERNATIVES}


def kind_hint(path: str, word: str, kinds: Iterable[str]) -> str:
    """A hint for a kind that a block at a path does not come in, or a precision that there is not."""
    place = ".".join(part for part in path.split(".") if not part.isdigit())
    return vocabulary.word_at(word, place) or suggest(word, kinds)
