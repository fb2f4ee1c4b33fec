"""A console of rich that prints into a text, in the width and colours that it is given, whatever the environment."""

from __future__ import annotations

import io

from rich.console import Console

from compiler.tools.picture.drawing import Screen

_ASCII = str.maketrans({
    "█": "#", "▀": "=", "▌": "|", "│": "|", "·": ".", "–": "-", "×": "x", "…": "~", "→": ">",
})  # fmt: skip


def console_of(screen: Screen, width: int) -> Console:
    """A console to print on; `printed` has the text."""
    return Console(
        file=io.StringIO(), width=width, force_terminal=screen.colours, no_color=not screen.colours,
        color_system="truecolor" if screen.colours else None, highlight=False, legacy_windows=False, _environ={},
    )  # fmt: skip


def printed(console: Console, screen: Screen) -> str:
    """What was printed, in ASCII where the screen has no more."""
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.translate(_ASCII) if screen.ascii else text
