"""Reads the files of a build folder once, and verifies them with its manifest. No torch.

A build folder has exactly the files that `manifest.json` lists, the manifest, the `cache/` of the next compilation, and
Python's `__pycache__`. The bytes are verified in memory, and training uses only these bytes, so that later changes of
the folder are never read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from runtime.contract import BuildManifest
from runtime.system.outcome import printable
from runtime.system.strict_json import FormError, NoJsonError

MANIFEST = "manifest.json"
CACHE = "cache"  # entries for the segments and orders of this build: compiler/emit/segment_cache.py
PACKAGES = ("dsc-trainer", "torch", "triton")  # packages whose versions determine the emitted files
MAX_FILE_BYTES = 256 << 20  # programs of DeepSeek-V3 have some MB
MAX_BYTES = 1 << 30  # of all files of a build
MAX_FILES = 100_000
TRIES = 20  # to read a folder that is being replaced repeatedly

_ENTRY = re.compile(CACHE + r"/(segments|orders)/[0-9a-f]{64}\.json", re.ASCII)
_ALWAYS = (
    "spec.resolved",
    "plan.json",
    "plan.txt",
    "schedule.txt",
    "train.py",
    "kernels.json",
    "launches.json",
    "watch.json",
)
_LISTED = re.compile(  # files that a manifest may list
    r"spec\.resolved|plan\.json|plan\.txt|schedule\.txt|train\.py|kernels\.json|launches\.json|report\.html|watch\.json|placement\.json|rates\.json"
    r"|initial\.sha256|modules\.json"
    r"|(program|certificate)/(train|evaluate)_[1-9][0-9]{0,8}\.json|stages/rank_(0|[1-9][0-9]{0,5})\.py"
    r"|rewards/[A-Za-z_][A-Za-z0-9_]{0,63}\.py"
    r"|(segments|kernels)/[A-Za-z][A-Za-z0-9_]*\.py",
    re.ASCII,
)


class BuildError(RuntimeError):
    """A folder is not the build that `dsc compile` wrote there. The message is one printable line."""

    def __init__(self, message: object) -> None:
        super().__init__(printable(str(message)))


class OtherBuildError(BuildError):
    """The folder holds another build than the expected one."""


@dataclass(frozen=True)
class BuildFiles:
    """The contents of a build folder when it was read.

    `files`: path in the folder → bytes, without the manifest; `digests`: sha256 of each. `digest`: digest of the
    manifest, which identifies the build. `edits`: differences from the manifest, a line each; only with
    `read(edited=True)`.
    """

    folder: Path
    files: Mapping[str, bytes] = field(repr=False)
    digests: Mapping[str, str] = field(repr=False)
    versions: Mapping[str, str]
    digest: str
    edits: tuple[str, ...] = ()


def versions() -> dict[str, str]:
    """Return the public versions of the packages that determine the emitted files: 2.13.0, not 2.13.0+cpu."""
    return {name: metadata.version(name).partition("+")[0] for name in PACKAGES}


def read(folder: Path, expect: str | None = None, *, edited: bool = False) -> BuildFiles:
    """Read and verify a build folder. The caller checks its versions.

    expect: the required digest of the build. edited: differences from the manifest are listed in `edits` instead of
    being errors. Raises BuildError; OtherBuildError for another digest.
    """
    for _ in range(TRIES):
        with _open_folder(folder) as top:
            try:
                return _read(folder, top, expect, edited)
            except (BuildError, OSError) as error:
                if is_at_path(folder, top):  # else another build has replaced it, and this one is being removed
                    if isinstance(error, BuildError):
                        raise
                    raise BuildError(f"{folder} cannot be read: {_reason(error)}") from None
    raise BuildError(f"{folder} was replaced {TRIES} times while it was read: something compiles it again and again")


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BuildError(f"{folder} holds no build ({_reason(error)}); run dsc compile") from None
    try:
        yield top
    finally:
        os.close(top)


def is_at_path(folder: Path, top: int) -> bool:
    """Whether an open folder is still the one at this path."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(top))
    except OSError:
        return False


