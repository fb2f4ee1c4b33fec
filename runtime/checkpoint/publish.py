"""Checkpoints: safetensors with logical names, published atomically, readable by any plan. No pickle.

    checkpoints/LATEST                    the name of the newest, for users and scripts
    checkpoints/step-00000300/manifest.json, shard.0.safetensors, shard.1.safetensors, …

A save writes `.tmp-<step>`, syncs it to disk, renames it, and only then removes older checkpoints. A kill or a full
disk at any point leaves the previous checkpoint intact. A checkpoint is used only if every byte matches its manifest.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from runtime.checkpoint import durable_files as files
from runtime.checkpoint.loading import DTYPE_NAMES, MANIFEST, LoadedCheckpoint, latest, load, published_checkpoints
from runtime.checkpoint.places import NOTHING, Inventory
from runtime.checkpoint.retention import RetentionPolicy
from runtime.checkpoint.shard_manifest import (
    CheckpointError,
    CheckpointShard,
    Manifest,
    ParsedManifests,
    ShardEntry,
    check_complete,
    check_name,
    in_order,
    render,
    shard_file,
    shard_from_json,
    shard_json,
    shard_layout,
)
from runtime.contract.slices import Slice
from runtime.system.outcome import printable

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "LoadedCheckpoint",
    "Publisher",
    "RetentionPolicy",
    "TensorPart",
    "latest",
    "load",
    "published_checkpoints",
]

LATEST = "LATEST"
SEE_ITS_LOG = "see its log"
_LEFT_OVER = re.compile(r"\.(tmp|purge)-[0-9a-z.-]+")


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Elements [start, start + len(values)) of a logical tensor of `shape`, or of a slice of it, flattened: `values` is
    1-D."""

    values: Tensor
    start: int
    shape: tuple[int, ...]
    slice: Slice | None = None


