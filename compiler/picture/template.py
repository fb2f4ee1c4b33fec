"""How the templates of pictures and of the report are rendered: every text escaped, nothing undefined."""

from __future__ import annotations

from pathlib import Path

import jinja2
from markupsafe import Markup

from compiler.picture import labels

FOLDER = Path(__file__).parent


def environment(*folders: Path) -> jinja2.Environment:
    """Templates of the folders and of this one; their filters are px, count and bytes."""
    found = jinja2.Environment(
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
    found.filters |= {"px": labels.px, "count": labels.count, "bytes": labels.num_bytes}
    return found
