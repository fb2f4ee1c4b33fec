"""Guess what was meant by an unknown key or kind of a block."""

from __future__ import annotations

from collections.abc import Iterable

from dsl.facts import vocabulary
from dsl.messages.diagnostics import OVERRIDE, Note, join_as_code
from dsl.messages.spelling import nearest_words, num_edits
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


def guess_key(
    path: str, cls: type[Node], block: Block, statement: Attribute | Block, keys: tuple[str, ...]
) -> tuple[set[str], str, tuple[Note, ...]]:
    """Return (keys that count as given, hint, notes) for a statement with an unknown key in the block at a path.

    Keys that the block already has are never proposed. Missing required keys are proposed before others.
    """
    word, place = statement.key.text, ".".join(part for part in path.split(".") if not part.isdigit())
    is_inside = block.encloses(statement.key.span)
    siblings = {
        key_of(sibling): sibling.key.span
        for sibling in block.body
        if isinstance(sibling, (Attribute, Block))
        and sibling.key.span.source == statement.key.span.source
        and block.encloses(sibling.key.span) == is_inside
    }
    is_last = is_inside or statement.key.span.source.name == OVERRIDE
    inherited = set() if is_last else {key for key in keys if block.has_key(key)}  # keys of a parent may be overridden
    used = {*siblings, *(ALTERNATIVES.get(key, "") for key in siblings), *inherited} - {"layers"}
    free = [key for key in keys if key not in used]
    value = statement.phrase.span.text if isinstance(statement, Attribute) else "…"
    hint = vocabulary.hint_in(word, place, value)
    if hint:
        names = {key_path.rpartition(".")[2] for key_path in vocabulary.paths_of(word)}
        return names & {*free}, hint, ()
    alias = key if (key := vocabulary.key_in(word, place)) in keys else ""  # not a key of a block of another kind
    if alias in free:
        return {alias}, f"did you mean `{alias}`?", ()
    home = _home(word, place, cls)
    hint_elsewhere = "" if alias else vocabulary.hint_elsewhere(word, value)
    if hint_elsewhere and not home:
        return set(), hint_elsewhere, ()
    absent = [key for key in free if key in _required_keys(cls) and not block.has_key(key)]
    close_keys = () if alias else nearest_words(word, absent) or nearest_words(word, free)
    if len(keys) <= 2 and keys[0] in free and num_edits(word, keys[0]) == 1:  # too short for `nearest_words`, as `fnn`
        close_keys = (keys[0],)
    if close_keys:
        fitting = [key for key in close_keys if _is_block(cls, key) in (isinstance(statement, Block), None)]
        form = "value" if isinstance(statement, Block) else "block"
        proposal = join_as_code(fitting, "or") if fitting else f"the {form} {join_as_code(close_keys, 'or')}"
        return {*close_keys}, f"did you mean {proposal}?{f' If not, {home}' if home else ''}", ()
    duplicate = next((key for key in (alias, *nearest_words(word, used & {*keys})) if key), "")
    present = duplicate if duplicate in siblings else ALTERNATIVES.get(duplicate, "")
    if present in siblings:
        return set(), f"remove it, or change `{present}`", (Note(f"`{present}` is given here", siblings[present]),)
    return set(), home or f"`{_head(cls, block)}` takes {join_as_code(keys, 'and')}", ()


def _is_block(cls: type[Node], key: str) -> bool | None:
    """Whether a key is written as a block, not as a value; None if either may be."""
    kind = fields_of(cls).get(key)
    if kind is None or key in NAMED or kind.types == (Tile,) or kind.form == "tokenizer":
        return False
    return None if kind.form == "batch" else bool(kind.nodes) or kind.form in ("layers", "rate", "entries")


def _home(key: str, place: str, cls: type[Node]) -> str:
    """Hint that names the blocks that have a key; "" if there are none."""
    from dsl.reference.keys import blocks, documented_path, without_kinds

    block_path = documented_path(place)
    homes = [block for block in blocks() if any(block_key.name == key for block_key in block.keys)]
    other_kinds = [block for block in homes if without_kinds(block.path) == (block_path or "run")]
    if other_kinds:  # of another kind
        heads = join_as_code([block.head for block in other_kinds], "or")
        reason = WHY_NOT_IN_MLA.get(key, "remove it") if cls is Mla else ""
        return (
            f"it is a key of {heads}, but this is `{_head_of_kind(other_kinds[0].head, cls)}`{reason and ', '}{reason}"
        )
    braces = list(dict.fromkeys(f"{block.head} {{ … }}" for block in homes))
    owner = ".".join(homes[0].path.split(".")[: -len(homes[0].head.split())]) if len(homes) == 1 else ""
    return f"move it into {join_as_code(braces, 'or')}{f' of `{owner}`' if owner else ''}" if homes else ""


def _head_of_kind(head: str, cls: type[Node]) -> str:
    return f"{head.partition(' ')[0]} {cls.model_fields['kind'].default}"


def _head(cls: type[Node], block: Block) -> str:
    """The head of a block without its name: `attention gqa`, `train`."""
    return _head_of_kind(block.key.text, cls) if "kind" in cls.model_fields else block.key.text


def _required_keys(cls: type[Node]) -> set[str]:
    """The keys that a block must give."""
    names = {name for name, kind in fields_of(cls).items() if kind.required}
    return names | {ALTERNATIVES[name] for name in names if name in ALTERNATIVES}


def kind_hint(path: str, word: str, kinds: Iterable[str]) -> str:
    """Hint for an unknown kind of the block at a path, or an unknown precision."""
    place = ".".join(part for part in path.split(".") if not part.isdigit())
    return vocabulary.word_hint_at(word, place) or suggest(word, kinds)
