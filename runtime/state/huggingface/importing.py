"""Converts published safetensors to a checkpoint that any plan can load, with one shard in memory at a time.

The caller has checked names, shapes and dtypes (compiler/tools/weights/folder.py). This module checks the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtime.checkpoint import publish
from runtime.contract.weights import FP4_DATA, FP4_SCALE, SCALE, ImportRequest, PublishedTensor, RowPiece
from runtime.state.huggingface.convert import FP4_NAN, dequantise_e4m3, from_mxfp4, gain_of, piece_of
from runtime.state.huggingface.progress import make_reporter
from runtime.system.outcome import ReportedError

SHARD_BYTES = 2 << 30  # a shard ends with the first tensor that reaches this size


class WeightsError(ReportedError):
    """The weights are damaged or unusable. The message names the file and the tensor."""


# With the first row of the piece in the published tensor, and its index.
Part = tuple[PublishedTensor, RowPiece, int, int]


@dataclass
class TensorReader:
    """Reads published tensors by name from their files. The last file stays open."""

    folder: Path
    files: Mapping[str, str]
    block: tuple[int, int]
    _opened: tuple[str, Any] = field(default=("", None))

    def rows(self, part: Part) -> Tensor:
        """Return the checkpoint's rows of a piece."""
        published, piece, start, index = part
        if published.stacked:
            tensor = self._slice(published.name, index)
        else:
            values = self._read_logical(published.name)
            tensor = (values.view(published.rows) if published.rows else values)[start:]
        if published.kind == "table":
            return self._table(published, tensor)
        if not torch.isfinite(tensor).all():
            raise WeightsError(f"{self._place(published.name)}: holds a number that is not finite")
        rows = piece_of(tensor[: piece.end - piece.start], piece)
        return gain_of(rows) if published.from_one else rows

    def _table(self, published: PublishedTensor, table: Tensor) -> Tensor:
        """Validate a table of experts, and return it as int32."""
        place, sorted_VK = self._place(published.name), table.sort(dim=1).values
        if (sorted_VK[:, :1] < 0).any() or (sorted_VK[:, -1:] >= published.below).any():
            raise WeightsError(f"{place}: names an expert that the layer, of {published.below:,}, does not have")
        if (sorted_VK[:, 1:] == sorted_VK[:, :-1]).any():
            raise WeightsError(f"{place}: names an expert twice for one token")
        return table.to(torch.int32)

    def _slice(self, name: str, index: int) -> Tensor:
        """Return the rows of one piece of a stacked tensor, dequantised if it is MXFP4."""
        if name in self.files:
            return self._read_stored(name, index).t()  # .t() leaves a vector unchanged
        scales = self._read_stored(name + FP4_SCALE, index)
        if (scales == FP4_NAN).any():
            raise WeightsError(f"{self._place(name + FP4_SCALE)}: a scale is not a number")
        return from_mxfp4(self._read_stored(name + FP4_DATA, index), scales)

    def _read_logical(self, name: str) -> Tensor:
        """Return a published tensor, dequantised if it is FP8."""
        tensor = self._read_stored(name)
        if tensor.dtype == torch.float8_e4m3fn:
            scales = self._read_stored(name + SCALE)
            if not (torch.isfinite(scales) & (scales >= 0)).all():
                raise WeightsError(f"{self._place(name + SCALE)}: a scale is negative or not finite")
            tensor = dequantise_e4m3(tensor, scales, self.block)
        return tensor

    def _read_stored(self, name: str, index: int | None = None) -> Tensor:
        """Read a tensor from its file, or one index of its first dimension."""
        file = self.files[name]
        try:
            if self._opened[0] != file:
                self._opened = (file, safe_open(self.folder / file, framework="pt"))
            opened = self._opened[1]
            tensor: Tensor = opened.get_tensor(name) if index is None else opened.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self._place(name)}: {error}") from error
        return tensor

    def _place(self, name: str) -> str:
        name = name if name in self.files else name + FP4_DATA
        return f"{self.folder / self.files[name]}: {name}"


def write_checkpoint(request: ImportRequest) -> dict[str, Any]:
    """Write the checkpoint of step 0. Return the numbers of tensors and bytes.

    Raises WeightsError if the numbers cannot be used, CheckpointError if the checkpoint cannot be written.
    """
    reader = TensorReader(Path(request.folder), request.files, request.block)
    sources = _pieces_by_tensor(request)
    counts = {"tensors": len(sources), "bytes": 0}
    report = make_reporter(len(sources))

    def shards() -> Iterator[dict[str, Tensor]]:
        shard: dict[str, Tensor] = {}
        size = 0
        for name, parts in sources.items():
            shard[name] = _assemble(name, parts, reader)
            size += shard[name].nbytes
            counts["bytes"] += shard[name].nbytes
            report(1)
            if size >= SHARD_BYTES:
                yield shard
                shard, size = {}, 0
        if shard:
            yield shard

    publish.write(Path(request.out), 0, shards(), request.meta)
    return counts


def _pieces_by_tensor(request: ImportRequest) -> dict[str, list[Part]]:
    """Return the pieces of each tensor of the checkpoint, in the order of the request."""
    pieces: dict[str, list[Part]] = {}
    for published in request.tensors:
        start = 0
        for index, piece in enumerate(published.pieces):
            pieces.setdefault(piece.tensor, []).append((published, piece, start, index))
            start += piece.end - piece.start
    return pieces


def _assemble(name: str, parts: Sequence[Part], reader: TensorReader) -> Tensor:
    """Assemble a tensor of the checkpoint. WeightsError if an optional repetition of it differs."""
    required = sorted((part for part in parts if not part[0].optional), key=lambda part: part[1].start)
    rows = [reader.rows(part) for part in required]
    values = rows[0].contiguous() if len(rows) == 1 else torch.cat(_to_common_dtype(rows))
    repetitions = (part for part in parts if part[0].optional and part[0].name in reader.files)
    for part in repetitions:
        published, piece, *_ = part
        if not torch.equal(reader.rows(part), values[piece.start : piece.end]):
            first = required[0][0].name
            raise WeightsError(f"{published.name} is not equal to {first}: a model of dsc has one tensor for both")
    return values


def _to_common_dtype(rows: Sequence[Tensor]) -> list[Tensor]:
    """Convert tensors to one dtype that holds all their numbers."""
    dtype = rows[0].dtype
    for tensor in rows[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in rows]
