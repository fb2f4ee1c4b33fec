"""Reading manifests: which checkpoints a folder has, and what each holds. No torch.

A checkpoint is named by its own folder, or as the newest of a folder of checkpoints or of a run, or as RUN@STEP.
"""

from __future__ import annotations

import re
from pathlib import Path

from runtime.checkpoint import durable_files as files
from runtime.checkpoint.durable_files import PUBLISHED
from runtime.checkpoint.shard_manifest import CheckpointError, Manifest, parse
from runtime.outcome import printable

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # of a run folder
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


def manifests(folder: Path) -> tuple[list[tuple[Path, Manifest]], list[str]]:
    """Checkpoints of a folder that have a sound manifest, the newest first, and why others have none."""
    found, refused = [], []
    try:
        with files.open_folder(folder, follow=True) as opened:
            candidates = [name for name in files.names(opened) if PUBLISHED.fullmatch(name)]
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error
    for name in candidates:
        try:
            found.append((folder / name, read_manifest(folder / name)))
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
