"""Documents in memory for the tests of features: `|` in a text is the cursor."""

from __future__ import annotations

import os
from pathlib import Path

from compiler.tools.editor.outline import OpenDocument, document
from dsl.resolve.files import over

ROOT = Path(__file__).parents[4]
QUICKSTART = (ROOT / "specs/quickstart.dsc").read_text("utf-8")
HERE = "/nowhere/spec.dsc"


def documented(text: str, path: str = HERE, **others: str) -> OpenDocument:
    """The document of a text; `others` are texts beside it, `lib="…"` is lib.dsc."""
    texts = {os.path.realpath(path): text}
    texts |= {os.path.realpath(Path(path).parent / f"{name}.dsc"): each for name, each in others.items()}
    return document(path, over(texts))


def cursor(marked: str, **others: str) -> tuple[OpenDocument, int]:
    """The document of a text without its `|`, and where that was."""
    assert marked.count("|") == 1, marked
    return documented(marked.replace("|", ""), **others), marked.index("|")


def in_quickstart(marked: str) -> str:
    """The quickstart with `|` put where a marked part of it says."""
    part = marked.replace("|", "")
    assert QUICKSTART.count(part) == 1, part
    return QUICKSTART.replace(part, marked)
