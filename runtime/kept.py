"""What a run folder keeps of its build: enough to plan it again. No torch here."""

from __future__ import annotations

import hashlib
from pathlib import Path

FILES = ("spec.resolved", "schedule.txt", "placement.json", "rates.json")  # the first may name the others
PROGRAM = "program.sha256"  # of a run folder: the digest of the programs that it ran last
PROGRAM_FOLDERS = ("program", "stages", "segments", "kernels")  # of a build: what its ranks execute


def copy(build: Path, run: Path) -> None:
    """Make a run folder hold the files of `build`, and the digest of its programs. OSError if it cannot be written."""
    for name in FILES:
        if (build / name).is_file():
            _replace(run / name, (build / name).read_bytes())
        else:
            (run / name).unlink(missing_ok=True)  # of a build before
    _replace(run / PROGRAM, (program_digest(build) + "\n").encode())


def digest(folder: Path) -> str:
    """Of those in a build or run folder: a run that goes on with another plan has another one."""
    found = hashlib.sha256()
    for name in FILES:
        if (folder / name).is_file():
            found.update(f"{name}\n".encode() + (folder / name).read_bytes())
    return found.hexdigest()


def program_digest(build: Path) -> str:
    """The digest of all that the ranks of a build execute: the same for specs that differ in, say, the rate alone."""
    found = hashlib.sha256()
    for folder in PROGRAM_FOLDERS:
        for path in sorted((build / folder).glob("*.*")):
            if path.is_file():
                found.update(f"{folder}/{path.name}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Write a file in one step: a reader sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
