"""Format the text of a spec: only blanks change; words, comments and line ends are kept.

The result does not depend on the old blanks, so formatting twice changes nothing. In consecutive lines, the first `=`
(or `{`) and the comments at the end are aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dsl.messages.diagnostics import Source, SpecError
from dsl.text.parser import CLOSERS, OPENERS, parse
from dsl.text.table import Token, tokens

INDENT = "  "
BEFORE_COMMENT = "  "
TIGHT_BEFORE = frozenset({"COMMA", "RPAR", "RSQUARE", "RANGE"})
TIGHT_AFTER = frozenset({"LPAR", "LSQUARE", "CALL", "RANGE"})
BEFORE_SIGN = frozenset({"EQUAL", "COMMA", "LPAR", "LSQUARE", "CALL"})  # a minus after one of these is a sign


@dataclass(frozen=True)
class FormattedLine:
    """One line of the formatted text."""

    head: str  # the words before the first `=` or `{`, if that is aligned
    tail: str  # the other words
    column: str | None  # consecutive lines with the same column are aligned
    comment: str
    depth: int
    after_blank: bool  # whether an empty line comes before it


def format_source(source: Source) -> str:
    """Return the formatted text of a source. Raises SpecError if it cannot be parsed."""
    mistakes = parse(source).diagnostics
    if mistakes:
        raise SpecError(mistakes)
    rows = list(_rows(source))
    codes = [INDENT * row.depth + row.tail for row in rows]
    for group in _groups(rows, lambda row: row.column):
        width = max(len(rows[index].head) for index in group)
        for index in group:
            codes[index] = f"{INDENT * rows[index].depth}{rows[index].head.ljust(width)} {rows[index].tail}"
    for group in _groups(rows, lambda row: "" if row.tail and row.comment else None):
        width = max(len(codes[index]) for index in group)
        for index in group:
            codes[index] = codes[index].ljust(width) + BEFORE_COMMENT
    lines = ("\n" * row.after_blank + code + row.comment + "\n" for row, code in zip(rows, codes, strict=True))
    return "".join(lines)


def _groups(rows: list[FormattedLine], column: Callable[[FormattedLine], str | None]) -> Iterator[list[int]]:
    """Yield the indices of consecutive lines with the same depth and column, without an empty line between them."""
    group: list[int] = []
    for index, row in enumerate(rows):
        kin = group and not row.after_blank and row.depth == rows[group[0]].depth
        if group and not (kin and column(row) == column(rows[group[0]])):
            yield group
            group = []
        if column(row) is not None:
            group.append(index)
    if group:
        yield group


# ---------------------------------------------------------------- lines


def _rows(source: Source) -> Iterator[FormattedLine]:
    """Yield the lines that are not empty. Several empty lines become one; none is kept at the start or end of a
    block."""
    depths: list[int] = []  # for each open bracket: depth of the lines in it
    line: list[Token] = []
    place, is_first, after_blank = 0, True, False
    for token in (*tokens(source.text), Token("NEWLINE", "\n", len(source.text), len(source.text))):
        if token.type != "NEWLINE":
            line.append(token)
            place = token.end
            continue
        comment = source.text[place : token.start].strip(" \t")
        if line or comment:
            keeps_blank = after_blank and not is_first and not (line and line[0].type in CLOSERS)
            yield FormattedLine(*_head_tail_column(line), comment, _line_depth(depths, line), keeps_blank)
            is_first = bool(line) and line[-1].type in OPENERS
        after_blank = token.text.count("\n") > 1
        line, place = [], token.end


def _line_depth(depths: list[int], line: list[Token]) -> int:
    """Return the depth of a line and update `depths`. Several brackets opened on one line indent once."""
    num_closing = next((index for index, token in enumerate(line) if token.type not in CLOSERS), len(line))
    depth = depths[-1] if depths else 0
    for _ in range(num_closing):
        depth = depths.pop() - 1
    for token in line[num_closing:]:
        if token.type in OPENERS:
            depths.append(depth + 1)
        elif token.type in CLOSERS:
            depths.pop()
    return depth


def _head_tail_column(line: list[Token]) -> tuple[str, str, str | None]:
    """Split a line into its head and the rest, and return them with its column.

    `key = …` and `key { … }` share a column; blocks with a label and `let` have one for each first word.
    """
    end = next((index for index, token in enumerate(line) if token.type in ("EQUAL", "LBRACE")), 0)
    opens = sum((token.type in OPENERS) - (token.type in CLOSERS) for token in line)
    is_head = bool(end) and all(token.type not in ("COMMA", "RBRACE") for token in line[:end])
    if not is_head or (end == 1 and line[end].type == "LBRACE" and opens):
        return "", _join_tokens(line), None
    return _join_tokens(line[:end]), _join_tokens(line[end:]), line[0].text if end > 1 else ""


def _join_tokens(words: Iterable[Token]) -> str:
    """Join words with the blanks that belong between them."""
    parts: list[str] = []
    before: Token | None = None
    after_sign = False
    for token in words:
        if before is not None and not after_sign and not _are_adjacent(before, token):
            parts.append(" ")
        parts.append(token.text)
        after_sign = token.type == "MINUS" and (before is None or before.type in BEFORE_SIGN)
        before = token
    return "".join(parts)


def _are_adjacent(before: Token, token: Token) -> bool:
    return token.type in TIGHT_BEFORE or before.type in TIGHT_AFTER
