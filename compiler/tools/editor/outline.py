"""A fault-tolerant parser: tokens, and the statements formed by braces and lines, of a text that need not parse.

While the user types, braces are open and values are missing. So statements end at a newline or a comma, an unmatched
closing brace is ignored, and `model x {` at the start of a line begins a top-level block whatever is still open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compiler.plan.read_files import mistakes_of
from dsl.load import Analysis, analyse, refusals
from dsl.messages.diagnostics import Diagnostic, Source, Span
from dsl.resolve.files import MAX_FILES, Reader
from dsl.text import table
from dsl.text.parser import MAX_DEPTH, MAX_WORDS
from dsl.text.syntax import KINDS

TokenKind = Literal["word", "number", "string", "comment", "newline", "sign"]
OF_TERMINALS: dict[str, TokenKind] = {  # terminal of the grammar → kind; all others are signs
    "WORD": "word",
    "NUMBER": "number",
    "STRING": "string",
    "OPEN_STRING": "string",
    "COMMENT": "comment",
    "NEWLINE": "newline",
}
OPENERS, CLOSERS = frozenset("[("), frozenset("])")


@dataclass(frozen=True)
class OutlineToken:
    """A word, a number with its unit, a string, a comment, a newline or a sign, at characters `start` to `end`."""

    kind: TokenKind
    text: str
    start: int
    end: int


@dataclass(eq=False, repr=False)
class OutlineNode:
    """A statement. For a block, `opened` and `closed` are the offsets of its braces. The file is a node without head
    and braces."""

    head: list[OutlineToken] = field(default_factory=list)  # key and labels, or the words of a line
    equals: OutlineToken | None = None
    value: list[OutlineToken] = field(default_factory=list)
    opened: int | None = None
    closed: int | None = None
    body: list[OutlineNode] = field(default_factory=list)
    parent: OutlineNode | None = None
    end: int = 0  # end of the last token, braces included

    @property
    def key(self) -> str:
        return self.head[0].text if self.head else ""

    @property
    def start(self) -> int:
        return self.head[0].start if self.head else 0

    @property
    def labels(self) -> list[str]:
        """The words after the key, without `extends` and what follows it."""
        texts = [token.text for token in self.head[1:]]
        return texts[: texts.index("extends")] if "extends" in texts else texts

    def path(self) -> list[OutlineNode]:
        """The enclosing blocks and this one, outermost first, without the file."""
        return [*(self.parent.path() if self.parent is not None else []), *([self] if self.head else [])]

    def walk(self) -> Iterator[OutlineNode]:
        """This statement and all statements in it."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending += reversed(node.body)


def tokens(text: str) -> list[OutlineToken]:
    """The tokens of a text without spaces, at most as many as a spec may have; the rest of the text is ignored."""
    parsed: list[OutlineToken] = []
    for match in table.load().pattern.finditer(text):
        terminal, start, end = str(match.lastgroup), match.start(), match.end()
        if terminal == "CALL":
            parsed += [OutlineToken("word", match[0][:-1], start, end - 1), OutlineToken("sign", "(", end - 1, end)]
        elif match[0] == "." and parsed and parsed[-1].kind == "word" and parsed[-1].end == start:
            parsed[-1] = OutlineToken("word", f"{parsed[-1].text}.", parsed[-1].start, end)  # `model.`, about to go on
        elif terminal != "SPACE":
            parsed.append(OutlineToken(OF_TERMINALS.get(terminal, "sign"), match[0], start, end))
        if len(parsed) >= MAX_WORDS:
            break
    return parsed


def read(text: str) -> OutlineNode:
    """Parse a text. Returns the node of the file, with the statements as its body."""
    return _OutlineReader([token for token in tokens(text) if token.kind != "comment"], text).run()


