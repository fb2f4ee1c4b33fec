"""In-memory documents for feature tests; `|` marks the cursor."""

from __future__ import annotations

import os
from pathlib import Path

from compiler.tools.editor.outline import OpenDocument, document
from dsl.resolve.files import reader_of_texts

ROOT = Path(__file__).parents[4]
QUICKSTART = (ROOT / "specs/quickstart.dsc").read_text("utf-8")
HERE = "/nowhere/spec.dsc"


def documented(text: str, path: str = HERE, **others: str) -> OpenDocument:
    """The document of a text. `others`: neighbouring files, where `lib="…"` is lib.dsc."""
    texts = {os.path.realpath(path): text}
    texts |= {os.path.realpath(Path(path).parent / f"{name}.dsc"): content for name, content in others.items()}
    return document(path, reader_of_texts(texts))


def cursor(marked: str, **others: str) -> tuple[OpenDocument, int]:
    """The document of a text without its `|`, and the offset of the `|`."""
    assert marked.count("|") == 1, marked
    return documented(marked.replace("|", ""), **others), marked.index("|")


def in_quickstart(marked: str) -> str:
    """The quickstart with a `|` inserted as in `marked`."""
    part = marked.replace("|", "")
    assert QUICKSTART.count(part) == 1, part
    return QUICKSTART.replace(part, marked)
