"""Places that checkpoints are copied to, besides the run folder: folders, and object stores with a URL.

A copy is a folder with the same files as in the run. A store has no rename, so the manifest is written last: a folder
without a valid manifest is an incomplete copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runtime.checkpoint import durable_files as files
from runtime.checkpoint.durable_files import CHUNK_BYTES, PUBLISHED
from runtime.checkpoint.shard_manifest import MANIFEST, CheckpointError, Manifest, parse
from runtime.system.outcome import ReportedError

LOCAL = "local"  # the run folder
_FILE = re.compile(r"(file|local)://(/.*)")
_INSTALL = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


class PlaceError(ReportedError):
    """A run cannot use a place."""


class CopyPlace(Protocol):
    """A place that checkpoints are copied to. All methods raise OSError if they fail."""

    text: str  # as written in the spec

    def names(self) -> list[str]:
        """Return the names of checkpoints there, complete or not; empty if the folder does not exist."""

    def write(self, name: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file of a checkpoint durably, replacing an existing one."""

    def read(self, name: str, file: str) -> Iterator[bytes | memoryview]:
        """Yield a file of a checkpoint in chunks. A chunk is valid until the next one."""

    def remove(self, name: str) -> None:
        """Remove a checkpoint, starting with its manifest."""


class FolderPlace:
    """A folder, for example a mounted store. Links below it are not followed."""

    def __init__(self, text: str, path: Path) -> None:
        self.text, self.path = text, path

    def names(self) -> list[str]:
        try:
            with files.open_folder(self.path, follow=True) as top:
                return [name for name in files.names(top) if PUBLISHED.fullmatch(name)]
        except FileNotFoundError:
            return []

    def write(self, name: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        self.path.mkdir(exist_ok=True)  # without parents: these would hide that a store is not mounted
        with files.open_folder(self.path, follow=True) as top:
            with suppress(FileExistsError):  # another rank has created it
                files.make_folder(top, name)
            with files.open_folder(self.path / name) as inner:
                part = f".part-{file}"
                if files.exists(inner, part):
                    files.unlink(inner, part)
                files.create(inner, part, chunks)
                files.rename(inner, part, file)  # so a manifest is complete or absent
                files.sync(inner)
            files.sync(top)

    def read(self, name: str, file: str) -> Iterator[bytes | memoryview]:
        with files.open_folder(self.path / name) as inner, files.open_file(inner, file) as opened:
            yield from files.chunks(opened, files.file_size(opened))

    def remove(self, name: str) -> None:
        with files.open_folder(self.path, follow=True) as top:
            with files.open_folder(self.path / name) as inner:
                if files.exists(inner, MANIFEST):
                    files.unlink(inner, MANIFEST)
                    files.sync(inner)
            files.remove(top, name)


class StorePlace:
    """A store with a URL that fsspec supports, such as `s3://bucket/mine`. Credentials come from the environment.

    Raises PlaceError if fsspec has no file system for it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            from fsspec.core import url_to_fs  # only if a spec names a store

            parsed: tuple[Any, str] = url_to_fs(text, **({"auto_mkdir": True} if _FILE.fullmatch(text) else {}))
        except ImportError:
            scheme = text.partition("://")[0]
            package = _INSTALL.get(scheme, f"a package for {scheme}")
            hint = ", or dsc with its extra: pip install 'dsc-trainer[s3]'" if package == "s3fs" else ""
            raise PlaceError(f"checkpoints go to {text}, which needs {package}: pip install it{hint}") from None
        except ValueError as error:
            raise PlaceError(f"checkpoints go to {text}: {error}") from None
        self._files, root = parsed
        self._root = root.rstrip("/")

    def names(self) -> list[str]:
        with _convert_to_os_error():
            self._files.invalidate_cache()
            try:
                listed = self._files.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
            return sorted(n for path in listed if PUBLISHED.fullmatch(n := path.rstrip("/").rpartition("/")[2]))

    def write(self, name: str, file: str, chunks: Iterable[bytes | memoryview]) -> None:
        with (
            _convert_to_os_error(),
            self._files.open(f"{self._root}/{name}/{file}", "wb", block_size=CHUNK_BYTES) as stream,
        ):
            for chunk in chunks:
                stream.write(chunk)

    def read(self, name: str, file: str) -> Iterator[bytes | memoryview]:
        with _convert_to_os_error():
            self._files.invalidate_cache()
            with self._files.open(f"{self._root}/{name}/{file}", "rb", block_size=CHUNK_BYTES) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    yield chunk

    def remove(self, name: str) -> None:
        with _convert_to_os_error():
            self._files.invalidate_cache()
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{self._root}/{name}/{MANIFEST}")
            self._files.rm(f"{self._root}/{name}", recursive=True)


@contextmanager
def _convert_to_os_error() -> Iterator[None]:
    """Convert the exceptions of a store's client to OSError."""
    try:
        yield
    except (OSError, GeneratorExit):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def places_of(texts: Sequence[str], folder: Path, run: Path) -> list[CopyPlace]:
    """Return the places of a spec except LOCAL. Paths are relative to `folder`; `run`: the run folder.

    Raises PlaceError if a place cannot be used: it is inside the run folder, or one place is inside another, links
    resolved.
    """
    paths = {text: _folder_of(text, folder) for text in texts if text != LOCAL}
    real = {f"the folder of the run, {run}": run.resolve()}
    for text, path in paths.items():
        if path is None:
            continue
        resolved = path.resolve()
        for number, (label, root) in enumerate(real.items()):
            if resolved.is_relative_to(root) or (number and root.is_relative_to(resolved)):
                raise PlaceError(f"`checkpoint {{ to }}` names {text}, which leads into {label}: name another folder")
        real[text] = resolved
    return [
        StorePlace(text) if path is None or text.startswith("local:") else FolderPlace(text, path)
        for text, path in paths.items()
    ]


def _folder_of(text: str, folder: Path) -> Path | None:
    """Return the local folder of a place; None for a store."""
    if url := _FILE.fullmatch(text):
        return Path(url[2])
    return None if "://" in text else folder / text


# ---------------------------------------------------------------- the contents of places


@dataclass(frozen=True)
class Inventory:
    """The contents of the places of a run. `names`: checkpoints, complete or not. `entries`: those with a valid
    manifest, newest first. `problems`: places that cannot be listed, and invalid manifests."""

    names: tuple[str, ...] = ()
    entries: tuple[tuple[CopyPlace, str, Manifest], ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def serial(self) -> int:
        """The serial number of the newest checkpoint; 0 if there is none."""
        return max((manifest.serial for _, _, manifest in self.entries), default=0)


NOTHING = Inventory()


def inventory(places: Sequence[CopyPlace]) -> Inventory:
    """List the contents of places. A missing manifest is no problem: the copy is incomplete."""
    names: list[str] = []
    copies: list[tuple[CopyPlace, str, Manifest]] = []
    problems: list[str] = []
    for place in places:
        try:
            listed = place.names()
        except OSError as error:
            problems.append(f"{place.text} cannot be listed: {error.strerror or error}")
            continue
        names += listed
        for name in listed:
            try:
                copies.append((place, name, manifest_of(place, name)))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, CheckpointError) as error:
                problems.append(f"{place.text}: {name}/{MANIFEST}: {error}")
    copies.sort(key=lambda row: row[2].serial, reverse=True)
    return Inventory(tuple(names), tuple(copies), tuple(problems))


def manifest_of(place: CopyPlace, name: str) -> Manifest:
    """Read the manifest of a checkpoint in a place. OSError, ValueError or CheckpointError if it is missing or
    invalid."""
    manifest = parse(b"".join(place.read(name, MANIFEST)))
    if int(name.partition(".")[0].removeprefix("step-")) != manifest.step:
        raise ValueError(f"it is of step {manifest.step}")
    return manifest
