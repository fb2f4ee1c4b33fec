"""The words of a shell script, and the arguments of its command lines, read without running anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.key_files import VARIABLE, ComputedValue, is_known, replaced, typed, unknown
from dsl.messages.diagnostics import Diagnostic, Source, Span

# --- The words of a shell script and where they are, without running it
#
# A word keeps its variables; quotes and backslashes are removed. The text of a string, which a shell divides into words
# when it is used, is read by the same rules, but for blanks and quotes alone.

PROTECTED = "\ue000"  # a `$` that begins no variable, because it is quoted
# Before Python 3.11.5 a possessive group whose alternatives backtrack matches too little: only sets are possessive.
BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
COMMENT = re.compile(r"#[^\n]*+")
OPERATOR = re.compile(r"\n|;;?|\|\|?|&&?|[()]")
REDIRECTION = re.compile(r"(?:\d+|&)?(?:<<<|<<-?|>>|>\||[<>]&|<>|[<>])[ \t]*+")
HERE = re.compile(r"\d*<<(?!<)")
SETTING = re.compile(r"[A-Za-z_]\w*+(?:\[[^]\s]*+\])?\+?=")
PIECE = re.compile(
    r"""
      '(?P<single>[^']*+)'
    | "(?P<double>[^"\\]*+(?:\\.[^"\\]*+)*)"
    | \\(?P<escaped>.)
    | (?P<computed>
        `[^`]*+`
      | \$\([^()]*+(?:\([^()]*+(?:\([^()]*+\)[^()]*+)*\)[^()]*+)*\)
      | \$\{[^{}\n]*+(?:(?<=\$)\{[^{}\n]*+\}[^{}\n]*+)*\}
      )
    | (?P<plain>[^\s'"\\`;|&()<>$]++)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
ENDS = frozenset(" \t\r\n;|&()<>")  # a word of a script
WHOLE = re.compile(r"(?P<operator>;|\|\|?|&&?)|(?:\d|&)?>.*|.*(?<!\\);", re.DOTALL)  # words of a string that end others


@dataclass(frozen=True)
class ShellWord:
    """A word, or what ends the words before it.

    `array`: the beginning of `NAME=(`, whose items follow, up to an `end`. `head`: `NAME=`, which the word begins with.
    `inner`: the place of the text between the quotes that all of the word stands in, but for its head.
    """

    kind: Literal["word", "array", "end", "redirection"]
    text: str
    start: int
    end: int
    head: str = ""
    inner: tuple[int, int] | None = None
    is_quoted: bool = False


def words(text: str, start: int, end: int, *, of_string: bool = False, in_body: bool = False) -> Iterator[ShellWord]:
    """The words from `start` to `end`. `of_string`: of what is between quotes, where lines and operators are none.
    `in_body`: of a here-document, where others do not begin."""
    at, in_array, is_target, bodies = start, False, False, list[str]()  # bodies: the words that end here-documents
    while at < end:
        if found := BLANK.match(text, at, end) or (not of_string and COMMENT.match(text, at, end)):
            at = found.end()
        elif text[at] == "\n" and (of_string or in_array):
            at += 1
        elif not of_string and (found := REDIRECTION.match(text, at, end)):
            yield ShellWord("redirection", "", at, found.end())
            at, is_target = found.end(), True
            if HERE.match(found[0]) and not in_body:
                bodies.append(_word(text, at, end, "", of_string).text)
        elif not of_string and (found := OPERATOR.match(text, at, end)):
            in_array = in_array and found[0] != ")"
            yield ShellWord("end", found[0], at, found.end())
            at, is_target = found.end(), False
            while found[0] == "\n" and bodies:  # a text of its own, whose quotes do not reach beyond it
                last = re.compile(rf"^\t*{re.escape(bodies.pop(0))}$", re.MULTILINE).search(text, at, end)
                yield from words(text, at, last.start() if last else end, in_body=True)
                yield ShellWord("end", "", at, at)
                at = last.end() if last else end
        else:
            head = SETTING.match(text, at, end)
            if head and not of_string and text.startswith("(", head.end()):
                yield ShellWord("array", "", at, head.end() + 1, head[0])
                at, in_array = head.end() + 1, True
                continue
            word = _word(text, at, end, head[0] if head else "", of_string)
            at = word.end
            if not is_target:
                yield from _ended(word) if of_string and not word.is_quoted else (word,)
            is_target = False


