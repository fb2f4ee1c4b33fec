"""The message about a mistake in a spec, and its rendering as text.

error[E0201]: `parallel` has no key `pipelin`
  --> run.dsc:7:5
   |
 7 |     pipelin = 16
   |     ^^^^^^^
   = hint: did you mean `pipeline`?
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

# --- Source text and positions in it

OVERRIDE = "-s"  # the source name of text from the command line


class LineColumn(NamedTuple):
    """The position of a character, both from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Source:
    """A text and its name in messages: a path, or `-s` for an override of the command line."""

    name: str
    text: str = field(repr=False)

    @cached_property
    def line_starts(self) -> tuple[int, ...]:
        return (0, *(i + 1 for i, c in enumerate(self.text) if c == "\n"))

    def position(self, offset: int) -> LineColumn:
        line = bisect_right(self.line_starts, offset)
        return LineColumn(line, offset - self.line_starts[line - 1] + 1)

    def line(self, number: int) -> str:
        """Line `number`, from 1, without its line end."""
        start = self.line_starts[number - 1]
        end = self.line_starts[number] if number < len(self.line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` (not included) of a source."""

    source: Source
    start: int
    end: int

    @property
    def line(self) -> int:
        return self.source.position(self.start).line

    @property
    def column(self) -> int:
        return self.source.position(self.start).column

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def extend_to(self, last: Span) -> Span:
        """The span from the start of this one to the end of the other."""
        return Span(self.source, self.start, last.end)

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"


# --- diagnostics

TAB = "    "
MEANT = re.compile(r"did you mean `([^`]+)`\?")  # a hint that proposes one word
MAX_WIDTH = 120  # characters of a quoted line
MAX_TEXT = 800  # characters of a line of a message
MAX_SHOWN = 100  # messages in one rendering
MAX_LISTED = 24  # names in a hint


@dataclass(frozen=True)
class Note:
    """A further position or fact that a mistake depends on. `places`: values that it follows from."""

    message: str
    span: Span | None = None
    places: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Edit:
    """Replace a span by `text`."""

    span: Span
    text: str


@dataclass(frozen=True)
class Conflict:
    """Lines that contradict each other, whatever the other lines say, and the edits that resolve it, best first.

    `mends`: code and position of each message that every resolution removes. `leaves_others`: whether messages about
    other mistakes remain.
    """

    lines: tuple[Span, ...]
    resolutions: tuple[tuple[Edit, ...], ...]
    mends: frozenset[tuple[str, Span | None]] = frozenset()
    leaves_others: bool = False


@dataclass(frozen=True)
class Diagnostic:
    """A mistake: the rule, the position, a message in the words and numbers of the spec, and an edit that fixes it."""

    code: str  # a key of dsl.rules.codes.CODES
    message: str
    span: Span | None = None
    hint: str = ""
    notes: tuple[Note, ...] = ()
    severity: Literal["error", "warning"] = "error"
    conflict: Conflict | None = None  # only on the first message that the conflict explains

    def __str__(self) -> str:
        return render(self)


class SpecError(Exception):
    """A spec cannot be used. `diagnostics` has all its mistakes, in source order."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__(f"{len(self.diagnostics)} error(s) in the spec")

    def __str__(self) -> str:
        return render_all(self.diagnostics)


def in_order(diagnostics: Iterable[Diagnostic], sources: Iterable[Source]) -> tuple[Diagnostic, ...]:
    """Return each message once, by source (in the given order) and position; those without a position come first."""
    rank = {source: index for index, source in enumerate(dict.fromkeys(sources))}

    def key(item: Diagnostic) -> tuple[int, int, int, str]:
        if item.span is None:
            return (-1, 0, 0, item.code)
        return (rank.get(item.span.source, len(rank)), item.span.start, item.span.end, item.code)

    unique: dict[object, Diagnostic] = {}
    # a mistake that several runs share is reported once, even if its notes differ between them
    for item in diagnostics:
        is_one = item.conflict or item.code == "E0201"
        unique.setdefault((item.code, item.message, item.span) if is_one else item, item)
    return tuple(sorted(unique.values(), key=key))


def render_all(diagnostics: tuple[Diagnostic, ...]) -> str:
    """Render all messages, separated by blank lines; those beyond MAX_SHOWN are counted."""
    parts = [render(item) for item in diagnostics[:MAX_SHOWN]]
    if len(diagnostics) > MAX_SHOWN:
        parts.append(f"and {len(diagnostics) - MAX_SHOWN} more")
    return "\n\n".join(parts)


def render(item: Diagnostic) -> str:
    """Render a message as text, without a final newline and without colour."""
    spans = [span for span in (item.span, *(note.span for note in item.notes)) if span is not None]
    margin = " " * max([len(str(span.line)) for span in spans], default=0)
    lines = [f"{item.severity}[{item.code}]: {_printable_line(item.message)}"]
    if item.span is not None:
        lines += _quote(item.span, margin, "-->")
    if item.hint:
        lines += _lines_with_label("hint", item.hint, margin)
    for note in item.notes:
        lines += _lines_with_label("note", note.message, margin)
        lines += [f"{margin}     {row}" for row in _table(note.places)] if note.places else []
        if note.span is not None:
            lines += _quote(note.span, margin, ":::")
    if item.conflict is not None:
        lines += _conflict(item.conflict, margin)
    return "\n".join(lines)


def _conflict(conflict: Conflict, margin: str) -> list[str]:
    """The lines that contradict each other, and the edits, each with its position."""
    lines: list[str] = []
    if conflict.lines:
        count = len(conflict.lines)
        text = (
            f"these {count} lines contradict each other" if count > 1 else "this line is wrong, whatever the others say"
        )
        lines += [f"{margin} = conflict: {text}", *(f"{margin}     {row}" for row in _table(conflict.lines))]
    if conflict.resolutions:
        edits = [edit for resolution in conflict.resolutions for edit in resolution]
        rows = iter(_table([edit.span for edit in edits], [edit.text for edit in edits]))
        target = "this conflict" if conflict.leaves_others else "it"
        has_several = len(conflict.resolutions) > 1
        text = f"any one of these fixes {target}, smallest change first" if has_several else f"this fixes {target}"
        lines.append(f"{margin} = edits: {text}{'; other errors remain' if conflict.leaves_others else ''}")
        for number, resolution in enumerate(conflict.resolutions, 1):
            marks = [f"{number}. ", *["   "] * (len(resolution) - 1)]
            lines += [f"{margin}     {mark}{next(rows)}" for mark in marks]
    return lines


def _table(spans: Sequence[Span], texts: Sequence[str] = ()) -> list[str]:
    """Rows with the position and statement of each value, or with the edit to one of `texts` if there are any."""
    width = max(len(make_visible(str(span))) for span in spans)
    rows = []
    for index, span in enumerate(spans):
        text = f"write `{text_before_value(span)}{texts[index]}`" if texts else statement_of(span)
        rows.append(f"{make_visible(str(span)):<{width}}  {_printable_line(text)}")
    return rows


def statement_of(span: Span) -> str:
    """The statement of a value: `pipeline = 2`."""
    return f"{text_before_value(span)}{span.text}"


def text_before_value(span: Span) -> str:
    """The text before a value in its statement: `pipeline = `."""
    before = span.source.text[: span.start]
    return re.sub(r"\s+=", " =", re.split(r"[\n,{}]", before)[-1].lstrip())


def _lines_with_label(label: str, text: str, margin: str) -> list[str]:
    first, *later_lines = text.split("\n")
    indent = " " * (len(margin) + len(label) + 5)
    return [f"{margin} = {label}: {_printable_line(first)}", *(indent + _printable_line(line) for line in later_lines)]


def _quote(span: Span, margin: str, arrow: str) -> list[str]:
    line = span.source.line(span.line)
    first = span.column - 1
    last = min(len(line), first + max(1, span.end - span.start))
    shift = max(0, first - MAX_WIDTH // 2) if len(line) > MAX_WIDTH else 0
    line, first, last = line[shift : shift + MAX_WIDTH], first - shift, min(last - shift, MAX_WIDTH)
    pad = " " * _width(line[:first])
    carets = "^" * max(1, _width(line[first:last]))
    return [
        f"{margin}{arrow} {make_visible(str(span))}",
        f"{margin} |",
        f"{span.line:>{len(margin)}} | {make_visible(line)}".rstrip(),
        f"{margin} | {pad}{carets}",
    ]


def _printable_line(text: str) -> str:
    """A line of a message with hidden characters made visible, shortened if what it quotes is very long."""
    return make_visible(text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]} … {text[-MAX_TEXT // 4 :]}")


def plural(count: int, word: str) -> str:
    """`1 error`, `2 errors`, `2 batches`."""
    return f"{count:,} {word}{'' if count == 1 else 'es' if word.endswith('ch') else 's'}"


def join_as_code(names: Sequence[str], before_last: str = "") -> str:
    """Join names as code: `a`, `b` or `c`."""
    quoted = [f"`{name}`" for name in names[:MAX_LISTED]]
    if len(names) > MAX_LISTED:
        return f"{', '.join(quoted)} …"
    return f"{', '.join(quoted[:-1])} {before_last} {quoted[-1]}" if before_last and quoted[1:] else ", ".join(quoted)


def make_visible(text: str) -> str:
    """Text that is safe for a terminal: without control characters and changes of direction."""
    return "".join(_glyph(character) for character in text)


def is_hidden(character: str) -> bool:
    """Whether a character is invisible and controls a terminal or the display of its neighbours."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _glyph(character: str) -> str:
    if character == "\t":
        return TAB
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    if is_hidden(character):
        return "\N{REPLACEMENT CHARACTER}"
    return character


def _width(text: str) -> int:
    """Columns that a terminal needs for the visible text."""
    printed = make_visible(text)
    num_wide = sum(unicodedata.east_asian_width(character) in "WF" for character in printed)
    return len(printed) + num_wide - sum(unicodedata.combining(character) > 0 for character in printed)
