"""Reading manifests: which checkpoints a folder has, and what each holds. No torch.

A checkpoint is named by its own folder, or as the newest of a folder of checkpoints or of a run, or as RUN@STEP.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.checkpoint import durable_files as files
from runtime.checkpoint.durable_files import PUBLISHED
from runtime.checkpoint.shard_manifest import CheckpointError, Manifest, digest, parse
from runtime.system.outcome import printable

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # of a run folder
BASE = "base"  # key of a manifest: the checkpoint that adapters are beside
AT_STEP = re.compile(r"(.+)@([0-9]{1,18})")
_MAX_MANIFEST_BYTES = 1 << 30


def find_manifest(path: Path) -> tuple[Path, Manifest]:
    """The folder of the checkpoint that `path` names, and its manifest. Its shards are not read.

    Raises CheckpointError where there is none.
    """
    if PUBLISHED.fullmatch(path.name) or (path / MANIFEST).is_file():
        return path, read_manifest(path)
    step = None
    if not path.exists() and (named := AT_STEP.fullmatch(path.name)):
        path, step = path.with_name(named[1]), int(named[2])
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    found, refused = manifests(folder)
    wanted = [each for each in found if step in (None, each[1].step)]
    if wanted:
        return wanted[0]
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    of_step = "" if step is None else f" of step {step:,}"
    raise CheckpointError("\n".join([f"{path} holds no checkpoint{of_step}", *refused]))


def trained_tokens(meta: Mapping[str, Any]) -> int | None:
    """Tokens that a run had trained on when it wrote a manifest; None where the manifest does not say."""
    position = meta.get("position")
    tokens = position.get("tokens") if isinstance(position, dict) else None
    return tokens if type(tokens) is int else None


def phase_of(meta: Mapping[str, Any]) -> int | None:
    """The number of the phase that wrote a manifest; None for a run without phases."""
    found = meta.get("plan")
    for key in ("train", "within", "number"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if type(found) is int else None


def base_of(path: Path, manifest: Manifest) -> tuple[Path, Manifest] | None:
    """The checkpoint of the weights that the adapters of one are beside, with its manifest; None of one without.

    Raises CheckpointError where it is not there, or is another one.
    """
    base = manifest.meta.get(BASE)
    if base is None:
        return None
    where, sha256 = (base.get(key) if isinstance(base, dict) else None for key in ("path", "sha256"))
    if not isinstance(where, str) or not isinstance(sha256, str):
        raise CheckpointError(f"{path / MANIFEST}: it does not say which weights its adapters are beside")
    folder = Path(os.path.normpath(path.absolute().parent / where))
    try:
        found = read_manifest(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{path} has adapters, and the weights that they are beside: {error}") from None
    if digest(found) != sha256:
        raise CheckpointError(f"{path} has adapters, and {printable(str(folder))} has other weights than theirs")
    return folder, found


def base_named(base: Path, manifest: Manifest, folder: Path) -> dict[str, str]:
    """What the manifests in a folder of checkpoints say of the weights that their adapters are beside: `base_of` reads
    it. The path begins in that folder, so that both may be moved together."""
    return {"path": os.path.relpath(base, folder), "sha256": digest(manifest)}


class Parsed:
    """Manifests that were parsed already, so that one is parsed once while its file stays as it is."""

    def __init__(self) -> None:
        self._found: dict[Path, tuple[object, Manifest]] = {}

    def read(self, path: Path) -> Manifest:
        """The manifest of a checkpoint. Raises CheckpointError."""
        identity, manifest = self._found.get(path, (None, None))
        if manifest is None or identity != _identity(path):
            manifest = read_manifest(path)
            self.put(path, manifest)
        return manifest

    def put(self, path: Path, manifest: Manifest) -> None:
        """Keep a manifest that this process has just written and compared."""
        self._found[path] = _identity(path), manifest


def _identity(path: Path) -> object:
    """Changes when the manifest of a checkpoint is written or replaced."""
    try:
        found = (path / MANIFEST).lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def manifests(folder: Path, parsed: Parsed | None = None) -> tuple[list[tuple[Path, Manifest]], list[str]]:
    """Checkpoints of a folder that have a sound manifest, the newest first, and why others have none."""
    found, refused, read = [], [], parsed.read if parsed else read_manifest
    try:
        with files.open_folder(folder, follow=True) as opened:
            candidates = [name for name in files.names(opened) if PUBLISHED.fullmatch(name)]
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error
    for name in candidates:
        try:
            found.append((folder / name, read(folder / name)))
        except CheckpointError as error:
            refused.append(str(error))
    return sorted(found, key=lambda each: each[1].serial, reverse=True), refused


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError."""
    try:
        with files.open_folder(path) as folder, files.open_file(folder, MANIFEST) as file:
            size = files.file_size(file)
            if size > _MAX_MANIFEST_BYTES:
                raise ValueError(f"has {size} bytes")
            manifest = parse(bytes(files.read_exactly(file, 0, size)))
            if (named := PUBLISHED.fullmatch(path.name)) and int(named[1]) != manifest.step:
                raise ValueError(f"it is of step {manifest.step}")
            expected = {shard.file for shard in manifest.shards}
            foreign = [n for n in files.names(folder) if n.startswith("shard.") and n not in expected]
    except (OSError, ValueError, CheckpointError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"{path / MANIFEST}: {problem}") from error
    if foreign:
        raise CheckpointError(f"{path / printable(foreign[0])}: does not belong to this checkpoint")
    return manifest
