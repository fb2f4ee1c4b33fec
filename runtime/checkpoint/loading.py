"""Reading checkpoints: one is used only if every byte is what was written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.checkpoint import durable_files as files
from runtime.checkpoint.durable_files import PUBLISHED
from runtime.checkpoint.shard_manifest import (
    MANIFEST,
    CheckpointError,
    CheckpointShard,
    Manifest,
    ParsedManifests,
    ShardEntry,
    base_of,
    manifests,
    read_manifest,
    shard_layout,
)
from runtime.contract.slices import Slice

# --- Slices of tensors: what a rank holds of a logical tensor, and how the tensor is put together again


def cut(whole: Tensor, of: Slice | None) -> Tensor:
    """What a slice has of a logical tensor; the tensor itself for None."""
    if of is None:
        return whole
    ranges = [whole.narrow(of.dimension, begin, end - begin) for begin, end in of.ranges]
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges, of.dimension)


def place(whole: Tensor, of: Slice, held: Tensor) -> None:
    """Put what a slice has to its ranges of a logical tensor."""
    parts = held.split([end - begin for begin, end in of.ranges], of.dimension)
    for (begin, end), part in zip(of.ranges, parts, strict=True):
        whole.narrow(of.dimension, begin, end - begin).copy_(part)


# --- loading

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose manifest is sound. `refused`: newer ones that were not used, and why. `base`: of adapters, the
    checkpoint of the weights that they are beside, whose tensors are among those that are read here."""

    path: Path
    manifest: Manifest
    verified: bool  # every shard's sha256 was compared; else `read` compares those it opens
    refused: tuple[str, ...] = ()
    base: LoadedCheckpoint | None = None

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
        held = {e.name: e.shape for shard in self.manifest.shards for e in shard.entries}
        return {**self.base.shapes, **held} if self.base else held

    @cached_property
    def _places(self) -> Mapping[str, list[tuple[int, ShardEntry, int]]]:
        """Logical name → (shard, entry, where in the shard it starts): one for a whole tensor, several for parts."""
        places: dict[str, list[tuple[int, ShardEntry, int]]] = {}
        for index, shard in enumerate(self.manifest.shards):
            for entry, start in zip(shard.entries, shard_layout(shard.entries)[1], strict=False):
                places.setdefault(entry.name, []).append((index, entry, start))
        return places

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole logical tensors, from whichever shards hold them. CheckpointError names a missing name or bad file."""
        wanted = dict.fromkeys(names)
        if self.base and (beside := [name for name in wanted if name not in self._places]):
            together = self.base.read(beside) | self.read(name for name in wanted if name in self._places)
            return {name: together[name] for name in wanted}
        if missing := [name for name in wanted if name not in self._places]:
            raise CheckpointError(f"{self.path} holds no {', '.join(missing)}")
        by_shard: dict[int, list[tuple[ShardEntry, int]]] = defaultdict(list)
        for name in wanted:
            for index, entry, start in self._places[name]:
                by_shard[index].append((entry, start))
        found = _Assembled()
        for index, places in by_shard.items():
            with self._open(self.manifest.shards[index], compare=not self.verified) as file:
                for entry, start in places:
                    found.put(entry, files.read_exactly(file, start, entry.num_bytes))
        tensors = found.tensors()
        return {name: tensors[name] for name in wanted}

    def verify(self) -> LoadedCheckpoint:
        """Compare every byte with what was written; CheckpointError names the file that differs."""
        for shard in self.manifest.shards:
            with self._open(shard, compare=True):
                pass
        return replace(self, verified=True)

    @contextmanager
    def _open(self, shard: CheckpointShard, *, compare: bool) -> Iterator[int]:
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


def load(path: Path, *, verify: bool = True) -> LoadedCheckpoint:
    """The checkpoint at `path`, or the newest good one of a folder of them; CheckpointError if there is none.

    `verify=False` leaves the comparison of shards to `read`: for ranks that need few of them.
    """
    if not (PUBLISHED.fullmatch(path.name) or (path / MANIFEST).is_file()):
        found = latest(path, verify=verify)
        if found is None:
            raise CheckpointError(f"{path} holds no checkpoint")
        return found
    opened = LoadedCheckpoint(path, read_manifest(path), verified=False)
    return opened.verify() if verify else opened


def with_base(checkpoint: LoadedCheckpoint) -> LoadedCheckpoint:
    """A checkpoint of adapters with the weights that they are beside; any other one as it is. CheckpointError where
    those weights are not there or not whole."""
    found = base_of(checkpoint.path, checkpoint.manifest)
    return replace(checkpoint, base=LoadedCheckpoint(*found, verified=False).verify()) if found else checkpoint


def latest(folder: Path, *, verify: bool = True) -> LoadedCheckpoint | None:
    """The newest good checkpoint of a folder, with what was `refused` on the way; None if it holds none.

    CheckpointError if it holds some and none is good: to begin anew then is not ours to decide.
    """
    found, refused = published(folder)
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


def published(folder: Path, parsed: ParsedManifests | None = None) -> tuple[list[LoadedCheckpoint], list[str]]:
    """Checkpoints with a sound manifest, the newest first, and why others have none."""
    found, refused = manifests(folder, parsed)
    return [LoadedCheckpoint(path, manifest, verified=False) for path, manifest in found], refused


class _Assembled:
    """Logical tensors, put together from entries in any order."""

    def __init__(self) -> None:
        self._whole: dict[str, Tensor] = {}
        self._slices: dict[tuple[str, Slice], Tensor] = {}  # those that several shards have parts of

    def put(self, entry: ShardEntry, data: bytearray) -> None:
        """Put the data of an entry to its place in the whole tensor, or in the slice that it is a part of."""
        dtype = DTYPES[entry.dtype]
        values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        is_all = entry.count == entry.num_elements
        if is_all and entry.slice is None:
            self._whole[entry.name] = values.view(entry.shape)
            return
        held = self._whole.setdefault(entry.name, torch.empty(entry.shape, dtype=dtype))
        if is_all and entry.slice is not None:
            place(held, entry.slice, values.view(entry.held_shape))
            return
        if entry.slice is not None:
            held = self._slices.setdefault((entry.name, entry.slice), torch.empty(entry.held_shape, dtype=dtype))
        held.view(-1)[entry.start : entry.start + entry.count] = values

    def tensors(self) -> dict[str, Tensor]:
        """Logical name → tensor; slices that several shards had parts of are placed now that they are complete."""
        for (name, of), held in self._slices.items():
            place(self._whole[name], of, held)
        return self._whole
