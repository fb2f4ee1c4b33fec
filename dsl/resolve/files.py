"""Files to definitions: imports, and later blocks that override earlier ones. This module reads; the rest is pure."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from dsl.diagnostics import Diagnostic, Note
from dsl.parser import MAX_BYTES, decode, parse
from dsl.resolve.merge import merge, unique
from dsl.source import Source, Span
from dsl.syntax import Attribute, Block, Document, Import, Let, Line, Lost, Statement

KINDS = ("run", "model", "cluster", "precision")
MAX_FILES = 64
MAX_ALL_WORDS = 100_000  # of all files; some five seconds
MAX_BLOCKS = 256  # of one file, each of which may be a run to resolve
Reader = Callable[[str], tuple[Source, tuple[Diagnostic, ...]]]  # path → its text, or why there is none


@dataclass
class Definitions:
    """What the files of a spec define, later definitions merged over earlier ones."""

    blocks: dict[tuple[str, str], Block] = field(default_factory=dict)  # by (kind, name)
    lets: dict[str, Let] = field(default_factory=dict)
    own: tuple[tuple[str, str], ...] = ()  # blocks that the first file itself defines
    sources: list[Source] = field(default_factory=list)  # in the order they were read
    mistakes: list[Diagnostic] = field(default_factory=list)
    damaged: bool = False  # some statement of the outermost level could not be read
    broken: bool = False  # in some file braces do not match
    num_words: int = 0  # of all files

    def complain(self, code: str, message: str, span: Span | None, hint: str = "", *notes: Note) -> None:
        self.mistakes.append(Diagnostic(code, message, span, hint, notes))


def content_of(path: str) -> tuple[bytes, tuple[Diagnostic, ...]]:
    """The bytes of a file. Only regular files are opened, so a pipe or a device cannot hang the reader."""
    name = os.path.normpath(path)
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            return b"", (Diagnostic("E0101", f"{name} is not a regular file"),)
        with Path(path).open("rb") as file:
            return file.read(MAX_BYTES + 1), ()
    except FileNotFoundError:
        return b"", (Diagnostic("E0101", f"there is no file {name}"),)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "the path is not valid"
        return b"", (Diagnostic("E0101", f"{name} cannot be read: {reason}"),)


def read(path: str) -> tuple[Source, tuple[Diagnostic, ...]]:
    """The source of a file."""
    name = os.path.normpath(path)
    content, mistakes = content_of(path)
    return (Source(name, ""), mistakes) if mistakes else decode(name, content)


def over(texts: Mapping[str, str]) -> Reader:
    """A reader for an editor: its unsaved texts, by real path, take the place of the files; others are read."""

    def reader(path: str) -> tuple[Source, tuple[Diagnostic, ...]]:
        text = texts.get(os.path.realpath(path))
        return read(path) if text is None else decode(os.path.normpath(path), text.encode("utf-8", "replace"))

    return reader


def collect(path: str, reader: Reader = read) -> Definitions:
    """Everything that a file and its imports define. An import comes before the rest of its file."""
    found = Definitions()
    source, mistakes = reader(path)
    found.sources.append(source)
    if mistakes:
        found.mistakes += mistakes
        found.broken = True
        return found
    document = _parsed(found, source)
    _visit(found, document, reader, (os.path.realpath(path),), {os.path.realpath(path)})
    names = (_name(block) for block in document.body if isinstance(block, Block))
    found.own = tuple(name for name in names if name in found.blocks)
    return found


def _parsed(found: Definitions, source: Source) -> Document:
    parsed = parse(source)
    found.mistakes += parsed.diagnostics
    found.broken = found.broken or parsed.broken
    found.num_words += parsed.num_words
    blocks = [each for each in parsed.document.body if isinstance(each, Block)]
    if len(blocks) > MAX_BLOCKS:
        message, hint = f"{source.name} has more than {MAX_BLOCKS} blocks", "put some of them into another file"
        found.complain("E0102", message, blocks[MAX_BLOCKS].head, hint)
        found.broken = True
    return Document(source, ()) if parsed.broken or len(blocks) > MAX_BLOCKS else parsed.document


def _visit(found: Definitions, document: Document, reader: Reader, chain: tuple[str, ...], seen: set[str]) -> None:
    for statement in document.body:
        if isinstance(statement, Import):
            _import(found, document, statement, reader, chain, seen)
    blocks: dict[tuple[str, str], Block] = {}
    lets: dict[str, Let] = {}
    for statement in document.body:
        if isinstance(statement, Block):
            key = _checked(found, statement)
            if key is not None:
                block = unique(statement, found.mistakes)
                blocks[key] = merge(blocks[key], block, found.mistakes) if key in blocks else block
        elif isinstance(statement, Let):
            if statement.name.text in lets:
                _twice(found, statement, lets[statement.name.text].span)
            lets[statement.name.text] = statement
        elif not isinstance(statement, Import):
            _stray(found, statement)
    for key, block in blocks.items():
        found.blocks[key] = merge(found.blocks[key], block, found.mistakes) if key in found.blocks else block
    found.lets |= lets


def _import(
    found: Definitions,
    document: Document,
    statement: Import,
    reader: Reader,
    chain: tuple[str, ...],
    seen: set[str],
) -> None:
    written, span = statement.path.value, statement.path.span
    if written.startswith("/") or "\\" in written or ":" in written or not written.endswith(".dsc"):
        hint = 'write a path from this file on, as in `import "models/deepseek-v3.dsc"`'
        found.complain("E0503", f'"{written}" is not a relative path to a .dsc file', span, hint)
        found.damaged = True
        return
    path = str(Path(document.source.name).parent / written)
    real = os.path.realpath(path)
    if real in chain:
        found.complain("E0502", f'"{written}" is imported by what it imports', span, "remove one of the imports")
        return
    if real in seen:
        return
    seen.add(real)
    if len(seen) > MAX_FILES or found.num_words > MAX_ALL_WORDS:
        most = f"{MAX_FILES} files" if len(seen) > MAX_FILES else f"{MAX_ALL_WORDS:,} words"
        found.complain("E0102", f"more than {most} are imported", span)
        found.broken = True
        return
    source, mistakes = reader(path)
    if mistakes:
        missing = mistakes[0].span is None
        found.mistakes += (
            [Diagnostic("E0501", f"the import cannot be read: {mistakes[0].message}", span, _nearby(path, written))]
            if missing
            else mistakes
        )
        found.damaged = True
        return
    found.sources.append(source)
    _visit(found, _parsed(found, source), reader, (*chain, real), seen)


def _nearby(path: str, written: str) -> str:
    """The import that was probably meant, or the specs that lie where a missing one was looked for."""
    folder = Path(path).parent
    names = sorted(entry.name for entry in folder.glob("*.dsc")) if folder.is_dir() else []
    close = get_close_matches(Path(path).name, names, n=1, cutoff=0.6)
    if close:
        return f'write `import "{written.removesuffix(Path(path).name)}{close[0]}"`'
    names = names[:8]
    return f"{folder} holds {', '.join(names)}" if names else f"there are no .dsc files in {folder}"


def _name(block: Block) -> tuple[str, str]:
    label = block.labels[0] if len(block.labels) == 1 else None
    return block.key.text, getattr(label, "text", "")


def _checked(found: Definitions, block: Block) -> tuple[str, str] | None:
    """The kind and name of a block of the outermost level, if it has them."""
    kind, name = _name(block)
    if kind not in KINDS:
        hint = f"blocks of a file are {', '.join(f'`{known}`' for known in KINDS)}"
        found.complain("E0201", f"a file has no block `{kind}`", block.key.span, hint)
        return None
    if not name or not name.isidentifier():
        found.complain("E0205", f"a {kind} has one name", block.head, f"write `{kind} my_{kind} {{ … }}`")
        found.damaged = True
        return None
    return kind, name


def _twice(found: Definitions, statement: Let, first: Span) -> None:
    note = Note("first given here", first)
    found.complain("E0202", f"`{statement.name.text}` is given twice", statement.name.span, "remove one", note)


def _stray(found: Definitions, statement: Statement) -> None:
    if isinstance(statement, Lost):
        found.damaged = True
    elif isinstance(statement, Attribute):
        hint = f"put it into a block, or write `let {statement.key.text} = {statement.phrase.span.text}`"
        found.complain("E0204", f"`{statement.key.text}` is given outside of any block", statement.key.span, hint)
    else:
        assert isinstance(statement, Line)
        is_block = statement.head.text in KINDS and bool(statement.items)
        message = "has no block" if is_block else "is no statement"
        hint = f"write `{statement.head.text} name {{ … }}`" if is_block else "a file holds imports, lets and blocks"
        found.complain("E0108", f"`{statement.span.text}` {message}", statement.span, hint)
        found.damaged = True
