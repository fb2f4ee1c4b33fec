"""Checks of a completion's text that need no process: is the answer the right one, and are thinking and answer marked.

Answers are written as in GSM8K (`#### 72`, arXiv 2110.14168), MATH (`\\boxed{72}`, arXiv 2103.03874) and DeepSeek-R1
(`<answer>72</answer>`, arXiv 2501.12948). Each function reads a text once, whatever a model has written.
"""

from __future__ import annotations

import re
from fractions import Fraction

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
LINE_MARK = "####"
_BRACE = re.compile(r"(\\boxed\s*\{)|\\.|[{}]", re.DOTALL)
# 1,234.50 and 1e-3 and 3/4. An exponent has three digits at most: 1e999999999 would fill memory.
_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?|[+-]?[0-9]+/[0-9]+"
)
_MAX_NUMBER = 64  # characters


def is_right(completion: str, answer: object) -> bool:
    """Whether the answer in a completion equals that of its row: a text, a number, or a list of which one is right.

    White space, `$` around it and a full stop at its end do not count. Numbers compare as numbers: 1,000 is 1e3.
    """
    if isinstance(answer, list):
        return any(is_right(completion, each) for each in answer)
    found, wanted = plain(answer_in(completion)), plain(answer_in(f"{answer}"))
    if found == wanted:
        return True
    number = number_of(found)
    return number is not None and number == number_of(wanted)


def answer_in(text: str) -> str:
    """The answer in a text: in its last `\\boxed{…}`, else in the last `<answer>…</answer>`, else the first line behind
    the last `####`, else all of the text."""
    if (found := _last_boxed(text)) is not None:
        return found
    head, closed, _ = text.rpartition(TAGS[3])
    _, opened, found = head.rpartition(TAGS[2])
    if closed and opened:
        return found
    _, marked, found = text.rpartition(LINE_MARK)
    return found.strip().partition("\n")[0] if marked else text


def plain(answer: str) -> str:
    """An answer without what does not count."""
    found = " ".join(answer.split()).removesuffix(".")
    if found.startswith("\\(") and found.endswith("\\)"):
        found = found[2:-2]
    return found.removeprefix("\\$").strip("$ ")


def number_of(text: str) -> Fraction | None:
    """The number that a text is, exactly; None if it is none."""
    text = text.replace("\N{MINUS SIGN}", "-")
    if len(text) > _MAX_NUMBER or not _NUMBER.fullmatch(text):
        return None
    try:
        return Fraction(text.replace(",", ""))
    except ZeroDivisionError:
        return None


def has_format(completion: str) -> bool:
    """Whether a completion is `<think>…</think>`, then `<answer>…</answer>`, each tag once, and white space around."""
    if any(completion.count(tag) != 1 for tag in TAGS):
        return False
    thought, _, rest = completion.partition(TAGS[1])
    between, _, answered = rest.partition(TAGS[2])
    return (
        thought.lstrip().startswith(TAGS[0])
        and not between.strip()
        and answered.rstrip().endswith(TAGS[3])  # once in all of it, so that its end is the only one
    )


def _last_boxed(text: str) -> str | None:
    """What is in the `\\boxed{…}` that begins last, of those whose brace is closed."""
    opened: list[tuple[int, bool]] = []  # where what is in braces begins, and whether it is boxed
    last, found = -1, None
    for match in _BRACE.finditer(text):
        if match[1] or match[0] == "{":
            opened.append((match.end(), bool(match[1])))
        elif match[0] == "}" and opened:
            begin, boxed = opened.pop()
            if boxed and begin > last:
                last, found = begin, text[begin : match.start()]
    return found