def _word(text: str, start: int, end: int, head: str, of_string: bool) -> ShellWord:
    """The word that begins at `start`, with `head`."""
    at, written, quotes = start + len(head), list[str](), list[tuple[int, int]]()
    while at < end and not (text[at].isspace() if of_string else text[at] in ENDS):
        piece = PIECE.match(text, at, end)
        assert piece is not None
        for kind in ("single", "double"):
            if piece[kind] is not None:
                quotes.append(piece.span(kind))
        is_quote = of_string and piece["escaped"] == '"'  # one of `eval`
        written.append("" if is_quote else _unquoted(piece))
        at = piece.end()
    whole = len(quotes) == 1 and quotes[0] == (start + len(head) + 1, at - 1)
    return ShellWord("word", "".join(written), start, at, head, quotes[0] if whole else None, bool(quotes))


def _unquoted(piece: re.Match[str]) -> str:
    if piece["single"] is not None:
        return piece["single"].replace("$", PROTECTED)
    if piece["double"] is not None:
        return re.sub(r"\\(?:([\"\\`])|(\$)|\r?\n)", _escape, piece["double"])
    if piece["escaped"] is not None:
        return "" if piece["escaped"] == "\n" else piece["escaped"].replace("$", PROTECTED)
    return piece[0]


def _escape(found: re.Match[str]) -> str:
    return PROTECTED if found[2] else found[1] or ""


def _ended(word: ShellWord) -> Iterator[ShellWord]:
    """A word of a string, or the operator that it is or ends with."""
    found = WHOLE.fullmatch(word.text)
    if found is None:
        yield word
    elif found["operator"] or not word.text.endswith(";"):
        yield ShellWord("end", word.text, word.start, word.end)
    else:
        yield ShellWord("word", word.text[:-1], word.start, word.end - 1, word.head)
        yield ShellWord("end", ";", word.end - 1, word.end)


# --- Arguments of the command lines of a shell script, read without running anything
#
# An argument is a word `--name`, with the words behind it up to the next one or up to where a shell ends a command.
# Arguments that a variable holds, `ARGS="--x 1"` and `ARGS=(--x 1)`, are read where they are written. Of all other
# variables `$NAME` and `${NAME:-default}` are replaced by their values, of the script or given ones; what stays is not
# known. The branches of a script are not followed.

ARGUMENT = re.compile(r"--([A-Za-z][^=]*+)(?:(=)(.*))?", re.DOTALL)
OPTION = re.compile(r"-[A-Za-z][\w-]*")  # of a shell, of Python
HOLDS = re.compile(r"(?:^|\s)--[A-Za-z]|\.py\s")  # of the text of a string: arguments, or a command
REFERENCE = re.compile(r"\$\{?(\w+|[@*])(?:\[[@*]\])?\}?")
BEFORE_SETTINGS = re.compile(r"export|local|readonly|declare|typeset|env|then|do|else|!|\{|-\w+")
LAUNCHERS = {"python", "python3", "torchrun", "srun", "mpirun", "bash", "sh", "exec", "env", "deepspeed", "nsys"}


def script(source: Source, given: Mapping[str, str]) -> tuple[dict[str, list[JsonValue]], list[Diagnostic]]:
    """The arguments of a shell script by name, with `-` as `_`, and what could not be read.

    `given`: variables, also in place of what the script sets.
    """
    reader = _ScriptReader(source, given, dict(given))
    reader.read(words(source.text, 0, len(source.text)))
    return reader.found, reader.mistakes


