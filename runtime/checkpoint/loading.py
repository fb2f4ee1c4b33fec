"""Reading checkpoints. A checkpoint is used only if every byte matches its manifest."""

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

# --- Slices of logical tensors: cutting out the slice of a rank, and assembling the whole tensor


def cut(tensor: Tensor, held_slice: Slice | None) -> Tensor:
    """Return the slice `held_slice` of a logical tensor; the tensor itself for None."""
    if held_slice is None:
        return tensor
    ranges = [tensor.narrow(held_slice.dimension, begin, end - begin) for begin, end in held_slice.ranges]
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges, held_slice.dimension)


def place(tensor: Tensor, held_slice: Slice, values: Tensor) -> None:
    """Copy the values of a slice into its ranges of a logical tensor."""
    parts = values.split([end - begin for begin, end in held_slice.ranges], held_slice.dimension)
    for (begin, end), part in zip(held_slice.ranges, parts, strict=True):
        tensor.narrow(held_slice.dimension, begin, end - begin).copy_(part)


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
    """A checkpoint with a valid manifest. `refused`: reasons why newer checkpoints were not used. `base`: for adapters,
    the checkpoint of their base weights, whose tensors can be read here too."""

    path: Path
    manifest: Manifest
    is_verified: bool  # the sha256 of every shard was compared; else `read` compares the shards that it opens
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
        """Logical name → shape of all tensors."""
        shapes = {e.name: e.shape for shard in self.manifest.shards for e in shard.entries}
        return {**self.base.shapes, **shapes} if self.base else shapes

    @cached_property
    def _places(self) -> Mapping[str, list[tuple[int, ShardEntry, int]]]:
        """Logical name → (shard, entry, start in the shard): one for a whole tensor, several for parts."""
        places: dict[str, list[tuple[int, ShardEntry, int]]] = {}
        for index, shard in enumerate(self.manifest.shards):
            for entry, start in zip(shard.entries, shard_layout(shard.entries).starts, strict=False):
                places.setdefault(entry.name, []).append((index, entry, start))
        return places

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read whole logical tensors from their shards. CheckpointError names a missing tensor or a damaged file."""
        wanted = dict.fromkeys(names)
        if self.base and (of_base := [name for name in wanted if name not in self._places]):
            merged = self.base.read(of_base) | self.read(name for name in wanted if name in self._places)
            return {name: merged[name] for name in wanted}
        if missing := [name for name in wanted if name not in self._places]:
            raise CheckpointError(f"{self.path} holds no {', '.join(missing)}")
        by_shard: dict[int, list[tuple[ShardEntry, int]]] = defaultdict(list)
        for name in wanted:
            for index, entry, start in self._places[name]:
                by_shard[index].append((entry, start))
        assembled = _TensorAssembler()
        for index, places in by_shard.items():
            with self._open(self.manifest.shards[index], compare=not self.is_verified) as file:
                for entry, start in places:
                    assembled.add_entry(entry, files.read_exactly(file, start, entry.num_bytes))
        tensors = assembled.tensors()
        return {name: tensors[name] for name in wanted}

    def verify(self) -> LoadedCheckpoint:
        """Compare every byte with the manifest. CheckpointError names the file that differs."""
        for shard in self.manifest.shards:
            with self._open(shard, compare=True):
                pass
        return replace(self, is_verified=True)

    @contextmanager
    def _open(self, shard: CheckpointShard, *, compare: bool) -> Iterator[int]:
        """Open a shard after checking its size and, with `compare`, its header and its sha256. Yield the descriptor."""
        try:
            with files.open_folder(self.path) as folder, files.open_file(folder, shard.file) as file:
                if files.file_size(file) != shard.size:
                    raise OSError(f"has {files.file_size(file)} bytes, {shard.size} were written")
                head = shard_layout(shard.entries).head if compare else b""
                if files.read_exactly(file, 0, len(head)) != head:
                    raise OSError("its header differs from the one in the manifest")
                if compare and files.sha256(file, shard.size) != shard.sha256:
                    raise OSError("its sha256 differs from the one in the manifest")
                yield file
        except OSError as error:
            raise CheckpointError(f"{self.path / shard.file}: {error.strerror or error}") from error


def load(path: Path, *, verify: bool = True) -> LoadedCheckpoint:
    """Load the checkpoint at `path`, or the newest valid one in a folder of checkpoints. CheckpointError if there is
    none.

    `verify=False` leaves the comparison of shards to `read`, for ranks that need few of them.
    """
    if not (PUBLISHED.fullmatch(path.name) or (path / MANIFEST).is_file()):
        checkpoint = latest(path, verify=verify)
        if checkpoint is None:
            raise CheckpointError(f"{path} holds no checkpoint")
        return checkpoint
    opened = LoadedCheckpoint(path, read_manifest(path), is_verified=False)
    return opened.verify() if verify else opened


def with_base(checkpoint: LoadedCheckpoint) -> LoadedCheckpoint:
    """Add the base checkpoint to a checkpoint of adapters; return any other as it is. CheckpointError if the base is
    missing or damaged."""
    base = base_of(checkpoint.path, checkpoint.manifest)
    return replace(checkpoint, base=LoadedCheckpoint(*base, is_verified=False).verify()) if base else checkpoint


def latest(folder: Path, *, verify: bool = True) -> LoadedCheckpoint | None:
    """Return the newest valid checkpoint of a folder, with the reasons of those `refused`; None if there is none.

    CheckpointError if there are checkpoints but none is valid: the user has to decide whether to start over.
    """
    candidates, refused = published_checkpoints(folder)
    for checkpoint in candidates:
        try:
            verified = checkpoint.verify() if verify else checkpoint
        except CheckpointError as error:
            refused.append(str(error))
        else:
            return replace(verified, refused=tuple(refused))
    if refused:
        raise CheckpointError("no checkpoint is good:\n" + "\n".join(refused))
    return None


def published_checkpoints(
    folder: Path, parsed: ParsedManifests | None = None
) -> tuple[list[LoadedCheckpoint], list[str]]:
    """Return the checkpoints with a valid manifest, newest first, and the problems of the others."""
    valid, refused = manifests(folder, parsed)
    return [LoadedCheckpoint(path, manifest, is_verified=False) for path, manifest in valid], refused


class _TensorAssembler:
    """Assembles logical tensors from entries in any order."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._slices: dict[tuple[str, Slice], Tensor] = {}  # slices with parts in several shards

    def add_entry(self, entry: ShardEntry, data: bytearray) -> None:
        """Copy the data of an entry to its place in the whole tensor, or in its slice."""
        dtype = DTYPES[entry.dtype]
        values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        is_all = entry.count == entry.num_elements
        if is_all and entry.slice is None:
            self._tensors[entry.name] = values.view(entry.shape)
            return
        target = self._tensors.setdefault(entry.name, torch.empty(entry.shape, dtype=dtype))
        if is_all and entry.slice is not None:
            place(target, entry.slice, values.view(entry.held_shape))
            return
        if entry.slice is not None:
            target = self._slices.setdefault((entry.name, entry.slice), torch.empty(entry.held_shape, dtype=dtype))
        target.view(-1)[entry.start : entry.start + entry.count] = values

    def tensors(self) -> dict[str, Tensor]:
        """Return logical name → tensor, after placing the slices that had parts in several shards."""
        for (name, span), values in self._slices.items():
            place(self._tensors[name], span, values)
        return self._tensors
