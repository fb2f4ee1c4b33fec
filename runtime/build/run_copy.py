"""What a run folder keeps of its build: enough to plan it again. No torch here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from runtime.system.regular_files import read_bytes, write

FILES = (
    "spec.resolved",
    "schedule.txt",
    "placement.json",
    "rates.json",
    "modules.json",
)  # the first may name the others
WATCH = "watch.json"  # what is predicted of a step, for those who watch the run
REWARDS = "rewards"  # a folder of a build, and of a run: files of Python that the first may name
PROGRAM = "program.sha256"  # of a run folder: the digest of the programs that it ran last
_ORIGIN = re.compile(rb"^# from spec\.resolved:.*\n", re.MULTILINE)  # of a segment: compiler/emit/stage_modules.py
PROGRAM_FOLDERS = ("program", "stages", "segments", "kernels")  # of a build: what its ranks execute


def copy(build: Mapping[str, bytes], run: Path, phase: int | None = None) -> None:
    """Make a run folder hold the files of a build, and the digest of its programs. `build`: files by path.

    `phase`: the number of the phase that the build is of. The run folder also keeps those of each phase. OSError if it
    cannot be written.
    """
    for folder in (run, *([] if phase is None else [_folder(run, phase)])):
        folder.mkdir(exist_ok=True)
        for name in (*FILES, WATCH):
            if name in build:
                write(folder / name, build[name])
            else:
                (folder / name).unlink(missing_ok=True)  # of a build before
        _copy_rewards(build, folder / REWARDS)
        write(folder / PROGRAM, (program_digest(build) + "\n").encode())


def _copy_rewards(build: Mapping[str, bytes], folder: Path) -> None:
    """Make a folder hold the files of rewards of a build; there is none where a build has none."""
    found = {name.partition("/")[2]: text for name, text in build.items() if name.startswith(f"{REWARDS}/")}
    if folder.is_dir():
        for path in folder.glob("*.py"):
            if path.name not in found:
                path.unlink()
    if found:
        folder.mkdir(exist_ok=True)
    for name, text in found.items():
        write(folder / name, text)


def described(run: Path, phase: int | None) -> Path:
    """The folder that describes a phase of a run: one in the run's. Without a number, or where there is none, that of
    the run, which describes the build that it trained last."""
    folder = run if phase is None else _folder(run, phase)
    return folder if (folder / FILES[0]).is_file() else run


def _folder(run: Path, phase: int) -> Path:
    return run / f"phase.{phase}"


def of_run(folder: Path) -> dict[str, bytes]:
    """What a run folder has of them."""
    return {name: read_bytes(folder / name) for name in FILES if (folder / name).is_file()}


def digest(files: Mapping[str, bytes]) -> str:
    """The digest of those of FILES that are in `files`: another plan has another digest."""
    found = hashlib.sha256()
    for name in FILES:
        if name in files:
            found.update(f"{name}\n".encode() + files[name])
    return found.hexdigest()


def program_digest(build: Mapping[str, bytes]) -> str:
    """The digest of all that the ranks of a build execute: the same for specs that differ in, say, the rate alone.
    Where in the spec a segment comes from is no part of what it computes."""
    found = hashlib.sha256()
    for name in sorted(build):
        if name.partition("/")[0] in PROGRAM_FOLDERS:
            text = _ORIGIN.sub(b"", build[name], count=1)
            found.update(f"{name}\n".encode() + hashlib.sha256(text).digest())
    return found.hexdigest()
