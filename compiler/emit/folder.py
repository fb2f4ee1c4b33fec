"""Files → build folder. It replaces an earlier build and nothing else: what dsc has not written, it does not remove."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "manifest.json"
CACHE = "cache"  # entries of the build's own segments and orders, and no others: compiler/graph/cache.py
_ENTRY = re.compile(CACHE + r"/(segments|orders)/[0-9a-f]{64}\.json", re.ASCII)


def check_place(folder: Path) -> None:
    """Raises OSError, with what to do, where a build cannot be put at `folder` without removing what is not dsc's."""
    place = folder.resolve()
    if Path.cwd().is_relative_to(place):
        raise FileExistsError(f"{folder} is the current folder or holds it: go out of it, or choose another with -o")
    parent = next(parent for parent in place.parents if parent.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{parent} is a file, so there is no {folder}: choose another folder with -o")
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"{parent} cannot be written to: choose another folder with -o")
    if not place.exists():
        return
    if not place.is_dir():
        raise NotADirectoryError(f"{folder} is a file: choose another folder with -o")
    if not any(place.iterdir()):
        return
    written = _written(place / MANIFEST)
    if written is None:
        raise FileExistsError(f"{folder} is not empty and holds no build of dsc: choose another folder with -o")
    foreign = sorted(_files(place) - written)
    if foreign:
        others = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise FileExistsError(
            f"{folder} holds what is not of its build, {foreign[0]}{others}:"
            " move it elsewhere, or choose another folder with -o"
        )


def _written(manifest: Path) -> set[str] | None:
    """The files of a build, by its manifest; None if it is no manifest of dsc."""
    try:
        found = json.loads(manifest.read_text("utf-8"))
        return {MANIFEST, *found["files"]} if "spec.resolved" in found["files"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _files(folder: Path) -> set[str]:
    """Everything in a folder but folders, by path; not what Python keeps beside modules it has imported, nor what
    is kept for the next build."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = {path.relative_to(folder).as_posix() for path in paths if path.parent.name != "__pycache__"}
    return {name for name in names if not _ENTRY.fullmatch(name)}


def write_build(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """Replace `folder` by the build: written beside it, then moved into place, so a reader never sees half of it.

    files: (path in the folder, text). Raises as `check_place` does.
    """
    check_place(folder)
    place = folder.resolve()  # a link stays, and leads to the build
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        for name, text in files:
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        if place.exists():
            place.replace(old)
        new.replace(place)
        shutil.rmtree(old, ignore_errors=True)
