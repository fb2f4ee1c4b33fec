"""Where a `}` is most likely missing: before the line whose indentation says that its block has ended.

A guess by the indentation of the text, so it counts only where the braces match once each missing one is put there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsl.messages.source import Source
from dsl.text.syntax import KINDS
from dsl.text.table import Token

MAX_MISSING = 8  # braces that are put in
WIDE = 4  # columns of a tab


@dataclass(frozen=True)
class Missing:
    """A `{` that is never closed, and the place among the tokens before which its `}` is missing."""

    opener: Token
    index: int


def missing_braces(source: Source, tokens: Sequence[Token]) -> tuple[Missing, ...]:
    """Where each missing `}` belongs, in the order of the text; nothing where the indentation does not say."""
    found: list[Missing] = []
    opened: list[tuple[Token, int]] = []  # with the indentation of its line
    indent, is_first = 0, True
    for index, token in enumerate(tokens):
        if token.type == "NEWLINE":
            is_first = True
            continue
        if is_first:
            indent, is_first = _indent(source, token), False
            closes = token.type == "RBRACE"
            while opened and _has_ended(opened, indent, closes, _begins_block(tokens, index) and not indent):
                found.append(Missing(opened.pop()[0], index))
        if token.type == "LBRACE":
            opened.append((token, indent))
        elif token.type == "RBRACE":
            if not opened:
                return ()
            opened.pop()
    found += [Missing(token, len(tokens) - 1) for token, _ in reversed(opened)]  # before the newline that is last
    return tuple(found) if len(found) <= MAX_MISSING else ()


def _has_ended(opened: Sequence[tuple[Token, int]], indent: int, closes: bool, begins_block: bool) -> bool:
    """Whether a line of that indentation stands behind the innermost block, which is still open."""
    its = opened[-1][1]
    if begins_block:
        return True
    return indent < its if closes else indent <= its


def _indent(source: Source, token: Token) -> int:
    start = source.text.rfind("\n", 0, token.start) + 1
    return len(source.text[start : token.start].replace("\t", " " * WIDE))


def _begins_block(tokens: Sequence[Token], index: int) -> bool:
    """`model NAME {` or `model NAME extends`: a block of the file."""
    following = tokens[index : index + 3]
    if len(following) < 3 or tokens[index].text not in KINDS or following[1].type != "WORD":
        return False
    return following[2].type == "LBRACE" or following[2].text == "extends"