ShardData: TypeAlias = Mapping[str, Tensor | TensorPart]


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """The folder name of a checkpoint, and its manifest."""

    name: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The result of a save on one rank: the shard that it wrote, and on rank 0 the published checkpoint."""

    shard: CheckpointShard
    published: PublishedCheckpoint | None


@dataclass(frozen=True, slots=True)
class Publisher:
    """Saves checkpoints, as one rank of `world`. Ranks share the file system, and synchronise with `barrier`.

    `keep`: which older checkpoints stay in `folder`; those in `held_names` stay too. `elsewhere`: checkpoints in other
    places: a new one gets a higher serial, and another name.
    """

    folder: Path
    rank: int
    world: int
    barrier: Callable[[], None]
    keep: RetentionPolicy
    held_names: Callable[[], Container[str]] = frozenset
    elsewhere: Inventory = NOTHING
    _parsed: ParsedManifests = field(default_factory=ParsedManifests)

    def save(self, step: int, shard: ShardData, meta: Mapping[str, Any]) -> SaveResult:
        """Publish a checkpoint of `step`. Every rank calls it with its tensors.

        Exactly one rank passes each element of each logical tensor (names such as `weight/layers.0.ffn.up`). `meta` is
        JSON; that of rank 0 is saved. If any rank cannot write, all ranks raise CheckpointError and no checkpoint has
        changed. ValueError for a bad name or meta.
        """
        assert step >= 0 and 0 <= self.rank < self.world
        render(Manifest(step, 1, meta, ()))  # refuses bad meta before any file is created
        entries = {e: t for name, t in shard.items() if (e := _entry(name, t)).count or not e.num_elements}
        folder, rank, temporary = self.folder, self.rank, f".tmp-{step}"
        place = folder / temporary
        error = _attempt(folder, lambda: prepare(folder, temporary)) if rank == 0 else ""
        self.barrier()
        if not _is_folder(place):
            raise CheckpointError(error or f"rank 0 could not make {place}", of_peer=not error)
        written: list[CheckpointShard] = []
        new: list[PublishedCheckpoint] = []
        error = error or _attempt(place / shard_file(rank), lambda: _write_shard(place, rank, entries, written.append))
        self.barrier()
        if rank == 0 and not error:
            error = _attempt(folder, lambda: new.append(self._publish(temporary, step, meta)))
        self.barrier()
        failed = _is_folder(place)  # not renamed, which every rank can see
        self.barrier()  # all ranks have checked
        if failed:
            if rank == 0:
                _attempt(folder, lambda: remove(folder, temporary))
            peer_error = f"{folder}: the checkpoint of step {step} was not written; see other ranks' logs"
            raise CheckpointError(error or peer_error, of_peer=not error or error.endswith(SEE_ITS_LOG))
        return SaveResult(written[0], new[0] if new else None)

    def _publish(self, temporary: str, step: int, meta: Mapping[str, Any]) -> PublishedCheckpoint:
        """Write the manifest and rename, on rank 0. This publishes the checkpoint; then surplus ones are removed."""
        folder = self.folder
        older, _ = published_checkpoints(folder, self._parsed)
        with files.open_folder(folder, follow=True) as opened, files.open_folder(folder / temporary) as inner:
            shards = tuple(_read_note(inner, rank) for rank in range(self.world))
            check_complete(shards)
            serial = max((c.manifest.serial for c in older), default=0)
            manifest = Manifest(step, max(serial, self.elsewhere.serial) + 1, meta, shards)
            text = render(manifest).encode()
            files.create(inner, MANIFEST, [text])
            for rank in range(self.world):
                files.unlink(inner, f"note.{rank}.json")
            files.sync(inner)
            name = free_name([*files.names(opened), *self.elsewhere.names], step)
            files.rename(opened, temporary, name)
            new = LoadedCheckpoint(folder / name, manifest, is_verified=False)
            if problem := _attempt(folder, lambda: self._take_over(opened, new, text)):
                note = f"checkpoint {name} is written, but older ones were not removed: {problem}"
                print(printable(note), file=sys.stderr)
        return PublishedCheckpoint(name, manifest)

    def _take_over(self, opened: int, new: LoadedCheckpoint, text: bytes) -> None:
        """Make the rename durable, update LATEST, read the manifest back, and remove surplus checkpoints."""
        files.sync(opened)
        files.replace(opened, LATEST, new.path.name + "\n")
        files.sync(opened)
        with files.open_folder(new.path) as inner, files.open_file(inner, MANIFEST) as file:
            if files.read_exactly(file, 0, len(text)) != text or files.file_size(file) != len(text):
                raise CheckpointError(f"{new.path / MANIFEST}: is not what was written")
        self._parsed.add(new.path, new.manifest)
        self._retire(opened)

    def retire(self) -> None:
        """Remove surplus checkpoints that are no longer held, on rank 0. OSError or CheckpointError if that fails."""
        with files.open_folder(self.folder, follow=True) as opened:
            self._retire(opened)

    def _retire(self, opened: int) -> None:
        checkpoints, _ = published_checkpoints(self.folder, self._parsed)
        held_names = self.held_names()
        old = [
            name
            for checkpoint in self.keep.checkpoints_to_remove(checkpoints)
            if (name := checkpoint.path.name) not in held_names
        ]
        for old_name in old:
            files.rename(opened, old_name, f".purge-{old_name}")
        if old:
            files.sync(opened)  # else a power loss could leave half a checkpoint under its published name
        for old_name in old:
            files.remove(opened, f".purge-{old_name}")


def write(folder: Path, step: int, shards: Iterable[Mapping[str, Tensor]], meta: Mapping[str, Any]) -> None:
    """Publish a checkpoint from one process, with one shard in memory at a time.

    Raises CheckpointError if it cannot be written, and lets exceptions of `shards` pass. Then the folder is unchanged.
    """
    temporary, count = f".tmp-{step}", 0
    try:
        prepare(folder, temporary)
        for shard in shards:
            tensors = {_entry(name, tensor): tensor for name, tensor in shard.items()}
            _write_shard(folder / temporary, count, tensors, lambda _: None)
            count += 1
        Publisher(folder, 0, count, lambda: None, RetentionPolicy())._publish(temporary, step, meta)
    except BaseException as error:
        with suppress(OSError):
            remove(folder, temporary)
        if isinstance(error, OSError):
            raise CheckpointError(_reason(folder, error)) from error
        raise


def _attempt(place: Path, action: Callable[[], None]) -> str:
    """Run `action`. Return why it failed at `place`, or "": a rank that cannot write must still meet the others."""
    try:
        action()
    except OSError as error:
        return _reason(place, error)
    except CheckpointError as error:
        return str(error)
    return ""


def _reason(place: Path, error: OSError) -> str:
    return f"{place}: {error.strerror or error}"


def _is_folder(path: Path) -> bool:
    """Whether the path is an accessible folder."""
    try:
        return path.is_dir()
    except OSError:
        return False


def prepare(folder: Path, temporary: str) -> None:
    """Remove leftovers of interrupted saves, and create the temporary folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with files.open_folder(folder, follow=True) as opened:
        for name in files.names(opened):
            if _LEFT_OVER.fullmatch(name):
                files.remove(opened, name)
        files.make_folder(opened, temporary)


