"""Parse a text into a document and report all syntax mistakes at once.

The grammar is in `grammar.lark`. At a mistake the parser goes back to the start of the statement, replaces it by a LOST
token, and continues at the next newline, brace or line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from dsl.messages.diagnostics import Diagnostic, Note, Source, Span
from dsl.text.syntax import KINDS, Document, Statement
from dsl.text.table import TableParser, Token, UnexpectedError, tokens
from dsl.text.tree import Builder

# --- Missing `}`: each is most likely missing before the line whose indentation shows that its block has ended
#
# This is a guess, so it is used only if all braces match after it.

MAX_MISSING = 8  # braces to insert
WIDE = 4  # columns of a tab


@dataclass(frozen=True)
class MissingBrace:
    """A `{` that is never closed, and the index of the token before which its `}` is missing."""

    opener: Token
    index: int


def missing_braces(source: Source, tokens: Sequence[Token]) -> tuple[MissingBrace, ...]:
    """Return where each missing `}` belongs, in text order; nothing if the indentation does not show it."""
    missing: list[MissingBrace] = []
    opened: list[tuple[Token, int]] = []  # with the indentation of their lines
    indent, is_first = 0, True
    for index, token in enumerate(tokens):
        if token.type == "NEWLINE":
            is_first = True
            continue
        if is_first:
            indent, is_first = _indent(source, token), False
            closes = token.type == "RBRACE"
            while opened and _has_ended(opened, indent, closes, _begins_block(tokens, index) and not indent):
                missing.append(MissingBrace(opened.pop()[0], index))
        if token.type == "LBRACE":
            opened.append((token, indent))
        elif token.type == "RBRACE":
            if not opened:
                return ()
            opened.pop()
    missing += [MissingBrace(token, len(tokens) - 1) for token, _ in reversed(opened)]  # before the last newline
    return tuple(missing) if len(missing) <= MAX_MISSING else ()


def _has_ended(opened: Sequence[tuple[Token, int]], indent: int, closes: bool, begins_block: bool) -> bool:
    """Whether a line with this indentation comes after the end of the innermost open block."""
    block_indent = opened[-1][1]
    if begins_block:
        return True
    return indent < block_indent if closes else indent <= block_indent


def _indent(source: Source, token: Token) -> int:
    start = source.text.rfind("\n", 0, token.start) + 1
    return len(source.text[start : token.start].replace("\t", " " * WIDE))


def _begins_block(tokens: Sequence[Token], index: int) -> bool:
    """Whether a top-level block begins here: `model NAME {` or `model NAME extends`."""
    following = tokens[index : index + 3]
    if len(following) < 3 or tokens[index].text not in KINDS or following[1].type != "WORD":
        return False
    return following[2].type == "LBRACE" or following[2].text == "extends"


# --- parser

MAX_BYTES = 1 << 20
MAX_WORDS = 40_000
MAX_DEPTH = 100
MAX_NUMBER = 40
MAX_EXPONENT = 330  # the smallest float is about 1e-324
MAX_NAME = 64
MAX_STRING = 4096
MAX_PARTS = 16  # of a dotted name
MAX_MISTAKES = 50
OPENERS = {"LBRACE": "}", "LSQUARE": "]", "LPAR": ")", "CALL": ")"}
CLOSERS = {"RBRACE": "}", "RSQUARE": "]", "RPAR": ")"}
OPERATORS = frozenset({"PLUS", "MINUS", "STAR", "SLASH"})


@dataclass(frozen=True)
class ParseResult:
    """The result of parsing. `document`: what could be read. `broken`: the braces do not match, so the structure is
    unknown.
    """

    document: Document
    diagnostics: tuple[Diagnostic, ...]
    broken: bool
    num_words: int


def decode(name: str, content: bytes) -> tuple[Source, tuple[Diagnostic, ...]]:
    """Decode a file; the diagnostics say why it is not a text. CRLF and a byte-order mark are allowed."""
    if len(content) > MAX_BYTES:
        message = f"{name} has more than the {MAX_BYTES:,} bytes that are allowed"
        return Source(name, ""), (Diagnostic("E0102", message, hint="split it with `import`"),)
    try:
        source = Source(name, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        source = Source(name, content.decode("utf-8-sig", errors="replace"))
        place = min(len(content[: error.start].decode("utf-8-sig", errors="replace")), max(0, len(source.text) - 1))
        byte = content[error.start]
        message = f"byte 0x{byte:02x} is not UTF-8"
        return source, (Diagnostic("E0101", message, Span(source, place, place + 1), "save the file as UTF-8"),)
    if "\0" in source.text:
        place = source.text.index("\0")
        return source, (Diagnostic("E0101", "a NUL byte: this is not a text file", Span(source, place, place + 1)),)
    return source, ()


def parse(source: Source) -> ParseResult:
    """Parse a source. Syntax mistakes are reported, never raised."""
    words = [*islice(tokens(source.text), MAX_WORDS + 1)]
    feeder = _Feeder(source, [*words])
    parsed = feeder.parse()
    return _parse_with_braces(source, words, parsed) if feeder.unclosed else parsed


def _parse_with_braces(source: Source, words: list[Token], parsed: ParseResult) -> ParseResult:
    """Parse a text with unclosed blocks as if they were closed where the indentation shows, if the braces then
    match."""

    end = len(source.text)
    written = [*words, Token("NEWLINE", "", end, end)]
    missing = missing_braces(source, written)
    inserted: dict[int, list[Token]] = {}
    for brace in missing:
        place = written[brace.index].start
        inserted.setdefault(brace.index, []).extend(
            (Token("RBRACE", "}", place, place), Token("NEWLINE", "", place, place))
        )
    feeder = _Feeder(
        source,
        [token for index, word in enumerate(written) for token in (*inserted.get(index, ()), word)],
        2 * MAX_WORDS,
    )
    closed = feeder.parse()
    if not missing or closed.broken:
        return parsed
    unclosed = []
    for brace in missing:
        line, opener = written[brace.index], Span(source, brace.opener.start, brace.opener.end)
        notes = (Note("the block most likely ends before this line", Span(source, line.start, line.end)),)
        is_last = brace.index == len(written) - 1
        message = f"this `{brace.opener.text}` is never closed"
        unclosed.append(Diagnostic("E0107", message, opener, "add `}`", () if is_last else notes))
    return ParseResult(closed.document, (*unclosed, *closed.diagnostics), False, parsed.num_words)


@dataclass
class _Feeder:
    """State of parsing the words of a text: open brackets, mistakes so far, the start of the statement."""

    source: Source
    tokens: list[Token]
    max_tokens: int = MAX_WORDS
    mistakes: list[Diagnostic] = field(default_factory=list)
    broken: bool = False
    unclosed: bool = False  # an unclosed block is the only mistake in the braces

    def __post_init__(self) -> None:
        if len(self.tokens) > self.max_tokens:
            self._complain("E0102", f"the text has more than {MAX_WORDS:,} words and signs", self.tokens.pop())
            self.tokens, self.broken = [], True
        self.tokens.append(self._token_to_insert("NEWLINE", len(self.source.text)))
        self.builder = Builder(self.source)
        self.parser = TableParser(self.builder)
        self.opened: list[Token] = []
        self.at_start = True
        self.previous: Token | None = None
        self._save(0)

    def parse(self) -> ParseResult:
        self.run()
        document = Document(self.source, self.finish())
        return ParseResult(document, (*self.mistakes, *self.builder.mistakes), self.broken, len(self.tokens))

    def run(self) -> None:
        index = 0
        while index < len(self.tokens):
            index = self._step(index)
            if len(self.mistakes) >= MAX_MISTAKES:
                self.broken = True
                return

    def finish(self) -> tuple[Statement, ...]:
        """Close open blocks and end the text."""
        if not self.at_start:
            self._feed_lost(len(self.source.text))
        if self.opened and not self.broken:
            self._complain("E0107", f"this `{self.opened[-1].text}` is never closed", self.opened[-1], "add `}`")
            self.broken = self.unclosed = True
        for _ in self.opened:
            self.parser.feed(self._token_to_insert("RBRACE", len(self.source.text)))
        body: tuple[Statement, ...] = self.parser.finish()
        return body

    def _step(self, index: int) -> int:
        """Feed one token; return the index to continue at."""
        token = self.tokens[index]
        in_brackets = bool(self.opened) and self.opened[-1].type != "LBRACE"
        if token.type == "NEWLINE" and in_brackets and index + 1 < len(self.tokens):
            return index + 1
        if self.at_start:
            self._save(token.start)
        mistake = self._mistake_before(index)
        if mistake is None:
            try:
                self.parser.feed(token)
            except UnexpectedError as error:
                mistake = self._mistake_of_unexpected(index, error.accepts)
        if mistake is not None:
            self.mistakes.append(mistake)
            return index + 1 if token.type == "OTHER" and self._feed_substitute(index) else self._recover(index)
        self._follow(token)
        return index + 1

    def _follow(self, token: Token) -> None:
        self.previous = token
        if token.type in OPENERS:
            self.opened.append(token)
        elif token.type in CLOSERS:
            self.opened.pop()
        self.operators += token.type in OPERATORS
        in_brackets = bool(self.opened) and self.opened[-1].type != "LBRACE"
        self.at_start = token.type in ("NEWLINE", "LBRACE") or (token.type == "COMMA" and not in_brackets)

    # ------------------------------------------------------------ mistakes

    def _mistake_before(self, index: int) -> Diagnostic | None:
        """Check limits, foreign characters and brackets, before the grammar is applied."""
        token = self.tokens[index]
        if token.type in CLOSERS:
            return self._mistake_of_closer(token)
        if token.type in OPENERS and len(self.opened) >= MAX_DEPTH:
            self.broken = True
            return self._diagnostic("E0103", f"brackets are nested more than {MAX_DEPTH} deep", token)
        if token.type in OPERATORS and self.operators >= MAX_DEPTH:
            return self._diagnostic("E0103", f"more than {MAX_DEPTH} operators in one statement", token)
        if token.type == "NUMBER" and _is_too_long(token.text):
            message = (
                f"this number is too long: at most {MAX_NUMBER} characters and an exponent of {MAX_EXPONENT} are "
                "allowed"
            )
            return self._diagnostic("E0104", message, token)
        if token.type in ("WORD", "CALL") and len(token.text) > MAX_NAME and _is_long(token.text):
            return self._diagnostic("E0104", f"this name is too long: at most {MAX_NAME} characters are allowed", token)
        if token.type == "STRING" and len(token.text) > MAX_STRING + 2:
            message = f"this string is too long: at most {MAX_STRING:,} characters are allowed"
            return self._diagnostic("E0104", message, token)
        if token.type == "OTHER":
            return self._diagnostic(
                "E0105", f"`{token.text}` is not part of the language", token, self._foreign_hint(index)
            )
        if token.type == "OPEN_STRING":
            return self._diagnostic("E0106", "this string is not closed on its line", token, 'add `"`')
        return None

    def _mistake_of_closer(self, token: Token) -> Diagnostic | None:
        if not self.opened:
            self.broken = self.broken or token.type == "RBRACE"
            return self._diagnostic("E0107", f"this `{token.text}` closes nothing", token, "remove it")
        opener = self.opened[-1]
        if OPENERS[opener.type] == token.text:
            return None
        note = (Note(f"`{opener.text}` was opened here", self._span(opener)),)
        message = f"`{token.text}` where `{OPENERS[opener.type]}` was expected"
        return Diagnostic("E0107", message, self._span(token), f"close `{opener.text}` first", note)

    def _foreign_hint(self, index: int) -> str:
        """Hint for a character that the language does not have."""
        character = self.tokens[index].text
        if character == ":" and self._is_before_brace(index):
            return "remove `:`"
        hints = {"'": 'strings are written with `"`', ";": "statements end at a newline or a comma"}
        return hints.get(character, "a value is given with `=`" if character == ":" else "")

    def _is_before_brace(self, index: int) -> bool:
        """Whether a `{` or `extends` follows a token."""
        following = self.tokens[index + 1 : index + 2]
        return any(token.type == "LBRACE" or token.text == "extends" for token in following)

    def _mistake_of_hyphens(self, index: int) -> Diagnostic | None:
        """Report a name with hyphens, such as `warm-up`; None if the tokens are none."""
        words = self.tokens[index - 1 : index]
        while [token.type for token in self.tokens[index : index + 2]] == ["MINUS", "WORD"]:
            if words[-1].end != self.tokens[index].start or self.tokens[index].end != self.tokens[index + 1].start:
                break
            words.append(self.tokens[index + 1])
            index += 2
        if len(words) < 2 or words[0].type != "WORD":
            return None
        from dsl.facts.vocabulary import SYNONYMS  # imported only to explain a mistake

        name = "_".join(word.text for word in words)
        span = Span(self.source, words[0].start, words[-1].end)
        message = f"`{span.text}` is not a valid name: names have letters, digits and `_`"
        return Diagnostic("E0108", message, span, f"did you mean `{SYNONYMS.get(name, name)}`?")

    def _mistake_of_unexpected(self, index: int, accepted: frozenset[str]) -> Diagnostic:
        token, unclosed = self.tokens[index], self._unclosed_bracket(index)
        if unclosed is not None:
            hint = f"add `{OPENERS[unclosed.type]}`"
            return self._diagnostic("E0107", f"this `{unclosed.text}` is never closed", unclosed, hint)
        subject = "the line ends" if token.type == "NEWLINE" else f"`{token.text}`"
        before = self.previous
        hyphenated = (
            self._mistake_of_hyphens(index) if token.type == "MINUS" and before is self.tokens[index - 1] else None
        )
        if hyphenated is not None:
            return hyphenated
        if before is not None and before.type == "EQUAL" and token.type == "LBRACE":
            return self._diagnostic("E0108", "a block has no `=`", before, "remove the `=`")
        if before is not None and before.type == "EQUAL":
            message = f"{subject} where a value was expected" if token.type != "NEWLINE" else "a value is missing"
            return self._diagnostic(
                "E0108", message, before if token.type == "NEWLINE" else token, "write `key = value`"
            )
        if "WORD" in accepted and "NUMBER" not in accepted:
            return self._diagnostic(
                "E0108", f"{subject} where a key was expected", token, "a statement begins with a name"
            )
        if before is not None and before.type == "RBRACE":
            return self._diagnostic("E0108", f"{subject} right after `}}`", token, "start a new line, or add a comma")
        place = token if token.type != "NEWLINE" or before is None else before
        message = f"{subject} is not allowed here" if token.type != "NEWLINE" else "this line ends too early"
        return self._diagnostic("E0108", message, place, _expected_hint(accepted))

    def _unclosed_bracket(self, index: int) -> Token | None:
        """The open bracket to report: opened on an earlier line, if the line of this token looks like a new
        statement."""
        if len(self.opened) <= self.saved_depth or self.opened[-1].type == "LBRACE":
            return None
        opener, token = self.opened[-1], self.tokens[index]
        if token.type in ("NEWLINE", "RBRACE"):
            return opener
        first = self._line_start(index)
        begins_statement = self.tokens[first].type == "WORD" and self.tokens[first + 1].type in (
            "EQUAL",
            "LBRACE",
            "WORD",
        )
        return opener if begins_statement and self.tokens[first].start > (opener.start) else None

    def _line_start(self, index: int) -> int:
        while index > 0 and self.tokens[index - 1].type != "NEWLINE":
            index -= 1
        return index

    # ------------------------------------------------------------ recovery

    def _recover(self, index: int) -> int:
        """Replace the statement by LOST; return the index to continue at."""
        token = self.tokens[index]
        unclosed = self._unclosed_bracket(index)
        if self.previous is not None and self.previous.type == "RBRACE":
            self._separate(token)
            if token.type == "WORD":  # only the separator was missing
                return index
        if token.type == "OPEN_STRING":  # it swallowed the braces that close blocks opened on its line
            openers = [opener for opener in self.opened if "\n" not in self.source.text[opener.start : token.start]]
            swallowed = min(len(openers), token.text.count("}"))
            self.tokens[index + 1 : index + 1] = [self._token_to_insert("RBRACE", token.end)] * swallowed
        if unclosed is not None and token.type not in ("NEWLINE", "RBRACE"):
            stop = self._line_start(index) - 1  # the newline before it
            self._feed_lost(self.tokens[stop].start)
            return stop
        self._feed_lost(self.tokens[self._end_of_lost(index)].start)
        index = self._end_of_lost(index + 1 if token.type == "RBRACE" and not self.opened else index)
        too_deep = self.tokens[index].type == "LBRACE" and len(self.opened) >= MAX_DEPTH
        return len(self.tokens) if too_deep else index

    def _end_of_lost(self, index: int) -> int:
        while self.tokens[index].type not in ("NEWLINE", "RBRACE", "LBRACE"):
            index += 1
        return index

    def _feed_substitute(self, index: int) -> bool:
        """Continue as if `:` were `=` and `;` a comma; a `:` before a brace is skipped. Returns whether that is
        possible."""
        token = self.tokens[index]
        kind = {":": "EQUAL", ";": "COMMA"}.get(token.text)
        if kind is None or self.at_start:
            return False
        if token.text == ":" and self._is_before_brace(index):
            return True
        inserted = self._token_to_insert(kind, token.start)
        try:
            self.parser.feed(inserted)
        except UnexpectedError:
            return False
        self._follow(inserted)
        return True

    def _separate(self, token: Token) -> None:
        """End a statement after its closing brace, as if a comma followed."""
        comma = self._token_to_insert("COMMA", token.start)
        self.parser.feed(comma)
        self._follow(comma)
        self._save(token.start)

    def _save(self, start: int) -> None:
        """Save the state of the parser at the start of a statement."""
        self.start = start
        self.saved = self.parser.copy_state()
        self.saved_depth = len(self.opened)
        self.operators = 0

    def _feed_lost(self, end: int) -> None:
        """Go back to the start of the statement and feed a LOST token that spans the unread text."""
        self.parser.restore(self.saved)
        self.opened = self.opened[: self.saved_depth]
        self.parser.feed(Token("LOST", "", self.start, max(self.start, end)))
        self.previous = None
        self.at_start = False

    # ------------------------------------------------------------ helpers

    def _token_to_insert(self, kind: str, offset: int) -> Token:
        return Token(kind, {"RBRACE": "}", "COMMA": ",", "EQUAL": "="}.get(kind, ""), offset, offset)

    def _span(self, token: Token) -> Span:
        return Span(self.source, token.start, token.end)

    def _diagnostic(self, code: str, message: str, token: Token, hint: str = "") -> Diagnostic:
        return Diagnostic(code, message, self._span(token), hint)

    def _complain(self, code: str, message: str, token: Token, hint: str = "") -> None:
        self.mistakes.append(self._diagnostic(code, message, token, hint))


def _is_too_long(number: str) -> bool:
    if len(number) > MAX_NUMBER:
        return True
    mantissa, e, exponent = number.lower().partition("e")
    digits = exponent.lstrip("+-")
    leading = digits[: len(digits) - len(digits.lstrip("0123456789"))]
    return bool(e) and mantissa.replace(".", "").replace("_", "").isdigit() and int(leading or 0) > MAX_EXPONENT


def _is_long(name: str) -> bool:
    parts = name.split(".")
    return max(map(len, parts)) > MAX_NAME or len(parts) > MAX_PARTS


def _expected_hint(accepted: frozenset[str]) -> str:
    names = {"EQUAL": "`=`", "LBRACE": "`{`", "COMMA": "`,`", "RPAR": "`)`", "RSQUARE": "`]`", "NUMBER": "a value"}
    words = [names[name] for name in names if name in accepted]
    return (
        f"expected {', '.join(words[:-1])} or {words[-1]}"
        if len(words) > 1
        else f"expected {words[0]}"
        if words
        else ""
    )
