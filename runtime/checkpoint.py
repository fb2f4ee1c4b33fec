"""Checkpoints: safetensors in logical names, published whole or not at all, read by any plan. No pickle.

    checkpoints/LATEST                    the name of the newest, for people and scripts
    checkpoints/step-00000300/manifest.json, shard.0.safetensors, shard.1.safetensors, …

A save writes `.tmp-<step>`, waits for the disk, renames it, and only then removes older ones; a kill or a full disk at
any point leaves the previous checkpoint as it was. A checkpoint is used only if every byte is what was written.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from runtime import checkpoint_files as files
from runtime.checkpoint_manifest import (
    DTYPE_NAMES,
    DTYPES,
    CheckpointError,
    Entry,
    Manifest,
    Shard,
    check_complete,
    check_name,
    in_order,
    parse,
    render,
    shard_file,
    shard_from_json,
    shard_json,
    shard_layout,
)

MANIFEST = "manifest.json"
LATEST = "LATEST"
_MAX_MANIFEST_BYTES = 1 << 30
_PUBLISHED = re.compile(r"step-([0-9]{8,})(\.[1-9][0-9]*)?")
_LEFT_OVER = re.compile(r"\.(tmp|purge)-[0-9a-z.-]+")


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, start + len(values)) of a logical tensor of `shape`, flattened: `values` is 1-D."""

    values: Tensor
    start: int
    shape: tuple[int, ...]


ShardData: TypeAlias = Mapping[str, Tensor | Part]

# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is sound. `refused`: newer ones that were not used, and why."""

    path: Path
    manifest: Manifest
    verified: bool  # every shard's sha256 was compared; else `read` compares those it opens
    refused: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.manifest.meta

    @property
    def world(self) -> int:
        return len(self.manifest.shards)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Logical name → shape, of all tensors it holds."""
        return {e.name: e.shape for shard in self.manifest.shards for e in shard.entries}

    @cached_property
    def _places(self) -> Mapping[str, list[tuple[int, Entry, int]]]:
        """Logical name → (shard, entry, where in the shard it starts): one for a whole tensor, several for parts."""
        places: dict[str, list[tuple[int, Entry, int]]] = {}
        for index, shard in enumerate(self.manifest.shards):
            for entry, start in zip(shard.entries, shard_layout(shard.entries)[1], strict=False):
                places.setdefault(entry.name, []).append((index, entry, start))
        return places

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole logical tensors, from whichever shards hold them. CheckpointError names a missing name or bad file."""
        wanted = dict.fromkeys(names)
        if missing := [name for name in wanted if name not in self._places]:
            raise CheckpointError(f"{self.path} holds no {', '.join(missing)}")
        by_shard: dict[int, list[tuple[Entry, int]]] = defaultdict(list)
        for name in wanted:
            for index, entry, start in self._places[name]:
                by_shard[index].append((entry, start))
        result: dict[str, Tensor] = {}
        for index, places in by_shard.items():
            with self._open(self.manifest.shards[index], compare=not self.verified) as file:
                for entry, start in places:
                    _place(entry, files.read_exactly(file, start, entry.num_bytes), result)
        return {name: result[name] for name in wanted}

    def verify(self) -> Checkpoint:
        """Compare every byte with what was written; CheckpointError names the file that differs."""
        for shard in self.manifest.shards:
            with self._open(shard, compare=True):
                pass
        return replace(self, verified=True)

    @contextmanager
    def _open(self, shard: Shard, *, compare: bool) -> Iterator[int]:
        """A shard's descriptor, its size and (where `compare`) its header and all its bytes as the manifest says."""
        try:
            with files.open_folder(self.path) as folder, files.open_file(folder, shard.file) as file:
                if files.file_size(file) != shard.size:
                    raise OSError(f"has {files.file_size(file)} bytes, {shard.size} were written")
                head, _ = shard_layout(shard.entries) if compare else (b"", ())
                if files.read_exactly(file, 0, len(head)) != head:
                    raise OSError("its header is not the one of its manifest")
                if compare and files.sha256(file, shard.size) != shard.sha256:
                    raise OSError("its sha256 is not that of what was written")
                yield file
        except OSError as error:
            raise CheckpointError(f"{self.path / shard.file}: {error.strerror or error}") from error


