"""The files of a cache: entries that several compilations may read and store at once. An entry names its own digest.

What segments and orders store: compiler/emit/segment_cache.py, compiler/plan/actions/order.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

MAX_BYTES = 16 << 20  # of an entry; those of DeepSeek-V3 have some ten thousand


def text_of(folder: Path, key: str) -> str | None:
    """The text of the entry of a key; None where there is none that can be read."""
    path = folder / f"{key}.json"
    try:
        return path.read_text("utf-8") if path.is_file() and path.stat().st_size <= MAX_BYTES else None
    except (OSError, ValueError):
        return None


def store(folder: Path, entries: Iterable[tuple[str, str]]) -> None:
    """Put entries, (path, text), into a cache. Raises OSError.

    Each is written under a name of its own and moved into place; one that is there already stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in entries:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if _holds(path, text):
            continue
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".new-", delete=False) as scratch:
            temporary = Path(scratch.name)
            try:
                scratch.write(text.encode())
                scratch.close()
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.stat().st_size <= MAX_BYTES and path.read_bytes() == text.encode()
