"""Conversion to and from types of the language server protocol: positions, diagnostics, completions, edits."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lsprotocol import types as lsp
from pygls import uris

from compiler.tools.editor.actions import CodeAction
from compiler.tools.editor.block_keys import CompletionItem
from compiler.tools.editor.hover import Hover
from compiler.tools.editor.navigation import Symbol
from dsl.messages.diagnostics import Diagnostic, Edit, Source, Span, statement_of

# --- Character offsets to lines and columns of an editor, and back
#
# The protocol counts columns in UTF-16 units unless the client agrees to another encoding; an astral character (😀) is
# two units there. Lines end at LF, CR LF or CR.

LINE_END = re.compile(r"\r\n|\n|\r")
UNITS = {  # position encoding → units per character
    "utf-8": lambda character: len(character.encode("utf-8", "replace")),
    "utf-16": lambda character: 1 + (ord(character) > 0xFFFF),
    "utf-32": lambda character: 1,
}


@dataclass(frozen=True)
class ClientLines:
    """The lines of a text, with columns in a client's position encoding."""

    text: str = field(repr=False)
    encoding: str = "utf-16"

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return (0, *(match.end() for match in LINE_END.finditer(self.text)))

    def position(self, offset: int) -> tuple[int, int]:
        """(line, column) of a character offset, both counted from 0."""
        line = bisect_right(self.starts, offset) - 1
        units = UNITS[self.encoding]
        return line, sum(map(units, self.text[self.starts[line] : offset]))

    def offset(self, line: int, column: int) -> int:
        """The character offset of a position, clamped to the end of its line or of the text."""
        if line >= len(self.starts):
            return len(self.text)
        start = self.starts[max(0, line)]
        end = self.starts[line + 1] if line + 1 < len(self.starts) else len(self.text)
        units = UNITS[self.encoding]
        for offset in range(start, end):
            if column <= 0 or self.text[offset] in "\r\n":
                return offset
            column -= units(self.text[offset])
        return end


# --- Protocol types

ITEM_KINDS = {
    "key": lsp.CompletionItemKind.Property,
    "block": lsp.CompletionItemKind.Struct,
    "value": lsp.CompletionItemKind.EnumMember,
    "name": lsp.CompletionItemKind.Variable,
    "unit": lsp.CompletionItemKind.Unit,
    "word": lsp.CompletionItemKind.Keyword,
    "file": lsp.CompletionItemKind.File,
    "reference": lsp.CompletionItemKind.Reference,
}
SYMBOL_KINDS = {
    "run": lsp.SymbolKind.Function,
    "model": lsp.SymbolKind.Class,
    "cluster": lsp.SymbolKind.Module,
    "precision": lsp.SymbolKind.Enum,
    "block": lsp.SymbolKind.Object,
    "key": lsp.SymbolKind.Property,
    "let": lsp.SymbolKind.Constant,
    "import": lsp.SymbolKind.File,
    "line": lsp.SymbolKind.Event,
}
SEVERITIES = {"error": lsp.DiagnosticSeverity.Error, "warning": lsp.DiagnosticSeverity.Warning}


def path_of(uri: str) -> str:
    """The path of a document; for one that is not a file (untitled), its URI as a name in the working folder.

    Never raises: NULs and lone surrogates, which no file name can have, are escaped.
    """
    try:
        path = uris.to_fs_path(uri) or uri
    except ValueError:  # from urllib, for example for `file://[`
        path = uri
    return path.replace("\0", "%00").encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True)
class Client:
    """The capabilities of a client, and its names of open documents."""

    encoding: str = "utf-16"
    snippets: bool = False
    markdown: bool = True
    document_changes: bool = False
    open: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)  # real path → (URI, version)

    @cached_property
    def _lines(self) -> dict[Source, ClientLines]:
        return {}

    def lines(self, source: Source) -> ClientLines:
        if source not in self._lines:
            self._lines[source] = ClientLines(source.text, self.encoding)
        return self._lines[source]

    def uri(self, source: Source) -> str:
        """The client's URI of a file."""
        opened = self.open.get(os.path.realpath(source.name))
        return opened[0] if opened is not None else str(uris.from_fs_path(os.path.realpath(source.name)))

    def range(self, source: Source, start: int, end: int) -> lsp.Range:
        lines = self.lines(source)
        return lsp.Range(start=lsp.Position(*lines.position(start)), end=lsp.Position(*lines.position(end)))

    def location(self, span: Span) -> lsp.Location:
        return lsp.Location(uri=self.uri(span.source), range=self.range(span.source, span.start, span.end))

    def offset(self, source: Source, position: lsp.Position) -> int:
        return self.lines(source).offset(position.line, position.character)

    def markup(self, text: str) -> lsp.MarkupContent:
        kind = lsp.MarkupKind.Markdown if self.markdown else lsp.MarkupKind.PlainText
        return lsp.MarkupContent(kind=kind, value=text)


