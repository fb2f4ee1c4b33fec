"""One open text with all that features ask about: its structure, the names it can see, what resolving it gives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compiler.plan.read_files import mistakes_of
from compiler.tools.editor import outline
from compiler.tools.editor.outline import Token
from dsl.load import Analysis, analyse, refusals
from dsl.messages.diagnostics import Diagnostic
from dsl.messages.source import Source, Span
from dsl.resolve.files import MAX_FILES, Reader
from dsl.text.syntax import KINDS

LET = "let"


@dataclass(frozen=True)
class Document:
    """A text as it is now. What it names is found even where it does not parse."""

    path: str
    source: Source
    file: outline.Node
    names: Mapping[tuple[str, str], Span]  # (kind or "let", name) → the name where it is defined, imports included
    analysis: Analysis
    reader: Reader = field(repr=False)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The diagnostics of `dsc check`: mistakes or, where there are none, what training would refuse."""
        wrong = self.analysis.diagnostics or mistakes_of(self.analysis, self.path)
        return wrong or refusals(self.analysis)

    def names_of(self, kind: str) -> list[str]:
        return [name for of, name in self.names if of == kind]


def document(path: str, reader: Reader) -> Document:
    """The document of a file. `reader` gives texts, those of the editor before those of the disk."""
    source, _ = reader(path)
    file = outline.read(source.text)
    names: dict[tuple[str, str], Span] = {}
    _collect(names, source, file, reader, {os.path.realpath(path)})
    return Document(path, source, file, names, analyse(path, reader=reader), reader)


def target(source: Source, written: str) -> str:
    """The path of a file that a source imports."""
    return str(Path(source.name).parent / written)


def span(source: Source, token: Token) -> Span:
    return Span(source, token.start, token.end)


def _collect(
    names: dict[tuple[str, str], Span], source: Source, file: outline.Node, reader: Reader, seen: set[str]
) -> None:
    """Names of imported files first, as a later definition is the one that is changed."""
    for statement in file.body:
        if statement.key != "import" or len(statement.head) != 2:
            continue
        path = target(source, statement.head[1].text.strip('"'))
        if "\0" in path:
            continue  # no text of a file: that is told
        real = os.path.realpath(path)
        if path.endswith(".dsc") and real not in seen and len(seen) < MAX_FILES:
            seen.add(real)
            imported, _ = reader(path)
            _collect(names, imported, outline.read(imported.text), reader, seen)
    for statement in file.body:
        is_let = statement.key == LET and statement.equals is not None
        if len(statement.head) > 1 and (is_let or (statement.key in KINDS and statement.opened is not None)):
            names[statement.key, statement.head[1].text] = span(source, statement.head[1])