class _OutlineReader:
    def __init__(self, outline_tokens: list[OutlineToken], text: str) -> None:
        self.tokens, self.text = outline_tokens, text
        self.file = OutlineNode(end=len(text))
        self.block, self.depth = self.file, 0
        self.statement: OutlineNode | None = None
        self.brackets: list[str] = []

    def run(self) -> OutlineNode:
        for index, token in enumerate(self.tokens):
            if self._ends_statement(index, token):
                self._finish()
            if token.kind == "newline" or (token.text == "," and not self.brackets):
                continue
            if token.text == "{" and not self.brackets:
                self._open(token)
            elif token.text == "}":
                self._close(token)
            else:
                self._take(token)
        return self.file

    def _ends_statement(self, index: int, token: OutlineToken) -> bool:
        """Whether a statement ends before this token, or at it."""
        if token.text == "," and token.kind == "sign":
            return not self.brackets
        if token.kind == "newline":
            return not self.brackets or self._begins_statement(index + 1)
        return token.text == "}" and token.kind == "sign"

    def _begins_statement(self, index: int) -> bool:
        """Whether a line looks like a new statement, so that an open bracket must have been forgotten."""
        following = self.tokens[index : index + 2]
        if not following or following[0].text == "}":
            return True
        return following[0].kind == "word" and len(following) > 1 and following[1].text in ("=", "{")

    def _take(self, token: OutlineToken) -> None:
        statement = self.statement or self._begin(token)
        statement.end = token.end
        if token.kind == "sign" and token.text in OPENERS:
            self.brackets.append(token.text)
        elif token.kind == "sign" and token.text in CLOSERS and self.brackets:
            self.brackets.pop()
        if statement.equals is not None:
            statement.value.append(token)
        elif token.text == "=" and token.kind == "sign":
            statement.equals = token
        else:
            statement.head.append(token)

    def _begin(self, token: OutlineToken) -> OutlineNode:
        if self._begins_block(token):
            self.block, self.depth = self.file, 0
        self.statement = OutlineNode(parent=self.block)
        self.block.body.append(self.statement)
        return self.statement

    def _begins_block(self, token: OutlineToken) -> bool:
        """`model x {` or `model x extends`, at the very start of a line."""
        if token.text not in KINDS or (token.start and self.text[token.start - 1] != "\n"):
            return False
        line = self.text[token.end : token.end + 200].partition("\n")[0].split()
        return len(line) > 1 and (line[0].endswith("{") or line[1].startswith("{") or line[1] == "extends")

    def _finish(self) -> None:
        self.statement = None
        self.brackets.clear()

    def _open(self, token: OutlineToken) -> None:
        block = self.statement or self._begin(token)
        block.opened, block.end = token.start, token.end
        if self.depth < MAX_DEPTH:
            self.block, self.depth = block, self.depth + 1
        self._finish()

    def _close(self, token: OutlineToken) -> None:
        if self.block is self.file:
            return
        self.block.closed, self.block.end = token.start, token.end
        assert self.block.parent is not None
        self.block, self.depth = self.block.parent, self.depth - 1


# ---------------------------------------------------------------- cursor
@dataclass(frozen=True)
class CursorPlace:
    """The position of a cursor: its block, its statement if there is one, and the tokens around it."""

    block: OutlineNode
    statement: OutlineNode | None
    token: OutlineToken | None  # the token that the cursor is in or at the end of
    before: tuple[OutlineToken, ...]  # tokens of the statement before the cursor, without `token`
    comment: bool = False


def place(text: str, file: OutlineNode, offset: int) -> CursorPlace:
    """The place of a cursor before character `offset`."""
    block = file
    while True:
        inner = next((node for node in block.body if _holds(node, offset)), None)
        if inner is None:
            break
        block = inner
    statement = next((node for node in block.body if _start(node) <= offset <= _head_end(node, text)), None)
    if statement is None:
        return CursorPlace(block, None, None, (), is_in_comment(text, offset))
    parts = [*statement.head, *([statement.equals] if statement.equals else []), *statement.value]
    touched = next((token for token in parts if token.start < offset <= token.end and _is_text(token)), None)
    touched = touched or next((token for token in parts if token.start == offset and _is_text(token)), None)
    before = tuple(token for token in parts if token.end <= offset and token is not touched)
    return CursorPlace(block, statement, touched, before, is_in_comment(text, offset))


