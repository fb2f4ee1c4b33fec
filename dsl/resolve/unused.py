"""Hints on what was written: what was meant by a key or a kind that is unknown, and values that nothing uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin

from dsl.facts import units, vocabulary
from dsl.messages.diagnostics import OVERRIDE, Diagnostic, Note, Span, listed
from dsl.messages.spelling import edits, nearest
from dsl.resolve.context import Context, RejectedError, Scope, suggest
from dsl.resolve.evaluate import no_unit, phrase
from dsl.resolve.files import Definitions
from dsl.resolve.merge import key_of
from dsl.resolve.values import TILE, let_of
from dsl.schema import Mla, Node, Spec, Tile
from dsl.schema.base import WORDS_AS_TEXT, fields_of
from dsl.text.syntax import (  # fmt: skip
    ALTERNATIVES,
    NAMED,
    Attribute,
    Binary,
    Block,
    Call,
    Let,
    Line,
    ListOf,
    Negate,
    Number,
    Range,
    Statement,
    String,
    Value,
    Word,
)

# --- What no value is made of is looked at all the same: lets that nobody uses, numbers that a child overrides

MAX_TOLD = 100  # numbers of one file without a unit


def examine(context: Context) -> None:
    """Evaluate the lets of the first file, and of the blocks that were looked at. Mistakes are reported."""
    reported = {item.span for item in context.mistakes}
    names = [each.name.text for each in context.definitions.body if isinstance(each, Let)]
    places = [(Scope(()), context.definitions.lets[name]) for name in names]
    for scope, let in (*places, *context.lets):
        if reported.isdisjoint(item.span for item in let.phrase.items) and not _is_no_number(context, scope, let):
            try:
                phrase(context, scope, let.phrase)
            except RejectedError:
                continue


def _is_no_number(context: Context, scope: Scope, let: Let) -> bool:
    """Whether a let is a text, a list, a tile or one of the words of some key, itself or by way of other lets."""
    seen: set[Span] = set()
    found: Let | None = let
    while found is not None and found.span not in seen and len(found.phrase.items) == 1:
        seen.add(found.span)
        value = found.phrase.items[0]
        if isinstance(value, (String, ListOf)):
            return True
        if isinstance(value, (Word, Number)) and _is_known(value.text):
            return True
        found = let_of(context, scope, value.text) if isinstance(value, Word) else None
    return False


def _is_known(text: str) -> bool:
    return TILE.fullmatch(text) is not None or text in _words()


@cache
def _words() -> frozenset[str]:
    """Every word that is a choice of some key."""
    return frozenset({"none", "auto", "true", "false", *WORDS_AS_TEXT, *_choices(Spec)})


def _choices(cls: type[Node], inside: tuple[type[Node], ...] = ()) -> Iterator[str]:
    if cls in inside:  # a block may hold one of its kind
        return
    for kind in fields_of(cls).values():
        for each in kind.types:
            yield from _of_type(each, (*inside, cls))


def _of_type(kind: Any, inside: tuple[type[Node], ...]) -> Iterator[str]:
    if isinstance(kind, type) and issubclass(kind, Node):
        yield from _choices(kind, inside)
    else:
        yield from _literals(kind, inside)


def _literals(kind: Any, inside: tuple[type[Node], ...]) -> Iterator[str]:
    """The words of a type: of `Literal["a", "b"]`, or of a tuple of such."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for each in get_args(kind):
            if get_origin(each) is not None or (isinstance(each, type) and issubclass(each, Node)):
                yield from _of_type(each, inside)


# ---------------------------------------------------------------- numbers as they are written
def misread(definitions: Definitions, reported: Iterable[Diagnostic]) -> list[Diagnostic]:
    """The numbers of the first file whose unit there is not, whether or not a value is made of them.

    Where something is reported of a number or what is around it, nothing more is.
    """
    if definitions.broken:
        return []
    wrong = [each for each in _numbers(definitions.body) if units.quantity(each.text) is None]
    wrong = [each for each in wrong if not _is_known(each.text)][:MAX_TOLD]
    spans = [item.span for item in reported if item.span is not None] if wrong else []
    return [
        Diagnostic("E0301", *no_unit(each))
        for each in wrong
        if not any(
            span.source is each.span.source and span.start <= each.span.start and each.span.end <= span.end
            for span in spans
        )
    ]


def _numbers(body: Iterable[Statement]) -> Iterator[Number]:
    for each in body:
        if isinstance(each, (Attribute, Let)):
            yield from _within(each.phrase.items)
        elif isinstance(each, Line):
            yield from _within(each.items)
        elif isinstance(each, Block):  # its labels, but for a range, are names
            yield from _within(label for label in each.labels if isinstance(label, Range))
            yield from _numbers(each.body)


def _within(values: Iterable[Value]) -> Iterator[Number]:
    for value in values:
        if isinstance(value, Number):
            yield value
        elif isinstance(value, ListOf):
            yield from _within(value.items)
        elif isinstance(value, Call):
            yield from _within(value.arguments)
        elif isinstance(value, Range):
            yield from _within((value.first, value.last))
        elif isinstance(value, Binary):
            yield from _within((value.left, value.right))
        elif isinstance(value, Negate):
            yield from _within((value.operand,))


