"""Converts a checkpoint to published safetensors and their index, with one file in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.checkpoint.loading import LoadedCheckpoint, load, with_base
from runtime.contract.names import StoredName
from runtime.contract.weights import INDEX, ONE, SCALE, A, B, Export, Format, PublishedTensor, factor_of, is_adapter
from runtime.ops.quantise import TILE
from runtime.state.huggingface.convert import quantise_e4m3, rows_of
from runtime.state.huggingface.progress import make_reporter

FILE_BYTES = 4 << 30  # most bytes of a file with several tensors
KINDS = {"buffer": torch.float32, "table": torch.int64}  # dtypes that are the same in all formats
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}  # of tensors without block scales


def export_weights(request: Export) -> dict[str, Any]:
    """Write the files and the index. Return the numbers of tensors, files and bytes.

    Raises CheckpointError if the checkpoint is damaged.
    """
    checkpoint, folder = with_base(load(Path(request.checkpoint))), Path(request.out)
    groups = list(_files(request.tensors, request.format))
    names = [ONE] if len(groups) == 1 else [_shard_name(i + 1, len(groups)) for i in range(len(groups))]
    report = make_reporter(len(request.tensors))
    tensors = Tensors(checkpoint, request)
    file_of: dict[str, str] = {}
    size = 0
    for name, group in zip(names, groups, strict=True):
        content: dict[str, Tensor] = {}
        for published in group:
            content |= tensors.publish(published)
            report(1)
        save_file(content, folder / name, metadata={"format": "pt"})
        _sync(folder / name)
        file_of |= dict.fromkeys(content, name)
        size += sum(tensor.nbytes for tensor in content.values())
    if len(groups) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return {"tensors": len(file_of), "files": len(groups), "bytes": size}


class Tensors:
    """Makes published tensors from a checkpoint. Caches the last tensor that was read, for its other pieces."""

    def __init__(self, checkpoint: LoadedCheckpoint, request: Export) -> None:
        self._checkpoint, self._request = checkpoint, request
        self._last: tuple[str, Tensor | None] = ("", None)

    def publish(self, published: PublishedTensor) -> dict[str, Tensor]:
        """Return a published tensor in the requested format, and the scales of its blocks."""
        if published.stacked:
            return {published.name: self._stack_pieces(published)}
        rows = [rows_of(piece, self._read(piece.tensor)) for piece in published.pieces]
        format: Format = self._request.format
        if not rows:
            return {published.name: torch.empty(published.shape, dtype=DTYPES[format])}
        values = rows[0] if len(rows) == 1 else torch.cat(rows)
        if published.kind == "spread":
            values = torch.stack(rows, dim=-1).flatten(1)
        values = values.to(torch.float64) - 1 if published.from_one else values
        if published.kind == "linear" and format == "fp8":
            data, scales = quantise_e4m3(values)
            return {published.name: data, published.name + SCALE: scales}
        dtype = KINDS.get(published.kind, DTYPES[format])
        return {published.name: values.to(dtype, copy=True).contiguous().view(published.shape)}

    def _stack_pieces(self, published: PublishedTensor) -> Tensor:
        """Stack the pieces of a tensor, with one piece in memory at a time besides the result."""
        stacked = torch.empty(published.shape, dtype=DTYPES[self._request.format])
        for slot, piece in zip(stacked, published.pieces, strict=True):
            slot.copy_(rows_of(piece, self._read(piece.tensor)).t())
        return stacked

    def _read(self, name: str) -> Tensor:
        if self._last[0] != name:
            self._last = ("", None)  # frees the tensor before the next is read
            self._last = (name, self._read_merged(name))
        tensor = self._last[1]
        assert tensor is not None
        return tensor

    def _read_merged(self, name: str) -> Tensor:
        """Read a tensor of the checkpoint, merged with its adapter: W + factor · B · A, summed in FP32 or wider."""
        a, b = (self._stored_name(f"{name}{end}") for end in (A, B))
        if a not in self._checkpoint.shapes:
            trained = self._checkpoint.base is None or is_adapter(name)
            name = self._stored_name(name) if trained else name
            return self._checkpoint.read([name])[name]
        tensors = self._checkpoint.read([name, a, b])
        wide = torch.promote_types(tensors[name].dtype, torch.float32)
        return (
            tensors[name]
            .to(wide)
            .addmm(tensors[b].to(wide), tensors[a].to(wide), alpha=factor_of(self._checkpoint.meta))
        )

    def _stored_name(self, name: str) -> str:
        """Return the name of a tensor, or of its moving average if the request asks for that."""
        stored = StoredName(name)
        return stored.averaged if self._request.average else stored


def _files(tensors: Sequence[PublishedTensor], format: Format) -> Iterator[list[PublishedTensor]]:
    """Yield the tensors of each file, in order."""
    group: list[PublishedTensor] = []
    size = 0
    for published in tensors:
        count = num_bytes(published, format)
        if group and size + count > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(published)
        size += count
    yield group


def num_bytes(published: PublishedTensor, format: Format) -> int:
    """Return the bytes of a published tensor, with its scales."""
    elements = prod(published.shape)
    if published.kind in KINDS:
        return KINDS[published.kind].itemsize * elements
    if published.kind == "linear" and format == "fp8":
        return elements + 4 * prod(-(-extent // TILE) for extent in published.shape)
    return elements * DTYPES[format].itemsize


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _sync(path: Path) -> None:
    """Sync a file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
