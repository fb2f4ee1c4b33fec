"""The files of a cache, which several compilations may read and write at once. An entry contains its own digest.

The formats of entries: compiler/emit/segment_cache.py, compiler/plan/actions/order.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

MAX_BYTES = 16 << 20  # of an entry; those of DeepSeek-V3 have about ten thousand


def text_of(folder: Path, key: str) -> str | None:
    """The text of the entry for a key, or None if there is none or it cannot be read."""
    path = folder / f"{key}.json"
    try:
        return path.read_text("utf-8") if path.is_file() and path.stat().st_size <= MAX_BYTES else None
    except (OSError, ValueError):
        return None


def store(folder: Path, entries: Iterable[tuple[str, str]]) -> None:
    """Put entries (path, text) into a cache. Raises OSError.

    Each is written to a temporary file and moved into place. An entry with the same text is left alone.
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
