"""Guess what was meant by an unknown key or kind of a block."""

from __future__ import annotations

from collections.abc import Iterable

from dsl.facts import vocabulary
from dsl.messages.diagnostics import OVERRIDE, Note, listed
from dsl.messages.spelling import edits, nearest
from dsl.resolve.context import suggest
from dsl.resolve.merge import key_of
from dsl.schema import Mla, Node, Tile
from dsl.schema.base import fields_of
from dsl.text.syntax import ALTERNATIVES, NAMED, Attribute, Block

# Keys of `attention gqa` that `attention mla` lacks → reason and edit. Other keys get "remove it".
WHY_NOT_IN_MLA: dict[str, str] = {
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
    """Return (keys that count as given, hint, notes) for a statement with an unknown key in the block at a path.

    Keys that the block already has are never proposed. Missing required keys are proposed before others.
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
    inherited = set() if is_last else {key for key in keys if block.gives(key)}  # keys of a parent may be overridden
    taken = {*beside, *(ALTERNATIVES.get(key, "") for key in beside), *inherited} - {"layers"}
    free = [key for key in keys if key not in taken]
    value = statement.phrase.span.text if isinstance(statement, Attribute) else "…"
    hint = vocabulary.hint_in(word, place, value)
    if hint:
        meant = {each.rpartition(".")[2] for each in vocabulary.places(word)}
        return meant & {*free}, hint, ()
    alias = key if (key := vocabulary.key_in(word, place)) in keys else ""  # not a key of a block of another kind
    if alias in free:
        return {alias}, f"did you mean `{alias}`?", ()
    home = _home(word, place, cls)
    elsewhere = "" if alias else vocabulary.hint_elsewhere(word, value)
    if elsewhere and not home:
        return set(), elsewhere, ()
    absent = [key for key in free if key in _required(cls) and not block.gives(key)]
    close = () if alias else nearest(word, absent) or nearest(word, free)
    if len(keys) <= 2 and keys[0] in free and edits(word, keys[0]) == 1:  # too short for `nearest`, as `fnn`
        close = (keys[0],)
    if close:
        fitting = [key for key in close if _is_block(cls, key) in (isinstance(statement, Block), None)]
        form = "value" if isinstance(statement, Block) else "block"
        shown = listed(fitting, "or") if fitting else f"the {form} {listed(close, 'or')}"
        return {*close}, f"did you mean {shown}?{f' If not, {home}' if home else ''}", ()
    same = next((key for key in (alias, *nearest(word, taken & {*keys})) if key), "")
    present = same if same in beside else ALTERNATIVES.get(same, "")
    if present in beside:
        return set(), f"remove it, or change `{present}`", (Note(f"`{present}` is given here", beside[present]),)
    return set(), home or f"`{_head(cls, block)}` takes {listed(keys, 'and')}", ()


def _is_block(cls: type[Node], key: str) -> bool | None:
    """Whether a key is written as a block, not as a value; None if either may be."""
    kind = fields_of(cls).get(key)
    if kind is None or key in NAMED or kind.types == (Tile,) or kind.form == "tokenizer":
        return False
    return None if kind.form == "batch" else bool(kind.nodes) or kind.form in ("layers", "rate", "entries")


def _home(key: str, place: str, cls: type[Node]) -> str:
    """Hint that names the blocks that have a key; "" if there are none."""
    from dsl.reference.keys import blocks, documented_at, plain

    here = documented_at(place)
    found = [block for block in blocks() if any(each.name == key for each in block.keys)]
    beside = [block for block in found if plain(block.path) == (here or "run")]
    if beside:  # of another kind
        heads = listed([block.head for block in beside], "or")
        reason = WHY_NOT_IN_MLA.get(key, "remove it") if cls is Mla else ""
        return f"it is a key of {heads}, but this is `{_head_of_kind(beside[0].head, cls)}`{reason and ', '}{reason}"
    braces = list(dict.fromkeys(f"{block.head} {{ … }}" for block in found))
    owner = ".".join(found[0].path.split(".")[: -len(found[0].head.split())]) if len(found) == 1 else ""
    return f"move it into {listed(braces, 'or')}{f' of `{owner}`' if owner else ''}" if found else ""


def _head_of_kind(head: str, cls: type[Node]) -> str:
    return f"{head.partition(' ')[0]} {cls.model_fields['kind'].default}"


def _head(cls: type[Node], block: Block) -> str:
    """The head of a block without its name: `attention gqa`, `train`."""
    return _head_of_kind(block.key.text, cls) if "kind" in cls.model_fields else block.key.text


def _required(cls: type[Node]) -> set[str]:
    """The keys that a block must give."""
    names = {name for name, kind in fields_of(cls).items() if kind.required}
    return names | {ALTERNATIVES[name] for name in names if name in ALTERNATIVES}


def kind_hint(path: str, word: str, kinds: Iterable[str]) -> str:
    """Hint for an unknown kind of the block at a path, or an unknown precision."""
    place = ".".join(part for part in path.split(".") if not part.isdigit())
    return vocabulary.word_at(word, place) or suggest(word, kinds)
