"""The parts of a build that a run folder keeps: enough to plan it again. No torch here."""

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
WATCH = "watch.json"  # predictions for viewers of the run
REWARDS = "rewards"  # a folder of a build and of a run: Python files that spec.resolved may name
PROGRAM = "program.sha256"  # in a run folder: the digest of the programs that it ran last
_ORIGIN = re.compile(rb"^# from spec\.resolved:.*\n", re.MULTILINE)  # in a segment: compiler/emit/stage_modules.py
PROGRAM_FOLDERS = ("program", "stages", "segments", "kernels")  # in a build: what its ranks execute


def copy(build: Mapping[str, bytes], run: Path, phase: int | None = None) -> None:
    """Copy files of a build, and the digest of its programs, into a run folder. `build`: files by path.

    `phase`: number of the phase of the build, for a copy per phase. OSError if the folder cannot be written.
    """
    for folder in (run, *([] if phase is None else [_folder(run, phase)])):
        folder.mkdir(exist_ok=True)
        for name in (*FILES, WATCH):
            if name in build:
                write(folder / name, build[name])
            else:
                (folder / name).unlink(missing_ok=True)  # of an earlier build
        _copy_rewards(build, folder / REWARDS)
        write(folder / PROGRAM, (program_digest(build) + "\n").encode())


def _copy_rewards(build: Mapping[str, bytes], folder: Path) -> None:
    """Copy the reward files of a build into a folder, and remove others."""
    rewards = {name.partition("/")[2]: text for name, text in build.items() if name.startswith(f"{REWARDS}/")}
    if folder.is_dir():
        for path in folder.glob("*.py"):
            if path.name not in rewards:
                path.unlink()
    if rewards:
        folder.mkdir(exist_ok=True)
    for name, text in rewards.items():
        write(folder / name, text)


def folder_of_phase(run: Path, phase: int | None) -> Path:
    """Return the folder that describes a phase of a run. Without a number, or if there is none, the run folder, which
    describes the build that was trained last."""
    folder = run if phase is None else _folder(run, phase)
    return folder if (folder / FILES[0]).is_file() else run


def _folder(run: Path, phase: int) -> Path:
    return run / f"phase.{phase}"


def files_of_run(folder: Path) -> dict[str, bytes]:
    """Return the FILES that a run folder has."""
    return {name: read_bytes(folder / name) for name in FILES if (folder / name).is_file()}


def digest(files: Mapping[str, bytes]) -> str:
    """Return the digest of the FILES in `files`, which identifies a plan."""
    total = hashlib.sha256()
    for name in FILES:
        if name in files:
            total.update(f"{name}\n".encode() + files[name])
    return total.hexdigest()


def program_digest(build: Mapping[str, bytes]) -> str:
    """Return the digest of everything that the ranks of a build execute. Specs that differ only in, say, the learning
    rate have the same digest. The origin of a segment in the spec does not count."""
    total = hashlib.sha256()
    for name in sorted(build):
        if name.partition("/")[0] in PROGRAM_FOLDERS:
            text = _ORIGIN.sub(b"", build[name], count=1)
            total.update(f"{name}\n".encode() + hashlib.sha256(text).digest())
    return total.hexdigest()
