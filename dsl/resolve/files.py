"""Read files into definitions: imports, and later blocks that override earlier ones.

Only this module of `dsl.resolve` reads files; the others are pure.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from dsl.messages.diagnostics import Diagnostic, Note, Source, Span
from dsl.resolve.exports import LET, Exports, Key, add_definition, join_exports
from dsl.resolve.merge import remove_duplicate_keys
from dsl.text.parser import MAX_BYTES, decode, parse
from dsl.text.syntax import KINDS, Attribute, Block, Document, Import, Let, Line, LostStatement, Statement, Word

RESOLVED = "spec.resolved"  # the spec in the folder of a build or run
MAX_FILES = 64
MAX_BESIDE = 1000  # files of a folder that the name of a missing file is compared with
MAX_ALL_WORDS = 100_000  # in all files; about five seconds of work
MAX_BLOCKS = 256  # in one file; each may be a run to resolve
Reader = Callable[[str], tuple[Source, tuple[Diagnostic, ...]]]  # path → its text, or the reasons why it cannot be read


@dataclass
class Definitions:
    """The definitions in the files of a spec, later ones merged over earlier ones."""

    blocks: dict[tuple[str, str], Block] = field(default_factory=dict)  # by (kind, name)
    lets: dict[str, Let] = field(default_factory=dict)
    of_first_file: tuple[tuple[str, str], ...] = ()  # (kind, name) of blocks that the first file itself defines
    body: tuple[Statement, ...] = ()  # statements of the first file, as written
    home: str = ""  # the folder of the first file
    # an imported file → its folder, relative to that of the first file
    folders: dict[str, str] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)  # in the order in which they were read
    mistakes: list[Diagnostic] = field(default_factory=list)
    damaged: bool = False  # a top-level statement could not be read
    broken: bool = False  # the braces of some file do not match
    num_words: int = 0  # in all files

    def complain(self, code: str, message: str, span: Span | None, hint: str = "", *notes: Note) -> None:
        self.mistakes.append(Diagnostic(code, message, span, hint, notes))


class FileContent(NamedTuple):
    """The bytes of a file, and the reasons why it cannot be read; b"" if there are any."""

    content: bytes
    mistakes: tuple[Diagnostic, ...]


def content_of(path: str) -> FileContent:
    """Read a file, or return the reasons why it cannot be read. Only regular files are opened, so that a pipe
    or device cannot block the reader."""
    name = os.path.normpath(path)
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            inside = Path(name, RESOLVED)
            hint = f"name a spec: the one of this folder is {inside}" if inside.is_file() else "name a .dsc file"
            return FileContent(b"", (Diagnostic("E0101", f"{name} is a folder, not a spec", hint=hint),))
        if not stat.S_ISREG(mode):
            return FileContent(b"", (Diagnostic("E0101", f"{name} is not a regular file"),))
        with Path(path).open("rb") as file:
            return FileContent(file.read(MAX_BYTES + 1), ())
    except FileNotFoundError:
        return FileContent(b"", (Diagnostic("E0101", f"there is no file {name}"),))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "the path is not valid"
        return FileContent(b"", (Diagnostic("E0101", f"{name} cannot be read: {reason}"),))


def read(path: str) -> tuple[Source, tuple[Diagnostic, ...]]:
    """Read and decode a file."""
    name = os.path.normpath(path)
    content, mistakes = content_of(path)
    return (Source(name, ""), mistakes) if mistakes else decode(name, content)


def reader_of_texts(texts: Mapping[str, str]) -> Reader:
    """A reader for an editor: it returns the unsaved texts, by real path, and reads all other files."""

    def reader(path: str) -> tuple[Source, tuple[Diagnostic, ...]]:
        text = texts.get(os.path.realpath(path))
        return read(path) if text is None else decode(os.path.normpath(path), text.encode("utf-8", "replace"))

    return reader


def collect(path: str, reader: Reader = read) -> Definitions:
    """Collect the definitions of a file and its imports. Imports come before the rest of their file."""
    definitions = Definitions(home=str(Path(path).parent))
    source, mistakes = reader(path)
    definitions.sources.append(source)
    if mistakes:
        definitions.mistakes += mistakes
        definitions.broken = True
        return definitions
    document = _parse_source(definitions, source)
    real = os.path.realpath(path)
    exports = _exports_of(definitions, document, reader, "", {real: None})
    for (kind, name), defined in exports.items():
        if isinstance(defined.statement, Block):
            definitions.blocks[kind, name] = defined.statement
        else:
            definitions.lets[name] = defined.statement
    names = (_kind_and_name(block) for block in document.body if isinstance(block, Block))
    definitions.of_first_file = tuple(name for name in names if name in definitions.blocks)
    definitions.body = document.body
    return definitions


def _parse_source(definitions: Definitions, source: Source) -> Document:
    parsed = parse(source)
    definitions.mistakes += parsed.diagnostics
    definitions.broken = definitions.broken or parsed.broken
    definitions.num_words += parsed.num_words
    blocks = [statement for statement in parsed.document.body if isinstance(statement, Block)]
    if len(blocks) > MAX_BLOCKS:
        message, hint = f"{source.name} has more than {MAX_BLOCKS} blocks", "move some of them to another file"
        definitions.complain("E0102", message, blocks[MAX_BLOCKS].head, hint)
        definitions.broken = True
        return Document(source, ())
    if parsed.broken:
        return Document(source, ())
    return Document(source, tuple(_correct_kind(definitions, statement) for statement in parsed.document.body))


def _correct_kind(definitions: Definitions, statement: Statement) -> Statement:
    """Return a statement, with the kind that was meant if it is a block of a misspelt kind."""
    if not isinstance(statement, Block) or statement.key.text in KINDS:
        return statement
    from dsl.messages.spelling import nearest_words  # imported only to explain a mistake

    kind, close_kinds = statement.key, nearest_words(statement.key.text, KINDS)
    if len(close_kinds) != 1:
        return statement
    definitions.complain("E0201", f"a file has no block `{kind.text}`", kind.span, f"did you mean `{close_kinds[0]}`?")
    return replace(statement, key=Word(close_kinds[0], kind.span))


# Real path of a file → its exports; None while its imports are being read.
Visited = dict[str, Exports | None]


def _exports_of(definitions: Definitions, document: Document, reader: Reader, folder: str, visited: Visited) -> Exports:
    """Collect the exports of a file. `folder` is its folder, relative to that of the first file."""
    imports = [
        (statement, _exports_of_import(definitions, document, statement, reader, folder, visited))
        for statement in document.body
        if isinstance(statement, Import)
    ]
    defined: dict[Key, Block | Let] = {}
    for statement in document.body:
        if isinstance(statement, Block):
            key = _check_block_name(definitions, statement)
            if key is not None:
                block = remove_duplicate_keys(statement, definitions.mistakes)
                if key in defined:
                    _report_duplicate(definitions, f"{key[0]} {key[1]}", statement.head, defined[key].span)
                defined.setdefault(key, block)
        elif isinstance(statement, Let):
            key = (LET, statement.name.text)
            if key in defined:
                _report_duplicate(definitions, statement.name.text, statement.name.span, defined[key].span)
            defined[key] = statement
        elif not isinstance(statement, Import):
            _report_stray(definitions, statement)
    exports = join_exports(imports, defined, definitions.mistakes)
    for key, definition in defined.items():
        add_definition(exports, key, definition, definitions.mistakes)
    return exports


def _exports_of_import(
    definitions: Definitions, document: Document, statement: Import, reader: Reader, folder: str, visited: Visited
) -> Exports:
    """Return the exports of an imported file; nothing if it cannot be read, which is reported."""
    written, span = statement.path.value, statement.path.span
    if written.startswith("/") or "\\" in written or ":" in written or not written.endswith(".dsc"):
        hint = 'write a path relative to this file, as in `import "models/deepseek-v3.dsc"`'
        definitions.complain("E0503", f'"{written}" is not a relative path to a .dsc file', span, hint)
        definitions.damaged = True
        return {}
    path = str(Path(definitions.home, folder, written))
    real = os.path.realpath(path)
    if real in visited:
        exports = visited[real]
        if exports is None:
            definitions.complain(
                "E0502",
                f'"{written}" imports this file, directly or through other files',
                span,
                "remove one of the imports",
            )
        return exports or {}
    visited[real] = {}
    if len(visited) > MAX_FILES or definitions.num_words > MAX_ALL_WORDS:
        limit = f"{MAX_FILES} files" if len(visited) > MAX_FILES else f"{MAX_ALL_WORDS:,} words"
        definitions.complain("E0102", f"more than {limit} are imported", span)
        definitions.broken = True
        return {}
    source, mistakes = reader(path)
    if mistakes:
        missing = mistakes[0].span is None
        definitions.mistakes += (
            [
                Diagnostic(
                    "E0501",
                    f"the import cannot be read: {mistakes[0].message}",
                    span,
                    _missing_import_hint(path, written),
                )
            ]
            if missing
            else mistakes
        )
        definitions.damaged = True
        return {}
    definitions.sources.append(source)
    inner = str(Path(folder, written).parent)
    definitions.folders.setdefault(source.name, inner)
    visited[real] = None
    exports = _exports_of(definitions, _parse_source(definitions, source), reader, inner, visited)
    visited[real] = exports
    return exports


def _missing_import_hint(path: str, written: str) -> str:
    """Hint for a missing import: the file that was probably meant, or the specs in the folder where it should be."""
    folder = Path(path).parent
    if Path(path).exists():  # then no other file was meant
        return "" if Path(path).is_file() else "import a regular file"
    names = sorted(entry.name for entry in folder.glob("*.dsc") if entry.is_file()) if folder.is_dir() else []
    from dsl.messages.spelling import nearest_words  # imported only to explain a mistake

    close = nearest_words(Path(path).stem, (name.removesuffix(".dsc") for name in names[:MAX_BESIDE]))
    if len(close) == 1:
        return f'write `import "{written.removesuffix(Path(path).name)}{close[0]}.dsc"`'
    names = names[:8]
    return f"{folder} holds {', '.join(names)}" if names else f"there are no .dsc files in {folder}"


def _kind_and_name(block: Block) -> tuple[str, str]:
    label = block.labels[0] if len(block.labels) == 1 else None
    return block.key.text, getattr(label, "text", "")


def _check_block_name(definitions: Definitions, block: Block) -> tuple[str, str] | None:
    """Return (kind, name) of a top-level block; None after reporting that it has no valid ones."""
    kind, name = _kind_and_name(block)
    if kind not in KINDS:
        hint = f"blocks of a file are {', '.join(f'`{kind}`' for kind in KINDS)}"
        definitions.complain("E0201", f"a file has no block `{kind}`", block.key.span, hint)
        definitions.damaged = True  # it may define a name that a run uses
        return None
    if kind == "precision" and _is_built_in(name):
        hint = f"write `precision my_{name} extends {name} {{ … }}`"
        definitions.complain("E0202", f"precision `{name}` is built in and cannot be changed", block.head, hint)
        return None
    if not (is_run_name(name) if kind == "run" else name.isidentifier()):
        written = block.labels[0].span.extend_to(block.labels[-1].span).text if block.labels else ""
        label = "_".join(re.findall(r"[A-Za-z0-9_]+", written[:64], re.ASCII))
        proposed = label if label.isidentifier() else f"my_{kind}"
        definitions.complain("E0205", f"a {kind} needs one name", block.head, f"write `{kind} {proposed} {{ … }}`")
        definitions.damaged = True
        return None
    return kind, name


def is_run_name(text: str) -> bool:
    """Whether a text is a valid RUN or RUN.PHASE; a phase is a name or a number."""
    run, point, phase = text.partition(".")
    return run.isidentifier() and (not point or phase.isidentifier() or phase.isdecimal())


def _is_built_in(name: str) -> bool:
    """Whether a precision has the name of a dtype; built-in recipes with other names may be redefined."""
    from dsl.schema.precision import BUILT_IN, DTYPES  # imports pydantic, which is slow and not needed just to read

    return name in BUILT_IN and name in DTYPES.meanings


def _report_duplicate(definitions: Definitions, name: str, span: Span, first: Span) -> None:
    hint = "remove one, or give it another name"
    definitions.complain("E0202", f"`{name}` is given twice", span, hint, Note("first given here", first))


def _report_stray(definitions: Definitions, statement: Statement) -> None:
    if isinstance(statement, LostStatement):
        definitions.damaged = True
    elif isinstance(statement, Attribute):
        hint = f"put it into a block, or write `let {statement.key.text} = {statement.phrase.span.text}`"
        definitions.complain("E0204", f"`{statement.key.text}` is outside any block", statement.key.span, hint)
    else:
        assert isinstance(statement, Line)
        is_block = statement.head.text in KINDS and bool(statement.items)
        message = "has no block" if is_block else "is not a statement"
        hint = f"write `{statement.head.text} name {{ … }}`" if is_block else "a file has imports, lets and blocks"
        definitions.complain("E0108", f"`{statement.span.text}` {message}", statement.span, hint)
        definitions.damaged = True