# --- What was meant by a key that a block does not have, or by a kind that a block does not come in

# Keys of grouped queries that latent attention has not → why, and what to do.
OF_GROUPED: dict[str, str] = {
    "kv_heads": "whose query heads have keys of their own: remove it",
    "bias": "whose projections have no biases: remove it",
    "qk_norm": "whose latents have norms, and whose heads have none: remove it",
    "output_gate": "which has no gate: remove it",
    **dict.fromkeys(
        ("window", "sinks", "softcap"), "whose kernels compute a plain softmax over all earlier tokens: remove it"
    ),
}


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
    is_last = inside or statement.key.span.source.name == OVERRIDE
    inherited = set() if is_last else {key for key in keys if block.gives(key)}  # what stands beside may be overridden
    taken = {*beside, *(ALTERNATIVES.get(key, "") for key in beside), *inherited} - {"layers"}
    free = [key for key in keys if key not in taken]
    value = statement.phrase.span.text if isinstance(statement, Attribute) else "…"
    said = vocabulary.said_in(word, place, value)
    if said:
        meant = {each.rpartition(".")[2] for each in vocabulary.places(word)}
        return meant & {*free}, said, ()
    alias = key if (key := vocabulary.key_in(word, place)) in keys else ""  # not of a block of another kind
    if alias in free:
        return {alias}, f"did you mean `{alias}`?", ()
    home = _home(word, place, cls)
    elsewhere = "" if alias else vocabulary.said_elsewhere(word, value)
    if elsewhere and not home:
        return set(), elsewhere, ()
    absent = [key for key in free if key in _required(cls) and not block.gives(key)]
    close = () if alias else nearest(word, absent) or nearest(word, free)
    if len(keys) <= 2 and keys[0] in free and edits(word, keys[0]) == 1:  # too short a word to be near: `fnn`
        close = (keys[0],)
    if close:
        fitting = [key for key in close if _is_block(cls, key) in (isinstance(statement, Block), None)]
        form = "value" if isinstance(statement, Block) else "block"
        shown = listed(fitting, "or") if fitting else f"the {form} {listed(close, 'or')}"
        return {*close}, f"did you mean {shown}?{f' If not, {home}' if home else ''}", ()
    same = next((key for key in (alias, *nearest(word, taken & {*keys})) if key), "")
    given = same if same in beside else ALTERNATIVES.get(same, "")
    if given in beside:
        return set(), f"remove it, or change `{given}`", (Note(f"`{given}` is given here", beside[given]),)
    return set(), home or f"`{_head(cls, block)}` takes {listed(keys, 'and')}", ()


def _is_block(cls: type[Node], key: str) -> bool | None:
    """Whether a key is written as a block, not as a value; None if either may be."""
    kind = fields_of(cls).get(key)
    if kind is None or key in NAMED or kind.types == (Tile,) or kind.form == "tokenizer":
        return False
    return None if kind.form == "batch" else bool(kind.nodes) or kind.form in ("layers", "rate", "entries")


def _home(key: str, place: str, cls: type[Node]) -> str:
    """Name the blocks of the language that have a key; "" where none has it."""
    from dsl.reference.keys import blocks, plain, told_at

    here = told_at(place)
    found = [block for block in blocks() if any(each.name == key for each in block.keys)]
    beside = [block for block in found if plain(block.path) == (here or "run")]
    if beside:  # of another kind
        heads = listed([block.head for block in beside], "or")
        why = OF_GROUPED.get(key, "") if cls is Mla else ""
        return f"it is a key of {heads}, and this is `{_head_of_kind(beside[0].head, cls)}`{why and ', '}{why}"
    braces = list(dict.fromkeys(f"{block.head} {{ … }}" for block in found))
    owner = ".".join(found[0].path.split(".")[: -len(found[0].head.split())]) if len(found) == 1 else ""
    return f"move it into {listed(braces, 'or')}{f' of `{owner}`' if owner else ''}" if found else ""


def _head_of_kind(head: str, cls: type[Node]) -> str:
    return f"{head.partition(' ')[0]} {cls.model_fields['kind'].default}"


def _head(cls: type[Node], block: Block) -> str:
    """How a block begins, without its name: `attention gqa`, `train`."""
    return _head_of_kind(block.key.text, cls) if "kind" in cls.model_fields else block.key.text


def _required(cls: type[Node]) -> set[str]:
    """The keys that a block must give."""
    names = {name for name, kind in fields_of(cls).items() if kind.required}
    return names | {ALTERNATIVES[name] for name in names if name in ALTERNATIVES}


def kind_hint(path: str, word: str, kinds: Iterable[str]) -> str:
    """A hint for a kind that a block at a path does not come in, or a precision that there is not."""
    place = ".".join(part for part in path.split(".") if not part.isdigit())
    return vocabulary.word_at(word, place) or suggest(word, kinds)
