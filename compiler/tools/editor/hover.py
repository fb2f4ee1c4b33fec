"""What is known of the word under the pointer: what it means, and what it comes to in this run."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from compiler.tools.editor import block_keys, outline, resolved, texts
from compiler.tools.editor.block_keys import Inside
from compiler.tools.editor.block_summary import summary
from compiler.tools.editor.open_text import LET, Document
from compiler.tools.editor.outline import Place, Token
from dsl.resolve.merge import PHASE
from dsl.schema import BUILT_IN, Spec
from dsl.schema.fields import fields_of
from dsl.text.syntax import KINDS, NAMED


@dataclass(frozen=True)
class Hover:
    """Markdown about characters `start` to `end`."""

    text: str
    start: int
    end: int


def hover(document: Document, offset: int) -> Hover | None:
    """About the word at character `offset`, or None where nothing is known of it."""
    place = outline.place(document.source.text, document.file, offset)
    token, statement = place.token, place.statement
    if place.comment or token is None or statement is None:
        return None
    text = _about(document, block_keys.inside(place.block.path()), place, statement, token)
    return Hover(text, token.start, token.end) if text else None


def _about(document: Document, where: Inside, place: Place, statement: outline.Node, token: Token) -> str:
    if statement.key == "import":
        return ""
    if where.form == "file":
        return _of_file(document, statement, token)
    if where.form == "rate":
        return _with_values(document, statement, statement.key)
    if token in statement.head[:1]:
        return _key(document, where, statement)
    if token in statement.head:
        return _label(document, where, statement, token)
    return _value(document, where, statement, token)


def _of_file(document: Document, statement: outline.Node, token: Token) -> str:
    kind, words = statement.key, [each.text for each in statement.head]
    if kind == LET:
        if token in statement.value and token.kind == "word":
            return _reference(document, token)
        value = resolved.let(document.analysis, document.source, statement)
        return _joined(texts.title(" ".join(words), ""), f"= {value}" if value else "")
    if kind not in KINDS:
        return ""
    if token in statement.head[:1]:
        return texts.title(kind, texts.block(kind))
    if token.text in words[1:2] or (token.text in words[3:4] and words[2] == "extends"):
        return _named(document, kind, token.text)
    return ""


def _named(document: Document, kind: str, name: str) -> str:
    if kind == "precision" and name in BUILT_IN and (kind, name) not in document.names:
        return texts.title(f"precision {name}", "built in")
    if (kind, name) not in document.names:
        return ""
    return texts.title(f"{kind} {name}", summary(document.analysis, kind, name))


def _key(document: Document, where: Inside, statement: outline.Node) -> str:
    key = statement.key
    if where.form == "batch":
        meaning = block_keys.BATCH_KEYS[key][1] if key in block_keys.BATCH_KEYS else ""
        return texts.title(key, meaning) if meaning else ""
    if key == PHASE and where.cls is Spec and not where.of_phase:
        return texts.title(key, texts.word(key))
    is_key = where.form == "class" and key in block_keys.every_key(where.cls)
    if not is_key:
        return ""
    about = texts.key(where.at(key)) or texts.block(where.at(key))
    return _joined(texts.title(key, ""), *_values(document, statement), about)


def _label(document: Document, where: Inside, statement: outline.Node, token: Token) -> str:
    """The kind of a block, the range of layers."""
    if statement.key == "layers":
        return _joined(*_values(document, statement))
    if statement.key == PHASE and where.cls is Spec and not where.of_phase:
        return texts.title(f"phase {token.text}", resolved.phase(document.analysis, statement))
    meaning = texts.block(f"{where.at(statement.key)}.{token.text}")
    return texts.title(f"{statement.key} {token.text}", meaning) if meaning else ""


def _value(document: Document, where: Inside, statement: outline.Node, token: Token) -> str:
    key = statement.key
    if where.form == "class" and where.cls is Spec and key in NAMED:
        return _named(document, key, token.text)
    if token.kind == "word":
        found = _reference(document, token)
        if found:
            return found
        kind = fields_of(where.cls).get(key) if where.form == "class" else None
        if kind is not None and token.text in block_keys.values(kind):
            return texts.title(token.text, texts.choice(where.at(key), token.text) or texts.key(where.at(key)))
    return _with_values(document, statement, f"{key} = {' '.join(each.text for each in statement.value)}")


def _reference(document: Document, token: Token) -> str:
    found = resolved.reference(document.analysis, document.source, token)
    if found is None:
        return ""
    target, value = found
    text = f"{target.span.text}"
    return _joined(
        f"```dsc\n{text}\n```",
        f"= {value}" if value else "",
        f"{posixpath.basename(target.span.source.name)}:{target.span.line}",
    )


def _values(document: Document, statement: outline.Node) -> tuple[str, ...]:
    return tuple(f"= {text}" for text in resolved.values(document.analysis, document.source, statement))


def _with_values(document: Document, statement: outline.Node, title: str) -> str:
    """What a statement comes to; nothing where that is what it says."""
    values = _values(document, statement)
    return _joined(texts.title(title, ""), *values) if values else ""


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