def client_of(
    capabilities: lsp.ClientCapabilities, encoding: str, opened: Mapping[str, tuple[str, int | None]]
) -> Client:
    """The client with the given capabilities and open documents."""
    document = capabilities.text_document or lsp.TextDocumentClientCapabilities()
    completion = document.completion and document.completion.completion_item
    formats = (document.hover and document.hover.content_format) or [lsp.MarkupKind.Markdown]
    edit = capabilities.workspace and capabilities.workspace.workspace_edit
    return Client(
        encoding,
        snippets=bool(completion and completion.snippet_support),
        markdown=lsp.MarkupKind.Markdown in formats,
        document_changes=bool(edit and edit.document_changes),
        open=opened,
    )


def diagnostic(client: Client, item: Diagnostic, source: Source) -> lsp.Diagnostic:
    """Convert a diagnostic. One without a span is put at the start of `source`, the analysed document."""
    span = item.span or Span(source, 0, 0)
    facts = [f"hint: {item.hint}"] if item.hint else []
    facts += [f"note: {note.message}" for note in item.notes if note.span is None]
    related = [(note.span, note.message) for note in item.notes if note.span is not None]
    related += [(place, f"`{statement_of(place)}`") for note in item.notes for place in note.places]
    if item.conflict is not None:
        related += [(line, f"`{line.text}` is part of the conflict") for line in item.conflict.lines]
    return lsp.Diagnostic(
        range=client.range(span.source, span.start, span.end),
        message="\n".join([item.message, *facts]),
        severity=SEVERITIES[item.severity],
        code=item.code,
        source="dsc",
        related_information=[
            lsp.DiagnosticRelatedInformation(location=client.location(place), message=message)
            for place, message in related
        ],
    )


def completion(client: Client, source: Source, items: Iterable[CompletionItem]) -> lsp.CompletionList:
    """Convert completion items, keeping their order. Lists with units are incomplete, so the client asks again after
    each character."""
    proposals = [_item(client, source, index, item) for index, item in enumerate(items)]
    incomplete = any(item.kind == lsp.CompletionItemKind.Unit for item in proposals)
    return lsp.CompletionList(is_incomplete=incomplete, items=proposals)


def _item(client: Client, source: Source, index: int, item: CompletionItem) -> lsp.CompletionItem:
    is_snippet = bool(item.snippet) and client.snippets
    text = item.snippet if is_snippet else item.label
    return lsp.CompletionItem(
        label=item.label,
        kind=ITEM_KINDS[item.kind],
        detail=item.detail or None,
        documentation=client.markup(item.documentation) if item.documentation else None,
        sort_text=f"{index:04}",
        filter_text=item.label,
        insert_text_format=lsp.InsertTextFormat.Snippet if is_snippet else lsp.InsertTextFormat.PlainText,
        text_edit=lsp.TextEdit(range=client.range(source, item.start, item.end), new_text=text),
    )


def hover(client: Client, source: Source, content: Hover) -> lsp.Hover:
    return lsp.Hover(contents=client.markup(content.text), range=client.range(source, content.start, content.end))


def symbol(client: Client, source: Source, entry: Symbol) -> lsp.DocumentSymbol:
    """Convert an outline entry with its children. Recursion is safe, as the parser limits the nesting."""
    return lsp.DocumentSymbol(
        name=entry.name,
        detail=entry.detail or None,
        kind=SYMBOL_KINDS[entry.kind],
        range=client.range(source, entry.start, entry.end),
        selection_range=client.range(source, entry.start, entry.head_end),
        children=[symbol(client, source, child) for child in entry.children],
    )


def text_edits(client: Client, source: Source, text: str) -> list[lsp.TextEdit]:
    """The edit that turns a source into `text`. It replaces only the lines that differ, to keep marks in the rest."""
    old, new = source.text.splitlines(keepends=True), text.splitlines(keepends=True)
    if old == new:
        return []
    leading = _num_equal_lines(old, new)
    trailing = _num_equal_lines(old[leading:][::-1], new[leading:][::-1])
    start = sum(map(len, old[:leading]))
    end = sum(map(len, old[: len(old) - trailing]))
    return [lsp.TextEdit(range=client.range(source, start, end), new_text="".join(new[leading : len(new) - trailing]))]


def _num_equal_lines(left: list[str], right: list[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def action(client: Client, code_action: CodeAction, source: Source) -> lsp.CodeAction:
    return lsp.CodeAction(
        title=code_action.title,
        kind=lsp.CodeActionKind.QuickFix,
        diagnostics=[diagnostic(client, code_action.mends, source)],
        is_preferred=code_action.is_preferred,
        edit=_workspace_edit(client, code_action.edits),
    )


def _workspace_edit(client: Client, edits: Iterable[Edit]) -> lsp.WorkspaceEdit:
    by_source: dict[Source, list[lsp.TextEdit]] = {}
    for edit in edits:
        range_ = client.range(edit.span.source, edit.span.start, edit.span.end)
        by_source.setdefault(edit.span.source, []).append(lsp.TextEdit(range=range_, new_text=edit.text))
    if not client.document_changes:
        return lsp.WorkspaceEdit(changes={client.uri(source): range_edits for source, range_edits in by_source.items()})
    return lsp.WorkspaceEdit(
        document_changes=[
            lsp.TextDocumentEdit(
                text_document=lsp.OptionalVersionedTextDocumentIdentifier(
                    uri=client.uri(source), version=client.open.get(os.path.realpath(source.name), ("", None))[1]
                ),
                edits=list(range_edits),
            )
            for source, range_edits in by_source.items()
        ]
    )