def is_in_comment(text: str, offset: int) -> bool:
    """Whether a cursor is in a comment."""
    line = text.rfind("\n", 0, offset) + 1
    end = text.find("\n", offset)
    line_tokens = tokens(text[line : end if end >= 0 else len(text)])
    return any(token.kind == "comment" and token.start + line < offset for token in line_tokens)


def _is_text(token: OutlineToken) -> bool:
    return token.kind != "sign"


def _holds(node: OutlineNode, offset: int) -> bool:
    """Whether an offset is between the braces of a block. An unclosed block extends as far as `_limit` allows."""
    if node.opened is None or offset <= node.opened:
        return False
    return offset <= node.closed if node.closed is not None else offset <= _limit(node)


def _limit(node: OutlineNode) -> int:
    """The end of an unclosed block: before the next statement of the enclosing block, or at that block's end."""
    around = node.parent
    if around is None:
        return node.end
    index = next(i for i, child in enumerate(around.body) if child is node)
    if index + 1 < len(around.body):
        return max(node.end, _start(around.body[index + 1]) - 1)
    if around.closed is not None:
        return around.closed
    return _limit(around) if around.parent is not None else around.end


def _start(node: OutlineNode) -> int:
    return node.head[0].start if node.head else node.opened or 0


def _head_end(node: OutlineNode, text: str) -> int:
    """The end of a statement, including the spaces after it; for a block, its opening brace."""
    if node.opened is not None:
        return node.opened
    end = node.end
    while end < len(text) and text[end] in " \t":
        end += 1
    return end


# --- Open documents: structure, visible names and analysis

LET = "let"


@dataclass(frozen=True)
class OpenDocument:
    """The current state of a text. Its names are available even if it does not parse."""

    path: str
    source: Source
    file: OutlineNode
    names: Mapping[tuple[str, str], Span]  # (kind or "let", name) → span of its definition, imports included
    analysis: Analysis
    reader: Reader = field(repr=False)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The diagnostics of `dsc check`: errors or, if there are none, what training would refuse."""
        mistakes = self.analysis.diagnostics or mistakes_of(self.analysis, self.path)
        return mistakes or refusals(self.analysis)

    def names_of(self, kind: str) -> list[str]:
        return [name for name_kind, name in self.names if name_kind == kind]


def document(path: str, reader: Reader) -> OpenDocument:
    """Analyse a file. `reader`: returns texts, preferring open editor buffers to files on disk."""
    source, _ = reader(path)
    file = read(source.text)
    names: dict[tuple[str, str], Span] = {}
    _collect(names, source, file, reader, {os.path.realpath(path)})
    return OpenDocument(path, source, file, names, analyse(path, reader=reader), reader)


def target(source: Source, written: str) -> str:
    """The path of a file that a source imports."""
    return str(Path(source.name).parent / written)


def span(source: Source, token: OutlineToken) -> Span:
    return Span(source, token.start, token.end)


def _collect(
    names: dict[tuple[str, str], Span], source: Source, file: OutlineNode, reader: Reader, seen: set[str]
) -> None:
    """Collect names, imported files first, so that later definitions override theirs."""
    for statement in file.body:
        if statement.key != "import" or len(statement.head) != 2:
            continue
        path = target(source, statement.head[1].text.strip('"'))
        if "\0" in path:
            continue  # not a valid path, which is a diagnostic
        real = os.path.realpath(path)
        if path.endswith(".dsc") and real not in seen and len(seen) < MAX_FILES:
            seen.add(real)
            imported, _ = reader(path)
            _collect(names, imported, read(imported.text), reader, seen)
    for statement in file.body:
        is_let = statement.key == LET and statement.equals is not None
        if len(statement.head) > 1 and (is_let or (statement.key in KINDS and statement.opened is not None)):
            names[statement.key, statement.head[1].text] = span(source, statement.head[1])
