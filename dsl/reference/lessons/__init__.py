"""A lesson for every code: the reason for the rule, and a wrong and a right example.

Each lesson is a file such as `E0802.md`: a few sentences, then fenced blocks. The rule itself is in `dsl.rules.codes`.

    ```dsc wrong         text of the wrong example, mine.dsc; with `right`, of the right one; without both, of both
    ```dsc wrong ×9      the text, repeated nine times
    ```sh wrong          the command line, if it is not `dsc check mine.dsc`

Examples are checked in the folder of the shipped specs, so they are short, such as
`import "tiny.dsc"` and `run mine extends tiny { … }`. Tests check that the wrong example gives only this code, once,
that the right one gives no message, and that the two differ in few lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources

from dsl.rules.codes import CODES

FILE = "mine.dsc"
COMMAND = f"dsc check {FILE}"
FENCE = re.compile(
    r"^```(?P<language>dsc|sh)(?: (?P<label>wrong|right))?(?: ×(?P<times>\d+))?\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class ExamplePart:
    """A piece of an example, repeated `times` times."""

    text: str
    times: int = 1


@dataclass(frozen=True)
class Example:
    """A spec `mine.dsc`, and the command line shown with it."""

    parts: tuple[ExamplePart, ...]
    command: str = COMMAND

    @property
    def text(self) -> str:
        """The whole file."""
        return "".join(part.text * part.times for part in self.parts)

    @property
    def abridged(self) -> str:
        """The text as shown: a repeated part appears once, with the number of repeats."""
        texts = (
            part.text if part.times == 1 else f"{part.text}# … and so on, {part.times:,} such lines\n"
            for part in self.parts
        )
        return "".join(texts)


@dataclass(frozen=True)
class Lesson:
    """The content of `dsc explain CODE`."""

    code: str
    rule: str
    why: str  # paragraphs of Markdown
    wrong: Example
    right: Example


def lesson(code: str) -> Lesson:
    """Return the lesson of a code in `dsl.rules.codes.CODES`."""
    return read(code, resources.files("dsl.reference.lessons").joinpath(f"{code}.md").read_text(encoding="utf-8"))


def read(code: str, text: str) -> Lesson:
    """Parse the text of a lesson file."""
    blocks = list(FENCE.finditer(text))
    assert blocks, f"{code} has no example"
    why = text[: blocks[0].start()].strip()
    return Lesson(code, CODES[code], why, _example(blocks, "wrong"), _example(blocks, "right"))


def _example(blocks: list[re.Match[str]], label: str) -> Example:
    fences = [block for block in blocks if block["label"] in (label, None)]
    parts = tuple(
        ExamplePart(block["text"], int(block["times"] or 1)) for block in fences if block["language"] == "dsc"
    )
    commands = [block["text"].strip() for block in fences if block["language"] == "sh"]
    return Example(parts, *commands)
