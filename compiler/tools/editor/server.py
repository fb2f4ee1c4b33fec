"""The language server: keeps the open documents, answers requests about them, and publishes their diagnostics.

A worker thread next to the event loop analyses texts, each state of the documents once. The server reads files, never
writes them, and listens only on stdin.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from importlib import metadata
from typing import Any

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer

from compiler.tools.editor import actions, navigation, protocol
from compiler.tools.editor.completion import complete
from compiler.tools.editor.hover import hover
from compiler.tools.editor.outline import OpenDocument, document
from compiler.tools.editor.protocol import Client
from dsl.messages.diagnostics import Span, SpecError
from dsl.resolve.files import reader_of_texts
from dsl.text.formatter import format_source

DELAY_S = 0.15  # from a keystroke to publishing diagnostics
MAX_LISTED = 1000  # proposed entries of a folder
TRIGGERS = ['"', "/", ".", "=", " "]
WATCHED = "**/*.dsc"

log = logging.getLogger("dsc.lsp")


class EditorSession:
    """The session of a client. Its documents are those of the server's workspace; `generation` counts their states."""

    def __init__(self, server: LanguageServer) -> None:
        self.server = server
        self.generation = 0
        self.analyses: dict[str, asyncio.Future[OpenDocument]] = {}  # URI → analysis of this generation
        self.pool = ThreadPoolExecutor(max_workers=1)
        self.waiting: asyncio.TimerHandle | None = None
        self.published: dict[str, tuple[int | None, list[lsp.Diagnostic]]] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ documents

    def client(self) -> Client:
        workspace = self.server.workspace
        opened = {
            os.path.realpath(protocol.path_of(uri)): (uri, text.version)
            for uri, text in workspace.text_documents.items()
        }
        encoding = lsp.PositionEncodingKind(workspace.position_encoding).value
        return protocol.client_of(self.server.client_capabilities, encoding, opened)

    async def document(self, uri: str) -> OpenDocument:
        """The current state of a document, analysed once per generation."""
        if uri not in self.analyses:
            texts = {
                os.path.realpath(protocol.path_of(open_uri)): text.source
                for open_uri, text in self.server.workspace.text_documents.items()
            }
            loop = asyncio.get_running_loop()
            self.analyses[uri] = loop.run_in_executor(
                self.pool, document, protocol.path_of(uri), reader_of_texts(texts)
            )
        return await asyncio.shield(self.analyses[uri])

    def drop_analyses(self, delay: float) -> None:
        """A text has changed: drop all analyses and schedule publishing."""
        self.generation += 1
        self.analyses.clear()
        if self.waiting is not None:
            self.waiting.cancel()
        self.waiting = asyncio.get_running_loop().call_later(delay, self._start)

    def _start(self) -> None:
        task = asyncio.get_running_loop().create_task(guard_handler(self.server, self.publish)())
        self.tasks.add(task)  # an unreferenced task may be garbage-collected
        task.add_done_callback(self.tasks.discard)

    async def publish(self) -> None:
        """Publish the diagnostics of the open documents and their imports, each in its file, and clear old ones."""
        generation, client = self.generation, self.client()
        diagnostics: dict[str, list[lsp.Diagnostic]] = {uri: [] for uri, _ in client.open.values()}
        for uri in tuple(diagnostics):
            current = await guard_handler(self.server, self.document)(uri)
            if generation != self.generation:
                return  # a later state will be published
            if current is None:  # the failure was logged; publish the others
                continue
            for item in current.diagnostics:
                source = item.span.source if item.span is not None else current.source
                diagnostics.setdefault(client.uri(source), []).append(protocol.diagnostic(client, item, current.source))
        versions = dict(client.open.values())
        for uri in {**dict.fromkeys(self.published), **dict.fromkeys(diagnostics)}:
            unique = {(str(item.range), item.code, item.message): item for item in diagnostics.get(uri, [])}
            state = (versions.get(uri), list(unique.values()))
            if self.published.get(uri) != state:
                self.server.text_document_publish_diagnostics(
                    lsp.PublishDiagnosticsParams(uri=uri, version=state[0], diagnostics=state[1])
                )
        self.published = {uri: (versions.get(uri), items) for uri, items in diagnostics.items()}

    # ------------------------------------------------------------ notifications

    async def did_open(self, params: lsp.DidOpenTextDocumentParams) -> None:
        self.drop_analyses(0)

    async def did_change(self, params: lsp.DidChangeTextDocumentParams) -> None:
        self.drop_analyses(DELAY_S)

    async def did_save(self, params: lsp.DidSaveTextDocumentParams) -> None:
        self.drop_analyses(0)

    async def did_close(self, params: lsp.DidCloseTextDocumentParams) -> None:
        self.drop_analyses(0)

    async def did_change_files(self, params: lsp.DidChangeWatchedFilesParams) -> None:
        self.drop_analyses(DELAY_S)

    async def watch_specs(self, params: lsp.InitializedParams) -> None:
        """Ask the client to report specs that change on disk, if it can."""
        workspace = self.server.client_capabilities.workspace
        watching = workspace and workspace.did_change_watched_files
        if not (watching and watching.dynamic_registration):
            return
        options = lsp.DidChangeWatchedFilesRegistrationOptions(watchers=[lsp.FileSystemWatcher(glob_pattern=WATCHED)])
        registration = lsp.Registration(
            id="dsc-files", method=lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES, register_options=options
        )
        await self.server.client_register_capability_async(lsp.RegistrationParams(registrations=[registration]))

    # ------------------------------------------------------------ requests

    async def complete(self, params: lsp.CompletionParams) -> lsp.CompletionList | None:
        current, client = await self.document(params.text_document.uri), self.client()
        offset = client.offset(current.source, params.position)
        typed = params.context.trigger_character if params.context is not None else None
        line = current.source.text[:offset].rpartition("\n")[2]
        if typed == " " and not line.strip():
            return None  # only indented so far
        return protocol.completion(client, current.source, complete(current, offset, list_folder))

    async def hover(self, params: lsp.HoverParams) -> lsp.Hover | None:
        current, client = await self.document(params.text_document.uri), self.client()
        hover_text = hover(current, client.offset(current.source, params.position))
        return protocol.hover(client, current.source, hover_text) if hover_text is not None else None

    async def definition(self, params: lsp.DefinitionParams) -> lsp.Location | None:
        current, client = await self.document(params.text_document.uri), self.client()
        target = navigation.definition(current, client.offset(current.source, params.position))
        return client.location(target) if target is not None else None

    async def references(self, params: lsp.ReferenceParams) -> list[lsp.Location]:
        current, client = await self.document(params.text_document.uri), self.client()
        target = navigation.definition(current, client.offset(current.source, params.position))
        if target is None:
            return []
        documents = [await self.document(uri) for uri, _ in client.open.values()]
        spans = navigation.references(documents, target)
        return [client.location(span) for span in spans[0 if params.context.include_declaration else 1 :]]

    async def symbols(self, params: lsp.DocumentSymbolParams) -> list[lsp.DocumentSymbol]:
        current, client = await self.document(params.text_document.uri), self.client()
        return [protocol.symbol(client, current.source, symbol) for symbol in navigation.symbols(current.file)]

    async def format(self, params: lsp.DocumentFormattingParams) -> list[lsp.TextEdit] | None:
        current, client = await self.document(params.text_document.uri), self.client()
        try:
            text = format_source(current.source)
        except SpecError:
            return None  # it does not parse, which is published as a diagnostic
        return protocol.text_edits(client, current.source, text)

    async def actions(self, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
        current, client = await self.document(params.text_document.uri), self.client()
        start, end = (client.offset(current.source, position) for position in (params.range.start, params.range.end))
        documents = [current, *[await self.document(uri) for uri, _ in client.open.values()]]
        span = Span(current.source, start, end)
        loop = asyncio.get_running_loop()
        fixes = await loop.run_in_executor(self.pool, actions.actions, documents, span)  # tries some edits
        return [protocol.action(client, fix, current.source) for fix in fixes]

    async def exit(self, params: Any) -> None:
        """Exit at once, even if the client keeps stdin open: there is nothing to clean up."""
        logging.shutdown()
        os._exit(0 if self.server.protocol._shutdown else 1)


def server() -> LanguageServer:
    """A server with all features; call `start_io` to serve."""
    language_server = LanguageServer(
        "dsc", metadata.version("dsc-trainer"), text_document_sync_kind=lsp.TextDocumentSyncKind.Full, max_workers=2
    )
    session = EditorSession(language_server)
    for method, (handler, options) in _features(session).items():
        language_server.feature(method, options)(guard_handler(language_server, handler))
    return language_server


Handler = Callable[[Any], Awaitable[Any]]


def _features(session: EditorSession) -> dict[str, tuple[Handler, Any]]:
    return {
        lsp.INITIALIZED: (session.watch_specs, None),
        lsp.TEXT_DOCUMENT_DID_OPEN: (session.did_open, None),
        lsp.TEXT_DOCUMENT_DID_CHANGE: (session.did_change, None),
        lsp.TEXT_DOCUMENT_DID_SAVE: (session.did_save, None),
        lsp.TEXT_DOCUMENT_DID_CLOSE: (session.did_close, None),
        lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES: (session.did_change_files, None),
        lsp.TEXT_DOCUMENT_COMPLETION: (session.complete, lsp.CompletionOptions(trigger_characters=TRIGGERS)),
        lsp.TEXT_DOCUMENT_HOVER: (session.hover, None),
        lsp.TEXT_DOCUMENT_DEFINITION: (session.definition, None),
        lsp.TEXT_DOCUMENT_REFERENCES: (session.references, None),
        lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL: (session.symbols, None),
        lsp.TEXT_DOCUMENT_FORMATTING: (session.format, None),
        lsp.TEXT_DOCUMENT_CODE_ACTION: (
            session.actions,
            lsp.CodeActionOptions(code_action_kinds=[lsp.CodeActionKind.QuickFix]),
        ),
        lsp.EXIT: (session.exit, None),
    }


def guard_handler(server: LanguageServer, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
    """Wrap a handler to log exceptions and return None: an error costs the editor one answer, not the server."""

    @wraps(handler)
    async def safe(*args: Any) -> Any:
        try:
            return await handler(*args)
        except Exception as error:
            name = getattr(handler, "__name__", "a feature")
            log.exception("%s failed", name)
            message = f"dsc lsp: {name} failed: {type(error).__name__}: {error}; please report this"
            server.window_log_message(lsp.LogMessageParams(type=lsp.MessageType.Error, message=message))
            return None

    return safe


def list_folder(folder: str) -> list[str]:
    """The names in a folder, with a `/` after subfolders; [] if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name + "/" * entry.is_dir() for _, entry in zip(range(MAX_LISTED), entries, strict=False)]
    except OSError:
        return []
    return sorted(name for name in names if not name.startswith("."))
