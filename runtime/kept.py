"""What a run folder keeps of its build: enough to plan it again. No torch here."""

from __future__ import annotations

import hashlib
from pathlib import Path

FILES = ("spec.resolved", "schedule.txt", "placement.json", "rates.json")  # the first may name the others


def copy(build: Path, run: Path) -> None:
    """Copy them to a run folder."""
    for name in FILES:
        if (build / name).is_file():
            (run / name).write_text((build / name).read_text("utf-8"), "utf-8")


def digest(folder: Path) -> str:
    """Of those in a build or run folder: a run that goes on with another plan has another one."""
    found = hashlib.sha256()
    for name in FILES:
        if (folder / name).is_file():
            found.update(f"{name}\n".encode() + (folder / name).read_bytes())
    return found.hexdigest()
