"""Copies of the project's files that a test may change, even if the project is read-only."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path


def copy(source: Path, target: Path | str) -> Path:
    """Copy a file, to another name or into a folder. The copy is writable."""
    copied = Path(shutil.copy(source, target))
    let_write(copied)
    return copied


def copytree(
    source: Path,
    target: Path | str,
    ignore: Callable[[str, list[str]], Iterable[str]] | None = None,
    dirs_exist_ok: bool = False,
) -> None:
    """Copy a folder like `shutil.copytree`. All files of the copy are writable."""
    shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=dirs_exist_ok)
    for folder, _, names in os.walk(target):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            if not path.is_symlink():
                let_write(path)


def let_write(path: Path) -> None:
    """Make a file or folder writable for its owner."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & stat.S_IWUSR:
        path.chmod(mode | stat.S_IWUSR)
