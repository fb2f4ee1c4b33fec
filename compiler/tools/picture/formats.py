"""The formats of a picture: a table from the name on the command line to what draws it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from compiler.tools.picture.drawing import Picture, Screen


class TooMuchError(ValueError):
    """A picture that its format does not take; the message says what to change."""


@dataclass(frozen=True)
class PictureFormat:
    """How a picture is drawn, the most actions that are, and what is said of files of it."""

    draw: Callable[[Picture], str]
    most: int
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


# Modules are imported where they are used: jinja and rich take longer than drawing. A file at its limit has
# some 20 MB (html, svg) or 100 MB (trace), and takes some 20 s.
FORMATS = {
    "terminal": PictureFormat(_terminal, 1_000_000, ".txt"),
    "svg": PictureFormat(_svg, 500_000, ".svg"),
    "html": PictureFormat(_html, 1_000_000, ".html"),
    "trace": PictureFormat(_trace, 400_000, ".json"),
}


def render(picture: Picture, name: str) -> str:
    """The file's contents; TooMuchError as `check_size`."""
    check_size(picture.num_actions, name)
    return FORMATS[name].draw(picture)


def check_size(num_actions: int, name: str) -> None:
    """TooMuchError with what to use instead where a format does not draw so many actions."""
    most = FORMATS[name].most
    if num_actions > most:
        others = [other for other, each in FORMATS.items() if each.most >= num_actions]
        instead = f"use --format {' or '.join(others)}, or fewer micro-batches" if others else "use fewer micro-batches"
        raise TooMuchError(f"{num_actions:,} actions are too many for {name}, at most {most:,}: {instead}")


def screen_of(stream: TextIO) -> Screen:
    """What a stream shows: colours on a terminal (see no-color.org), the terminal's width, or 100 columns."""
    shown = stream.isatty()
    coloured = shown and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size((100, 24)).columns if shown or "COLUMNS" in os.environ else 100
    plain = "utf" not in (getattr(stream, "encoding", None) or "").lower()
    return Screen(width, bool(coloured), plain)
