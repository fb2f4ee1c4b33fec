"""Completion at the cursor. It uses only tokens and braces, so the text need not parse."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import get_origin

from compiler.tools.editor import block_keys, outline, texts
from compiler.tools.editor.block_keys import BlockKind, CompletionItem
from compiler.tools.editor.outline import LET, CursorPlace, OpenDocument, OutlineToken
from dsl.facts import units
from dsl.resolve import derive
from dsl.resolve.forms import CLAUSES, SHAPES
from dsl.resolve.merge import PHASE
from dsl.schema import BUILT_IN, Node, Spec, StoredUnit
from dsl.schema.base import WORDS_AS_TEXT, FieldType, fields_of
from dsl.text.syntax import KINDS, NAMED

# --- Values: words, names, units after a number, references, phases

TOKENS, STEPS = StoredUnit("token", bare=True), StoredUnit("step", bare=True)
OPERATORS = ("+", "-", "*", "/", "(")


def value_items(document: OpenDocument, block: BlockKind, place: CursorPlace) -> Iterable[CompletionItem]:
    """Proposals after the `=` of a statement."""
    statement = place.statement
    assert statement is not None and statement.equals is not None
    before = [token for token in place.before if token.start > statement.equals.start]
    if statement.key == LET:
        return _numbers(document, place, before, None)
    if block.form == "batch":
        return _numbers(document, place, before, TOKENS if statement.key == "over" else None)
    if block.form != "class":
        return ()
    if statement.key == "steps":
        return _numbers(document, place, before, STEPS)
    kind = fields_of(block.cls).get(statement.key)
    return _complete_value(document, block, statement.key, kind, place, before) if kind is not None else ()


def _complete_value(
    document: OpenDocument, block: BlockKind, key: str, kind: FieldType, place: CursorPlace, before: list[OutlineToken]
) -> Iterator[CompletionItem]:
    first = not before
    if key in NAMED and block.cls is Spec:
        yield from _names(document, key) if first else ()
    elif kind.form == "phases":
        yield from _phases(before, place)
    elif block_keys.values(kind):
        yield from _words(block.path_of(key), kind, place, first)
    elif kind.form == "tokenizer" and first:
        yield CompletionItem(
            "train(4096)", "value", "train one on the data, with this vocabulary size", snippet="train(${1:4096})"
        )
        yield CompletionItem('"tokenizer.json"', "value", "a file", snippet='"${1:tokenizer.json}"')
    elif str in kind.types and first:
        yield from (CompletionItem(word, "value") for word in sorted(WORDS_AS_TEXT) if key == "source")
    elif {int, float, Fraction} & {*kind.types} or kind.form == "batch":
        takes_word = first and (place.token is None or place.token.kind == "word")
        if takes_word and kind.optional:
            yield CompletionItem("none", "value", "without")
        if takes_word and key in derive.DEFAULTS.get(block.cls, {}):
            yield CompletionItem("auto", "value", "derived from other keys")
        yield from _numbers(document, place, before, kind.unit, float in kind.types)


def _names(document: OpenDocument, kind: str) -> Iterator[CompletionItem]:
    names = document.names_of(kind)
    yield from (CompletionItem(name, "name", kind) for name in names)
    if kind == "precision":
        yield from (CompletionItem(name, "name", "built in") for name in BUILT_IN if name not in names)


def _words(path: str, kind: FieldType, place: CursorPlace, first: bool) -> Iterator[CompletionItem]:
    """The words of an enum; in a list, those that it lacks."""
    statement = place.statement
    assert statement is not None
    if get_origin(kind.types[0]) is not tuple:
        yield from (
            CompletionItem(word, "value", texts.choice(path, word)) for word in block_keys.values(kind) if first
        )
    elif first:
        yield CompletionItem("[ ]", "value", "a list", snippet="[$0]")
    else:
        present = {token.text for token in statement.value if token is not place.token}
        yield from (
            CompletionItem(word, "value", texts.choice(path, word))
            for word in block_keys.values(kind)
            if word not in present
        )


def _numbers(
    document: OpenDocument, place: CursorPlace, before: list[OutlineToken], unit: StoredUnit | None, share: bool = False
) -> Iterator[CompletionItem]:
    """Units after a number; elsewhere names of numbers."""
    token = place.token
    if token is not None and token.kind == "number":
        yield from _units(token, unit, share)
    elif before and before[-1].kind == "number":
        yield from _unit_word(before[-1], unit)
    elif not before or before[-1].text in OPERATORS:
        yield from _references(document, place)


# ---------------------------------------------------------------- units
def _units(token: OutlineToken, unit: StoredUnit | None, share: bool = False) -> Iterator[CompletionItem]:
    """A number with each unit that its field accepts."""
    match = units.NUMBER.match(token.text)
    assert match is not None
    if unit is not None:
        yield from (CompletionItem(match["mantissa"] + suffix, "unit") for suffix, _ in units.SUFFIXES[unit.name])
    elif share:
        yield CompletionItem(match["mantissa"] + "%", "unit")


def _unit_word(number: OutlineToken, unit: StoredUnit | None) -> Iterator[CompletionItem]:
    """`tokens` or `steps` after a number that has no unit yet; `10T` has none."""
    match = units.NUMBER.match(number.text)
    assert match is not None
    if unit in (TOKENS, STEPS) and match["suffix"] in units.COUNTS:
        yield CompletionItem(f"{unit.name}s", "unit")


# ---------------------------------------------------------------- references
def _references(document: OpenDocument, place: CursorPlace) -> Iterator[CompletionItem]:
    """`let`s and keys of the enclosing blocks; after a dot, the keys of the block before it."""
    typed = place.token.text if place.token is not None else ""
    if "." in typed:
        yield from _complete_dotted_name(place, typed.split(".")[:-1])
        return
    items: dict[str, CompletionItem] = {}
    for block in [*reversed(place.block.path()), document.file]:
        for statement in block.body:
            is_let = statement.key == LET and len(statement.head) > 1
            name = statement.head[1].text if is_let else statement.key
            if statement is not place.statement and (is_let or (block is not document.file and statement.equals)):
                value = " ".join(token.text for token in statement.value)
                items.setdefault(name, CompletionItem(name, "reference", f"= {value}"))
    for name in document.names_of(LET):  # also from imported files
        items.setdefault(name, CompletionItem(name, "reference", LET))
    yield from items.values()


def _complete_dotted_name(place: CursorPlace, parts: list[str]) -> Iterator[CompletionItem]:
    """The keys of the block that a dotted name refers to, from the schema."""
    path = place.block.path()
    enclosing = [block_keys.kind_of_block(path[: index + 1]).cls for index in range(len(path))]
    classes: tuple[type[Node], ...] = ()
    for cls in (*reversed(enclosing), Spec):
        if parts[0] in fields_of(cls):
            classes = fields_of(cls)[parts[0]].nodes
            break
    for part in parts[1:]:
        classes = tuple(inner for cls in classes if part in fields_of(cls) for inner in fields_of(cls)[part].nodes)
    items: dict[str, CompletionItem] = {}
    for cls in classes:  # the kinds of a block share keys
        for name, kind in fields_of(cls).items():
            if kind.form not in ("label", "layers", "rate"):
                meaning = cls.model_fields[name].description or ""
                items.setdefault(name, CompletionItem(".".join([*parts, name]), "reference", meaning))
    yield from items.values()


# ---------------------------------------------------------------- phases and learning rates
def _duration(place: CursorPlace, before: list[OutlineToken]) -> Iterator[CompletionItem]:
    """Units of the duration at the cursor."""
    for unit in (TOKENS, STEPS):
        if place.token is not None and place.token.kind == "number":
            yield from _units(place.token, unit)
        elif before and before[-1].kind == "number":
            yield from _unit_word(before[-1], unit)


def _phases(before: list[OutlineToken], place: CursorPlace) -> Iterator[CompletionItem]:
    """The words of a value by phases, such as `0.3 until 10T tokens then 0.1`."""
    words = [token.text for token in before]
    last = next((word for word in reversed(words) if word in ("until", "then")), "")
    tail = words[len(words) - words[::-1].index(last) :] if last else words
    if last == "until":
        yield from _duration(place, before)
        if tail:
            yield CompletionItem("then", "word", "the value that follows")
    elif tail:
        yield CompletionItem("until", "word", "where this value ends, in tokens or steps")


def rate_items(place: CursorPlace) -> Iterator[CompletionItem]:
    """The words of a learning-rate line: its shape, then clauses, each at most once."""
    before, words = list(place.before), [token.text for token in place.before]
    if not words:
        alone = place.statement is None or len(place.statement.head) < 2
        yield from (
            CompletionItem(name, "word", snippet=block_keys.phase_snippet(name) if alone else "") for name in SHAPES
        )
        return
    clause = next((word for word in reversed(words) if word in CLAUSES), "over")
    if clause in ("over", "until"):
        yield from _duration(place, before)
    if words[-1] in CLAUSES or (place.token is not None and place.token.kind == "number"):
        return
    ended = {"until", "over"} & set(words) or (len(words) > 1 and words[1] not in CLAUSES)
    for name in ("at", "until", "over") if SHAPES.get(words[0]) == "constant" else ("to", "from", "until", "over"):
        if name not in words and not (ended and name in ("until", "over")):
            yield CompletionItem(name, "word")


# --- All proposals

Lister = Callable[[str], list[str]]  # path of a folder → names in it, with a `/` after subfolders
STATEMENTS = {  # top-level statements
    "run": "run ${1:pretrain} {\n  model = $2\n  cluster = $3\n  precision = ${4:bf16}\n  $0\n}",
    "model": "model ${1:name} {\n  $0\n}",
    "cluster": "cluster ${1:name} {\n  $0\n}",
    "precision": "precision ${1:name} {\n  $0\n}",
    "import": 'import "$1"',
    "let": "let ${1:name} = $2",
}
PHASE_SNIPPET = "phase ${1:long} {\n  train { sequence = ${2:32_768}, batch = ${3:32}, steps = ${4:1000} }\n}"


def complete(document: OpenDocument, offset: int, lister: Lister) -> tuple[CompletionItem, ...]:
    """Proposals for the cursor before character `offset`, best first, not filtered by the typed text."""
    place = outline.place(document.source.text, document.file, offset)
    if place.comment:
        return ()
    start, end = (place.token.start, place.token.end) if place.token is not None else (offset, offset)
    return tuple(replace(item, start=start, end=end) for item in _items(document, place, offset, lister))


def _items(document: OpenDocument, place: CursorPlace, offset: int, lister: Lister) -> Iterable[CompletionItem]:
    inside, statement = block_keys.kind_of_block(place.block.path()), place.statement
    if inside.form == "rate":
        return rate_items(place)
    if statement is None or not place.before:
        return _keys(inside, place)
    if statement.key == "import":
        return _imports(document, place, offset, lister)
    if place.token is not None and place.token.kind == "string":
        return ()
    if statement.equals is None or statement.equals.start >= offset:
        return _labels(document, inside, place)
    return value_items(document, inside, place)


def _keys(block: BlockKind, place: CursorPlace) -> Iterator[CompletionItem]:
    """The keys that a block lacks; only the word if the rest of the statement exists already."""
    statement = place.statement
    is_complete = statement is not None and (
        statement.equals is not None or statement.opened is not None or len(statement.head) > 1
    )
    present = set() if block.form == "file" else block_keys.present_keys(place.block)
    present -= {statement.key} if statement is not None else set()
    for item in _all_keys(block):
        if item.label not in present:
            yield replace(item, snippet="") if is_complete else item


def _all_keys(block: BlockKind) -> Iterator[CompletionItem]:
    if block.form == "file":
        for name, text in STATEMENTS.items():
            yield CompletionItem(name, "block" if name in KINDS else "word", snippet=text)
    elif block.form == "batch":
        for name, (text, meaning) in block_keys.BATCH_KEYS.items():
            yield CompletionItem(name, "key", meaning, snippet=block_keys.placeholders(text))
    elif block.form == "class":
        fields = fields_of(block.cls)
        for name in block_keys.keys_in(block):
            is_block = name in fields and block_keys.is_block(fields[name]) and name not in NAMED
            detail = "required" if block_keys.is_required(block.cls, name) and not block.is_in_phase else ""
            documentation, snippet = texts.key(block.path_of(name)), block_keys.snippet(block.cls, name)
            yield CompletionItem(name, "block" if is_block else "key", detail, documentation, snippet)
        if block.cls is Spec and not block.is_in_phase:
            yield CompletionItem(PHASE, "block", "", texts.word(PHASE), PHASE_SNIPPET)


def _labels(document: OpenDocument, block: BlockKind, place: CursorPlace) -> Iterator[CompletionItem]:
    """Words between a key and its brace: the kind of a block, or `extends` and a name."""
    assert place.statement is not None
    key, before = place.statement.key, [token.text for token in place.before]
    if block.form == "file":
        if before[-1:] == ["extends"]:
            yield from (CompletionItem(name, "name", key) for name in document.names_of(key) if [name] != before[1:2])
        elif key in KINDS and len(before) == 2:
            yield CompletionItem("extends", "word", "inherit missing keys from another block")
    elif block.form == "class" and len(before) == 1 and key in fields_of(block.cls):
        for name, cls in block_keys.kinds_of(fields_of(block.cls)[key]).items():
            snippet = (
                "" if place.statement.opened is not None else block_keys.placeholders(block_keys.block_text(name, cls))
            )
            yield CompletionItem(
                name, "value", documentation=texts.block(f"{block.path_of(key)}.{name}"), snippet=snippet
            )


def _imports(document: OpenDocument, place: CursorPlace, offset: int, lister: Lister) -> Iterator[CompletionItem]:
    """Specs and folders next to the document, or in the folder typed so far."""
    token = place.token
    typed = token.text[1 : offset - token.start] if token is not None and token.kind == "string" else ""
    folder = typed.rpartition("/")[0]
    directory = posixpath.normpath(posixpath.join(posixpath.dirname(document.source.name), folder))
    for name in lister(directory):
        if name.endswith((".dsc", "/")) and posixpath.join(directory, name) != document.source.name:
            path = f'"{posixpath.join(folder, name)}"'
            snippet = (
                f'{block_keys.escape_snippet(path[:-1])}$0"' if name.endswith("/") else ""
            )  # continue after the slash
            yield CompletionItem(path, "file", snippet=snippet)
