"""A folder that a command writes for the user: a new one, which appears when it is complete."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compiler.emit.folder import put_folder


@contextmanager
def new_folder(out: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder to write into, and what moves it to `out`. Without that nothing is left of it.

    FileExistsError where `out` has anything in it, or is no folder; other OSErrors where it cannot be written.
    """
    place = out.absolute()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FileExistsError(f"{out} exists and is not empty")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent, ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new, lambda: put_folder(new, place)
