"""A proposal of the completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ItemKind = Literal["key", "block", "value", "name", "unit", "word", "file", "reference"]


@dataclass(frozen=True)
class Item:
    """What takes the place of characters `start` to `end`: the label, or a snippet where the client knows them."""

    label: str
    kind: ItemKind
    detail: str = ""
    documentation: str = ""  # Markdown
    snippet: str = ""
    start: int = 0
    end: int = 0
