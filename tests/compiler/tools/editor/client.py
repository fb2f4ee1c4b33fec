"""A minimal LSP client that frames messages by hand, so that it shares no code with the server."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from tests import progress
from tests.runtime.processes import wait_for

CAPABILITIES = {
    "general": {"positionEncodings": ["utf-16"]},
    "workspace": {"workspaceEdit": {"documentChanges": True}},
    "textDocument": {
        "completion": {"completionItem": {"snippetSupport": True}},
        "hover": {"contentFormat": ["markdown"]},
        "publishDiagnostics": {"relatedInformation": True},
    },
}


class Editor:
    """A client of `dsc lsp` in a process of its own."""

    def __init__(self, folder: Path, capabilities: dict[str, Any] = CAPABILITIES) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "compiler.cli.main", "lsp"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin: BinaryIO = self.process.stdin  # type: ignore[assignment]
        self.inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()
        self.folder, self.last, self.versions = folder, 0, {}  # type: ignore[var-annotated]
        self.diagnostics: dict[str, list[dict[str, Any]]] = {}
        self.logged: list[str] = []
        self.answer = self.request(
            "initialize", {"processId": os.getpid(), "rootUri": folder.as_uri(), "capabilities": capabilities}
        )
        self.notify("initialized", {})

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()

    # ------------------------------------------------------------ messages

    def _read(self, stream: BinaryIO) -> None:
        while line := stream.readline():
            length = 0
            while line.strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
                assert b":" in line, f"not a header: {line!r}"
                line = stream.readline()
            self.inbox.put(json.loads(stream.read(length)))
        self.inbox.put(None)

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.stdin.flush()

    def notify(self, method: str, params: Any) -> None:
        self._send({"method": method, "params": params})

    def request(self, method: str, params: Any) -> Any:
        """The result of a request."""
        self.last += 1
        self._send({"id": self.last, "method": method, "params": params})
        answer = self._until(lambda message: message.get("id") == self.last and "method" not in message)
        assert "error" not in answer, answer
        return answer["result"]

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            wait_for(lambda: not self.inbox.empty(), "a message of the server")
            message = self.inbox.get()
            assert message is not None, f"the server has ended: {self.process.stderr.read().decode()}"  # type: ignore[union-attr]
            if message.get("method") == "textDocument/publishDiagnostics":
                params = message["params"]
                version = self.versions.get(params["uri"])
                if params.get("version") in (None, version):  # ignore diagnostics of an older version
                    self.diagnostics[params["uri"]] = params["diagnostics"]
                else:
                    assert version is None or params["version"] < version
            if message.get("method") == "window/logMessage":
                self.logged.append(message["params"]["message"])
            if wanted(message):
                return message

    # ------------------------------------------------------------ documents

    def uri(self, name: str) -> str:
        return (self.folder / name).as_uri()

    def open(self, name: str, text: str | None = None) -> None:
        text = (self.folder / name).read_text("utf-8") if text is None else text
        self.versions[self.uri(name)] = 1
        document = {"uri": self.uri(name), "languageId": "dsc", "version": 1, "text": text}
        self.notify("textDocument/didOpen", {"textDocument": document})

    def change(self, name: str, text: str) -> None:
        uri = self.uri(name)
        self.versions[uri] += 1
        document = {"uri": uri, "version": self.versions[uri]}
        self.notify("textDocument/didChange", {"textDocument": document, "contentChanges": [{"text": text}]})

    def close(self, name: str) -> None:
        del self.versions[self.uri(name)]
        self.notify("textDocument/didClose", {"textDocument": {"uri": self.uri(name)}})

    def codes(self, name: str, wanted: list[str]) -> list[dict[str, Any]]:
        """Wait until a document's diagnostics have these codes. Returns them."""

        def there() -> bool:
            diagnostics = self.diagnostics.get(self.uri(name))
            return diagnostics is not None and [item["code"] for item in diagnostics] == wanted

        while not there():
            self._until(lambda message: message.get("method") == "textDocument/publishDiagnostics")
        return self.diagnostics[self.uri(name)]

    def at(self, name: str, text: str, marked: str) -> dict[str, Any]:
        """The parameters of a request at the `|` in `marked`, a part of a text."""
        before = text.index(marked.replace("|", "")) + marked.index("|")
        line = text.count("\n", 0, before)
        column = len(text[text.rfind("\n", 0, before) + 1 : before].encode("utf-16-le")) // 2
        return {"textDocument": {"uri": self.uri(name)}, "position": {"line": line, "character": column}}

    def stop(self) -> int:
        """Shut the server down by the protocol, leaving its stdin open. Returns its exit code."""
        assert self.request("shutdown", None) is None
        self.notify("exit", None)
        return progress.end(self.process)


def applied(text: str, edits: list[dict[str, Any]]) -> str:
    """Apply a server's edits to a text, with UTF-16 positions."""
    lines = text.split("\n")

    def offset(position: dict[str, int]) -> int:
        start = sum(len(line) + 1 for line in lines[: position["line"]])
        line = lines[position["line"]] if position["line"] < len(lines) else ""
        return start + len(line.encode("utf-16-le")[: 2 * position["character"]].decode("utf-16-le"))

    places = [(offset(edit["range"]["start"]), offset(edit["range"]["end"]), edit["newText"]) for edit in edits]
    for start, end, new in sorted(places, reverse=True):
        text = text[:start] + new + text[end:]
    return text