@dataclass
class _ScriptReader:
    """What was found of a script so far."""

    source: Source
    given: Mapping[str, str]
    variables: dict[str, str]
    found: dict[str, list[JsonValue]] = field(default_factory=dict)
    mistakes: list[Diagnostic] = field(default_factory=list)
    holders: set[str] = field(default_factory=set)  # variables whose arguments were read
    name: tuple[str, Span] | None = None  # of the argument that is being read
    values: list[tuple[str, Span]] = field(default_factory=list)

    def read(self, of: Iterable[ShellWord]) -> None:
        """Read commands."""
        begins, has_program, each = True, False, iter(of)
        for word in each:
            if word.kind == "array":
                self._array(word, each)
            elif word.kind != "word":
                self._end()
                begins, has_program = (True, False) if word.kind == "end" else (begins, has_program)
            elif begins and word.head:
                self._setting(word)
            elif not (begins and BEFORE_SETTINGS.fullmatch(word.text)):
                for part in self._expanded(word):
                    has_program = self._word(part, has_program or (begins and part.text.startswith("--")))
                    begins = False
        self._end()

    def _expanded(self, word: ShellWord) -> Iterator[ShellWord]:
        """The words that a shell makes of a word whose variables are known."""
        text = replaced(word.text, self.variables)
        is_split = text != word.text and is_known(text) and not word.is_quoted
        if is_split or (word.is_quoted and word.inner is None and self.name is None and HOLDS.search(text)):
            yield from (replace(word, text=part, inner=None, is_quoted=False) for part in text.split())
        else:
            yield word

    def _word(self, word: ShellWord, has_program: bool) -> bool:
        """Read a word of a command; whether its program was named. Words before that are of what launches it."""
        text, span = word.head + word.text, Span(self.source, word.start, word.end)
        reference = REFERENCE.fullmatch(text)
        if found := ARGUMENT.fullmatch(text) if not self._opens(word) else None:
            self._end()
            key = found[1].rstrip(":").replace("-", "_")
            self.name, self.values = (key, span), [(found[3], span)] if found[2] else []
        elif self._opens(word) and not (self.name and not self.values):
            self._end()
            assert word.inner is not None
            self.read(words(self.source.text, *word.inner, of_string=True))
        elif reference and reference[1] in self.holders:
            self._end()
        elif text.endswith(".py") and not has_program:
            self._end()
            return True
        elif text in LAUNCHERS or OPTION.fullmatch(text):
            self._end()
        elif self.name is not None:
            self.values.append((text, span))
        elif reference and has_program:
            message = f"arguments that {text} holds are not read: nothing is executed here"
            hint = f"give it: -D {reference[1]}='--name value'" if reference[1].isidentifier() else "write them out"
            self.mistakes.append(Diagnostic("I0104", message, span, hint, severity="warning"))
        return has_program

    def _opens(self, word: ShellWord) -> bool:
        """Whether a word is a string with arguments in it."""
        return word.inner is not None and HOLDS.search(self.source.text[slice(*word.inner)]) is not None

    def _setting(self, word: ShellWord) -> None:
        """Read `NAME=value`."""
        name, is_more = re.split(r"[\[+=]", word.head)[0], word.head.endswith("+=")
        if name in self.given:
            return
        if self._opens(word):
            assert word.inner is not None
            self.holders.add(name)
            self.read(words(self.source.text, *word.inner, of_string=True))
            return
        before, text = self.variables.get(name, ""), replaced(word.text, self.variables)
        self.variables[name] = before + text if is_more else text
        if before and before != text and not is_more and name not in VARIABLE.sub(r"\1\3 ", word.text).split():
            message = f"`{name}` is {text} from here on, and was {before}: branches are not followed"
            span = Span(self.source, word.start, word.end)
            self.mistakes.append(Diagnostic("I0104", message, span, f"say which: -D {name}=VALUE", severity="warning"))

    def _array(self, begin: ShellWord, rest: Iterator[ShellWord]) -> None:
        """Read `NAME=(…)`."""
        name, items = re.split(r"[+=]", begin.head)[0], list[ShellWord]()
        for word in rest:
            if word.kind == "end":
                break
            items.append(word)
        if name in self.given:
            return
        if any(word.text.startswith("--") for word in items):
            self._end()
            self.holders.add(name)
            self.read(items)
        else:
            more = [self.variables[name]] if begin.head.endswith("+=") and name in self.variables else []
            self.variables[name] = " ".join([*more, *(replaced(word.text, self.variables) for word in items)])

    def _end(self) -> None:
        """Put what is being read among what was found."""
        if self.name is not None:
            (name, place), written = self.name, " ".join(word for word, _ in self.values)
            last = self.values[-1][1] if self.values else place
            text = replaced(written, self.variables)
            value = typed(text.replace(PROTECTED, "$")) if self.values else True
            if not is_known(text):
                self.mistakes.append(unknown(name, text, place, written))
                value = ComputedValue(text)
            self.found.setdefault(name, []).append(JsonValue(value, place.to(last), place))
        self.name, self.values = None, []
