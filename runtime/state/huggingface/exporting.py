"""A checkpoint → published safetensors and their index. One file of them is in memory at a time."""

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
from runtime.state.huggingface.convert import quantised, rows_of
from runtime.state.huggingface.progress import reporting

FILE_BYTES = 4 << 30  # of a file, unless it has one tensor
KINDS = {"buffer": torch.float32, "table": torch.int64}  # dtypes that no format changes
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}  # of what is not in blocks


def write_published(request: Export) -> dict[str, Any]:
    """Write the files and the index. Returns how many tensors, files and bytes of tensors there are.

    Raises CheckpointError where the checkpoint is not what was written.
    """
    checkpoint, out = with_base(load(Path(request.checkpoint))), Path(request.out)
    groups = list(_files(request.tensors, request.format))
    names = [ONE] if len(groups) == 1 else [_numbered(i + 1, len(groups)) for i in range(len(groups))]
    report = reporting(len(request.tensors))
    tensors = Tensors(checkpoint, request)
    where: dict[str, str] = {}
    size = 0
    for name, group in zip(names, groups, strict=True):
        content: dict[str, Tensor] = {}
        for published in group:
            content |= tensors.publish(published)
            report(1)
        save_file(content, out / name, metadata={"format": "pt"})
        _sync(out / name)
        where |= dict.fromkeys(content, name)
        size += sum(each.nbytes for each in content.values())
    if len(groups) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return {"tensors": len(where), "files": len(groups), "bytes": size}


class Tensors:
    """Published tensors of a checkpoint. The last tensor that was read stays in memory, for the pieces of it."""

    def __init__(self, checkpoint: LoadedCheckpoint, request: Export) -> None:
        self._checkpoint, self._request = checkpoint, request
        self._last: tuple[str, Tensor | None] = ("", None)

    def publish(self, published: PublishedTensor) -> dict[str, Tensor]:
        """A published tensor in the format that is asked for, and the scales of its blocks."""
        if published.stacked:
            return {published.name: self._stacked(published)}
        rows = [rows_of(piece, self._read(piece.tensor)) for piece in published.pieces]
        format: Format = self._request.format
        if not rows:
            return {published.name: torch.empty(published.shape, dtype=DTYPES[format])}
        whole = rows[0] if len(rows) == 1 else torch.cat(rows)
        if published.kind == "spread":
            whole = torch.stack(rows, dim=-1).flatten(1)
        whole = whole.to(torch.float64) - 1 if published.from_one else whole
        if published.kind == "linear" and format == "fp8":
            data, scales = quantised(whole)
            return {published.name: data, published.name + SCALE: scales}
        dtype = KINDS.get(published.kind, DTYPES[format])
        return {published.name: whole.to(dtype, copy=True).contiguous().view(published.shape)}

    def _stacked(self, published: PublishedTensor) -> Tensor:
        """A tensor whose first dimension counts its pieces: beside it, one piece is in memory at a time."""
        whole = torch.empty(published.shape, dtype=DTYPES[self._request.format])
        for slot, piece in zip(whole, published.pieces, strict=True):
            slot.copy_(rows_of(piece, self._read(piece.tensor)).t())
        return whole

    def _read(self, name: str) -> Tensor:
        if self._last[0] != name:
            self._last = ("", None)  # before the next one is read
            self._last = (name, self._merged(name))
        found = self._last[1]
        assert found is not None
        return found

    def _merged(self, name: str) -> Tensor:
        """A tensor of the checkpoint, with what its adapter adds: W + factor · B · A, a sum in FP32 or wider."""
        a, b = (self._averaged(f"{name}{end}") for end in (A, B))
        if a not in self._checkpoint.shapes:
            trained = self._checkpoint.base is None or is_adapter(name)
            name = self._averaged(name) if trained else name
            return self._checkpoint.read([name])[name]
        of = self._checkpoint.read([name, a, b])
        wide = torch.promote_types(of[name].dtype, torch.float32)
        return of[name].to(wide).addmm(of[b].to(wide), of[a].to(wide), alpha=factor_of(self._checkpoint.meta))

    def _averaged(self, name: str) -> str:
        """The name of a tensor, or that of its moving average where that is asked for."""
        stored = StoredName(name)
        return stored.averaged if self._request.average else stored


def _files(tensors: Sequence[PublishedTensor], format: Format) -> Iterator[list[PublishedTensor]]:
    """The tensors of each file, in their order."""
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
    """Bytes of a published tensor, with its scales."""
    elements = prod(published.shape)
    if published.kind in KINDS:
        return KINDS[published.kind].itemsize * elements
    if published.kind == "linear" and format == "fp8":
        return elements + 4 * prod(-(-extent // TILE) for extent in published.shape)
    return elements * DTYPES[format].itemsize


def _numbered(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
