"""The Jinja environment of pictures and reports, which escapes all text and refuses undefined names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import jinja2
from markupsafe import Markup

from compiler.tools.picture import labels

FOLDER = Path(__file__).parent


def environment(*folders: Path) -> jinja2.Environment:
    """Return an environment for templates of the folders and of this one. Filters: px, rect, path, count and bytes."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, FOLDER]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: (
            labels.clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value
        ),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "px": labels.px,
        "rect": _rect,
        "path": _path,
        "count": labels.count,
        "bytes": labels.num_bytes,
    }
    return templates


class _TemplateArea(Protocol):
    @property
    def x(self) -> float: ...
    @property
    def y(self) -> float: ...
    @property
    def width(self) -> float: ...
    @property
    def height(self) -> float: ...


# A drawing has thousands of these. Python formats their numbers, which takes a fraction of the time of a template.


def _rect(area: _TemplateArea) -> Markup:
    """Return the attributes that place a rectangle."""
    x, y, width, height = map(labels.px, (area.x, area.y, area.width, area.height))
    return Markup(f'x="{x}" y="{y}" width="{width}" height="{height}"')


def _path(points: Iterable[tuple[float, float]]) -> Markup:
    """Return the commands of a path through points."""
    return Markup("M" + "L".join([f"{labels.px(x)} {labels.px(y)}" for x, y in points]))
