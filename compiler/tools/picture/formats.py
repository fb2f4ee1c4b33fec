"""The formats of a picture by their names on the command line."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from compiler.tools.picture.drawing import Picture, Screen


class TooMuchError(ValueError):
    """A picture is too large for its format. The message says what to change."""


@dataclass(frozen=True)
class PictureFormat:
    """A function that draws a picture, the maximum number of actions, and the suffix of files."""

    draw: Callable[[Picture], str]
    max_actions: int
    suffix: str


def _svg(picture: Picture) -> str:
    from compiler.tools.picture.sheet import svg

    return svg(picture)


def _html(picture: Picture) -> str:
    from compiler.tools.picture.html import html

    return html(picture)


def _trace(picture: Picture) -> str:
    from compiler.tools.picture.trace_events import trace

    return trace(picture)


def _terminal(picture: Picture) -> str:
    from compiler.tools.picture.terminal import terminal

    return terminal(picture, screen_of(sys.stdout))


# Modules are imported when they are used: importing jinja and rich takes longer than drawing. A file at the limit has
# about 20 MB (html, svg) or 100 MB (trace), and takes about 20 s.
FORMATS = {
    "terminal": PictureFormat(_terminal, 1_000_000, ".txt"),
    "svg": PictureFormat(_svg, 500_000, ".svg"),
    "html": PictureFormat(_html, 1_000_000, ".html"),
    "trace": PictureFormat(_trace, 400_000, ".json"),
}


def render(picture: Picture, name: str) -> str:
    """Return the contents of the file. Raises TooMuchError as `check_size` does."""
    check_size(picture.num_actions, name)
    return FORMATS[name].draw(picture)


def check_size(num_actions: int, name: str) -> None:
    """Raise TooMuchError, with an alternative, if there are too many actions for a format."""
    limit = FORMATS[name].max_actions
    if num_actions > limit:
        alternatives = [alternative for alternative, entry in FORMATS.items() if entry.max_actions >= num_actions]
        hint = (
            f"use --format {' or '.join(alternatives)}, or fewer micro-batches"
            if alternatives
            else "use fewer micro-batches"
        )
        raise TooMuchError(f"{num_actions:,} actions are too many for {name}, at most {limit:,}: {hint}")


def screen_of(stream: TextIO) -> Screen:
    """Describe a stream: colours if it is a terminal (see no-color.org), and its width, 100 columns by default."""
    is_terminal = stream.isatty()
    coloured = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size((100, 24)).columns if is_terminal or "COLUMNS" in os.environ else 100
    plain = "utf" not in (getattr(stream, "encoding", None) or "").lower()
    return Screen(width, bool(coloured), plain)
