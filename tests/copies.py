"""Copies of the project's own files that a test may change, also where the project itself may not be written to."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path


def copy(source: Path, target: Path | str) -> Path:
    """Copy a file, to another name or into a folder. The copy may be written to."""
    copied = Path(shutil.copy(source, target))
    let_write(copied)
    return copied


def copytree(
    source: Path,
    target: Path | str,
    ignore: Callable[[str, list[str]], Iterable[str]] | None = None,
    dirs_exist_ok: bool = False,
) -> None:
    """Copy a folder as `shutil.copytree` does. All of the copy may be written to."""
    shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=dirs_exist_ok)
    for folder, _, names in os.walk(target):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            if not path.is_symlink():
                let_write(path)


def let_write(path: Path) -> None:
    """Let the owner of a file or folder write to it."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & stat.S_IWUSR:
        path.chmod(mode | stat.S_IWUSR)
