"""An audit hook of the interpreter that records actions of possible attacks while `watch` is active.

A hook cannot be removed, so all tests of a process share one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "socket.connect")
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SECRETS = ("/etc/passwd", "/etc/shadow", "/proc/self/environ")


class _Seen:
    allowed: tuple[str, ...] | None = None  # files may only change below this folder; None: not watching
    found: ClassVar[list[str]] = []


@contextmanager
def watch(*allowed: Path) -> Iterator[list[str]]:
    """Forbidden actions in this context: programs and connections, unpickling, reading secrets, changes outside the
    `allowed` folders."""
    _install()
    _Seen.allowed, _Seen.found = (*(f"{folder}/" for folder in allowed), "/dev/"), []
    try:
        yield _Seen.found
    finally:
        _Seen.allowed = None


@cache
def _install() -> None:
    sys.addaudithook(_hook)


def _hook(event: str, given: tuple[Any, ...]) -> None:
    if _Seen.allowed is None:
        return
    if event in FORBIDDEN:
        _Seen.found.append(f"{event} {given[0]}")
    elif event in CHANGES or event == "open":
        path = os.fsdecode(given[0]) if isinstance(given[0], (str, bytes)) else ""
        changes = event != "open" or _writes(path, given[2])
        if path in SECRETS or (changes and _leads_out(path)):
            _Seen.found.append(f"{event} {path}")


def _writes(path: str, flags: Any) -> bool:
    """Whether a file that is opened so may change; where the path is a folder, the file has no name in it."""
    return isinstance(flags, int) and bool(flags & WRITES) and not Path(path).is_dir()


def _leads_out(path: str) -> bool:
    """Whether a path is outside the allowed folders. A relative path is relative to an open folder."""
    assert _Seen.allowed is not None
    if ".." in path.split("/"):
        return True
    return path.startswith("/") and "__pycache__" not in path.split("/") and not path.startswith(_Seen.allowed)
