"""A lesson for every code: what the rule is, why reality demands it, a wrong and a right example.

One file each, `E0802.md`: a few sentences, then fenced blocks; the rule itself is the code's line in `dsl.rules.codes`.

    ```dsc wrong         text of the wrong example, mine.dsc; `right` of the right one; neither: of both
    ```dsc wrong ×9      the text nine times over
    ```sh wrong          the command line, where it is not `dsc check mine.dsc`

Examples lie beside the shipped specs, so they are short: `import "tiny.dsc"`, `run mine extends tiny { … }`.
Tests hold them to their word: the wrong one gives this code once and nothing else, the right one gives nothing, and
the two differ in few lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources

from dsl.rules.codes import CODES

FILE = "mine.dsc"
COMMAND = f"dsc check {FILE}"
FENCE = re.compile(
    r"^```(?P<language>dsc|sh)(?: (?P<of>wrong|right))?(?: ×(?P<times>\d+))?\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class ExamplePart:
    """A piece of an example, `times` over."""

    text: str
    times: int = 1


@dataclass(frozen=True)
class Example:
    """A spec `mine.dsc`, and the command line that is shown with it."""

    parts: tuple[ExamplePart, ...]
    command: str = COMMAND

    @property
    def text(self) -> str:
        """The whole file."""
        return "".join(part.text * part.times for part in self.parts)

    @property
    def abridged(self) -> str:
        """The text as it is shown: a repeated part is there once, with the number of times."""
        texts = (
            part.text if part.times == 1 else f"{part.text}# … and so on, {part.times:,} lines of it\n"
            for part in self.parts
        )
        return "".join(texts)


@dataclass(frozen=True)
class Lesson:
    """What `dsc explain CODE` teaches."""

    code: str
    rule: str
    why: str  # paragraphs of Markdown
    wrong: Example
    right: Example


def lesson(code: str) -> Lesson:
    """The lesson of a code of `dsl.rules.codes.CODES`."""
    return read(code, resources.files("dsl.reference.lessons").joinpath(f"{code}.md").read_text(encoding="utf-8"))


def read(code: str, text: str) -> Lesson:
    """The lesson that a file's text says."""
    blocks = list(FENCE.finditer(text))
    assert blocks, f"{code} has no example"
    why = text[: blocks[0].start()].strip()
    return Lesson(code, CODES[code], why, _example(blocks, "wrong"), _example(blocks, "right"))


def _example(blocks: list[re.Match[str]], which: str) -> Example:
    mine = [block for block in blocks if block["of"] in (which, None)]
    parts = tuple(ExamplePart(block["text"], int(block["times"] or 1)) for block in mine if block["language"] == "dsc")
    commands = [block["text"].strip() for block in mine if block["language"] == "sh"]
    return Example(parts, *commands)
