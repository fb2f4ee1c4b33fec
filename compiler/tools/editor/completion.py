"""What may be written at the cursor. Only tokens and braces are looked at, so the text need not parse."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from compiler.tools.editor import block_keys, outline, texts
from compiler.tools.editor.block_keys import Inside
from compiler.tools.editor.items import Item
from compiler.tools.editor.open_text import Document
from compiler.tools.editor.outline import Place
from compiler.tools.editor.value_words import rate_items, value_items
from dsl.resolve.merge import PHASE
from dsl.schema import Spec
from dsl.schema.fields import fields_of
from dsl.text.syntax import KINDS, NAMED

Lister = Callable[[str], list[str]]  # path of a folder → the names in it, those of folders with a `/` at the end
STATEMENTS = {  # of a file
    "run": "run ${1:pretrain} {\n  model = $2\n  cluster = $3\n  precision = ${4:bf16}\n  $0\n}",
    "model": "model ${1:name} {\n  $0\n}",
    "cluster": "cluster ${1:name} {\n  $0\n}",
    "precision": "precision ${1:name} {\n  $0\n}",
    "import": 'import "$1"',
    "let": "let ${1:name} = $2",
}

PHASE_SNIPPET = "phase ${1:long} {\n  train { sequence = ${2:32_768}, batch = ${3:32}, steps = ${4:1000} }\n}"


def complete(document: Document, offset: int, lister: Lister) -> tuple[Item, ...]:
    """Proposals for the cursor before character `offset`, best first. They are not narrowed to what is typed so far."""
    place = outline.place(document.source.text, document.file, offset)
    if place.comment:
        return ()
    start, end = (place.token.start, place.token.end) if place.token is not None else (offset, offset)
    return tuple(replace(item, start=start, end=end) for item in _items(document, place, offset, lister))


def _items(document: Document, place: Place, offset: int, lister: Lister) -> Iterable[Item]:
    where, statement = block_keys.inside(place.block.path()), place.statement
    if where.form == "rate":
        return rate_items(place)
    if statement is None or not place.before:
        return _keys(where, place)
    if statement.key == "import":
        return _imports(document, place, offset, lister)
    if place.token is not None and place.token.kind == "string":
        return ()
    if statement.equals is None or statement.equals.start >= offset:
        return _labels(document, where, place)
    return value_items(document, where, place)


def _keys(where: Inside, place: Place) -> Iterator[Item]:
    """Keys of a block that it has not yet; only the word where the rest of the statement is there already."""
    statement = place.statement
    stands = statement is not None and (
        statement.equals is not None or statement.opened is not None or len(statement.head) > 1
    )
    taken = set() if where.form == "file" else block_keys.given(place.block)
    taken -= {statement.key} if statement is not None else set()
    for item in _all_keys(where):
        if item.label not in taken:
            yield replace(item, snippet="") if stands else item


def _all_keys(where: Inside) -> Iterator[Item]:
    if where.form == "file":
        for name, text in STATEMENTS.items():
            yield Item(name, "block" if name in KINDS else "word", snippet=text)
    elif where.form == "batch":
        for name, (text, meaning) in block_keys.BATCH_KEYS.items():
            yield Item(name, "key", meaning, snippet=block_keys.placeholders(text))
    elif where.form == "class":
        fields = fields_of(where.cls)
        for name in block_keys.keys_in(where):
            is_block = name in fields and block_keys.is_block(fields[name]) and name not in NAMED
            detail = "required" if block_keys.required(where.cls, name) and not where.of_phase else ""
            documentation, snippet = texts.key(where.at(name)), block_keys.snippet(where.cls, name)
            yield Item(name, "block" if is_block else "key", detail, documentation, snippet)
        if where.cls is Spec and not where.of_phase:
            yield Item(PHASE, "block", "", texts.word(PHASE), PHASE_SNIPPET)


def _labels(document: Document, where: Inside, place: Place) -> Iterator[Item]:
    """Words between a key and its brace: the kind of a block, what it extends."""
    assert place.statement is not None
    key, before = place.statement.key, [token.text for token in place.before]
    if where.form == "file":
        if before[-1:] == ["extends"]:
            yield from (Item(name, "name", key) for name in document.names_of(key) if [name] != before[1:2])
        elif key in KINDS and len(before) == 2:
            yield Item("extends", "word", "take from another one what this one does not say")
    elif where.form == "class" and len(before) == 1 and key in fields_of(where.cls):
        for name, cls in block_keys.kinds_of(fields_of(where.cls)[key]).items():
            snippet = (
                "" if place.statement.opened is not None else block_keys.placeholders(block_keys.block_text(name, cls))
            )
            yield Item(name, "value", documentation=texts.block(f"{where.at(key)}.{name}"), snippet=snippet)


def _imports(document: Document, place: Place, offset: int, lister: Lister) -> Iterator[Item]:
    """Specs and folders beside the document, or in the folder that is typed so far."""
    token = place.token
    typed = token.text[1 : offset - token.start] if token is not None and token.kind == "string" else ""
    folder = typed.rpartition("/")[0]
    here = posixpath.normpath(posixpath.join(posixpath.dirname(document.source.name), folder))
    for name in lister(here):
        if name.endswith((".dsc", "/")) and posixpath.join(here, name) != document.source.name:
            path = f'"{posixpath.join(folder, name)}"'
            snippet = f'{block_keys.escaped(path[:-1])}$0"' if name.endswith("/") else ""  # go on behind the slash
            yield Item(path, "file", snippet=snippet)
