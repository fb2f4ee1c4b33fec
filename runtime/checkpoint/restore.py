"""Restores the newest valid checkpoint from the places of a run, if the run folder has none at least as new.

A restored checkpoint is compared with its manifest byte by byte before it gets its name, as in a save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from runtime.checkpoint import durable_files as files
from runtime.checkpoint.loading import latest
from runtime.checkpoint.places import CopyPlace, inventory
from runtime.checkpoint.publish import LATEST, free_name, prepare, remove
from runtime.checkpoint.shard_manifest import CHECKPOINTS, MANIFEST, CheckpointError, Manifest, read_manifest, render


def restore(
    run: Path,
    places: Sequence[CopyPlace],
    say: Callable[[str], None],
    is_given_up: Callable[[Manifest], bool] = lambda _: False,
) -> tuple[str, Manifest, CopyPlace] | None:
    """Copy the newest valid checkpoint of `places` into the run folder, unless that has one at least as new. Return its
    name there, its manifest and its place.

    `say` reports checkpoints that cannot be used. `is_given_up`: whether a rollback has discarded a checkpoint. Raises
    CheckpointError if the run folder has no valid checkpoint and a place may have one that cannot be read.
    """
    copies, newest_here = inventory(places), _newest(run / CHECKPOINTS)
    problems = list(copies.problems)
    for text in problems:
        say(text)
    for place, name, manifest in copies.entries:
        if is_given_up(manifest):
            continue
        if manifest.serial <= newest_here:
            return None
        say(f"{name} is taken from {place.text}")
        try:
            return _copy_back(run / CHECKPOINTS, place, name, manifest), manifest, place
        except (OSError, CheckpointError) as error:
            problems.append(f"{place.text}: {name}: {getattr(error, 'strerror', None) or error}")
            say(f"checkpoint not used: {problems[-1]}")
    if problems and not newest_here:
        raise CheckpointError("no checkpoint is good:\n" + "\n".join(problems))
    return None


def _newest(folder: Path) -> int:
    """Return the serial of the newest valid checkpoint of a folder; 0 if there is none."""
    with suppress(CheckpointError):
        checkpoint = latest(folder)
        return checkpoint.manifest.serial if checkpoint else 0
    return 0


def _copy_back(folder: Path, place: CopyPlace, name: str, manifest: Manifest) -> str:
    """Copy a checkpoint from a place into a folder, replacing a damaged copy. Return its name there."""
    temporary = f".tmp-of-{name}"
    prepare(folder, temporary)
    try:
        with files.open_folder(folder / temporary) as inner:
            for shard in manifest.shards:
                size, sha256 = files.create(inner, shard.file, place.read(name, shard.file))
                if (size, sha256) != (shard.size, shard.sha256):
                    raise CheckpointError(f"{shard.file} is not what was written")
            files.create(inner, MANIFEST, [render(manifest).encode()])
            files.sync(inner)
    except BaseException:
        with suppress(OSError):
            remove(folder, temporary)
        raise
    with files.open_folder(folder, follow=True) as opened:
        twin = f".purge-{name}"
        if has_twin := _has_manifest(folder / name, manifest):
            files.rename(opened, name, twin)
        new_name = free_name(files.names(opened), manifest.step)
        files.rename(opened, temporary, new_name)
        files.sync(opened)
        files.replace(opened, LATEST, new_name + "\n")
        files.sync(opened)
        if has_twin:
            files.remove(opened, twin)
    return new_name


def _has_manifest(path: Path, manifest: Manifest) -> bool:
    """Whether the checkpoint at a path has this manifest."""
    try:
        return read_manifest(path) == manifest
    except CheckpointError:
        return False
