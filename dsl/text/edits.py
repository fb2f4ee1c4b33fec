"""Derive an edit from a hint if a machine can apply it: "did you mean `pipeline`?" is an edit, "keep one" is not.

Hints are written for people and parsed here, so that every automatic edit is one that the user was shown. There is no
edit if a hint leaves a choice, has a placeholder, or is an example.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from dsl.messages.diagnostics import MEANT, OVERRIDE, Diagnostic, Edit, Source, Span
from dsl.text.syntax import ALTERNATIVES
from dsl.text.table import tokens

WRITE = re.compile(r"write `([^`]+)`(.*)", re.DOTALL)
SETTING = re.compile(r"([A-Za-z_][\w.]*)\s*=\s*(.*)", re.DOTALL)  # key = value
PLACEHOLDER = re.compile(r"…|\bvalue\b|\bname\b|\bmy_|\bchild\b")
EXAMPLES = ("E0108", "E0303", "E0504", "E0703", "E0704")  # rules whose "write `…`" is an example
INDENT = "  "  # indentation of the lines in a block


def edit_of(item: Diagnostic) -> Edit | None:
    """The edit that the hint of a message describes; None if it is none that a machine can apply."""
    if item.span is None:
        return None
    for reader in READERS:
        edit = reader(item, item.span)
        if edit is not None:
            return edit
    return None


def corrects_spelling(item: Diagnostic) -> bool:
    """Whether the hint of a message proposes one word for a misspelt one."""
    return bool(MEANT.fullmatch(item.hint))


def is_mended(before: Sequence[Diagnostic], after: Sequence[Diagnostic]) -> bool:
    """Whether the correction of one word has removed mistakes and added none.

    Rules across fields do not count: they check values that could not be read before the correction.
    """
    return _text_mistakes(after) < _text_mistakes(before)


def _text_mistakes(items: Iterable[Diagnostic]) -> Counter[tuple[str, str]]:
    """Mistakes in syntax, keys, values and names, which do not depend on other values."""
    return Counter((item.code, item.message) for item in items if item.severity == "error" and item.code < "E07")


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Apply edits to a text. Of two that overlap, only the first one in the text is applied."""
    parts, end = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.span.start, edit.span.end)):
        if edit.span.start >= end:
            parts += [text[end : edit.span.start], edit.text]
            end = edit.span.end
    return "".join((*parts, text[end:]))


# ---------------------------------------------------------------- one reader per kind of hint


def _only_resolution(item: Diagnostic, span: Span) -> Edit | None:
    """The edit that resolves a conflict, if it is the only one."""
    resolutions = item.conflict.resolutions if item.conflict else ()
    return resolutions[0][0] if len(resolutions) == 1 and len(resolutions[0]) == 1 else None


def _spelling(item: Diagnostic, span: Span) -> Edit | None:
    match = MEANT.fullmatch(item.hint)
    if match is None:
        return None
    word = match[1]
    if span.source.name == OVERRIDE and item.code == "E0201":  # the span is a whole dotted key
        misspelt_word = item.message.split("`")[-2]
        begin = span.start + span.text.rfind(misspelt_word)
        return Edit(Span(span.source, begin, begin + len(misspelt_word)), word) if begin >= span.start else None
    return Edit(span, word)


def _new_value(item: Diagnostic, span: Span) -> Edit | None:
    """write `key = value`, or write `2`: replace the old value."""
    match = WRITE.fullmatch(item.hint)
    if match is None or PLACEHOLDER.search(match[1]) or not _is_certain(match[2]):
        return None
    text, text_before = match[1], _text_before(span)
    layers = re.fullmatch(r"layers (\S+)", text)
    if layers:
        return Edit(span, layers[1]) if text_before.endswith("layers ") else None
    setting = SETTING.fullmatch(text)
    if setting and re.search(rf"(?:^|[^\w]){re.escape(setting[1])}\s*=\s*$", text_before) and item.code not in EXAMPLES:
        return Edit(span, setting[2])
    if setting and setting[1] == span.text and (block := _span_with_block(span)) != span:
        return Edit(block, text)  # a value instead of a block: `mtp = none`
    named = re.search(r"(\w+)\s*=\s*$", text_before)
    if setting and named and item.code == "E0301" and ALTERNATIVES.get(setting[1]) == named[1]:  # `steps = 5 tokens`
        return Edit(Span(span.source, span.start - len(named[0]), span.end), text)
    if setting and re.fullmatch(rf"{re.escape(setting[1])}\s+\S.*", span.text) and item.code == "E0204":
        return Edit(span, text)  # a statement without its `=`
    if item.code in ("E0301", "E0302", "E0304", "E0401") and not setting:
        return Edit(span, text)
    return None


def _is_certain(following: str) -> bool:
    """Whether the first `…` of a hint can be applied: the text after it, if any, is a remark or lists alternatives."""
    return following == "" or following.startswith((";", ", or `", ", or a multiple"))