def load(path: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at `path`, or the newest good one of a folder of them; CheckpointError if there is none.

    `verify=False` leaves the comparison of shards to `read`: for ranks that need few of them.
    """
    if not (_PUBLISHED.fullmatch(path.name) or (path / MANIFEST).is_file()):
        found = latest(path, verify=verify)
        if found is None:
            raise CheckpointError(f"{path} holds no checkpoint")
        return found
    opened = Checkpoint(path, _read_manifest(path), verified=False)
    return opened.verify() if verify else opened


def latest(folder: Path, *, verify: bool = True) -> Checkpoint | None:
    """The newest good checkpoint of a folder, with what was `refused` on the way; None if it holds none.

    CheckpointError if it holds some and none is good: to begin anew then is not ours to decide.
    """
    found, refused = _published(folder)
    for checkpoint in found:
        try:
            good = checkpoint.verify() if verify else checkpoint
        except CheckpointError as error:
            refused.append(str(error))
        else:
            return replace(good, refused=tuple(refused))
    if refused:
        raise CheckpointError("no checkpoint is good:\n" + "\n".join(refused))
    return None


def _published(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """Checkpoints with a sound manifest, the newest first, and why others have none."""
    found, refused = [], []
    try:
        with files.open_folder(folder, follow=True) as opened:
            candidates = [name for name in files.names(opened) if _PUBLISHED.fullmatch(name)]
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error
    for name in candidates:
        try:
            found.append(Checkpoint(folder / name, _read_manifest(folder / name), verified=False))
        except CheckpointError as error:
            refused.append(str(error))
    return sorted(found, key=lambda c: c.manifest.serial, reverse=True), refused


def _read_manifest(path: Path) -> Manifest:
    try:
        with files.open_folder(path) as folder, files.open_file(folder, MANIFEST) as file:
            size = files.file_size(file)
            if size > _MAX_MANIFEST_BYTES:
                raise ValueError(f"has {size} bytes")
            manifest = parse(bytes(files.read_exactly(file, 0, size)))
            if (named := _PUBLISHED.fullmatch(path.name)) and int(named[1]) != manifest.step:
                raise ValueError(f"it is of step {manifest.step}")
            expected = {shard.file for shard in manifest.shards}
            foreign = [n for n in files.names(folder) if n.startswith("shard.") and n not in expected]
    except (OSError, ValueError, CheckpointError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"{path / MANIFEST}: {problem}") from error
    if foreign:
        raise CheckpointError(f"{path / foreign[0]}: does not belong to this checkpoint")
    return manifest


def _place(entry: Entry, data: bytearray, into: dict[str, Tensor]) -> None:
    dtype = DTYPES[entry.dtype]
    values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    if entry.count == entry.num_elements:
        into[entry.name] = values.view(entry.shape)
        return
    whole = into.setdefault(entry.name, torch.empty(entry.shape, dtype=dtype))
    whole.view(-1)[entry.start : entry.start + entry.count] = values


# ---------------------------------------------------------------- writing


def save(
    folder: Path,
    step: int,
    shard: ShardData,
    rank: int,
    world: int,
    meta: Mapping[str, Any],
    barrier: Callable[[], None],
    keep: int,
) -> None:
    """Publish a checkpoint of `step` in `folder`; every rank calls it with the tensors it answers for.

    Every element of every logical tensor is given by exactly one rank (names such as `weight/layers.0.ffn.up`). `meta`
    (JSON, of rank 0) is kept with it; the `keep` newest checkpoints stay. If any rank cannot write, all ranks raise
    CheckpointError and no checkpoint has changed. Ranks share the file system. ValueError for a bad name or meta.
    """
    assert keep >= 1 and step >= 0 and 0 <= rank < world
    render(Manifest(step, 1, meta, ()))  # meta and names are refused before any file is made
    entries = {e: tensor for name, tensor in shard.items() if (e := _entry(name, tensor)).count or not e.num_elements}
    temporary = f".tmp-{step}"
    error = _attempt(lambda: _prepare(folder, temporary)) if rank == 0 else ""
    barrier()
    if not (folder / temporary).is_dir():
        raise CheckpointError(error or f"rank 0 could not make {folder / temporary}")
    error = error or _attempt(lambda: _write_shard(folder / temporary, rank, entries))
    barrier()
    if rank == 0 and not error:
        error = _attempt(lambda: _publish(folder, temporary, step, world, meta, keep))
    barrier()
    failed = (folder / temporary).is_dir()  # not renamed: every rank sees it, none needs to be told
    barrier()  # all have looked
    if failed:
        if rank == 0:
            _attempt(lambda: _remove(folder, temporary))
        raise CheckpointError(
            error or f"{folder}: the checkpoint of step {step} was not written; see other ranks' logs"
        )


def _attempt(action: Callable[[], None]) -> str:
    """Why `action` failed, or "": a rank that cannot write must still meet the others."""
    try:
        action()
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


def _prepare(folder: Path, temporary: str) -> None:
    """Remove what interrupted saves left, and make the temporary folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with files.open_folder(folder, follow=True) as opened:
        for name in files.names(opened):
            if _LEFT_OVER.fullmatch(name):
                files.remove(opened, name)
        files.make_folder(opened, temporary)


def _remove(folder: Path, name: str) -> None:
    with files.open_folder(folder, follow=True) as opened:
        files.remove(opened, name)


def _entry(name: str, tensor: Tensor | Part) -> Entry:
    check_name(name)
    values, start, shape = (
        (tensor, 0, tuple(tensor.shape)) if isinstance(tensor, Tensor) else (tensor.values, tensor.start, tensor.shape)
    )
    return Entry(name, DTYPE_NAMES[values.dtype], shape, start, values.numel())


def _write_shard(folder: Path, rank: int, tensors: Mapping[Entry, Tensor | Part]) -> None:
    """The shard, and beside it what rank 0 needs to know of it: its row of the manifest, or why there is none."""
    note = f"note.{rank}.json"
    entries = in_order(tensors)
    head, _ = shard_layout(entries)

    def chunks() -> Iterator[bytes | memoryview]:
        yield head
        for entry in entries:
            tensor = tensors[entry]
            yield _bytes(tensor if isinstance(tensor, Tensor) else tensor.values)

    with files.open_folder(folder) as opened:
        try:
            size, sha256 = files.create(opened, shard_file(rank), chunks())
            row = shard_json(Shard(shard_file(rank), size, sha256, entries))
            files.create(opened, note, [json.dumps(row).encode()])
        except OSError as error:
            with suppress(OSError):
                files.create(opened, f"error.{rank}", [str(error).encode()])
            raise


def _bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor in memory order, without a copy where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _publish(folder: Path, temporary: str, step: int, world: int, meta: Mapping[str, Any], keep: int) -> None:
    """Rank 0: the manifest, then the rename; from there on the new checkpoint stands, and only then old ones go."""
    found, _ = _published(folder)
    with files.open_folder(folder, follow=True) as opened, files.open_folder(folder / temporary) as made:
        shards = tuple(_read_note(made, rank) for rank in range(world))
        check_complete(shards)
        serial = max((c.manifest.serial for c in found), default=0) + 1
        files.create(made, MANIFEST, [render(Manifest(step, serial, meta, shards)).encode()])
        for rank in range(world):
            files.unlink(made, f"note.{rank}.json")
        files.sync(made)
        name = _free_name(files.names(opened), step)
        files.rename(opened, temporary, name)
        if problem := _attempt(lambda: _retire(folder, opened, name, keep)):
            print(f"checkpoint {name} is written, but older ones were not removed: {problem}", file=sys.stderr)


def _read_note(folder: int, rank: int) -> Shard:
    try:
        with files.open_file(folder, f"note.{rank}.json") as file:
            row = json.loads(files.read_exactly(file, 0, files.file_size(file)))
        return shard_from_json(row, shard_file(rank))
    except (OSError, ValueError) as error:
        reason = "see its log"
        with suppress(OSError), files.open_file(folder, f"error.{rank}") as file:
            reason = files.read_exactly(file, 0, files.file_size(file)).decode(errors="replace") or reason
        raise CheckpointError(f"rank {rank} did not write its shard: {reason}") from error


def _free_name(taken: list[str], step: int) -> str:
    """`step-00000300`, or `step-00000300.1` where an earlier run left one: nothing published is written again."""
    name, again = f"step-{step:08d}", 0
    while name in taken:
        again += 1
        name = f"step-{step:08d}.{again}"
    return name


def _retire(folder: Path, opened: int, name: str, keep: int) -> None:
    """Make the rename last, point LATEST to it, read it back, and remove all but the `keep` newest."""
    files.sync(opened)
    files.replace(opened, LATEST, name + "\n")
    files.sync(opened)
    found, _ = _published(folder)
    old = [checkpoint.path.name for checkpoint in found[keep:]]
    if not old:
        return
    load(folder / name)
    for each in old:
        files.rename(opened, each, f".purge-{each}")
    files.sync(opened)  # else a loss of power may show half of one under its published name
    for each in old:
        files.remove(opened, f".purge-{each}")