def remove(folder: Path, name: str) -> None:
    with files.open_folder(folder, follow=True) as opened:
        files.remove(opened, name)


def _entry(name: str, tensor: Tensor | TensorPart) -> ShardEntry:
    check_name(name)
    part = TensorPart(tensor, 0, tuple(tensor.shape)) if isinstance(tensor, Tensor) else tensor
    dtype, count = DTYPE_NAMES[part.values.dtype], part.values.numel()
    return ShardEntry(name, dtype, part.shape, part.start, count, part.slice)


def _write_shard(
    folder: Path,
    rank: int,
    tensors: Mapping[ShardEntry, Tensor | TensorPart],
    written: Callable[[CheckpointShard], None],
) -> None:
    """Write a shard, and pass it to `written`. Write its row of the manifest, or the error, into a file for rank 0."""
    note = f"note.{rank}.json"
    entries = in_order(tensors)
    head = shard_layout(entries).head

    def chunks() -> Iterator[bytes | memoryview]:
        yield head
        yield from _join_adjacent(
            tensor if isinstance(tensor := tensors[entry], Tensor) else tensor.values for entry in entries
        )

    with files.open_folder(folder) as opened:
        try:
            size, sha256 = files.create(opened, shard_file(rank), chunks())
            written(shard := CheckpointShard(shard_file(rank), size, sha256, entries))
            files.create(opened, note, [json.dumps(shard_json(shard)).encode()])
        except OSError as error:
            with suppress(OSError):
                files.create(opened, f"error.{rank}", [_reason(folder / shard_file(rank), error).encode()])
            raise


def _join_adjacent(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of these tensors. Tensors that are adjacent in memory are joined into one piece.

    Each piece takes a few calls that release and retake the GIL, for which the training thread waits.
    """
    begun: Tensor | None = None  # flat bytes
    for tensor in tensors:
        new = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        if begun is not None and _follows(new, begun):
            begun = begun.as_strided((begun.numel() + new.numel(),), (1,))
            continue
        if begun is not None:
            yield begun.numpy().data
        begun = new
    if begun is not None:
        yield begun.numpy().data


def _follows(tensor: Tensor, before: Tensor) -> bool:
    """Whether `tensor` starts where `before` ends in the same allocation. Both are flat bytes."""
    same_storage = tensor.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    return same_storage and tensor.storage_offset() == before.storage_offset() + before.numel()


def _read_note(folder: int, rank: int) -> CheckpointShard:
    try:
        with files.open_file(folder, f"note.{rank}.json") as file:
            row = json.loads(files.read_exactly(file, 0, files.file_size(file)))
        return shard_from_json(row, shard_file(rank))
    except (OSError, ValueError) as error:
        reason = SEE_ITS_LOG
        with suppress(OSError), files.open_file(folder, f"error.{rank}") as file:
            reason = files.read_exactly(file, 0, files.file_size(file)).decode(errors="replace") or reason
        raise CheckpointError(f"rank {rank} did not write its shard: {reason}") from error


def free_name(names: list[str], step: int) -> str:
    """Return `step-00000300`, or `step-00000300.1` if that name is taken: a published checkpoint is never
    overwritten."""
    name, repetition = f"step-{step:08d}", 0
    while name in names:
        repetition += 1
        name = f"step-{step:08d}.{repetition}"
    return name
