"""Reads the command-line arguments in a shell script without running it.

An argument is a word `--name` and the words after it, up to the next argument or the end of the command. `$NAME` and
`${NAME:-default}` are replaced by values from the script or from the caller, also where a variable holds arguments:
`ARGS="--x 1"` and `ARGS=(--x 1)`. Variables left unreplaced are unknown values. Branches are not followed. `shlex`
splits words and removes quotes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.key_files import ComputedValue, is_known, parse_word, replace_variables, unknown
from dsl.messages.diagnostics import Diagnostic, Source, Span, SpecError

MOST_CHARACTERS = 10_000_000  # in all words together, because variables may refer to each other
ENDS = ";|&\n"  # characters that end a command
COMMENT = re.compile(r"(?:(?<=\s)|^)#[^\n]*")
REDIRECTION = re.compile(r"(?<![^\s;&|\"'])(?:\d|&)?(?:>>?|<)(?:&\d|[ \t]*[^\s;&|)\"'<>]+)")
ARGUMENT = re.compile(r"--([A-Za-z][^=]*+)(?:(=)(.*))?", re.DOTALL)
QUOTED = re.compile(r"[\s'\"\\]")
OPTION = re.compile(r"-[A-Za-z][\w-]*")  # an option of the shell or of Python
HOLDS = re.compile(r"(?:^|\s)--[A-Za-z]|\.py\s")  # matches a text that holds arguments or a command
SETTING = re.compile(r"([A-Za-z_]\w*)(\+?)=(\(?)(.*)", re.DOTALL)
REFERENCE = re.compile(r"\$\{?(\w+|[@*])(?:\[[@*]\])?\}?")
BEFORE_SETTINGS = re.compile(r"export|local|readonly|declare|typeset|env|then|do|else|!|\{|-\w+")
LAUNCHERS = {"python", "python3", "torchrun", "srun", "mpirun", "bash", "sh", "exec", "env", "deepspeed", "nsys"}


def script(source: Source, overrides: Mapping[str, str]) -> tuple[dict[str, list[JsonValue]], list[Diagnostic]]:
    """The arguments of a shell script by name, with `-` as `_`, and warnings about what could not be read.

    `overrides`: variables that replace those that the script sets. Raises SpecError if the text is not a shell script.
    """
    reader = _ScriptReader(source, overrides, dict(overrides))
    try:
        reader.read(_words(source.text))
    except ValueError as error:  # from shlex
        raise SpecError([Diagnostic("I0103", f"this is not a shell script: {error}", Span(source, 0, 1))]) from None
    return reader.members, reader.mistakes


def _words(text: str) -> Iterator[str]:
    """The words of a script, unquoted, and the operators between them."""
    text = REDIRECTION.sub(" ", COMMENT.sub("", re.sub(r"\\\r?\n", "  ", text)))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=ENDS)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    return iter(lexer)


def _words_of_string(text: str) -> Iterator[str]:
    """The words of an expanded variable, split at blanks only: an operator is a word of its own or ends one."""
    for word in shlex.split(REDIRECTION.sub(" ", text)):
        yield from (word[:-1], ";") if word.endswith(";") else (word,)


@dataclass
class _ScriptReader:
    """State of reading a script: variables, the arguments so far, and the argument being read."""

    source: Source
    overrides: Mapping[str, str]
    variables: dict[str, str]  # current values, overrides included
    members: dict[str, list[JsonValue]] = field(default_factory=dict)
    mistakes: list[Diagnostic] = field(default_factory=list)
    name: tuple[str, Span] | None = None  # name and place of the argument being read
    values: list[str] = field(default_factory=list)
    characters: int = 0  # in the words so far
    next: dict[str, int] = field(default_factory=dict)  # text → offset from which to look for its next occurrence

    def read(self, words: Iterable[str]) -> None:
        """Read commands."""
        begins, has_program, remaining = True, False, iter(words)
        for word in remaining:
            if word and not word.strip(ENDS):
                self._end()
                begins, has_program = True, False
            elif begins and (setting := SETTING.fullmatch(word)):
                self._set(setting, remaining)
            elif not (begins and BEFORE_SETTINGS.fullmatch(word)):
                has_program, begins = self._word(word, has_program or (begins and word.startswith("--"))), False
        self._end()

    def _set(self, setting: re.Match[str], words: Iterator[str]) -> None:
        """Read `NAME=value` or `NAME=(…)`."""
        name, plus, bracket, text = setting.groups()
        if bracket:
            items = list(_items(text, words))
            text = " ".join(shlex.quote(item) if QUOTED.search(item) else item for item in items)
        if name in self.overrides:
            return
        place = self._place(f"{name}{plus}=")
        previous, text = self.variables.get(name, ""), replace_variables(text, self.variables)
        if previous and not plus and previous not in text:
            message = f"`{name}` is {text[:80]} from here on, and was {previous[:80]}: branches are not followed"
            self.mistakes.append(Diagnostic("I0104", message, place, f"set it: -D {name}=VALUE", severity="warning"))
        text = f"{previous} {text}" if plus and bracket else previous + text if plus else text
        self.variables.pop(name, "")
        if is_known(text) or HOLDS.search(text):
            self.variables[name] = text

    def _word(self, word: str, has_program: bool) -> bool:
        """Read a word of a command. Returns whether the program has been named; words before it are the launcher's."""
        text = replace_variables(word, self.variables)
        self.characters += len(text)
        if self.characters > MOST_CHARACTERS:
            raise ValueError("its variables are too long")
        is_value = self.name is not None and not self.values
        if re.search(r"\s", text) and HOLDS.search(text) and not is_value:
            for inner in _words_of_string(text):
                if inner and not inner.strip(ENDS):
                    self._end()
                    has_program = False
                else:
                    has_program = self._word(inner, has_program)
        elif match := ARGUMENT.fullmatch(text):
            self._end()
            key = match[1].rstrip(":")
            self.name, self.values = (key.replace("-", "_"), self._place(f"--{key}")), [match[3]] if match[2] else []
        elif text.endswith(".py") and not has_program:
            self._end()
            return True
        elif text in LAUNCHERS or OPTION.fullmatch(text):
            self._end()
        elif self.name is not None:
            self.values.append(text)
        elif has_program and (unread := REFERENCE.fullmatch(text)):
            message = f"the arguments in {text} are not read: nothing is executed here"
            hint = f"set it: -D {unread[1]}='--name value'" if unread[1].isidentifier() else "write them out"
            self.mistakes.append(Diagnostic("I0104", message, self._place(text), hint, severity="warning"))
        return has_program

    def _end(self) -> None:
        """Finish the argument being read and record it."""
        if self.name is not None:
            (name, place), text = self.name, " ".join(self.values)
            is_read = is_known(text)
            value = (parse_word(text) if self.values else True) if is_read else ComputedValue(text)
            values = self.members.setdefault(name, [])
            if all(earlier.value != value for earlier in values):  # scripts often print a command and then run it
                values.append(JsonValue(value, place, place))
                self.mistakes += [] if is_read else [unknown(name, text, place, text)]
        self.name, self.values = None, []

    def _place(self, text: str) -> Span:
        """The span of a text; if it occurs several times, the span of its next occurrence."""
        start = self.source.text.find(text, self.next.get(text, 0))
        start = start if start >= 0 else max(0, self.source.text.find(text))
        self.next[text] = start + len(text)
        return Span(self.source, start, min(len(self.source.text), start + len(text)))


def _items(first: str, words: Iterator[str]) -> Iterator[str]:
    """The words of `NAME=(…)`. `first`: the one directly after the parenthesis."""
    for word in chain((first,), words):
        is_last = word.count(")") > word.count("(")
        text = word.removesuffix(")") if is_last else word
        if text.strip(ENDS):
            yield text
        if is_last:
            return
