"""Reads the files of a build folder once, and compares them with its manifest. No torch.

A build folder holds exactly what `manifest.json` lists, beside the manifest, the `cache/` of the next compilation, and
what Python keeps in `__pycache__`. What is checked here are bytes in memory, and whoever trains a build uses these
bytes alone, so that nothing that is written into the folder afterwards, or has taken its place, is read.
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
CACHE = "cache"  # entries of this build's segments and orders, and no others: compiler/emit/segment_cache.py
PACKAGES = ("dsc-trainer", "torch", "triton")  # whose versions decide what is emitted
MAX_FILE_BYTES = 256 << 20  # programs of DeepSeek-V3 have some MB
MAX_BYTES = 1 << 30  # of all files of a build
MAX_FILES = 100_000
TRIES = 20  # to read a folder that is replaced again and again meanwhile

_ENTRY = re.compile(CACHE + r"/(segments|orders)/[0-9a-f]{64}\.json", re.ASCII)
_ALWAYS = (
    "spec.resolved",
    "plan.json",
    "plan.txt",
    "schedule.txt",
    "train.py",
    "kernels.json",
    "watch.json",
)
_LISTED = re.compile(  # what a manifest may list
    r"spec\.resolved|plan\.json|plan\.txt|schedule\.txt|train\.py|kernels\.json|report\.html|watch\.json|placement\.json|rates\.json"
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
    """The folder holds a build, and not the one that was asked for."""


@dataclass(frozen=True)
class BuildFiles:
    """What a build folder held when it was read.

    `files`: path in the folder → bytes, of everything but the manifest; `digests`: sha256 of each. `digest`: that of
    the manifest, which names the build. `edits`: how the folder differs from its manifest, a line each; only
    `read(edited=True)` leaves any.
    """

    folder: Path
    files: Mapping[str, bytes] = field(repr=False)
    digests: Mapping[str, str] = field(repr=False)
    versions: Mapping[str, str]
    digest: str
    edits: tuple[str, ...] = ()


def versions() -> dict[str, str]:
    """Public versions of the packages that decide what is emitted: 2.13.0, not 2.13.0+cpu."""
    return {name: metadata.version(name).partition("+")[0] for name in PACKAGES}


def read(folder: Path, expect: str | None = None, *, edited: bool = False) -> BuildFiles:
    """Read and verify a build folder; its versions are for the caller to judge.

    expect: the digest that the build must have. edited: a difference from the manifest is told in `edits`, and is no
    error. Raises BuildError, and OtherBuildError where the digest is another one.
    """
    for _ in range(TRIES):
        with _opened(folder) as top:
            try:
                return _read(folder, top, expect, edited)
            except (BuildError, OSError) as error:
                if is_there(folder, top):  # else another build has taken its place, and this one is being removed
                    if isinstance(error, BuildError):
                        raise
                    raise BuildError(f"{folder} cannot be read: {_reason(error)}") from None
    raise BuildError(f"{folder} was replaced {TRIES} times while it was read: something compiles it again and again")


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BuildError(f"{folder} holds no build ({_reason(error)}); run dsc compile") from None
    try:
        yield top
    finally:
        os.close(top)


def is_there(folder: Path, top: int) -> bool:
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
        raise OtherBuildError(f"{folder} is another build than was asked for: its digest is {digest}, not {expect}")
    manifest = _parsed(folder, text)
    listed = manifest.files
    found = file_names(top)
    edits: list[str] = []
    files: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    total = 0
    for name in sorted(listed.keys() | found):
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


def _parsed(folder: Path, text: bytes) -> BuildManifest:
    """The manifest of a build, which lists what a build may have and must have."""
    broken = f"{folder} is not what dsc compile wrote: {MANIFEST}"
    try:
        manifest = BuildManifest.from_json(text)
    except NoJsonError:
        raise BuildError(f"{broken} is no JSON; compile it again") from None
    except FormError:
        raise BuildError(f"{broken} must have versions and files; compile it again") from None
    listed = manifest.files
    if len(listed) > MAX_FILES:
        raise BuildError(f"{broken} lists more than {MAX_FILES:,} files; compile it again")
    if missing := [name for name in _ALWAYS if name not in listed]:
        raise BuildError(f"{broken} lists no {missing[0]}; compile it again")
    if foreign := [name for name in listed if not _LISTED.fullmatch(name)]:
        raise BuildError(f"{broken} lists {foreign[0]}, which is no file of a build; compile it again")
    return manifest


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# ---------------------------------------------------------------- files below an open folder


def read_file(top: int, name: str) -> bytes:
    """A regular file below an open folder, by its path from there. No link is followed and no pipe is waited for.

    Raises OSError, also where it is no regular file or holds more than MAX_FILE_BYTES.
    """
    *folders, last = name.split("/")
    opened: list[int] = []
    try:
        place = top
        for each in folders:
            place = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
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
    """The paths of everything below an open folder but folders, without the manifest, without what Python keeps of
    imported modules, and without what is kept for the next compilation. OSError where there is no end of them."""
    names: set[str] = set()
    for path, folders, files, place in os.fwalk(".", dir_fd=top):
        here = path.removeprefix(".").removeprefix("/")
        links = [each for each in folders if _is_link(place, each)]
        names |= {f"{here}/{each}" if here else each for each in (*files, *links)}
        if len(names) > MAX_FILES:
            raise OSError(errno.EFBIG, f"more than {MAX_FILES:,} files")
        folders[:] = [each for each in folders if each != "__pycache__"]
    return {name for name in names if name != MANIFEST and not _ENTRY.fullmatch(name)}


def _is_link(place: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode)
    except OSError:
        return False