def _words_before_equal(item: Diagnostic, span: Span) -> Edit | None:
    """`pipeline x = 2`: remove the words between key and `=`."""
    match = WRITE.fullmatch(item.hint)
    if match is None or item.code != "E0108" or not item.message.endswith("and `=`"):
        return None
    name = re.match(r"let (\w+) = ", match[1])  # `let my-width = 64`: replace the name
    return Edit(span, name[1]) if name else _removal_of(span)


def _label(item: Diagnostic, span: Span) -> Edit | None:
    """`parallel four { }`: remove the name, which the block does not take."""
    return _removal_of(span) if item.code == "E0205" and item.message.endswith("takes no name") else None


def _removal(item: Diagnostic, span: Span) -> Edit | None:
    if item.hint in ("remove it", "remove the `=`", f"remove `{span.text}`") and item.code != "E0107":
        begins = re.search(r"(^|[\n{,])[ \t]*$", span.source.text[: span.start])
        return _removal_of(_span_with_block(span) if begins and span.text.isidentifier() else span)
    if item.message.endswith("is listed twice"):
        comma = re.search(r",\s*$", span.source.text[: span.start])
        return Edit(Span(span.source, comma.start(), span.end), "") if comma else None
    return None


def _separator(item: Diagnostic, span: Span) -> Edit | None:
    if item.code == "E0105" and span.text == ";":
        return Edit(span, ",")
    if item.code == "E0105" and item.hint == "a value is given with `=`":
        return Edit(span, "=" if span.source.text[: span.start].endswith((" ", "\t")) else " =")
    if item.hint == "start a new line, or add a comma":
        place = len(span.source.text[: span.start].rstrip())
        return Edit(Span(span.source, place, place), ",")
    return None


def _closing(item: Diagnostic, span: Span) -> Edit | None:
    """Close an open list or call at the end of its line."""
    match = re.fullmatch(r"add `([\])}])`", item.hint)
    if match is None or item.code != "E0107":
        return None
    if match[1] == "}":
        return _brace(item, span)
    line = span.source.line(span.line)[span.column - 1 :]
    place = span.start + len(line.partition("#")[0].rstrip().rstrip(","))
    return Edit(Span(span.source, place, place), match[1])


def _brace(item: Diagnostic, span: Span) -> Edit | None:
    """Close an open block before the line that a note points at."""
    line = next((note.span.line for note in item.notes if note.span is not None), None)
    if line is None:
        return None
    start, opening = span.source.line_starts[line - 1], span.source.line(span.line)
    indent = opening[: len(opening) - len(opening.lstrip())]
    return Edit(Span(span.source, start, start), f"{indent}}}\n")


def _missing(item: Diagnostic, span: Span) -> Edit | None:
    """add `key = value`, one or several: insert them at the beginning of the block, each on a line if the block has
    lines.
    """
    if item.code != "E0203" or not item.hint.startswith("add `") or "…" in item.hint:
        return None
    statements = re.findall(r"^(?:add )?\s*`([^`]+)`", item.hint, re.MULTILINE)
    text = span.source.text
    brace = re.compile(r"\s*(?:extends\s+\w+\s*)?\{").match(text, span.end)
    if brace is None:
        return None
    blanks = re.compile(r"[ \t]*").match(text, brace.end())
    assert blanks is not None
    place = Span(span.source, brace.end(), brace.end())
    if text[blanks.end() : blanks.end() + 1] in ("\n", "\r", "#"):
        line = span.source.line(span.line)
        indent = line[: len(line) - len(line.lstrip())] + INDENT
        next_line_start = span.source.line_starts[span.source.position(brace.end()).line :][:1]  # the next line
        place = Span(span.source, next_line_start[0], next_line_start[0]) if next_line_start else place
        return Edit(place, "".join(f"{indent}{statement}\n" for statement in statements))
    ends = "" if text[blanks.end() : blanks.end() + 1] == "}" else ","
    return Edit(place, f" {', '.join(statements)}{ends}" + (" " if blanks.end() == brace.end() else ""))


def _span_with_block(span: Span) -> Span:
    """The span of a key and the block after it, up to its closing brace; the same span if no block follows."""
    depth = 0
    for token in tokens(span.source.text):
        if token.start < span.end:
            continue
        depth += {"LBRACE": 1, "RBRACE": -1}.get(token.type, 0)
        if depth <= 0:
            return Span(span.source, span.start, token.end) if token.type == "RBRACE" and depth == 0 else span
    return span


def _removal_of(span: Span) -> Edit:
    """Remove a span and the blanks before it, so that no double blank is left."""
    source: Source = span.source
    begin = len(source.text[: span.start].rstrip(" \t"))
    begin = span.start if source.text[begin - 1 : begin] in ("", "\n") else begin
    return Edit(Span(source, begin, span.end), "")


def _text_before(span: Span) -> str:
    """The text before a span on its line."""
    return span.source.text[span.source.line_starts[span.line - 1] : span.start]


READERS: tuple[Callable[[Diagnostic, Span], Edit | None], ...] = (
    _only_resolution,
    _spelling,
    _new_value,
    _words_before_equal,
    _label,
    _removal,
    _separator,
    _closing,
    _missing,
)
