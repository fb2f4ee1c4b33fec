"""The words of a shell script and where they are, without running it.

A word keeps its variables; quotes and backslashes are removed. The text of a string, which a shell divides into words
when it is used, is read by the same rules, but for blanks and quotes alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
class Word:
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


def words(text: str, start: int, end: int, *, of_string: bool = False, in_body: bool = False) -> Iterator[Word]:
    """The words from `start` to `end`. `of_string`: of what is between quotes, where lines and operators are none.
    `in_body`: of a here-document, where others do not begin."""
    at, in_array, is_target, bodies = start, False, False, list[str]()  # bodies: the words that end here-documents
    while at < end:
        if found := BLANK.match(text, at, end) or (not of_string and COMMENT.match(text, at, end)):
            at = found.end()
        elif text[at] == "\n" and (of_string or in_array):
            at += 1
        elif not of_string and (found := REDIRECTION.match(text, at, end)):
            yield Word("redirection", "", at, found.end())
            at, is_target = found.end(), True
            if HERE.match(found[0]) and not in_body:
                bodies.append(_word(text, at, end, "", of_string).text)
        elif not of_string and (found := OPERATOR.match(text, at, end)):
            in_array = in_array and found[0] != ")"
            yield Word("end", found[0], at, found.end())
            at, is_target = found.end(), False
            while found[0] == "\n" and bodies:  # a text of its own, whose quotes do not reach beyond it
                last = re.compile(rf"^\t*{re.escape(bodies.pop(0))}$", re.MULTILINE).search(text, at, end)
                yield from words(text, at, last.start() if last else end, in_body=True)
                yield Word("end", "", at, at)
                at = last.end() if last else end
        else:
            head = SETTING.match(text, at, end)
            if head and not of_string and text.startswith("(", head.end()):
                yield Word("array", "", at, head.end() + 1, head[0])
                at, in_array = head.end() + 1, True
                continue
            word = _word(text, at, end, head[0] if head else "", of_string)
            at = word.end
            if not is_target:
                yield from _ended(word) if of_string and not word.is_quoted else (word,)
            is_target = False


def _word(text: str, start: int, end: int, head: str, of_string: bool) -> Word:
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
    return Word("word", "".join(written), start, at, head, quotes[0] if whole else None, bool(quotes))


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


def _ended(word: Word) -> Iterator[Word]:
    """A word of a string, or the operator that it is or ends with."""
    found = WHOLE.fullmatch(word.text)
    if found is None:
        yield word
    elif found["operator"] or not word.text.endswith(";"):
        yield Word("end", word.text, word.start, word.end)
    else:
        yield Word("word", word.text[:-1], word.start, word.end - 1, word.head)
        yield Word("end", ";", word.end - 1, word.end)
