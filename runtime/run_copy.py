"""What a run folder keeps of its build: enough to plan it again. No torch here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

FILES = (
    "spec.resolved",
    "schedule.txt",
    "placement.json",
    "rates.json",
    "modules.json",
)  # the first may name the others
PROGRAM = "program.sha256"  # of a run folder: the digest of the programs that it ran last
PROGRAM_FOLDERS = ("program", "stages", "segments", "kernels")  # of a build: what its ranks execute


def copy(build: Mapping[str, bytes], run: Path) -> None:
    """Make a run folder hold the files of a build, and the digest of its programs. `build`: files by path.

    OSError if the run folder cannot be written.
    """
    for name in FILES:
        if name in build:
            _replace(run / name, build[name])
        else:
            (run / name).unlink(missing_ok=True)  # of a build before
    _replace(run / PROGRAM, (program_digest(build) + "\n").encode())


def of_run(folder: Path) -> dict[str, bytes]:
    """What a run folder has of them."""
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}


def digest(files: Mapping[str, bytes]) -> str:
    """The digest of those of FILES that are in `files`: another plan has another digest."""
    found = hashlib.sha256()
    for name in FILES:
        if name in files:
            found.update(f"{name}\n".encode() + files[name])
    return found.hexdigest()


def program_digest(build: Mapping[str, bytes]) -> str:
    """The digest of all that the ranks of a build execute: the same for specs that differ in, say, the rate alone."""
    found = hashlib.sha256()
    for name in sorted(build):
        if name.partition("/")[0] in PROGRAM_FOLDERS:
            found.update(f"{name}\n".encode() + hashlib.sha256(build[name]).digest())
    return found.hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Write a file in one step: a reader sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