def _read(folder: Path, top: int, expect: str | None, edited: bool) -> BuildFiles:
    try:
        text = read_file(top, MANIFEST)
    except OSError as error:
        raise BuildError(f"{folder} holds no build ({MANIFEST}: {_reason(error)}); run dsc compile") from None
    digest = hashlib.sha256(text).hexdigest()
    if expect is not None and digest != expect:
        raise OtherBuildError(f"{folder} is not the build that was asked for: its digest is {digest}, not {expect}")
    manifest = _parse_manifest(folder, text)
    listed = manifest.files
    present = file_names(top)
    edits: list[str] = []
    files: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    total = 0
    for name in sorted(listed.keys() | present):
        if name not in listed:
            edits.append(f"{folder / name} is not in its manifest: remove it, or run dsc compile again")
            if not edited or not _LISTED.fullmatch(name):
                continue
        try:
            files[name] = read_file(top, name)
        except OSError as error:
            edits.append(f"{folder / name} is not the file that was compiled ({_reason(error)}); run dsc compile again")
            continue
        total += len(files[name])
        if total > MAX_BYTES:
            raise BuildError(f"{folder} holds more than {MAX_BYTES:,} bytes: that is no build")
        digests[name] = hashlib.sha256(files[name]).hexdigest()
        if digests[name] != listed.get(name, digests[name]):
            edits.append(f"{folder / name} is not the file that was compiled; run dsc compile again")
    if edits and not edited:
        raise BuildError(edits[0])
    return BuildFiles(folder, files, digests, manifest.versions, digest, tuple(map(printable, edits)))


def _parse_manifest(folder: Path, text: bytes) -> BuildManifest:
    """Parse the manifest of a build, and check the files that it lists."""
    subject = f"{folder} is not what dsc compile wrote: {MANIFEST}"
    try:
        manifest = BuildManifest.from_json(text)
    except NoJsonError:
        raise BuildError(f"{subject} is no JSON; compile it again") from None
    except FormError:
        raise BuildError(f"{subject} must have versions and files; compile it again") from None
    listed = manifest.files
    if len(listed) > MAX_FILES:
        raise BuildError(f"{subject} lists more than {MAX_FILES:,} files; compile it again")
    if missing := [name for name in _ALWAYS if name not in listed]:
        raise BuildError(f"{subject} lists no {missing[0]}; compile it again")
    if foreign := [name for name in listed if not _LISTED.fullmatch(name)]:
        raise BuildError(f"{subject} lists {foreign[0]}, which is no file of a build; compile it again")
    return manifest


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# ---------------------------------------------------------------- files below an open folder


def read_file(top: int, name: str) -> bytes:
    """Read a regular file by its path below an open folder. Links are not followed, and pipes do not block.

    Raises OSError, also if it is no regular file or larger than MAX_FILE_BYTES.
    """
    *folders, last = name.split("/")
    opened: list[int] = []
    try:
        place = top
        for folder in folders:
            place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
            opened.append(place)
        file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
        opened.append(file)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("no regular file")
        with open(file, "rb", closefd=False) as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise OSError(f"holds more than {MAX_FILE_BYTES:,} bytes")
        return data
    except OSError as error:
        raise OSError("a link") if error.errno == errno.ELOOP else error from None
    except ValueError as error:  # a NUL, or a lone surrogate
        raise OSError(str(error)) from None
    finally:
        for descriptor in reversed(opened):
            os.close(descriptor)


def file_names(top: int) -> set[str]:
    """Return the paths of all files below an open folder, without the manifest, `__pycache__`, and the cache of the
    next compilation. OSError if there are too many."""
    names: set[str] = set()
    for path, folders, files, place in os.fwalk(".", dir_fd=top):
        folder = path.removeprefix(".").removeprefix("/")
        links = [name for name in folders if _is_link(place, name)]
        names |= {f"{folder}/{name}" if folder else name for name in (*files, *links)}
        if len(names) > MAX_FILES:
            raise OSError(errno.EFBIG, f"more than {MAX_FILES:,} files")
        folders[:] = [name for name in folders if name != "__pycache__"]
    return {name for name in names if name != MANIFEST and not _ENTRY.fullmatch(name)}


def _is_link(place: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode)
    except OSError:
        return False
