"""Characters of a text to the lines and columns of an editor, and back.

The protocol counts columns in UTF-16 units unless the client agrees to another encoding; an astral character (😀) is
two units there. Lines end at LF, CR LF or CR.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

LINE_END = re.compile(r"\r\n|\n|\r")
UNITS = {  # position encoding → units of a character
    "utf-8": lambda character: len(character.encode("utf-8", "replace")),
    "utf-16": lambda character: 1 + (ord(character) > 0xFFFF),
    "utf-32": lambda character: 1,
}


@dataclass(frozen=True)
class Lines:
    """The lines of a text, in the encoding of a client."""

    text: str = field(repr=False)
    encoding: str = "utf-16"

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return (0, *(match.end() for match in LINE_END.finditer(self.text)))

    def position(self, offset: int) -> tuple[int, int]:
        """(line, column) of a character, both from 0."""
        line = bisect_right(self.starts, offset) - 1
        units = UNITS[self.encoding]
        return line, sum(map(units, self.text[self.starts[line] : offset]))

    def offset(self, line: int, column: int) -> int:
        """The character at a position; what lies beyond its line or the text is taken to be at the end of it."""
        if line >= len(self.starts):
            return len(self.text)
        start = self.starts[max(0, line)]
        end = self.starts[line + 1] if line + 1 < len(self.starts) else len(self.text)
        units = UNITS[self.encoding]
        for offset in range(start, end):
            if column <= 0 or self.text[offset] in "\r\n":
                return offset
            column -= units(self.text[offset])
        return end
